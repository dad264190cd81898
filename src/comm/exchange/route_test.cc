#include "comm/exchange/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "comm/exchange/exchange_cost.h"
#include "comm/exchange/exchange_test_support.h"

namespace moesaic::comm {
namespace {

constexpr const char* kTrees[] = {"1",   "2",  "1+3", "2+2+1", "(2+2)+(1+3)", "((1+2)+1)+(2+(1+2))",
                                  "1+8", "4+4"};

TEST(ExpertMapTest, FaultyPlacementsAreRefused) {
  EXPECT_EQ(Message(ExpertMap::Create(2, {{0, 2}, {1}}).status()),
            "expert map: rank 0 lists an expert outside [0, 2): 2");
  EXPECT_EQ(Message(ExpertMap::Create(2, {{0}, {1, 1}}).status()),
            "expert map: rank 1 lists an expert twice, keep one copy per rank: 1");
  EXPECT_EQ(Message(ExpertMap::Create(3, {{0}, {1}}).status()), "expert map: no rank has expert 2");
}

TEST(ExpertMapTest, EvenBlocksDifferByAtMostOne) {
  const ExpertMap map = ExpertMap::Even(7, 3);
  EXPECT_EQ(map.local_experts(0), 3);
  EXPECT_EQ(map.local_experts(1), 2);
  EXPECT_EQ(map.physical(map.PhysicalIndex(2, 1)).expert, 6);
  EXPECT_EQ(ExpertMap::Even(1, 3).local_experts(2), 0);
}

TEST(ReplicaChooserTest, NearestReplicasAreChosen) {
  const Topology topology = ShapeReader::Read("2+2");
  const ExpertMap map = *ExpertMap::Create(1, {{}, {0}, {0}, {0}});
  const ReplicaChooser near_one(topology, map, 0, ReplicaChoice::kNearest);
  const ReplicaChooser own(topology, map, 2, ReplicaChoice::kNearest);
  for (int token = 0; token < 50; ++token) {
    EXPECT_EQ(map.physical(near_one.Choose(0, token)).rank, 1);
    EXPECT_EQ(map.physical(own.Choose(0, token)).rank, 2);
  }
}

TEST(ReplicaChooserTest, ADeadRankChangesOnlyItsOwnTokensAndLoadIsSpread) {
  const Topology topology = ShapeReader::Read("5");
  const ExpertMap map = *ExpertMap::Create(1, {{0}, {0}, {0}, {0}, {}});
  ReplicaChooser chooser(topology, map, 4, ReplicaChoice::kSpread);
  std::vector<int> before(4000), load(5);
  for (int token = 0; token < 4000; ++token)
    ++load[before[token] = map.physical(chooser.Choose(0, token)).rank];
  // Binomial with mean 1000 and deviation 27.
  for (int rank = 0; rank < 4; ++rank) EXPECT_NEAR(load[rank], 1000, 140);
  chooser.SetDead({false, false, true, false, false});
  for (int token = 0; token < 4000; ++token) {
    const int after = map.physical(chooser.Choose(0, token)).rank;
    EXPECT_NE(after, 2);
    EXPECT_TRUE(before[token] == 2 || after == before[token]);
  }
  chooser.SetDead(std::vector<bool>(5, true));
  EXPECT_EQ(chooser.Choose(0, 0), -1);
}

TEST(RouteTreeTest, SourcesAreTheInverseOfTargetsAndEntriesAreTargets) {
  for (const char* shape : kTrees) {
    const Topology topology = ShapeReader::Read(shape);
    for (int lost = -1; lost < topology.ranks(); ++lost) {
      if (topology.ranks() == 1 && lost == 0) continue;
      std::vector<bool> dead(topology.ranks(), false);
      if (lost >= 0) dead[lost] = true;
      for (const RouteTree& tree : {RouteTree::Hierarchical(topology, dead, {}), RouteTree::Direct(dead)}) {
        for (int rank = 0; rank < topology.ranks(); ++rank) {
          if (dead[rank]) continue;
          for (int phase = 0; phase < tree.phases(); ++phase) {
            const auto targets = tree.Targets(rank, phase);
            for (const int peer : targets) {
              const auto sources = tree.Sources(peer, phase);
              EXPECT_TRUE(std::binary_search(sources.begin(), sources.end(), rank));
            }
            for (const int source : tree.Sources(rank, phase)) {
              const auto back = tree.Targets(source, phase);
              EXPECT_TRUE(std::binary_search(back.begin(), back.end(), rank));
            }
          }
          for (int peer = 0; peer < topology.ranks(); ++peer) {
            if (peer == rank || dead[peer]) continue;
            for (int token = 0; token < 5; ++token) {
              const int entry = tree.Entry(rank, peer, rank, token);
              const auto targets = tree.Targets(rank, tree.MeetingPhase(rank, peer));
              EXPECT_TRUE(std::binary_search(targets.begin(), targets.end(), entry));
              EXPECT_TRUE(entry == peer || tree.MeetingPhase(entry, peer) > tree.MeetingPhase(rank, peer));
            }
          }
        }
      }
    }
  }
}

TEST(RouteTreeTest, EqualGroupsUseThePeerOfEqualIndexAndSpreadOtherwise) {
  const std::vector<bool> alive(9, false);
  const RouteTree equal = RouteTree::Hierarchical(ShapeReader::Read("4+4"), std::vector<bool>(8, false), {});
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(equal.Entry(rank, 4 + (rank + 1) % 4, rank, 0), 4 + rank);
  const RouteTree uneven = RouteTree::Hierarchical(ShapeReader::Read("1+8"), alive, {});
  std::set<int> entries;
  for (int token = 0; token < 100; ++token) entries.insert(uneven.Entry(0, 3, 0, token));
  EXPECT_EQ(entries.size(), 8U);
  EXPECT_EQ(uneven.Entry(5, 0, 5, 0), 0);
}

TEST(RouteTreeTest, LevelsThatAreNotNamedAreMerged) {
  const Topology topology = ShapeReader::Read("(2+2)+(1+3)");
  const std::vector<bool> alive(8, false);
  EXPECT_EQ(RouteTree::Hierarchical(topology, alive, {}).phases(), 3);
  const RouteTree outer = RouteTree::Hierarchical(topology, alive, {"L1"});
  EXPECT_EQ(outer.phases(), 2);
  EXPECT_EQ(outer.Targets(0, 1), (std::vector<int>{1, 2, 3}));
  const RouteTree inner = RouteTree::Hierarchical(topology, alive, {"L2"});
  EXPECT_EQ(inner.phases(), 2);
  EXPECT_EQ(inner.MeetingPhase(0, 2), 0);
  EXPECT_EQ(RouteTree::Hierarchical(topology, alive, {"device"}).phases(), 1);
}

// Every pair arrives exactly once at its expert's rank, and a token enters each group at most once.
TEST(RouteTest, ATokenEntersEachGroupOnceAndReachesAllItsExperts) {
  for (const char* shape : kTrees) {
    const Topology topology = ShapeReader::Read(shape);
    const RouteTree tree = RouteTree::Hierarchical(topology, std::vector<bool>(topology.ranks(), false), {});
    const ExpertMap map = UnevenMap(16, topology.ranks(), 8);
    std::vector<TokenRoutes> tokens;
    for (int rank = 0; rank < topology.ranks(); ++rank) {
      tokens.push_back(
          *UniformTokens(topology, map, {.tokens_per_rank = 40, .k = 5}, ReplicaChoice::kSpread, rank));
    }
    const auto routes = BuildRoutes(tree, map, tokens, 7);
    ASSERT_TRUE(routes.ok()) << routes.status();
    std::set<std::tuple<int, int, int>> arrived;  // source, token, slot
    std::set<std::tuple<int, int, int>> entered;  // source, token, group
    for (int rank = 0; rank < topology.ranks(); ++rank) {
      const Route& route = (*routes)[rank];
      for (const RowOrigin& from : route.origins) {
        EXPECT_TRUE(arrived.emplace(from.source, from.token, from.slot).second);
      }
      for (const RouteSend& send : route.sends) {
        for (const int32_t row : send.rows) {
          // All groups that contain the receiver and not the sender.
          for (int group = topology.leaf(send.peer); group >= 0; group = topology.groups()[group].parent) {
            const auto& ranks = topology.groups()[group].ranks;
            if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) break;
            EXPECT_TRUE(entered.emplace(route.held[row].source, route.held[row].token, group).second)
                << shape;
          }
        }
      }
    }
    EXPECT_EQ(arrived.size(), static_cast<size_t>(topology.ranks()) * 40 * 5);
  }
}

TEST(RouteTest, MalformedRoutingIsReportedAndNeverReadBeyondItsEnd) {
  const Topology topology = ShapeReader::Read("2+2");
  const RouteTree tree = RouteTree::Hierarchical(topology, std::vector<bool>(4, false), {});
  const ExpertMap map = ExpertMap::Even(8, 4);
  TokenRoutes tokens =
      *UniformTokens(topology, map, {.tokens_per_rank = 6, .k = 4}, ReplicaChoice::kSpread, 0);
  Route sender, receiver;
  RouteBuilder from(tree, map, 0, 4, &sender);
  from.AddTokens(tokens);
  from.BeginPhase(0);
  std::vector<std::byte> valid;
  ASSERT_FALSE(sender.sends.empty());
  from.Encode(sender.sends[0], &valid);
  const int peer = sender.sends[0].peer;
  const auto rows = static_cast<int32_t>(sender.sends[0].rows.size());
  const auto accept = [&](int32_t count, std::vector<std::byte> bytes) {
    RouteBuilder to(tree, map, peer, 4, &receiver);
    to.AddTokens({{0}, {}, {}});
    bytes.shrink_to_fit();
    const Status status = to.Accept(0, 0, count, bytes);
    if (status.ok()) {
      to.BeginPhase(1);
      to.Finish();
    }
    return status.code();
  };
  EXPECT_EQ(accept(rows, valid), StatusCode::kOk);
  EXPECT_EQ(accept(rows + 1, valid), StatusCode::kDataLoss);
  EXPECT_EQ(accept(rows - 1, valid), StatusCode::kDataLoss);
  EXPECT_EQ(accept(rows, {valid.begin(), valid.end() - 3}), StatusCode::kDataLoss);
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    auto bytes = valid;
    for (int i = 0; i < 3; ++i) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    const StatusCode code = accept(rows, bytes);
    EXPECT_TRUE(code == StatusCode::kOk || code == StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace moesaic::comm
