// A model for tests whose logits are a function of all tokens of a sequence, which it reads from the KV
// blocks. A wrong block table, a block of two sequences or a row that is computed twice changes the output or
// is an error.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "models/model.h"

namespace moesaic::engine {

class FakeModel : public models::Model {
 public:
  static constexpr int kVocab = 97;

  // `mtp`: adds a module that drafts the next token of the model, except for the drafts that misses_every
  // makes wrong.
  explicit FakeModel(int context, int vocab = kVocab, bool mtp = false) {
    info_.vocab_size = vocab;
    info_.own_vocab = {0, vocab};
    info_.hidden_size = 4;
    info_.layers = kLayers;
    info_.own_layers = {0, kLayers};
    info_.mtp_layers = info_.own_mtp_layers = mtp ? 1 : 0;
    info_.context_length = context;
    info_.weight_format = "f32";
    info_.kv = {
        .layers = kLayers + info_.mtp_layers, .heads = 3, .key_dim = 2, .value_dim = 1, .shared = false};
  }

  const models::ModelInfo& info() const override { return info_; }

  Status Forward(const kernels::ExecContext&, const models::ForwardBatch& batch,
                 std::span<const kernels::KvLayer> all, const models::ForwardOutput& out) override {
    const auto kv = all.first(kLayers);
    ++steps;
    largest_step = std::max(largest_step, batch.tokens.size());
    computed += static_cast<int64_t>(batch.tokens.size());
    std::this_thread::sleep_for(row_time * batch.tokens.size());
    if (std::exchange(fail_next, false)) return absl::InternalError("the model failed");
    std::vector<uint64_t> rows(batch.tokens.size());
    for (const kernels::SequenceSlice& slice : batch.sequences) {
      for (int i = 0; i < slice.count; ++i) Write(kv, slice, slice.start + i, batch.tokens[slice.row + i]);
    }
    for (const kernels::SequenceSlice& slice : batch.sequences) {
      for (int i = 0; i < slice.count; ++i) {
        std::vector<int32_t> seen;
        for (int p = 0; p <= slice.start + i; ++p) {
          const int32_t token = Read(kv, slice, p);
          if (token < 0) return absl::InternalError(fmt::format("position {} holds another's keys", p));
          seen.push_back(token);
        }
        rows[slice.row + i] =
            HashOf(std::span(seen).last(memory > 0 ? std::min(seen.size(), memory) : seen.size()));
      }
    }
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      Say(rows[batch.logit_rows[i]], i, out);
    }
    for (size_t i = 0; i < rows.size() && !out.hidden.empty(); ++i) Keep(rows[i], i, out);
    return OkStatus();
  }

