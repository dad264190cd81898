#include "parallel/batch_split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <random>

#include "comm/transport/local_transport.h"
#include "parallel/counted_transport.h"

namespace moesaic::parallel {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

constexpr int kSplitExperts = 24, kSplitRanks = 4;

LayerPlacement RandomReplicas(std::mt19937& random) {
  LayerPlacement layer(kSplitRanks);
  for (int expert = 0; expert < kSplitExperts; ++expert) {
    layer[random() % kSplitRanks].push_back(expert);
    std::vector<int>& other = layer[random() % kSplitRanks];
    if (random() % 2 == 0 && (other.empty() || other.back() != expert)) other.push_back(expert);
  }
  return layer;
}

std::vector<int64_t> RandomCounts(std::mt19937& random) {
  std::vector<int64_t> counts(kSplitExperts);
  for (int64_t& count : counts) count = static_cast<int64_t>(random() % 50 * (random() % 4));
  return counts;
}

TEST(PlanBatch, TheBusiestRankHasTheTokensOfTheOptimum) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 50; ++trial) {
    const LayerPlacement layer = RandomReplicas(random);
    TokenSplit split(layer, kSplitExperts), oracle(layer, kSplitExperts);
    const std::vector<int64_t> tokens = RandomCounts(random);
    const BatchPlan plan = PlanBatch(layer, split, tokens, {});
    EXPECT_EQ(plan.busiest,
              std::ceil(oracle.Solve(std::vector<double>(tokens.begin(), tokens.end())) - 1e-6));
    EXPECT_EQ(plan.all, std::accumulate(tokens.begin(), tokens.end(), int64_t{0}));
  }
}

TEST(PlanBatch, ExpertsOfDeadRanksAreLeftOut) {
  const LayerPlacement layer = {{0, 1}, {0, 3}, {}};  // the last rank had expert 2
  const std::vector<double> speeds = {1, 1, kDeadSpeed};
  TokenSplit split(layer, 4, speeds);
  const BatchPlan plan = PlanBatch(layer, split, std::vector<int64_t>{40, 10, 0, 20}, speeds);
  EXPECT_EQ(plan.busiest, 35);
  EXPECT_EQ(plan.all, 70);
}

std::optional<BatchPlan> Spilled(const LayerPlacement& layer, const std::vector<int64_t>& tokens,
                                 const std::vector<double>& speeds, const SpillOptions& spill) {
  TokenSplit split(layer, static_cast<int>(tokens.size()), speeds);
  return SpillBatch(PlanBatch(layer, split, tokens, speeds), layer, split, tokens, speeds, spill);
}

TEST(SpillBatch, MovesExpertsOfTheBusiestRankWithinTheBudget) {
  const LayerPlacement layer = {{0, 1, 2}, {3, 4, 5}};
  const std::vector<int64_t> tokens = {400, 300, 300, 10, 10, 10};
  SpillOptions spill = {.max_moves = 4, .tolerance = 0.05, .expert_bytes = 100, .max_bytes = 200};
  const auto plan = Spilled(layer, tokens, {}, spill);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->all, 1030);
  EXPECT_LE(plan->busiest, 541);  // 1.05 of the mean
  EXPECT_LE(plan->spilled.size(), 2U);
  for (const SpillMove& move : plan->spilled) {
    EXPECT_EQ(move.from, 0);
    EXPECT_EQ(move.to, 1);
  }
  EXPECT_THAT(plan->experts[1], SizeIs(3 + plan->spilled.size()));
  spill.max_bytes = 99;
  EXPECT_FALSE(Spilled(layer, tokens, {}, spill).has_value());
}

TEST(SpillBatch, RelievesASlowRankWithFewerTokens) {
  const SpillOptions spill = {.max_moves = 4, .expert_bytes = 1, .max_bytes = 4};
  const auto plan = Spilled({{0}, {1, 2}}, {200, 100, 100}, {1, 0.25}, spill);
  ASSERT_TRUE(plan.has_value());
  EXPECT_GT(plan->busiest, 200);
  EXPECT_LT(plan->slowest, 400);  // from 800
}

TEST(SpillBatch, SendsNoTokensToDeadRanks) {
  const SpillOptions spill = {.max_moves = 4, .expert_bytes = 1, .max_bytes = 4};
  const auto plan = Spilled({{0, 1}, {}, {2, 3}}, {90, 80, 1, 1}, {1, kDeadSpeed, 1}, spill);
  ASSERT_TRUE(plan.has_value());
  for (const SpillMove& move : plan->spilled) EXPECT_EQ(move.to, 2);
  EXPECT_THAT(plan->tokens[1], SizeIs(0));
}

