#include "cache/swap_space.h"

#include <gtest/gtest.h>

#include <array>

namespace moesaic::cache {
namespace {

using Block = std::array<std::byte, 64>;

Block Of(int value) {
  Block block;
  block.fill(static_cast<std::byte>(value));
  return block;
}

TEST(SwapSpaceTest, GivesBackWhatWasPutIn) {
  const auto space = *SwapSpace::Create(64, 3 * 64 + 63);
  EXPECT_EQ(space->total_blocks(), 3);
  std::array<SwapRef, 3> held;
  for (int i = 0; i < 3; ++i) held[i] = space->Put(Of(i).data());
  EXPECT_EQ(space->Put(Of(9).data()), nullptr);
  EXPECT_EQ(space->used_blocks(), 3);
  Block back{};
  for (int i = 2; i >= 0; --i) {
    space->Get(*held[i], back.data());
    EXPECT_EQ(back, Of(i));
  }
  EXPECT_EQ(space->blocks_out(), 3);
  EXPECT_EQ(space->blocks_in(), 3);
  EXPECT_GT(space->copy_seconds(), 0);
}

TEST(SwapSpaceTest, APlaceIsFreeWithItsLastReference) {
  const auto space = *SwapSpace::Create(64, 64);
  SwapRef first = space->Put(Of(1).data());
  SwapRef second = first;
  first = nullptr;
  EXPECT_EQ(space->Put(Of(2).data()), nullptr);
  second = nullptr;
  EXPECT_EQ(space->used_blocks(), 0);
  EXPECT_NE(space->Put(Of(2).data()), nullptr);
}

TEST(SwapSpaceTest, RefusesLessThanOneBlock) {
  EXPECT_EQ(SwapSpace::Create(64, 63).status().code(), StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace moesaic::cache
