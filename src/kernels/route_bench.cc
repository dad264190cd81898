// Benchmarks routing at the shapes of real models: rows per microsecond, from cached logits to ids and
// weights. bench/peers/operators.py compares the median step with PyTorch's.
//   kernels_route_bench --benchmark_filter=RouteDeepSeekV3/512/
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include "kernels/kernel_table.h"
#include "kernels/route.h"

namespace moesaic::kernels {
namespace {

// Logits and bias of the magnitude in trained routers: 256 scores close to each other.
std::vector<float> Normal(size_t count, float deviation) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(count);
  for (float& v : values) v = normal(rng);
  return values;
}

// Benchmarks are named by rows and threads.
void Measure(benchmark::State& state, RouteParams p) {
  p.rows = static_cast<int>(state.range(0));
  const auto pool = *runtime::ThreadPool::Create({.threads = static_cast<int>(state.range(1)), .pin = true});
  const KernelTable kernels = SelectKernels(runtime::DetectCpu());
  runtime::Arena scratch;
  const ExecContext context = {.kernels = &kernels, .pool = pool.get(), .scratch = &scratch};
  const std::vector<float> logits = Normal(size_t(p.rows) * p.experts, 1), bias = Normal(p.experts, 0.01F);
  std::vector<int32_t> ids(size_t(p.rows) * p.top_k);
  std::vector<float> weights(ids.size());
  p.logits = logits.data();
  p.bias = p.scoring == RouteParams::Scoring::kSigmoid ? bias.data() : nullptr;
  p.ids = ids.data();
  p.weights = weights.data();
  Route(context, p);  // scratch grows to its final size
  std::vector<double> seconds;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    Route(context, p);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    state.SetIterationTime(seconds.back());
  }
  benchmark::DoNotOptimize(weights.data());
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  state.counters["us"] = median * 1e6;
  state.counters["rows/us"] = p.rows / median * 1e-6;
}

void RouteDeepSeekV3(benchmark::State& state) {
  Measure(state, {.logits = nullptr,
                  .rows = 0,
                  .experts = 256,
                  .top_k = 8,
                  .scoring = RouteParams::Scoring::kSigmoid,
                  .groups = 8,
                  .top_groups = 4,
                  .group_score = RouteParams::GroupScore::kTopTwoSum,
                  .normalize = true,
                  .scale = 2.5F,
                  .ids = nullptr,
                  .weights = nullptr});
}

void RouteQwen3Moe(benchmark::State& state) {
  Measure(state, {.logits = nullptr,
                  .rows = 0,
                  .experts = 128,
                  .top_k = 8,
                  .scoring = RouteParams::Scoring::kSoftmax,
                  .normalize = true,
                  .ids = nullptr,
                  .weights = nullptr});
}

#define MOESAIC_ROUTE                             \
  ArgNames({"rows", "threads"})                   \
      ->ArgsProduct({{1, 32, 512, 4096}, {1, 2}}) \
      ->UseManualTime()                           \
      ->Unit(benchmark::kMicrosecond)
BENCHMARK(RouteDeepSeekV3)->MOESAIC_ROUTE;
BENCHMARK(RouteQwen3Moe)->MOESAIC_ROUTE;

}  // namespace
}  // namespace moesaic::kernels