// The ranks' own divisions, which each computes alone, add up to the split.
TEST(OwnTokens, SumToTheSplitAndStayOnTheirRankWherePossible) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int64_t> counts(kSplitRanks);
    for (int64_t& count : counts) count = static_cast<int64_t>(random() % 30);
    const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const std::vector<int> holders = {0, 2, 3};
    const auto first = static_cast<int64_t>(random() % (all + 1)),
               second = static_cast<int64_t>(random() % (all - first + 1));
    const std::vector<int64_t> tokens = {first, second, all - first - second};
    std::vector<int64_t> sums(holders.size(), 0);
    for (int rank = 0; rank < kSplitRanks; ++rank) {
      const std::vector<int64_t> own = OwnTokens(tokens, holders, counts, rank);
      EXPECT_EQ(std::accumulate(own.begin(), own.end(), int64_t{0}), counts[rank]);
      for (size_t i = 0; i < own.size(); ++i) {
        sums[i] += own[i];
        if (holders[i] != rank) continue;
        EXPECT_GE(own[i], std::min(tokens[i], counts[rank]));
      }
    }
    EXPECT_EQ(sums, tokens);
  }
  EXPECT_THAT(OwnTokens(std::vector<int64_t>{5, 5}, std::vector<int>{0, 1}, std::vector<int64_t>{7, 3}, 0),
              ElementsAre(5, 2));
}

constexpr int kLayersOfPass = 2, kPassExperts = 6;
constexpr int64_t kPassExpertBytes = 128;

// Experts 0 to 2 are on rank 0, and each other rank has one expert. Weights name the layer and the expert.
class PassOfRank {
 public:
  PassOfRank(comm::Transport& end, int64_t spill_bytes)
      : ranks_(*comm::GroupTransport::Create(end, {0, 1, 2, 3})),
        split_(end, *ranks_, kPassExperts, 20,
               {.least_tokens = 1,
                .spill_bytes = spill_bytes,
                .spill_tolerance = 0.05,
                .spill_bytes_per_s = 1e18}) {
    for (int layer = 0; layer < kLayersOfPass; ++layer) {
      layers_.push_back(
          {.experts = experts_, .speeds = speeds_, .split = TokenSplit(experts_, kPassExperts, speeds_)});
      for (const int expert : experts_[ranks_->rank()])
        weights_[layer].insert(weights_[layer].end(), kPassExpertBytes, WeightOf(layer, expert));
    }
  }

  // A batch of this rank in one layer, whose weights must be those of the layer.
  Status Run(int layer, const std::vector<int32_t>& ids) {
    const auto choice =
        split_.Split(layers_[layer], map_, ids, {.data = weights_[layer].data(), .bytes = kPassExpertBytes},
                     /*row_seconds=*/1e-6);
    RETURN_IF_ERROR(choice.status());
    const auto data = split_.AwaitSpilled();
    RETURN_IF_ERROR(data.status());
    const comm::ExpertMap& map = choice->map != nullptr ? *choice->map : map_;
    const int own = map_.local_experts(ranks_->rank());
    int slot = -own;
    for (int i = 0; i < map.physical_experts(); ++i) {
      if (map.physical(i).rank != ranks_->rank() || slot++ < 0) continue;
      const std::byte* const first = *data + (slot - 1) * kPassExpertBytes;
      EXPECT_EQ(std::count(first, first + kPassExpertBytes, WeightOf(layer, map.physical(i).expert)),
                kPassExpertBytes)
          << "layer " << layer << ", expert " << map.physical(i).expert;
    }
    return OkStatus();
  }
  Status Prefetch() { return split_.Prefetch(layers_[1]); }
  BatchSplit& split() { return split_; }
  // The layers as living ranks have them.
  void Exclude(int rank) {
    std::vector<bool> dead(4, false);
    dead[rank] = true;
    split_.SetDead(dead);
    speeds_[rank] = kDeadSpeed;
    const LayerPlacement living = LivingPart(experts_, dead);
    for (BatchSplit::Layer& layer : layers_)
      layer = {.experts = living, .speeds = speeds_, .split = TokenSplit(living, kPassExperts, speeds_)};
  }

 private:
  static std::byte WeightOf(int layer, int expert) { return static_cast<std::byte>(16 * layer + expert + 1); }

  const LayerPlacement experts_ = {{0, 1, 2}, {3}, {4}, {5}};
  const comm::ExpertMap map_ = *comm::ExpertMap::Create(kPassExperts, experts_);
  std::vector<double> speeds_ = std::vector<double>(4, 1.0);
  std::unique_ptr<comm::GroupTransport> ranks_;
  BatchSplit split_;
  std::vector<BatchSplit::Layer> layers_;
  std::vector<std::byte> weights_[kLayersOfPass];
};

