// For tests: a model whose logits are a function of all tokens of a sequence, as they stand in its KV blocks.
// A wrong block table, a block given to two sequences or a row computed twice changes what comes out, or is
// an error.
#pragma once

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

  explicit FakeModel(int context, int vocab = kVocab) {
    info_.vocab_size = vocab;
    info_.hidden_size = 4;
    info_.context_length = context;
    info_.weight_format = "f32";
    info_.kv = {.layers = 2, .heads = 3, .key_dim = 2, .value_dim = 1, .shared = false};
  }

  const models::ModelInfo& info() const override { return info_; }

  Status Forward(const kernels::ExecContext&, const models::ForwardBatch& batch,
                 std::span<const kernels::KvLayer> kv, const models::ForwardOutput& out) override {
    ++steps;
    largest_step = std::max(largest_step, batch.tokens.size());
    computed += static_cast<int64_t>(batch.tokens.size());
    std::this_thread::sleep_for(row_time * batch.tokens.size());
    if (std::exchange(fail_next, false)) return absl::InternalError("the model failed");
    std::vector<std::vector<float>> rows(batch.tokens.size());
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
        rows[slice.row + i] = LogitsAfter(seen, info_.vocab_size);
      }
    }
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      std::memcpy(&out.logits[i * info_.vocab_size], rows[batch.logit_rows[i]].data(),
                  info_.vocab_size * sizeof(float));
    }
    for (size_t i = 0; i < out.hidden.size(); ++i) {
      out.hidden[i] = rows[i / info_.hidden_size][i % info_.hidden_size];  // as good as any
    }
    return OkStatus();
  }

  Status ForwardMtp(const kernels::ExecContext&, int, const models::ForwardBatch&, std::span<const float>,
                    std::span<const kernels::KvLayer>, const models::ForwardOutput&) override {
    return Unimplemented("the fake model has no MTP");
  }

  // What Forward gives for the last of `tokens`.
  static std::vector<float> LogitsAfter(std::span<const int32_t> tokens, int vocab = kVocab) {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const int32_t token : tokens) hash = Mix(hash + static_cast<uint64_t>(token) + 1);
    std::vector<float> logits(vocab);
    for (int v = 0; v < vocab; ++v) {
      logits[v] = static_cast<float>(Mix(hash ^ static_cast<uint64_t>(v)) % 8000) / 1000.0f - 4.0f;
    }
    return logits;
  }

  int steps = 0;
  size_t largest_step = 0;  // rows
  int64_t computed = 0;     // rows of all steps
  bool fail_next = false;
  std::chrono::microseconds row_time{0};

 private:
  static uint64_t Mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  static float* Slot(const kernels::KvLayer& layer, const kernels::SequenceSlice& slice, int position,
                     int head, int64_t offset, int dim) {
    const int block = slice.block_table[position / kernels::kKvBlockTokens];
    auto* rows = reinterpret_cast<float*>(layer.base + block * layer.block_stride + offset);
    return rows + (head * kernels::kKvBlockTokens + position % kernels::kKvBlockTokens) * dim;
  }

  // Keys hold the token and its position, values a mark of layer and head.
  static void Write(std::span<const kernels::KvLayer> kv, const kernels::SequenceSlice& slice, int position,
                    int32_t token) {
    for (size_t l = 0; l < kv.size(); ++l) {
      for (int h = 0; h < kv[l].heads; ++h) {
        float* key = Slot(kv[l], slice, position, h, 0, kv[l].key_dim);
        key[0] = static_cast<float>(token);
        key[1] = static_cast<float>(position);
        *Slot(kv[l], slice, position, h, kv[l].value_offset, kv[l].value_dim) =
            static_cast<float>(token * 10 + static_cast<int>(l) * 3 + h);
      }
    }
  }

  // The token at `position`, or -1 when layers, heads or positions disagree.
  static int32_t Read(std::span<const kernels::KvLayer> kv, const kernels::SequenceSlice& slice,
                      int position) {
    const float token = Slot(kv[0], slice, position, 0, 0, kv[0].key_dim)[0];
    for (size_t l = 0; l < kv.size(); ++l) {
      for (int h = 0; h < kv[l].heads; ++h) {
        const float* key = Slot(kv[l], slice, position, h, 0, kv[l].key_dim);
        const float value = *Slot(kv[l], slice, position, h, kv[l].value_offset, kv[l].value_dim);
        if (key[0] != token || key[1] != static_cast<float>(position)) return -1;
        if (value != token * 10 + static_cast<float>(static_cast<int>(l) * 3 + h)) return -1;
      }
    }
    return static_cast<int32_t>(token);
  }

  models::ModelInfo info_;
};

}  // namespace moesaic::engine
