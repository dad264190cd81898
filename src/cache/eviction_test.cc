#include "cache/eviction.h"

#include <gtest/gtest.h>

namespace moesaic::cache {
namespace {

constexpr EvictionCandidate kOnce = {.last_use = 50, .uses = 1, .end_position = 1000};

TEST(LruPolicyTest, DependsOnTheLastUseOnly) {
  auto policy = MakeLruPolicy();
  EvictionCandidate later = kOnce;
  later.last_use = 51;
  EvictionCandidate often = kOnce;
  often.uses = 9;
  EXPECT_LT(policy->Worth(kOnce), policy->Worth(later));
  EXPECT_EQ(policy->Worth(kOnce), policy->Worth(often));
}

class CostAwarePolicyTest : public testing::Test {
 protected:
  // Runs stay in the cache for about 30 requests here.
  CostAwarePolicyTest() {
    for (int i = 0; i < 1000; ++i) policy_->OnEvict(kOnce, 0, kOnce.last_use + 30);
  }
  double Worth(uint64_t last_use, uint32_t uses, Session session = Session::kNone,
               int64_t end_position = 1000) {
    return policy_->Worth(
        {.last_use = last_use, .uses = uses, .session = session, .end_position = end_position});
  }
  std::unique_ptr<EvictionPolicy> policy_ = MakeCostAwarePolicy(/*attention_tokens=*/8000, /*remembered=*/3);
};

TEST_F(CostAwarePolicyTest, EvictsTheLeastRecentlyUsedAmongEquals) {
  EXPECT_LT(Worth(50, 1), Worth(51, 1));
  EXPECT_LT(Worth(50, 4), Worth(51, 4));
}

TEST_F(CostAwarePolicyTest, AnotherUseAddsAPartOfALifetime) {
  EXPECT_GT(Worth(50, 2), Worth(54, 1));
  EXPECT_LT(Worth(50, 2), Worth(60, 1)) << "a use adds less than 10 steps";
}

TEST_F(CostAwarePolicyTest, ExpensiveBlocksStayLonger) {
  EXPECT_GT(Worth(50, 2, Session::kNone, 16000), Worth(50, 2, Session::kNone, 1000));
}

TEST_F(CostAwarePolicyTest, SessionHintsOutweighPastUses) {
  EXPECT_GT(Worth(50, 1, Session::kContinues), Worth(64, 1)) << "a hint adds half a lifetime";
  EXPECT_GT(Worth(50, 1, Session::kContinues), Worth(50, 2)) << "a hint outweighs a past use";
  EXPECT_LT(Worth(75, 1, Session::kEnds), Worth(50, 1));
  EXPECT_EQ(Worth(50, 2, Session::kEnds), Worth(50, 2)) << "other requests use the block too";
}

TEST_F(CostAwarePolicyTest, PredictedReturnsCountAsUses) {
  EvictionCandidate due = kOnce;
  due.session = Session::kContinues;
  due.returns_at = 70;
  EXPECT_EQ(policy_->ReturnsAt(due), 70);
  EXPECT_EQ(policy_->Worth(due), Worth(70, 1, Session::kContinues));
  EXPECT_EQ(MakeLruPolicy()->ReturnsAt(due), 0) << "LRU ignores session hints";
}

TEST_F(CostAwarePolicyTest, RemembersTheLastEvictedRuns) {
  EvictionCandidate often = kOnce;
  often.uses = 5;
  policy_->OnEvict(often, 111, 80);
  EXPECT_EQ(policy_->UsesBefore(111), 5U);
  for (uint64_t hash = 1; hash <= 3; ++hash) policy_->OnEvict(kOnce, hash, 80);
  EXPECT_EQ(policy_->UsesBefore(111), 0U);
  EXPECT_EQ(policy_->UsesBefore(3), 1U);
}

}  // namespace
}  // namespace moesaic::cache
