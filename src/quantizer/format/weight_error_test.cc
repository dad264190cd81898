#include "quantizer/format/weight_error.h"

#include <gtest/gtest.h>

#include "checkpoint/test_files.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "models/test_session.h"
#include "quantizer/quantize.h"
#include "quantizer/verify.h"

namespace moesaic::quantizer {
namespace {

class WeightErrorTest : public ::testing::Test {
 protected:
  static std::unique_ptr<checkpoint::Checkpoint> Open(const std::string& path) {
    return *checkpoint::Checkpoint::Open(path);
  }
  const std::string path_ = models::SourcePath("models/moesaic-tiny");
  std::unique_ptr<runtime::ThreadPool> pool_ = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
};

TEST_F(WeightErrorTest, IsZeroForACheckpointAndItself) {
  const auto source = Open(path_);
  const auto errors = WeightErrors(*source, *source, *pool_, nullptr);
  ASSERT_TRUE(errors.ok()) << errors.status();
  EXPECT_GT(errors->size(), 200U);
  for (const LinearError& error : *errors) {
    EXPECT_EQ(error.error, 0) << error.name;
    EXPECT_GT(error.weight, 0) << error.name;
  }
}

// verify sums the same differences in another way.
TEST_F(WeightErrorTest, EqualsTheErrorOfVerify) {
  const checkpoint::TestFolder folder;
  const auto source = Open(path_);
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  QuantizeOptions options;
  options.output.scheme = Scheme::kW4A16;
  ASSERT_TRUE(Quantize(*source, options, kernels, *pool_, folder.Path("out")).ok());
  const auto out = Open(folder.Path("out"));
  const auto errors = WeightErrors(*out, *source, *pool_, nullptr);
  ASSERT_TRUE(errors.ok()) << errors.status();
  const auto verified = Verify(*out, *source, kernels, *pool_, nullptr);
  ASSERT_TRUE(verified.ok()) << verified.status();
  for (const KindError& kind : verified->kinds) {
    double error = 0, weight = 0;
    for (const LinearError& linear : *errors) {
      if (linear.kind != kind.kind) continue;
      error += linear.error;
      weight += linear.weight;
      EXPECT_EQ(linear.layer, LayerOf(linear.name));
      EXPECT_GE(linear.layer, 0);
    }
    EXPECT_NEAR(error, kind.error, 1e-9 * kind.error) << kind.kind;
    EXPECT_NEAR(weight, kind.weight, 1e-9 * kind.weight) << kind.kind;
  }
  const auto before = BytesOf(*source), after = BytesOf(*out);
  ASSERT_TRUE(before.ok() && after.ok());
  EXPECT_LT(after->total, before->total);
  EXPECT_LT(after->active, before->active);
  EXPECT_LT(before->active, before->total);
}

TEST(LayerOfTest, ReturnsTheLayerNumberOfTheName) {
  EXPECT_EQ(LayerOf("model.layers.17.mlp.experts.3.up_proj"), 17);
  EXPECT_EQ(LayerOf("lm_head"), -1);
}

}  // namespace
}  // namespace moesaic::quantizer
