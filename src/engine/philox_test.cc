#include "engine/philox.h"

#include <gtest/gtest.h>

#include <set>

namespace moesaic::engine {
namespace {

// The expected values are from the authors' Random123 distribution (kat_vectors, philox4x32 with 10 rounds).
TEST(PhiloxTest, MatchesTheKnownAnswers) {
  EXPECT_EQ(Philox({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, UniformsFillTheUnitInterval) {
  double sum = 0;
  int below_tenth = 0;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const double u = UniformAt(7, i);
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
    below_tenth += u < 0.1;
  }
  // The limits are five standard errors: sqrt(1/12/n) and sqrt(0.09/n).
  EXPECT_NEAR(sum / kDraws, 0.5, 5 * 0.000913);
  EXPECT_NEAR(static_cast<double>(below_tenth) / kDraws, 0.1, 5 * 0.00095);
}

TEST(PhiloxTest, BatchesOfNeighbouringSeedsShareNoSeed) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    EXPECT_EQ(SeedOf(seed, 0), seed);
    for (size_t index = 0; index < 50; ++index) seeds.insert(SeedOf(seed, index));
  }
  EXPECT_EQ(seeds.size(), 50U * 50U);
}

}  // namespace
}  // namespace moesaic::engine
