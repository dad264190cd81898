// Measures the speed of GPTQ's parts and their share of the dot products' peak, which is measured in the same
// run:
//
//   Hessian/...  tokens x k^2 operations (of the triangle) in bf16
//   Factor/...   k^3 / 3 in f32, or three times as many in bf16 on machines with tile instructions
//   Gptq/...     n x k^2 in bf16 (int4 groups of 32, searched scales)
//   Expert/...   all three for one matrix: `of_peak` is the time at peak divided by the measured time,
//                `of_f32_peak` the same with factor and GPTQ at the f32 peak
//   Nearest/...  rounding without a Hessian: GB/s of f32 weights
//
// Arguments: threads, k, n, tokens.
#include <benchmark/benchmark.h>

#include <map>
#include <memory>
#include <random>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "kernels/probe.h"
#include "quantizer/gptq/gptq.h"
#include "quantizer/gptq/panel_product.h"

namespace moesaic::quantizer {
namespace {

using tensor::PackedFormat;

struct Machine {
  explicit Machine(int threads) : pool(*runtime::ThreadPool::Create({.threads = threads, .pin = true})) {
    for (const kernels::DotPeak& peak : kernels::MeasureDotPeaks(runtime::DetectCpu(), pool.get())) {
      peaks[peak.format] = peak.all_threads;
    }
  }
  kernels::ExecContext context() { return {.kernels = &table, .pool = pool.get(), .scratch = &scratch}; }

  kernels::KernelTable table = kernels::SelectKernels(runtime::DetectCpu());
  std::unique_ptr<runtime::ThreadPool> pool;
  runtime::Arena scratch;
  std::map<PackedFormat, double> peaks;
};

Machine& MachineOf(int threads) {
  static std::map<int, std::unique_ptr<Machine>> machines;
  auto& machine = machines[threads];
  if (machine == nullptr) machine = std::make_unique<Machine>(threads);
  return *machine;
}

std::vector<float> Normal(size_t count) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(rng);
  return values;
}

// One matrix and its tokens.
struct Work {
  explicit Work(const benchmark::State& state)
      : machine(MachineOf(static_cast<int>(state.range(0)))),
        ctx(machine.context()),
        k(static_cast<int>(state.range(1))),
        n(static_cast<int>(state.range(2))),
        tokens(static_cast<int>(state.range(3))),
        x(Normal(size_t(tokens) * k)),
        weights(Normal(size_t(n) * k)),
        hessian(*Hessian::Create(k)) {}
  void AddTokens() { hessian.Add(ctx, {.f32 = x.data(), .bf16 = nullptr, .stride = k, .count = tokens}); }
  double HessianSeconds() const { return 1.0 * tokens * k * k / machine.peaks.at(PackedFormat::kBF16); }
  double FactorSeconds() const {
    const double operations = 1.0 * k * k * k / 3;
    return MultipliesHalves(ctx) ? 3 * operations / machine.peaks.at(PackedFormat::kBF16)
                                 : operations / machine.peaks.at(PackedFormat::kF32);
  }
  double GptqSeconds() const { return 1.0 * n * k * k / machine.peaks.at(PackedFormat::kBF16); }
  double F32Seconds() const {
    return (1.0 * k * k * k / 3 + 1.0 * n * k * k) / machine.peaks.at(PackedFormat::kF32);
  }

  Machine& machine;
  kernels::ExecContext ctx;
  int k, n, tokens;
  std::vector<float> x, weights;
  Hessian hessian;
};

void Report(benchmark::State& state, double seconds_at_peak) {
  state.counters["of_peak"] = benchmark::Counter(seconds_at_peak * static_cast<double>(state.iterations()),
                                                 benchmark::Counter::kIsRate);
}

void HessianBench(benchmark::State& state) {
  Work work(state);
  for (auto _ : state) work.AddTokens();
  Report(state, work.HessianSeconds());
}

void FactorBench(benchmark::State& state) {
  Work work(state);
  work.AddTokens();
  for (auto _ : state) benchmark::DoNotOptimize(FactorHessian(work.ctx, work.hessian, {}).ok());
  Report(state, work.FactorSeconds());
}

bool Round(const Work& work, const HessianFactor& factor) {
  GptqReport report;
  return RoundByGptq(work.ctx, {GridKind::kInt4Group, 32}, work.weights.data(), work.n, work.k, factor,
                     {.by_error = true, .importance = factor.diagonal, .global_scale = 0}, &report)
      .ok();
}

void GptqBench(benchmark::State& state) {
  Work work(state);
  work.AddTokens();
  const auto factor = FactorHessian(work.ctx, work.hessian, {});
  for (auto _ : state) benchmark::DoNotOptimize(Round(work, *factor));
  Report(state, work.GptqSeconds());
}

void ExpertBench(benchmark::State& state) {
  Work work(state);
  for (auto _ : state) {
    work.hessian.Clear(work.ctx);
    work.AddTokens();
    const auto factor = FactorHessian(work.ctx, work.hessian, {});
    benchmark::DoNotOptimize(Round(work, *factor));
  }
  Report(state, work.HessianSeconds() + work.FactorSeconds() + work.GptqSeconds());
  state.counters["of_f32_peak"] = benchmark::Counter(
      (work.HessianSeconds() + work.F32Seconds()) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

void NearestBench(benchmark::State& state, Grid grid, bool by_error) {
  Work work(state);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        RoundToNearest(work.ctx, grid, work.weights.data(), work.n, work.k, {by_error, {}, 0}).ok());
  }
  state.counters["GB/s"] = benchmark::Counter(
      4e-9 * work.n * work.k * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

// Shapes: down, and gate and up, of an expert of a model like Qwen3-30B-A3B; gate and up of Kimi-K2.
void Shapes(benchmark::internal::Benchmark* bench) {
  bench->Args({2, 768, 2048, 4096})->Args({2, 2048, 1536, 4096})->Args({2, 7168, 4096, 8192});
  bench->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(HessianBench)->Name("Hessian")->Apply(Shapes);
BENCHMARK(FactorBench)->Name("Factor")->Apply(Shapes);
BENCHMARK(GptqBench)->Name("Gptq")->Apply(Shapes);
BENCHMARK(ExpertBench)->Name("Expert")->Apply(Shapes);
BENCHMARK_CAPTURE(NearestBench, Int8, Grid{GridKind::kInt8Channel, 0}, false)
    ->Name("Nearest/int8")
    ->Args({2, 2048, 2048, 1})
    ->UseRealTime();
BENCHMARK_CAPTURE(NearestBench, Int4, Grid{GridKind::kInt4Group, 32}, false)
    ->Name("Nearest/int4")
    ->Args({2, 2048, 2048, 1})
    ->UseRealTime();
BENCHMARK_CAPTURE(NearestBench, Int4Searched, Grid{GridKind::kInt4Group, 32}, true)
    ->Name("Nearest/int4_searched")
    ->Args({2, 2048, 2048, 1})
    ->UseRealTime();
BENCHMARK_CAPTURE(NearestBench, Nvfp4, Grid{GridKind::kNvfp4, 16}, false)
    ->Name("Nearest/nvfp4")
    ->Args({2, 2048, 2048, 1})
    ->UseRealTime();
BENCHMARK_CAPTURE(NearestBench, Nvfp4Searched, Grid{GridKind::kNvfp4, 16}, true)
    ->Name("Nearest/nvfp4_searched")
    ->Args({2, 2048, 2048, 1})
    ->UseRealTime();

}  // namespace
}  // namespace moesaic::quantizer
