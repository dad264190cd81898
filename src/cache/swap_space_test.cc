#include "cache/swap_space.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace moesaic::cache {
namespace {

constexpr KvLayout kLayout = {.layers = 3, .heads = 1, .key_dim = 2, .value_dim = 1, .summary_bytes = 84};

class SwapSpaceTest : public testing::Test {
 protected:
  SwapSpaceTest() {
    for (int i = 0; i < 4; ++i) blocks_.push_back(*pool_->Allocate());
  }

  // Keys, values and summaries of each layer, all different.
  static std::vector<std::byte> Of(int value) {
    std::vector<std::byte> bytes(kLayout.total_bytes());
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i / 61 + 77 * value);
    return bytes;
  }
  void Write(int32_t block, int value) {
    std::vector<std::byte> bytes = Of(value);
    kLayout.Copy(kLayout.Flat(bytes.data()), pool_->ViewOf(block));
  }
  std::vector<std::byte> Read(int32_t block) {
    std::vector<std::byte> bytes(kLayout.total_bytes());
    kLayout.Copy(pool_->ViewOf(block), kLayout.Flat(bytes.data()));
    return bytes;
  }

  const std::unique_ptr<KvPool> pool_ = *KvPool::Create(kLayout, 4 * kLayout.total_bytes());
  std::vector<BlockRef> blocks_;
};

TEST_F(SwapSpaceTest, GivesBackWhatWasPutInWithItsDigests) {
  const auto space = *SwapSpace::Create(kLayout.total_bytes(), 4 * kLayout.total_bytes() - 1);
  EXPECT_EQ(space->total_blocks(), 3);
  std::array<SwapRef, 3> held;
  for (int i = 0; i < 3; ++i) {
    Write(i, i);
    held[i] = space->Put(*pool_, i);
  }
  EXPECT_EQ(space->Put(*pool_, 3), nullptr);
  EXPECT_EQ(space->used_blocks(), 3);
  for (int i = 0; i < 4; ++i) Write(i, 9);
  for (int i = 2; i >= 0; --i) {
    space->Get(*held[i], *pool_, 3 - i);
    EXPECT_EQ(Read(3 - i), Of(i));
  }
  EXPECT_EQ(Read(0), Of(9)) << "nor is another touched";
  EXPECT_EQ(space->blocks_out(), 3);
  EXPECT_EQ(space->blocks_in(), 3);
  EXPECT_GT(space->copy_seconds(), 0);
}

TEST_F(SwapSpaceTest, APlaceIsFreeWithItsLastReference) {
  const auto space = *SwapSpace::Create(kLayout.total_bytes(), kLayout.total_bytes());
  SwapRef first = space->Put(*pool_, 1);
  SwapRef second = first;
  first = nullptr;
  EXPECT_EQ(space->Put(*pool_, 2), nullptr);
  second = nullptr;
  EXPECT_EQ(space->used_blocks(), 0);
  EXPECT_NE(space->Put(*pool_, 2), nullptr);
}

TEST_F(SwapSpaceTest, RefusesLessThanOneBlock) {
  EXPECT_EQ(SwapSpace::Create(kLayout.total_bytes(), kLayout.total_bytes() - 1).status().code(),
            StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace moesaic::cache
