#include "kernels/tuning.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/gemm_tiling.h"
#include "kernels/test_context.h"
#include "kernels/tuner.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;

// A crossover selects between tiles and vectors, which must give the same bits for any number of rows.
TEST(Tuning, CrossoversDoNotChangeResults) {
  std::mt19937 rng(7);
  TestContext test(runtime::HostIsas(runtime::DetectCpu()).back(), 2);
  for (int f = 0; f < tensor::kPackedFormats; ++f) {
    const auto format = static_cast<PackedFormat>(f);
    const KernelTable::Gemm& gemm = test.context().kernels->gemm[f];
    if (gemm.few == nullptr || !tensor::CanQuantize(format)) continue;  // gemm_test.cc tests the others
    for (const auto& [n, k] : {std::pair{1, 1}, {100, 65}, {333, 300}, {64, 2000}}) {
      const TestMatrix w = RandomMatrix(&rng, format, n, k);
      for (int m : {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 79, 150}) {
        const auto x = RandomValues(&rng, size_t(m) * k, 1);
        const size_t mark = test.scratch_mark();
        const QuantizedActivations a = QuantizeActivations(test.context(), format, x.data(), k, m, k);
        std::vector<float> of_tiles(size_t(m) * n), of_few(of_tiles.size());
        gemm.tile(TileOf(a, 0, m, w.matrix, 0, 0, w.matrix.layout.panels(), of_tiles.data(), n));
        gemm.few(TileOf(a, 0, m, w.matrix, 0, 0, w.matrix.layout.panels(), of_few.data(), n));
        ASSERT_EQ(std::memcmp(of_tiles.data(), of_few.data(), of_few.size() * sizeof(float)), 0)
            << PackedFormatName(format) << " " << m << "x" << n << "x" << k;
        test.context().scratch->Rewind(mark);
      }
    }
  }
}

// The limits that ApplyTuning accepts.
TEST(Tuning, TaskSizesDoNotChangeResults) {
  std::mt19937 rng(8);
  TestContext test(runtime::HostIsas(runtime::DetectCpu()).back(), 3);
  for (PackedFormat format : {PackedFormat::kBF16, PackedFormat::kI8, PackedFormat::kI4G32}) {
    for (const auto& [m, n, k] : {std::tuple{1, 1000, 300}, {150, 700, 100}, {500, 100, 2000}}) {
      const TestMatrix w = RandomMatrix(&rng, format, n, k);
      const auto x = RandomValues(&rng, size_t(m) * k, 1);
      std::vector<float> first;
      for (const TileSizes& sizes : {TileSizes{}, TileSizes{.panel_bytes = 16 << 10, .row_bytes = 16 << 10},
                                     TileSizes{.panel_bytes = 64 << 20, .row_bytes = 64 << 20},
                                     TileSizes{.tasks_per_thread = 1}, TileSizes{.tasks_per_thread = 64}}) {
        KernelTable table = *test.context().kernels;
        ASSERT_TRUE(ApplyTuning({.tile_sizes = sizes, .few_below = {}}, table).ok());
        ExecContext ctx = test.context();
        ctx.kernels = &table;
        const size_t mark = test.scratch_mark();
        const QuantizedActivations a = QuantizeActivations(ctx, format, x.data(), k, m, k);
        std::vector<float> c(size_t(m) * n);
        Linear(ctx, {.a = &a, .w = &w.matrix, .c = c.data(), .c_stride = n});
        if (first.empty()) first = c;
        ASSERT_EQ(std::memcmp(c.data(), first.data(), c.size() * sizeof(float)), 0);
        ctx.scratch->Rewind(mark);
      }
    }
  }
}

TEST(Tuning, RejectsValuesOutOfRange) {
  KernelTable table = SelectKernels(runtime::DetectCpu());
  const KernelTable before = table;
  const auto error = [&](const Tuning& tuning) { return Message(ApplyTuning(tuning, table)); };
  EXPECT_EQ(error({.tile_sizes = {.panel_bytes = 0}, .few_below = {}}),
            "panel_bytes must be in [16384, 67108864], found 0");
  EXPECT_EQ(error({.tile_sizes = {.row_bytes = -1}, .few_below = {}}),
            "row_bytes must be in [16384, 67108864], found -1");
  EXPECT_EQ(error({.tile_sizes = {.tasks_per_thread = 65}, .few_below = {}}),
            "tasks_per_thread must be in [1, 64], found 65");
  Tuning f32;
  f32.few_below[static_cast<int>(PackedFormat::kF32)] = 4;
  EXPECT_EQ(error(f32), "f32 few_below: this processor has only one kernel for the format");
  f32.few_below[static_cast<int>(PackedFormat::kF32)] = 1025;
  EXPECT_EQ(error(f32), "f32 few_below must be in [0, 1024], found 1025");
  EXPECT_EQ(table.tile_sizes, before.tile_sizes);
}

TEST(Tuning, StopsOnCancel) {
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const KernelTable table = SelectKernels(runtime::DetectCpu());
  const auto stopped = Tune(table, *pool, [](int64_t done, int64_t total, const std::string& what) {
    EXPECT_EQ(done, 0);
    EXPECT_GE(total, 3) << "and one more for each format with a kernel for few rows";
    EXPECT_FALSE(what.empty());
    return false;
  });
  EXPECT_EQ(stopped.status().code(), StatusCode::kCancelled);
}

// The callback runs repeatedly while one parameter is measured.
TEST(Tuning, StopsDuringAStep) {
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const KernelTable table = SelectKernels(runtime::DetectCpu());
  int64_t calls = 0;
  const auto stopped = Tune(table, *pool, [&](int64_t done, int64_t, const std::string&) {
    EXPECT_EQ(done, 0);
    return ++calls < 2;
  });
  EXPECT_EQ(stopped.status().code(), StatusCode::kCancelled);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace moesaic::kernels
