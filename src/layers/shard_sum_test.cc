#include "layers/shard_sum.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "comm/transport/local_transport.h"
#include "kernels/test_context.h"
#include "layers/linear.h"

namespace moesaic::layers {
namespace {

// Two ranks with one column half of x and of the weights each: their partial outputs sum up to the whole one.
class ShardSumTest : public testing::TestWithParam<int> {
 protected:
  static constexpr int kOutputs = 200, kHalf = 32;
};

TEST_P(ShardSumTest, SumsAnOutputThatIsComputedInParts) {
  const int rows = GetParam();
  std::mt19937 rng(3);
  const std::vector<float> x = kernels::RandomValues(&rng, size_t(rows) * 2 * kHalf, 1);
  kernels::TestMatrix halves[2];
  for (auto& half : halves) half = kernels::RandomMatrix(&rng, tensor::PackedFormat::kF32, kOutputs, kHalf);
  const parallel::Layout layout = *parallel::Layout::Create({.tensor = 2});
  comm::RunRanks(2, [&](comm::Transport& end) {
    const auto groups = *parallel::RankGroups::Create(
        end, comm::Topology::Flat(2, {.latency_s = 1e-6, .bytes_per_s = 1e10}), layout);
    kernels::TestContext test(runtime::Isa::kRef, 2);
    const kernels::ExecContext ctx = test.context();
    const std::vector<int32_t> positions(rows);
    const Step step{.ctx = ctx, .sequences = {}, .positions = positions, .groups = groups.get()};
    std::vector<float> out(size_t(rows) * kOutputs, 99.0F);
    {
      ScratchScope scratch(ctx);
      ShardSum sum(step, scratch, out.data(), kOutputs);
      EXPECT_EQ(sum.parts().count, rows >= 1000 ? 3 : 1);
      const Linear linear{.weight = halves[end.rank()].matrix};
      Apply(ctx, linear, x.data() + end.rank() * kHalf, 2 * kHalf, rows, out.data(), kOutputs,
            /*accumulate=*/false, sum.parts());
      sum.Wait();
    }
    ASSERT_TRUE(groups->Finish().ok());
    for (int row = 0; row < rows; row += 37) {
      for (int n = 0; n < kOutputs; ++n) {
        double expected = 0;
        for (int k = 0; k < 2 * kHalf; ++k) {
          expected +=
              double{x[size_t(row) * 2 * kHalf + k]} * halves[k / kHalf].values[n * kHalf + k % kHalf];
        }
        ASSERT_NEAR(out[size_t(row) * kOutputs + n], expected, 1e-4) << row << ", " << n;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, ShardSumTest, testing::Values(1, 100, 1000));

}  // namespace
}  // namespace moesaic::layers
