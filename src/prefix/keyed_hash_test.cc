#include "prefix/keyed_hash.h"

#include <gtest/gtest.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace moesaic::prefix {
namespace {

std::array<std::byte, 192> FixedSecret() {
  std::array<std::byte, 192> secret;
  for (size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::byte>(i * 37 + 11);
  return secret;
}

std::vector<int32_t> Numbers(size_t count, int32_t first) {
  std::vector<int32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

TEST(KeyedHasherTest, DependsOnTheSecretTheNamespaceAndTheTokens) {
  const KeyedHasher one, two;
  const std::vector<int32_t> a = Numbers(64, 1), b = Numbers(64, 2);
  EXPECT_EQ(one.Next(one.Root("x"), a), one.Next(one.Root("x"), a));
  EXPECT_NE(one.Next(one.Root("x"), a), two.Next(two.Root("x"), a));
  EXPECT_NE(one.Next(one.Root("x"), a), one.Next(one.Root("y"), a));
  EXPECT_NE(one.Next(one.Root("x"), a), one.Next(one.Root("x"), b));
  EXPECT_NE(one.AddContent(1, "cat"), one.AddContent(1, "dog"));
  EXPECT_NE(one.AddContent(1, "cat"), one.AddContent(2, "cat"));
}

TEST(KeyedHasherTest, KeepsTheGivenNumberOfBits) {
  const KeyedHasher hasher(/*bits=*/3);
  const std::vector<int32_t> tokens = Numbers(16, 5);
  for (int i = 0; i < 50; ++i) {
    EXPECT_LT(hasher.Root(std::to_string(i)), 8U);
    EXPECT_LT(hasher.Next(i, tokens), 8U);
    EXPECT_LT(hasher.AddContent(i, "x"), 8U);
  }
}

class BlockSizeTest : public testing::TestWithParam<size_t> {};

// Workers of the proxy that share a memory zone must compute the same keys, also after an update.
TEST_P(BlockSizeTest, ComputesTheDocumentedFunction) {
  const std::array<std::byte, 192> secret = FixedSecret();
  const KeyedHasher hasher(secret);
  const auto hash = [&](const void* bytes, size_t size) {
    return XXH3_64bits_withSecret(bytes, size, secret.data(), secret.size());
  };
  const std::vector<int32_t> tokens = Numbers(GetParam(), 1000);
  const uint64_t root = hasher.Root("tenant");
  EXPECT_EQ(root, hash("tenant", 6));
  const std::array<uint64_t, 2> pair = {root, hash(tokens.data(), tokens.size() * sizeof(int32_t))};
  const uint64_t block = hasher.Next(root, tokens);
  EXPECT_EQ(block, hash(pair.data(), sizeof(pair)));
  const std::array<uint64_t, 2> with_content = {block, hash("image", 5)};
  EXPECT_EQ(hasher.AddContent(block, "image"), hash(with_content.data(), sizeof(with_content)));
}

TEST_P(BlockSizeTest, HashesAdjacentBlocksOneByOneOrTogether) {
  constexpr size_t kBlocks = 9;
  const KeyedHasher hasher;
  const std::vector<int32_t> tokens = Numbers(kBlocks * GetParam() + GetParam() / 2, 7);
  std::vector<uint64_t> together(kBlocks);
  hasher.NextBlocks(hasher.Root(""), tokens, GetParam(), together);
  uint64_t parent = hasher.Root("");
  for (size_t i = 0; i < kBlocks; ++i) {
    parent = hasher.Next(parent, std::span(tokens).subspan(i * GetParam(), GetParam()));
    EXPECT_EQ(together[i], parent) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(BlockTokens, BlockSizeTest, testing::Values(1, 16, 17, 64, 300));

}  // namespace
}  // namespace moesaic::prefix