  // A row gets the earlier tokens only from its hidden state. Keys are only read to find missing rows.
  Status ForwardMtp(const kernels::ExecContext&, int depth, const models::ForwardBatch& batch,
                    std::span<const float> hidden, std::span<const kernels::KvLayer> kv,
                    const models::ForwardOutput& out) override {
    if (depth != 0 || info_.mtp_layers == 0) return Unimplemented("the fake model has no such MTP module");
    if (std::exchange(fail_next_mtp, false)) return absl::InternalError("the MTP module failed");
    mtp_rows += static_cast<int64_t>(batch.tokens.size());
    const auto layer = kv.subspan(kLayers, 1);
    std::vector<uint64_t> rows(batch.tokens.size());
    for (const kernels::SequenceSlice& slice : batch.sequences) {
      for (int i = 0; i < slice.count; ++i) {
        Write(layer, slice, slice.start + i, batch.tokens[slice.row + i]);
      }
      for (int p = 0; p < slice.start + slice.count; ++p) {
        if (Read(layer, slice, p) < 0 && !IsZero(layer[0], slice, p)) {
          ++mtp_gaps;
          return absl::InternalError(fmt::format("MTP lacks position {}", p));
        }
      }
      for (int i = slice.row; i < slice.row + slice.count; ++i) {
        uint64_t before = 0;
        for (int k = 4; k-- > 0;) before = before << 16 | static_cast<uint64_t>(hidden[i * 4 + k]);
        rows[i] = Mix(before + static_cast<uint64_t>(batch.tokens[i]) + 1);
      }
    }
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      const uint64_t hash = rows[batch.logit_rows[i]];
      Say(misses_every > 0 && hash % misses_every == 0 ? ~hash : hash, i, out);
    }
    for (size_t i = 0; i < rows.size() && !out.hidden.empty(); ++i) Keep(rows[i], i, out);
    return OkStatus();
  }

  // Returns the logits that Forward computes for the last of `tokens`.
  static std::vector<float> LogitsAfter(std::span<const int32_t> tokens, int vocab = kVocab) {
    return LogitsOf(HashOf(tokens), vocab);
  }

  // The hidden state of the last of `tokens`: the hash in four parts.
  static std::array<float, 4> HiddenAfter(std::span<const int32_t> tokens) {
    return HiddenOf(HashOf(tokens));
  }

  static uint64_t HashOf(std::span<const int32_t> tokens) {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const int32_t token : tokens) hash = Mix(hash + static_cast<uint64_t>(token) + 1);
    return hash;
  }

  static std::vector<float> LogitsOf(uint64_t hash, int vocab) {
    std::vector<float> logits(vocab);
    for (int v = 0; v < vocab; ++v) {
      logits[v] = static_cast<float>(Mix(hash ^ static_cast<uint64_t>(v)) % 8000) / 1000.0f - 4.0f;
    }
    return logits;
  }

  int steps = 0;
  size_t largest_step = 0;  // rows
  int64_t computed = 0;     // rows of all steps
  int64_t mtp_rows = 0;
  int mtp_gaps = 0;   // rows that the module read before they were written, which is a bug of the drafter
  size_t memory = 0;  // number of last tokens that decide the next token, so that output repeats; 0: all
  uint64_t misses_every = 0;  // one in this number of drafts is wrong; 0: none
  bool fail_next = false, fail_next_mtp = false;
  std::chrono::microseconds row_time{0};

 private:
  static constexpr int kLayers = 2;

  void Say(uint64_t hash, size_t row, const models::ForwardOutput& out) const {
    const std::vector<float> logits = LogitsOf(hash, info_.vocab_size);
    std::memcpy(&out.logits[row * info_.vocab_size], logits.data(), logits.size() * sizeof(float));
  }

  static std::array<float, 4> HiddenOf(uint64_t hash) {
    std::array<float, 4> hidden;
    for (int k = 0; k < 4; ++k) hidden[k] = static_cast<float>(hash >> (16 * k) & 0xffff);
    return hidden;
  }

  static void Keep(uint64_t hash, size_t row, const models::ForwardOutput& out) {
    std::ranges::copy(HiddenOf(hash), out.hidden.begin() + static_cast<int64_t>(row) * 4);
  }

  static uint64_t Mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  static float* Slot(const kernels::KvLayer& layer, const kernels::SequenceSlice& slice, int position,
                     int head, int64_t offset, int dim) {
    const int block = slice.block_table[position / tensor::kKvBlockTokens];
    auto* rows = reinterpret_cast<float*>(layer.base + block * layer.block_stride +
                                          head * layer.head_stride() + offset);
    return rows + position % tensor::kKvBlockTokens * dim;
  }

  // Keys hold the token and its position, values a mark of layer and head.
  static void Write(std::span<const kernels::KvLayer> kv, const kernels::SequenceSlice& slice, int position,
                    int32_t token) {
    for (size_t l = 0; l < kv.size(); ++l) {
      for (int h = 0; h < kv[l].heads; ++h) {
        float* key = Slot(kv[l], slice, position, h, 0, kv[l].key_dim);
        key[0] = static_cast<float>(token);
        key[1] = static_cast<float>(position);
        *Slot(kv[l], slice, position, h, kv[l].value_offset(), kv[l].value_dim) =
            static_cast<float>(token * 10 + static_cast<int>(l) * 3 + h);
      }
    }
  }

  // Returns whether a row is zero, as before its computation.
  static bool IsZero(const kernels::KvLayer& layer, const kernels::SequenceSlice& slice, int position) {
    for (int h = 0; h < layer.heads; ++h) {
      const float* key = Slot(layer, slice, position, h, 0, layer.key_dim);
      if (key[0] != 0 || key[1] != 0) return false;
      if (*Slot(layer, slice, position, h, layer.value_offset(), layer.value_dim) != 0) return false;
    }
    return true;
  }

  // The token at `position`, or -1 when layers, heads or positions disagree.
  static int32_t Read(std::span<const kernels::KvLayer> kv, const kernels::SequenceSlice& slice,
                      int position) {
    const float token = Slot(kv[0], slice, position, 0, 0, kv[0].key_dim)[0];
    for (size_t l = 0; l < kv.size(); ++l) {
      for (int h = 0; h < kv[l].heads; ++h) {
        const float* key = Slot(kv[l], slice, position, h, 0, kv[l].key_dim);
        const float value = *Slot(kv[l], slice, position, h, kv[l].value_offset(), kv[l].value_dim);
        if (key[0] != token || key[1] != static_cast<float>(position)) return -1;
        if (value != token * 10 + static_cast<float>(static_cast<int>(l) * 3 + h)) return -1;
      }
    }
    return static_cast<int32_t>(token);
  }

  models::ModelInfo info_;
};

}  // namespace moesaic::engine
