// Benchmarks attention of one layer at the shapes of real models. Decode over a long context reports the
// bytes of keys and values read per second, comparable with the read bandwidth of `moesaic doctor`. Prefill
// reports floating-point operations per second.
//   kernels_attention_bench --benchmark_filter=DecodeGqa
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "base/round.h"
#include "kernels/kernel_table.h"
#include "kernels/kv_layer.h"
#include "runtime/probe.h"

namespace moesaic::kernels {
namespace {

using tensor::DType;

struct Shape {
  int heads, kv_heads, key_dim, value_dim;
  bool shared;
};
constexpr Shape kQwen3_30B = {32, 4, 128, 128, false};
constexpr Shape kLlama8B = {32, 8, 128, 128, false};
constexpr Shape kDeepSeekV3 = {128, 1, 576, 512, true};
constexpr Shape kDeepSeekV2Lite = {16, 1, 576, 512, true};

// Layers are used in turn, so that none is still cached when it is used again, as in a real step.
constexpr int64_t kTotalBytes = int64_t{1} << 30;

class Setting {
 public:
  Setting(const Shape& shape, DType dtype, int depth, int batch, int count, int threads)
      : shape_(shape),
        pool_(*runtime::ThreadPool::Create({.threads = threads, .pin = true})),
        kernels_(SelectKernels(runtime::DetectCpu())) {
    const int blocks = base::CeilDiv(depth, kKvBlockTokens);
    layer_ = LayOutKv(dtype, shape.kv_heads, shape.key_dim, shape.value_dim, shape.shared);
    layer_bytes_ = layer_.block_stride * blocks * batch;
    layers_ = static_cast<int>(std::max<int64_t>(1, kTotalBytes / layer_bytes_));
    memory_ = *runtime::Buffer::Allocate(layer_bytes_ * layers_, true);
    // Small numbers of both signs in any type, including int8's scales: the bits 0x3c00 .. 0x3cff and their
    // negatives.
    std::mt19937 rng(1);
    for (size_t i = 0; i < memory_.size() / 2; ++i) {
      const uint32_t bits = rng();
      memory_.as<uint16_t>()[i] = static_cast<uint16_t>(0x3c00U | (bits & 0x80ffU));
    }
    tables_.resize(size_t(blocks) * batch);
    for (size_t i = 0; i < tables_.size(); ++i) tables_[i] = static_cast<int32_t>(i);
    std::shuffle(tables_.begin(), tables_.end(), rng);
    for (int b = 0; b < batch; ++b) {
      sequences_.push_back({&tables_[size_t(b) * blocks], depth - count, count, b * count});
    }
    q_.assign(size_t(batch) * count * shape.heads * shape.key_dim, 0.25F);
    out_.resize(size_t(batch) * count * shape.heads * shape.value_dim);
  }

  void Step() {
    layer_.base = memory_.data() + (step_++ % layers_) * layer_bytes_;
    Attention({.kernels = &kernels_, .pool = pool_.get(), .scratch = &scratch_},
              {layer_, q_.data(), int64_t{shape_.heads} * shape_.key_dim, out_.data(),
               int64_t{shape_.heads} * shape_.value_dim, shape_.heads, 0.1F, sequences_});
  }

  int64_t layer_bytes() const { return layer_bytes_; }
  // Multiplications and additions of both products that the causal mask leaves.
  double operations() const {
    double pairs = 0;
    for (const SequenceSlice& s : sequences_) pairs += s.count * (s.start + (s.count + 1) / 2.0);
    return 2.0 * pairs * shape_.heads * (shape_.key_dim + shape_.value_dim);
  }

 private:
  Shape shape_;
  std::unique_ptr<runtime::ThreadPool> pool_;
  KernelTable kernels_;
  runtime::Arena scratch_;
  KvLayer layer_;
  int64_t layer_bytes_ = 0;
  int layers_ = 0, step_ = 0;
  runtime::Buffer memory_;
  std::vector<int32_t> tables_;
  std::vector<SequenceSlice> sequences_;
  std::vector<float> q_, out_;
};

// Read bandwidth of this machine with `threads` threads in bytes per second, measured once per run.
double ReadBandwidth(int threads) {
  static std::map<int, double> measured;
  if (!measured.contains(threads)) {
    auto pool = *runtime::ThreadPool::Create({.threads = threads, .pin = true});
    measured[threads] = runtime::MeasureReadBandwidth(pool.get(), runtime::ProbeBytes(threads))->all_threads;
  }
  return measured[threads];
}

// Rates are those of the median step; `share` is the fraction of the read bandwidth used.
void Measure(benchmark::State& state, const Shape& shape, DType dtype, int depth, int batch, int count) {
  const auto threads = static_cast<int>(state.range(0));
  const double bandwidth = ReadBandwidth(threads);
  Setting setting(shape, dtype, depth, batch, count, threads);
  std::vector<double> seconds;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    setting.Step();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    state.SetIterationTime(seconds.back());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2], best = seconds.front();
  const auto bytes = static_cast<double>(setting.layer_bytes());
  state.counters["us"] = median * 1e6;
  state.counters["best_us"] = best * 1e6;
  state.counters["GB/s"] = bytes / median * 1e-9;
  state.counters["share"] = bytes / median / bandwidth;
  state.counters["GFLOP/s"] = setting.operations() / median * 1e-9;
}

void DecodeGqa(benchmark::State& state, DType dtype, int depth, int batch) {
  Measure(state, kQwen3_30B, dtype, depth, batch, 1);
}
void DecodeGqa4(benchmark::State& state, DType dtype, int depth, int batch) {
  Measure(state, kLlama8B, dtype, depth, batch, 1);
}
void DecodeMla128(benchmark::State& state, DType dtype, int depth, int batch) {
  Measure(state, kDeepSeekV3, dtype, depth, batch, 1);
}
void DecodeMla16(benchmark::State& state, DType dtype, int depth, int batch) {
  Measure(state, kDeepSeekV2Lite, dtype, depth, batch, 1);
}
void PrefillGqa(benchmark::State& state, DType dtype, int depth, int count) {
  Measure(state, kQwen3_30B, dtype, depth, 1, count);
}

#define MOESAIC_THREADS ArgName("threads")->Arg(1)->Arg(2)->UseManualTime()->Unit(benchmark::kMicrosecond)
BENCHMARK_CAPTURE(DecodeGqa, bf16_4096, DType::kBF16, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeGqa, bf16_16384, DType::kBF16, 16384, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeGqa, f32_4096, DType::kF32, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeGqa, int8_4096, DType::kI8, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeGqa, int8_16384, DType::kI8, 16384, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeGqa, bf16_1024_x16, DType::kBF16, 1024, 16)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeGqa4, bf16_4096, DType::kBF16, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeMla16, bf16_4096, DType::kBF16, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeMla16, int8_4096, DType::kI8, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeMla128, int8_4096, DType::kI8, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeMla128, bf16_4096, DType::kBF16, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeMla128, bf16_16384, DType::kBF16, 16384, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(DecodeMla128, f32_4096, DType::kF32, 4096, 1)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(PrefillGqa, int8_512_at_4096, DType::kI8, 4608, 512)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(PrefillGqa, bf16_512, DType::kBF16, 512, 512)->MOESAIC_THREADS;
BENCHMARK_CAPTURE(PrefillGqa, bf16_512_at_4096, DType::kBF16, 4608, 512)->MOESAIC_THREADS;

}  // namespace
}  // namespace moesaic::kernels
