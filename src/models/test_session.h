// Shared by tests of models: goldens, a model on one instruction set, and sequences in a plain block pool.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "kernels/kernel_table.h"
#include "kernels/kv_layer.h"
#include "models/model.h"

namespace moesaic::models {

inline std::string SourcePath(const std::string& relative) {
  return std::string(MOESAIC_SOURCE_DIR) + "/" + relative;
}

/// One prompt of a golden.safetensors (see tests/golden/README.md).
struct GoldenPrompt {
  std::vector<int32_t> ids, rows, greedy, mtp_next_ids;
  std::vector<float> logits, margins, mtp_logits, logits_w8a8;
  float w8a8_noise = 0;
};

template <typename T>
std::vector<T> ReadTensor(const checkpoint::Checkpoint& file, const std::string& name) {
  const checkpoint::TensorEntry* entry = file.Find(name);
  if (entry == nullptr) return {};
  EXPECT_EQ(entry->dtype, (std::is_same_v<T, float> ? tensor::DType::kF32 : tensor::DType::kI32)) << name;
  std::vector<T> values(entry->bytes.size() / sizeof(T));
  std::memcpy(values.data(), entry->bytes.data(), entry->bytes.size());
  return values;
}

inline std::vector<GoldenPrompt> ReadGolden(const std::string& path) {
  const auto file = checkpoint::Checkpoint::Open(path);
  EXPECT_TRUE(file.ok()) << Message(file.status());
  std::vector<GoldenPrompt> prompts;
  for (int i = 0; file.ok() && (*file)->Has("prompt_" + std::to_string(i) + ".ids"); ++i) {
    const std::string p = "prompt_" + std::to_string(i) + ".";
    prompts.push_back({.ids = ReadTensor<int32_t>(**file, p + "ids"),
                       .rows = ReadTensor<int32_t>(**file, p + "rows"),
                       .greedy = ReadTensor<int32_t>(**file, p + "greedy"),
                       .mtp_next_ids = ReadTensor<int32_t>(**file, p + "mtp_next_ids"),
                       .logits = ReadTensor<float>(**file, p + "logits"),
                       .margins = ReadTensor<float>(**file, p + "margins"),
                       .mtp_logits = ReadTensor<float>(**file, p + "mtp_logits"),
                       .logits_w8a8 = ReadTensor<float>(**file, p + "logits_w8a8")});
    const std::vector<float> noise = ReadTensor<float>(**file, p + "w8a8_noise");
    if (!noise.empty()) prompts.back().w8a8_noise = noise[0];
  }
  return prompts;
}

/// A model with its kernels, thread pool and scratch memory.
class TestModel {
 public:
  TestModel(const std::string& path, runtime::Isa isa, const LoadOptions& options)
      : TestModel(path, isa, options, {.threads = 2, .pin = false}) {}
  TestModel(const std::string& path, runtime::Isa isa, const LoadOptions& options,
            const runtime::ThreadPool::Options& threads)
      : kernels_(kernels::SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), isa))),
        pool_(*runtime::ThreadPool::Create(threads)) {
    auto model = Model::Load(path, options, *pool_);
    status_ = model.status();
    if (model.ok()) model_ = *std::move(model);
  }
  const Status& status() const { return status_; }
  Model& operator*() { return *model_; }
  Model* operator->() { return model_.get(); }
  kernels::ExecContext context() { return {.kernels = &kernels_, .pool = pool_.get(), .scratch = &scratch_}; }
  runtime::ThreadPool& pool() { return *pool_; }

 private:
  kernels::KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> pool_;
  runtime::Arena scratch_;
  Status status_;
  std::unique_ptr<Model> model_;
};

