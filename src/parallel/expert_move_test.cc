#include "parallel/expert_move.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "comm/transport/local_transport.h"

namespace moesaic::parallel {
namespace {

using comm::Transport;
using testing::HasSubstr;

constexpr int64_t kBytes = (1 << 20) + 5000;  // two pieces

std::vector<std::byte> WeightsOf(const std::vector<int>& experts) {
  std::vector<std::byte> weights(experts.size() * kBytes);
  for (size_t i = 0; i < experts.size(); ++i)
    std::memset(weights.data() + i * kBytes, experts[i] + 1, kBytes);
  return weights;
}

LayerPlacement RandomPlacement(std::mt19937& random, int experts, int ranks) {
  LayerPlacement placement(ranks);
  for (int expert = 0; expert < experts; ++expert) {
    placement[random() % ranks].push_back(expert);
    for (int copies = static_cast<int>(random() % 3); copies > 0; --copies) {
      std::vector<int>& rank = placement[random() % ranks];
      if (rank.empty() || rank.back() != expert) rank.push_back(expert);
    }
  }
  return placement;
}

TEST(ExpertMove, EveryRankGetsTheExpertsOfTheNextPlacement) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 8; ++trial) {
    const int ranks = 2 + trial % 4;
    const LayerPlacement current = RandomPlacement(random, 9, ranks),
                         next = RandomPlacement(random, 9, ranks);
    comm::RunRanks(ranks, [&](Transport& end) {
      const std::vector<std::byte> old = WeightsOf(current[end.rank()]);
      const auto old_of = [&](int expert) {
        const auto& own = current[end.rank()];
        return old.data() + (std::ranges::find(own, expert) - own.begin()) * kBytes;
      };
      std::vector<std::byte> weights(next[end.rank()].size() * kBytes);
      auto move = ExpertMove::Create(end, trial, current, next, kBytes, old_of, weights.data());
      ASSERT_TRUE(move.ok()) << Message(move.status());
      while (!move->done()) {
        ASSERT_TRUE(move->Advance().ok());
        end.Idle();
      }
      EXPECT_EQ(weights, WeightsOf(next[end.rank()])) << "trial " << trial;
    });
  }
}

TEST(ExpertMove, ADeadPeerEndsIt) {
  comm::LocalJob job(2);
  const std::vector<std::byte> old = WeightsOf({0});
  std::vector<std::byte> weights(kBytes);
  auto move = ExpertMove::Create(
      job.end(0), 1, {{0}, {1}}, {{1}, {0}}, kBytes, [&](int) { return old.data(); }, weights.data());
  ASSERT_TRUE(move.ok());
  ASSERT_TRUE(move->Advance().ok());
  job.Kill(1);
  Status failed;
  for (int i = 0; i < 1000 && failed.ok(); ++i) failed = move->Advance();
  EXPECT_EQ(failed.code(), StatusCode::kUnavailable);
}

TEST(ExpertMove, AnExpertWithoutHolderIsRefused) {
  comm::LocalJob job(2);
  const auto move = ExpertMove::Create(job.end(0), 1, {{0}, {1}}, {{0, 2}, {1}}, kBytes, nullptr, nullptr);
  EXPECT_THAT(Message(move.status()), HasSubstr("expert 2"));
}

}  // namespace
}  // namespace moesaic::parallel
