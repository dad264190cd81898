// Compares the predicted work of a rank with the plan of the weights that it loads.
#include "models/rank_work.h"

#include <gtest/gtest.h>

#include "models/model_info.h"

namespace moesaic::models {
namespace {

TEST(WorkOfRanksTest, OneRankHasAllLoadedWeights) {
  for (const char* name : {"qwen3-tied", "qwen3-moe-norm-tied", "deepseek-v3-noqlora", "glm4-moe"}) {
    for (const char* dtype : {"auto", "bf16", "int8", "int4_g32"}) {
      const auto checkpoint =
          checkpoint::Checkpoint::Open(std::string(MOESAIC_SOURCE_DIR) + "/tests/golden/" + name);
      ASSERT_TRUE(checkpoint.ok()) << Message(checkpoint.status());
      const auto work = WorkOfRanks::Create(**checkpoint, dtype, /*kv_element_bytes=*/2,
                                            /*load_mtp=*/true);
      ASSERT_TRUE(work.ok()) << Message(work.status());
      const auto rank = work->Of(parallel::Layout(), 0);
      ASSERT_TRUE(rank.ok()) << Message(rank.status());
      const auto info = InfoOf(**checkpoint, dtype);
      ASSERT_TRUE(info.ok()) << Message(info.status());
      EXPECT_EQ(rank->weight_bytes, static_cast<double>(info->weight_bytes + info->mtp_weight_bytes))
          << name << " as " << dtype;
    }
  }
}

}  // namespace
}  // namespace moesaic::models
