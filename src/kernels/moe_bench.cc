// Benchmarks the work of a MoE layer around its experts: sorting slots by expert, gathering and quantizing
// each expert's rows, and adding the weighted results of each token. Experts are one panel wide and share one
// set of weights, which stays in the caches. "us" is the layer's time including the products, an upper bound
// of the dispatch. "products_us" is the time of the products alone, on cached rows and outputs; the
// difference is the dispatch. bench/peers/operators.py compares the median step with PyTorch's.
//   kernels_moe_bench --benchmark_filter=Dispatch.*512
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/gemm_tiling.h"
#include "kernels/linear.h"
#include "kernels/moe.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;

// DeepSeek-V3.
constexpr int kHidden = 7168, kExperts = 256, kTopK = 8;

std::vector<int32_t> RandomRoutes(int rows) {
  std::mt19937 rng(1);
  std::vector<int32_t> all(kExperts), ids;
  std::iota(all.begin(), all.end(), 0);
  for (int row = 0; row < rows; ++row) {
    std::shuffle(all.begin(), all.end(), rng);
    ids.insert(ids.end(), all.begin(), all.begin() + kTopK);
  }
  return ids;
}

// Fills a matrix with small equal numbers that are valid in every format.
tensor::PackedMatrix FillMatrix(PackedFormat format, int n, int k, runtime::Buffer* buffer) {
  const tensor::PackedLayout layout = tensor::PackedLayout::Of(format, n, k);
  *buffer = *runtime::Buffer::Allocate(layout.total_bytes, /*huge=*/true);
  std::memset(buffer->data(), 0x3c, layout.total_bytes);
  return {.layout = layout, .data = buffer->data()};
}

template <typename Step>
double MedianMicroseconds(int steps, const Step& step) {
  std::vector<double> seconds;
  for (int i = 0; i < steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2] * 1e6;
}

// Measures the experts' products alone: each expert processes its average number of rows together.
double ProductsMicroseconds(const ExecContext& context, const MoeParams& p) {
  const int rows = std::max(p.rows * p.top_k / kExperts, 1), experts = std::min(p.rows * p.top_k, kExperts);
  const tensor::PackedMatrix &up = p.experts.up, &down = p.experts.down;
  const QuantizedActivations x = QuantizeActivations(context, up.layout.format, p.x, 0, rows, p.hidden);
  const QuantizedActivations h =
      QuantizeActivations(context, down.layout.format, p.x, 0, rows, p.intermediate);
  constexpr int kPanels = 16;  // outputs processed together
  const int64_t room = int64_t{rows} * kPanels * tensor::kPanelRows;
  const auto y = context.scratch->Take<float>(room * context.pool->size());
  const auto run = [&](const QuantizedActivations& a, const tensor::PackedMatrix& w, int panel, int worker) {
    const int panels = std::min(kPanels, w.layout.panels() - panel);
    context.kernels->gemm[static_cast<int>(w.layout.format)].Run(TileOf(
        a, 0, rows, w, /*node=*/0, panel, panels, y.data() + worker * room, kPanels * tensor::kPanelRows));
  };
  return MedianMicroseconds(9, [&] {
    context.pool->Run(experts, [&](int64_t, int worker) {
      for (int i = 0; i < 2; ++i) run(x, up, 0, worker);
      for (int panel = 0; panel < down.layout.panels(); panel += kPanels) run(h, down, panel, worker);
    });
  });
}

// Benchmarks are named by rows and threads.
void Dispatch(benchmark::State& state, PackedFormat format) {
  const auto rows = static_cast<int>(state.range(0));
  const auto pool = *runtime::ThreadPool::Create({.threads = static_cast<int>(state.range(1)), .pin = true});
  const KernelTable kernels = SelectKernels(runtime::DetectCpu());
  runtime::Arena scratch;
  const ExecContext context = {.kernels = &kernels, .pool = pool.get(), .scratch = &scratch};
  runtime::Buffer up_buffer, down_buffer;
  const tensor::PackedMatrix up = FillMatrix(format, tensor::kPanelRows, kHidden, &up_buffer);
  const tensor::PackedMatrix down = FillMatrix(format, kHidden, tensor::kPanelRows, &down_buffer);
  const std::vector<int32_t> ids = RandomRoutes(rows);
  const std::vector<float> weights(ids.size(), 1.0F / kTopK), x(size_t(rows) * kHidden, 1e-3F);
  std::vector<float> out(x.size());
  const MoeParams params = {.x = x.data(),
                            .x_stride = kHidden,
                            .rows = rows,
                            .hidden = kHidden,
                            .intermediate = tensor::kPanelRows,
                            .experts = {.gate = up, .up = up, .down = down, .stride = 0, .count = kExperts},
                            .ids = ids.data(),
                            .weights = weights.data(),
                            .top_k = kTopK,
                            .shared_gate = {},
                            .shared_up = {},
                            .shared_down = {},
                            .out = out.data(),
                            .out_stride = kHidden};
  Moe(context, params);  // scratch grows to its final size
  std::vector<double> seconds;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    Moe(context, params);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    state.SetIterationTime(seconds.back());
  }
  std::sort(seconds.begin(), seconds.end());
  state.counters["us"] = seconds[seconds.size() / 2] * 1e6;
  state.counters["products_us"] = ProductsMicroseconds(context, params);
}

#define MOESAIC_DISPATCH                            \
  ArgNames({"rows", "threads"})                     \
      ->ArgsProduct({{1, 512, 2048, 4096}, {1, 2}}) \
      ->UseManualTime()                             \
      ->Unit(benchmark::kMicrosecond)
BENCHMARK_CAPTURE(Dispatch, bf16, PackedFormat::kBF16)->MOESAIC_DISPATCH;
BENCHMARK_CAPTURE(Dispatch, int8, PackedFormat::kI8)->MOESAIC_DISPATCH;

}  // namespace
}  // namespace moesaic::kernels