// Choices of a rank: most for `hot`, and some for each expert.
std::vector<int32_t> HotIds(int hot) {
  std::vector<int32_t> ids(40, hot);
  ids.insert(ids.end(), 30, (hot + 1) % kPassExperts);
  ids.insert(ids.end(), 20, (hot + 2) % kPassExperts);
  for (int expert = 0; expert < kPassExperts; ++expert) ids.push_back(expert);
  return ids;
}

struct PassTotals {
  std::mutex mutex;
  int64_t spilled = 0, prefetched = 0, used = 0, bytes = 0, busiest = 0;
  void Add(const BatchSplitStats& before, const BatchSplitStats& after) {
    const std::lock_guard<std::mutex> lock(mutex);
    spilled += after.spilled - before.spilled;
    prefetched += after.prefetched - before.prefetched;
    used += after.prefetched_used - before.prefetched_used;
    bytes += after.spilled_bytes - before.spilled_bytes;
    busiest = after.busiest_rows - before.busiest_rows;
  }
};

TEST(Prefetch, TheNextLayerHasItsSpilledWeightsBeforeItsTokensAreCounted) {
  constexpr int64_t kBudget = 4 * kPassExpertBytes;
  PassTotals first, second, other;
  comm::RunRanks(4, [&](comm::Transport& end) {
    PassOfRank pass(end, kBudget);
    BatchSplitStats before;
    const auto run = [&](int hot, PassTotals& totals) {
      ASSERT_TRUE(pass.Run(0, HotIds(hot)).ok());
      before = pass.split().stats();
      ASSERT_TRUE(pass.Prefetch().ok());
      ASSERT_TRUE(pass.Run(1, HotIds(hot)).ok());
      totals.Add(before, pass.split().stats());
    };
    run(0, first);
    run(0, second);
    run(3, other);
  });
  EXPECT_EQ(first.prefetched, 0) << "no batch is known";
  EXPECT_GT(first.spilled, 0);
  EXPECT_GT(second.prefetched, 0);
  EXPECT_EQ(second.used, second.prefetched);
  EXPECT_EQ(second.spilled, 0) << "the batch is like the last one";
  EXPECT_EQ(second.busiest, first.busiest);
  EXPECT_GT(other.prefetched, 0);
  EXPECT_LT(other.used, other.prefetched) << "another domain: nobody has tokens for all of them";
  for (const PassTotals* totals : {&first, &second, &other}) EXPECT_LE(totals->bytes, kBudget);
}

TEST(Prefetch, WeightsForAnotherLayerAreDropped) {
  PassTotals dropped, skipped;
  comm::RunRanks(4, [&](comm::Transport& end) {
    PassOfRank pass(end, 8 * kPassExpertBytes);
    for (int layer = 0; layer < kLayersOfPass; ++layer) ASSERT_TRUE(pass.Run(layer, HotIds(0)).ok());
    const auto unused = [&](PassTotals& totals, const auto& between) {
      const BatchSplitStats before = pass.split().stats();
      ASSERT_TRUE(pass.Prefetch().ok());
      between();
      ASSERT_TRUE(pass.Run(1, HotIds(0)).ok());
      totals.Add(before, pass.split().stats());
    };
    unused(dropped, [&] { ASSERT_TRUE(pass.split().DropPrefetched().ok()); });
    unused(skipped, [&] { ASSERT_TRUE(pass.Run(0, HotIds(0)).ok()); });
  });
  for (const PassTotals* totals : {&dropped, &skipped}) {
    EXPECT_GT(totals->prefetched, 0);
    EXPECT_EQ(totals->used, 0);
    EXPECT_GT(totals->spilled, 0);
  }
}

TEST(Prefetch, ARankThatDiesDuringItIsExcluded) {
  comm::LocalJob job(4);
  comm::RunRanks(job, [&](comm::Transport& end) {
    CountedTransport counted(end);
    PassOfRank pass(counted, 8 * kPassExpertBytes);
    for (int layer = 0; layer < kLayersOfPass; ++layer) ASSERT_TRUE(pass.Run(layer, HotIds(0)).ok());
    pass.Prefetch().IgnoreError();  // the rank may have died
    if (end.rank() == 2) return job.Kill(2);
    EXPECT_FALSE(pass.Run(1, HotIds(0)).ok());
    counted.Ignore(2);
    pass.Exclude(2);
    for (int again = 0; again < 2; ++again) {
      for (int layer = 0; layer < kLayersOfPass; ++layer) {
        ASSERT_TRUE(pass.Run(layer, HotIds(0)).ok());
        if (layer == 0) {
          ASSERT_TRUE(pass.Prefetch().ok());
        }
      }
    }
    EXPECT_GT(pass.split().stats().prefetched + pass.split().stats().spilled_bytes, 0);
  });
}

}  // namespace
}  // namespace moesaic::parallel
