// Benchmarks the GEMM kernels and reports the fraction of the machine's limits, measured in the same run.
//
//   Gemv/...  one or few rows by weights far larger than the caches: GB/s of weights read, and the part of
//             the read bandwidth that the same threads reach with plain loads
//   Gemm/...  many rows: GOP/s, and the fraction of the peak of the format's fastest dot product
//   Expert/.. the same for the gate of one expert of Qwen3-30B-A3B, in the cache: 768 x 2048
//   Moe/...   one MoE layer of a model's shape
//
// Names end with the thread count. MOESAIC_ISA selects a weaker instruction set; the peak remains the host's.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "kernels/gemm_tiling.h"
#include "kernels/linear.h"
#include "kernels/moe.h"
#include "kernels/probe.h"
#include "runtime/probe.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;

runtime::CpuFeatures Cpu() {
  const runtime::CpuFeatures host = runtime::DetectCpu();
  const char* name = std::getenv("MOESAIC_ISA");
  if (name == nullptr) return host;
  const auto isa = runtime::ParseIsa(name);
  const auto cpu = isa.ok() ? runtime::LimitTo(host, *isa) : StatusOr<runtime::CpuFeatures>(isa.status());
  if (!cpu.ok()) {
    std::fprintf(stderr, "MOESAIC_ISA: %s\n", Message(cpu.status()).c_str());
    std::exit(1);
  }
  return *cpu;
}

struct Machine {
  explicit Machine(int threads)
      : pool(*runtime::ThreadPool::Create({.threads = threads, .pin = true})),
        bandwidth(runtime::MeasureReadBandwidth(pool.get(), 512 << 20)->all_threads) {
    for (const DotPeak& peak : MeasureDotPeaks(runtime::DetectCpu(), pool.get())) {
      peaks[peak.format] = peak.all_threads;
    }
  }
  ExecContext context() { return {.kernels = &kernels, .pool = pool.get(), .scratch = &scratch}; }

  KernelTable kernels = SelectKernels(Cpu());
  std::unique_ptr<runtime::ThreadPool> pool;
  runtime::Arena scratch;
  double bandwidth;
  std::map<PackedFormat, double> peaks;
};

Machine& MachineOf(int threads) {
  static std::map<int, std::unique_ptr<Machine>> machines;
  auto& machine = machines[threads];
  if (machine == nullptr) machine = std::make_unique<Machine>(threads);
  return *machine;
}

// `count` matrices [n, k], contiguous. Speed does not depend on values, so bytes repeat but are never
// denormal.
struct Weights {
  Weights(PackedFormat format, int n, int k, int count, runtime::ThreadPool* pool) {
    matrix.layout = tensor::PackedLayout::Of(format, n, k);
    buffer = *runtime::Buffer::Allocate(matrix.layout.total_bytes * count, /*huge=*/true);
    matrix.data = buffer.data();
    pool->Run(count, [&](int64_t i, int) { std::memset(buffer.data() + i * bytes(), 0x3c, bytes()); });
  }
  int64_t bytes() const { return matrix.layout.total_bytes; }
  tensor::PackedMatrix Of(int i) const {
    tensor::PackedMatrix one = matrix;
    one.data += i * bytes();
    return one;
  }
  tensor::PackedMatrix matrix;
  runtime::Buffer buffer;
};

std::vector<float> Activations(size_t count) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& v : x) v = normal(rng);
  return x;
}

