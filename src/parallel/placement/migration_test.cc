#include "parallel/placement/migration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

LayerPlacement RandomRanks(Random& random, int experts, int ranks, int slots) {
  LayerPlacement layer(ranks);
  for (std::vector<int>& rank : layer) {
    std::vector<int> left(experts);
    for (int e = 0; e < experts; ++e) left[e] = e;
    for (int slot = 0; slot < slots; ++slot) {
      const auto at = left.begin() + random.Below(static_cast<int>(left.size()));
      rank.push_back(*at);
      left.erase(at);
    }
  }
  for (int e = 0; e < experts; ++e) {
    std::vector<int>& rank = layer[e % ranks];
    if (std::find(rank.begin(), rank.end(), e) == rank.end()) rank.push_back(e);
  }
  return layer;
}

// Fewest rounds over all choices of sources, by exhaustive search.
int FewestRounds(const LayerPlacement& current, const std::vector<std::pair<int, int>>& needs) {
  int best = 1 << 20;
  std::vector<std::set<int>> busy;               // ranks of each round
  std::vector<std::set<std::array<int, 2>>> on;  // (from, to) of each round
  const std::function<void(size_t)> place = [&](size_t index) {
    if (static_cast<int>(busy.size()) >= best) return;
    if (index == needs.size()) {
      best = static_cast<int>(busy.size());
      return;
    }
    const auto [expert, to] = needs[index];
    for (int from = 0; from < static_cast<int>(current.size()); ++from) {
      if (std::find(current[from].begin(), current[from].end(), expert) == current[from].end()) continue;
      for (size_t round = 0; round <= busy.size(); ++round) {
        if (round == busy.size()) {
          busy.emplace_back();
          on.emplace_back();
        }
        const bool exchange = on[round].contains({to, from}) && !on[round].contains({from, to});
        if (exchange || (!busy[round].contains(from) && !busy[round].contains(to))) {
          const auto ranks = busy[round];
          busy[round].insert({from, to});
          on[round].insert({from, to});
          place(index + 1);
          on[round].erase({from, to});
          busy[round] = ranks;
        }
        if (busy.back().empty()) {
          busy.pop_back();
          on.pop_back();
          break;
        }
      }
    }
  };
  place(0);
  return best;
}

TEST(Migration, RoundsMakeTheNextPlacementAndEveryRankHasOnePeer) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int ranks = 1 + random.Below(12), experts = 2 + random.Below(30);
    const LayerPlacement current = RandomRanks(random, experts, ranks, 1 + random.Below(experts));
    const LayerPlacement next =
        KeepSlots(current, RandomRanks(random, experts, ranks, 1 + random.Below(experts)));
    const auto rounds = PlanTransfers(current, next);
    ASSERT_TRUE(rounds.ok()) << rounds.status();
    LayerPlacement result = next;
    for (std::vector<int>& rank : result) std::fill(rank.begin(), rank.end(), -1);
    for (int rank = 0; rank < ranks; ++rank) {
      for (size_t slot = 0; slot < next[rank].size(); ++slot) {
        const int expert = next[rank][slot];
        if (std::count(current[rank].begin(), current[rank].end(), expert) > 0) result[rank][slot] = expert;
      }
    }
    std::vector<int> sent(ranks, 0), received(ranks, 0);
    for (const TransferRound& round : *rounds) {
      std::vector<int> peer(ranks, -1), sends(ranks, 0), receives(ranks, 0);
      for (const ExpertTransfer& transfer : round) {
        EXPECT_EQ(std::count(current[transfer.from].begin(), current[transfer.from].end(), transfer.expert),
                  1);
        for (const auto& [rank, other] :
             {std::pair(transfer.from, transfer.to), std::pair(transfer.to, transfer.from)}) {
          EXPECT_TRUE(peer[rank] == -1 || peer[rank] == other) << seed;
          peer[rank] = other;
        }
        EXPECT_EQ(++sends[transfer.from], 1);
        EXPECT_EQ(++receives[transfer.to], 1);
        ++sent[transfer.from];
        ++received[transfer.to];
        result[transfer.to][transfer.slot] = transfer.expert;
      }
      EXPECT_FALSE(round.empty());
    }
    EXPECT_EQ(result, next) << seed;
    int most = 0, sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      most = std::max({most, sent[rank], received[rank]});
      sum = std::max(sum, sent[rank] + received[rank]);
    }
    EXPECT_GE(static_cast<int>(rounds->size()), most);
    EXPECT_LE(static_cast<int>(rounds->size()), std::max(0, 2 * sum - 1));
  }
}

TEST(Migration, SmallPlansNeedAtMostOneRoundMoreThanTheOptimum) {
  int optimal = 0, cases = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Random random(seed);
    const int ranks = 2 + random.Below(3), experts = 4 + random.Below(3);
    const LayerPlacement current = RandomRanks(random, experts, ranks, 2);
    const LayerPlacement next = RandomRanks(random, experts, ranks, 2);
    std::vector<std::pair<int, int>> needs;
    for (int rank = 0; rank < ranks; ++rank) {
      for (const int expert : next[rank]) {
        if (std::count(current[rank].begin(), current[rank].end(), expert) == 0)
          needs.emplace_back(expert, rank);
      }
    }
    if (needs.size() > 6) continue;
    const int rounds = static_cast<int>(PlanTransfers(current, next)->size());
    const int fewest = needs.empty() ? 0 : FewestRounds(current, needs);
    EXPECT_GE(rounds, fewest) << seed;
    EXPECT_LE(rounds, fewest + 1) << seed;
    optimal += rounds == fewest ? 1 : 0;
    ++cases;
  }
  EXPECT_GT(cases, 100);
  EXPECT_GT(optimal, cases * 9 / 10);
}

TEST(Migration, ExpertsThatStayKeepTheirSlots) {
  EXPECT_EQ(KeepSlots({{4, 5, 6}, {1}}, {{6, 7, 4}, {2, 3}}), (LayerPlacement{{4, 7, 6}, {2, 3}}));
  // A rank with fewer slots than before.
  EXPECT_EQ(KeepSlots({{4, 5, 6}}, {{6, 4}}), (LayerPlacement{{4, 6}}));
}

TEST(Migration, EqualPlacementsNeedNoRound) {
  const LayerPlacement layer = {{0, 1}, {2, 0}};
  EXPECT_TRUE(PlanTransfers(layer, layer)->empty());
}

TEST(Migration, TwoRanksSwapInOneRound) {
  const auto rounds = PlanTransfers({{0, 1}, {2, 3}}, {{0, 2}, {1, 3}});
  ASSERT_TRUE(rounds.ok());
  ASSERT_EQ(rounds->size(), 1U);
  EXPECT_EQ(rounds->front(), (TransferRound{{1, 0, 1, 0}, {2, 1, 0, 1}}));
}

TEST(Migration, RefusesAnExpertThatNoRankHolds) {
  EXPECT_EQ(PlanTransfers({{0}, {1}}, {{0}, {2}}).status().message(),
            "expert 2 of rank 1 needs a holder in the placement in use, found none");
  EXPECT_EQ(PlanTransfers({{0}}, {{0}, {0}}).status().message(),
            "both placements must have 1 ranks, found 2");
}

}  // namespace
}  // namespace moesaic::parallel
