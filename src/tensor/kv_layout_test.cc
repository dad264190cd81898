#include "tensor/kv_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace moesaic::tensor {
namespace {

KvLayout Gqa() {
  return {.layers = 3, .heads = 2, .key_dim = 5, .value_dim = 3, .shared = false, .dtype = DType::kBF16};
}

TEST(KvLayoutTest, CountsKeysAndValuesOfEveryLayer) {
  const KvLayout gqa = Gqa();
  EXPECT_EQ(gqa.keys_bytes(), 2 * 64 * 5 * 2);
  EXPECT_EQ(gqa.values_bytes(), 2 * 64 * 3 * 2);
  EXPECT_EQ(gqa.layer_bytes(), 2 * 64 * (5 + 3) * 2);
  EXPECT_EQ(gqa.block_bytes(), 3 * gqa.layer_bytes());
  EXPECT_EQ(gqa.total_bytes(), gqa.block_bytes());
}

TEST(KvLayoutTest, KeySummariesAreStoredOutsideTheBlock) {
  KvLayout gqa = Gqa();
  gqa.summary_bytes = 84;
  EXPECT_EQ(gqa.layer_bytes(), Gqa().layer_bytes());
  EXPECT_EQ(gqa.block_bytes(), Gqa().block_bytes());
  EXPECT_EQ(gqa.summary_stride(), 128);
  EXPECT_EQ(gqa.total_bytes(), gqa.block_bytes() + 3 * 128);
}

TEST(KvLayoutTest, SharedKeysHaveNoValues) {
  const KvLayout mla = {
      .layers = 2, .heads = 1, .key_dim = 576, .value_dim = 512, .shared = true, .dtype = DType::kF32};
  EXPECT_EQ(mla.values_bytes(), 0);
  EXPECT_EQ(mla.value_offset(), 0);
  EXPECT_EQ(mla.layer_bytes(), mla.keys_bytes());
  EXPECT_EQ(mla.keys_bytes(), 64 * 576 * 4);
}

// Two scales per token and head: int8 takes (5 + 3 + 8) bytes where bf16 takes 16.
TEST(KvLayoutTest, Int8HasScales) {
  KvLayout gqa = Gqa();
  gqa.dtype = DType::kI8;
  EXPECT_EQ(gqa.scales_bytes(), 2 * 2 * 64 * 4);
  EXPECT_EQ(gqa.layer_bytes(), 2 * 64 * (5 + 3) + gqa.scales_bytes());
  const KvLayout qwen3 = {.layers = 1, .heads = 4, .key_dim = 128, .value_dim = 128, .dtype = DType::kI8};
  const KvLayout deepseek = {
      .layers = 1, .heads = 1, .key_dim = 576, .value_dim = 512, .shared = true, .dtype = DType::kI8};
  EXPECT_EQ(qwen3.layer_bytes(), 64 * 4 * (256 + 8));
  EXPECT_EQ(deepseek.layer_bytes(), 64 * (576 + 8));
}

TEST(KvLayoutTest, CopiesTokensOfEveryLayerAndHeadWithTheirScales) {
  KvLayout layout = Gqa();
  layout.dtype = DType::kI8;
  std::vector<std::byte> from(layout.block_bytes(), std::byte{1}), to(layout.block_bytes(), std::byte{2});
  layout.CopyTokens({.data = from.data()}, {.data = to.data()}, 40);
  EXPECT_EQ(std::ranges::count(to, std::byte{1}),
            40 * layout.layers * layout.heads * (layout.key_dim + layout.value_dim + 8));
  const auto* scales = to.data() + layout.scale_offset();
  EXPECT_EQ(scales[40 * 4 - 1], std::byte{1});
  EXPECT_EQ(scales[40 * 4], std::byte{2});
}

}  // namespace
}  // namespace moesaic::tensor