// Args: threads, rows. Walks over 2 GiB of matrices, so that none is still cached when it is used again.
void Gemv(benchmark::State& state, PackedFormat format) {
  constexpr int kN = 4096, kK = 4096;
  Machine& machine = MachineOf(static_cast<int>(state.range(0)));
  const int rows = static_cast<int>(state.range(1));
  const ExecContext ctx = machine.context();
  const int count =
      static_cast<int>((int64_t{2} << 30) / tensor::PackedLayout::Of(format, kN, kK).total_bytes);
  const Weights weights(format, kN, kK, count, machine.pool.get());
  const auto x = Activations(size_t(rows) * kK);
  std::vector<float> c(size_t(rows) * kN);
  int next = 0;
  for (auto _ : state) {
    const tensor::PackedMatrix w = weights.Of(next++ % count);
    const QuantizedActivations a = QuantizeActivations(ctx, format, x.data(), kK, rows, kK);
    Linear(ctx, {.a = &a, .w = &w, .c = c.data(), .c_stride = kN});
    machine.scratch.Reset();
  }
  const double bytes = static_cast<double>(weights.bytes()) * static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(bytes / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_bandwidth"] = benchmark::Counter(bytes / machine.bandwidth, benchmark::Counter::kIsRate);
}

// Args: threads, rows.
void Gemm(benchmark::State& state, PackedFormat format, int n) {
  constexpr int kK = 2048;
  Machine& machine = MachineOf(static_cast<int>(state.range(0)));
  const int rows = static_cast<int>(state.range(1));
  const ExecContext ctx = machine.context();
  const Weights weights(format, n, kK, 1, machine.pool.get());
  const auto x = Activations(size_t(rows) * kK);
  const auto c = machine.scratch.Take<float>(size_t(rows) * n);  // huge pages, like a model's
  const QuantizedActivations a = QuantizeActivations(ctx, format, x.data(), kK, rows, kK);
  for (auto _ : state) Linear(ctx, {.a = &a, .w = &weights.matrix, .c = c.data(), .c_stride = n});
  const double operations = 2.0 * rows * n * kK * static_cast<double>(state.iterations());
  state.counters["GOP/s"] = benchmark::Counter(operations / 1e9, benchmark::Counter::kIsRate);
  // Group-scaled formats multiply int8 by int8 too.
  const auto peak = machine.peaks.find(tensor::IsGroupScaled(format) ? PackedFormat::kI8 : format);
  if (peak != machine.peaks.end()) {
    state.counters["of_peak"] = benchmark::Counter(operations / peak->second, benchmark::Counter::kIsRate);
  }
  machine.scratch.Reset();
}

// Args: threads, rows. The layer shape of Qwen3-30B-A3B: 128 experts of 3 x 768 x 2048, 8 per token.
void MoeLayer(benchmark::State& state, PackedFormat format) {
  constexpr int kHidden = 2048, kIntermediate = 768, kExperts = 128, kTopK = 8;
  Machine& machine = MachineOf(static_cast<int>(state.range(0)));
  const int rows = static_cast<int>(state.range(1));
  const ExecContext ctx = machine.context();
  const auto up = tensor::PackedLayout::Of(format, kIntermediate, kHidden);
  const auto down = tensor::PackedLayout::Of(format, kHidden, kIntermediate);
  ExpertWeights experts{};
  experts.count = kExperts;
  experts.stride = 2 * up.total_bytes + down.total_bytes;
  const runtime::Buffer all = *runtime::Buffer::Allocate(experts.stride * kExperts, /*huge=*/true);
  std::memset(all.data(), 0x3c, all.size());
  experts.gate.layout = experts.up.layout = up;
  experts.down.layout = down;
  experts.gate.data = all.data();
  experts.up.data = all.data() + up.total_bytes;
  experts.down.data = all.data() + 2 * up.total_bytes;
  const auto x = Activations(size_t(rows) * kHidden);
  std::vector<float> out(x.size());
  std::vector<int32_t> ids(size_t(rows) * kTopK);
  const std::vector<float> weights(ids.size(), 1.0F / kTopK);
  std::mt19937 rng(2);
  std::vector<bool> used(kExperts);
  double experts_read = 0;
  for (auto _ : state) {
    std::fill(used.begin(), used.end(), false);
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int32_t>(rng() % kExperts);
      experts_read += used[ids[i]] ? 0 : 1;
      used[ids[i]] = true;
    }
    Moe(ctx, {.x = x.data(),
              .x_stride = kHidden,
              .rows = rows,
              .hidden = kHidden,
              .intermediate = kIntermediate,
              .experts = experts,
              .ids = ids.data(),
              .weights = weights.data(),
              .top_k = kTopK,
              .shared_gate = {},
              .shared_up = {},
              .shared_down = {},
              .out = out.data(),
              .out_stride = kHidden});
  }
  const double bytes = experts_read * static_cast<double>(experts.stride);
  const double operations =
      6.0 * rows * kTopK * kHidden * kIntermediate * static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(bytes / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_bandwidth"] = benchmark::Counter(bytes / machine.bandwidth, benchmark::Counter::kIsRate);
  state.counters["GOP/s"] = benchmark::Counter(operations / 1e9, benchmark::Counter::kIsRate);
}

void Arguments(benchmark::internal::Benchmark* bench, std::initializer_list<int> rows) {
  for (int threads : {1, 0}) {
    for (int m : rows) bench->Args({threads, m});
  }
  bench->ArgNames({"threads", "rows"})->UseRealTime()->Unit(benchmark::kMicrosecond);
}

const bool kRegistered = [] {
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    const auto format = static_cast<PackedFormat>(f);
    const std::string name = PackedFormatName(format);
    Arguments(benchmark::RegisterBenchmark(("Gemv/" + name).c_str(), Gemv, format), {1, 2, 4, 8, 16, 32});
    Arguments(benchmark::RegisterBenchmark(("Gemm/" + name).c_str(), Gemm, format, 2048), {16, 64, 512});
    Arguments(benchmark::RegisterBenchmark(("Expert/" + name).c_str(), Gemm, format, 768), {32, 512});
    if (format == PackedFormat::kF32) continue;
    Arguments(benchmark::RegisterBenchmark(("Moe/" + name).c_str(), MoeLayer, format), {1, 8, 512});
  }
  return true;
}();

}  // namespace
}  // namespace moesaic::kernels