/// Cache blocks for `sequences` sequences of `tokens` tokens each. A sequence's blocks are in descending
/// order, so that no test passes by accident of their order.
class TestCache {
 public:
  TestCache(const KvSpec& spec, int sequences, int tokens, tensor::DType dtype = tensor::DType::kF32)
      : blocks_each_((tokens + kernels::kKvBlockTokens - 1) / kernels::kKvBlockTokens) {
    kernels::KvLayer layer = kernels::LayOutKv(dtype, spec.heads, spec.key_dim, spec.value_dim, spec.shared);
    const int64_t layer_bytes = layer.block_stride;
    layer.block_stride *= spec.layers;
    memory_ = *runtime::Buffer::Allocate(layer.block_stride * blocks_each_ * sequences, false);
    for (int i = 0; i < spec.layers; ++i) {
      layer.base = memory_.data() + i * layer_bytes;
      layers_.push_back(layer);
    }
    for (int b = 0; b < blocks_each_ * sequences; ++b) table_.push_back(blocks_each_ * sequences - 1 - b);
  }
  std::span<const kernels::KvLayer> layers() const { return layers_; }
  const int32_t* table(int sequence) const { return table_.data() + sequence * blocks_each_; }

 private:
  int blocks_each_;
  runtime::Buffer memory_;
  std::vector<kernels::KvLayer> layers_;
  std::vector<int32_t> table_;
};

struct Outputs {
  std::vector<float> logits;  // [logit_rows, vocab]
  std::vector<float> hidden;  // [rows, hidden]
};

/// Runs `tokens` of one sequence from position `start` on and returns the logits of `rows` and all hidden
/// states.
inline Outputs Feed(TestModel& model, const TestCache& cache, int sequence, int start,
                    std::span<const int32_t> tokens, std::span<const int32_t> rows) {
  const kernels::SequenceSlice slice{.block_table = cache.table(sequence),
                                     .start = start,
                                     .count = static_cast<int>(tokens.size()),
                                     .row = 0};
  Outputs out;
  out.logits.resize(rows.size() * model->info().vocab_size);
  out.hidden.resize(tokens.size() * model->info().hidden_size);
  const Status status =
      model->Forward(model.context(), {.tokens = tokens, .sequences = {&slice, 1}, .logit_rows = rows},
                     cache.layers(), {.logits = out.logits, .hidden = out.hidden});
  EXPECT_TRUE(status.ok()) << Message(status);
  return out;
}

inline float MaxDiff(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  float worst = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float diff = std::fabs(a[i] - b[i]);
    if (!(diff <= worst)) worst = diff;  // NaN counts as the largest difference
  }
  return worst;
}

inline int32_t ArgMax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// Converts "qwen3-moe-tied" to "qwen3_moe_tied", a valid test name.
inline std::string TestName(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

/// Converts a dtype to the suffix of operator names: "int8_g32" to "i8g32", "fp8_g128" to "f8g128".
inline std::string OpSuffix(const std::string& dtype) {
  std::string suffix = dtype;
  if (dtype.starts_with("int")) suffix.erase(1, 2);
  if (dtype.starts_with("fp8")) suffix.erase(1, 1);
  std::erase(suffix, '_');
  return suffix;
}

/// Returns the instruction sets on which weights in format `dtype` use different kernels: MOESAIC_ISA if set,
/// otherwise those of the host, without sets whose kernels equal the next weaker one's.
inline std::vector<runtime::Isa> TestIsas(const std::string& dtype) {
  if (const char* name = std::getenv("MOESAIC_ISA")) return {*runtime::ParseIsa(name)};
  const runtime::CpuFeatures host = runtime::DetectCpu();
  std::vector<runtime::Isa> isas;
  std::vector<std::string> previous;
  for (const runtime::Isa isa : runtime::HostIsas(host)) {
    std::vector<std::string> names;
    for (const kernels::KernelChoice& choice : kernels::SelectKernels(*runtime::LimitTo(host, isa)).choices) {
      const bool other_format =
          choice.op.starts_with("gemm_") && choice.op != "gemm_f32" && choice.op != "gemm_" + OpSuffix(dtype);
      if (!other_format) names.push_back(choice.name);
    }
    if (names != previous) isas.push_back(isa);
    previous = std::move(names);
  }
  return isas;
}

/// Returns the instruction set that a user gets by default.
inline runtime::Isa BestIsa() {
  if (const char* name = std::getenv("MOESAIC_ISA")) return *runtime::ParseIsa(name);
  return runtime::HostIsas(runtime::DetectCpu()).back();
}

}  // namespace moesaic::models
