#include "parallel/placement/published_balancers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "parallel/placement/balance.h"
#include "parallel/placement/load_generator.h"
#include "parallel/placement/planner.h"
#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

enum class Published { kOmni, kFlashLb, kSwift, kLplb };

// The generator of tests/golden/balancer_goldens.py.
struct BalancerCase {
  std::vector<LoadMatrix> windows = {};
  int ranks = 0, spare = 0, choice = 0;

  int slots() const { return windows.front().experts / ranks + spare; }
};

BalancerCase MakeCase(Published balancer, int number) {
  Random random(1000 * static_cast<int>(balancer) + number);
  BalancerCase result;
  constexpr int kRanks[] = {2, 4, 8, 16, 24, 32}, kLplbRanks[] = {8, 16, 24};
  result.ranks = kRanks[random.Below(6)];
  const int own = 1 + random.Below(8);
  result.spare = balancer == Published::kOmni ? 1 : random.Below(std::min(own, 3) + 1);
  if (balancer == Published::kLplb) {
    result.ranks = kLplbRanks[random.Below(3)];
    result.spare = 1 + random.Below(own);
  }
  int windows = 1;
  if (balancer == Published::kFlashLb) {
    windows = 1 + random.Below(4);
    if (random.Below(8) == 0) windows = 60 + random.Below(100);
  }
  const int layers = 2 + random.Below(2);
  const bool ties = random.Below(4) == 0 && (balancer == Published::kOmni || balancer == Published::kLplb);
  result.choice = random.Below(1000);
  for (int w = 0; w < windows; ++w) {
    LoadMatrix& load = result.windows.emplace_back(LoadMatrix{layers, result.ranks * own});
    for (int i = 0; i < load.layers * load.experts; ++i) {
      const uint64_t value = random.Next() >> 40;
      load.tokens.push_back(static_cast<double>(ties ? value % 7 : (value * value) >> 24));
    }
  }
  return result;
}

StatusOr<Placement> PlanCase(Published balancer, const BalancerCase& input) {
  const LoadMatrix& load = input.windows.front();
  switch (balancer) {
    case Published::kOmni:
      return PlanOmniStatic(load, {.ranks = input.ranks,
                                   .slots_per_rank = input.slots(),
                                   .redundant_layers = input.choice % (load.layers + 1),
                                   .most_copies = 1 + std::min(input.choice % 12, input.ranks - 1),
                                   .hosts = std::max(1, (input.ranks + 1) / 16)});
    case Published::kFlashLb:
      return PlanFlashLb(input.windows, input.ranks, input.slots());
    case Published::kSwift:
      return PlanSwiftBalance(load, input.ranks, input.slots());
    case Published::kLplb:
      break;
  }
  const LplbGraph graphs[] = {LplbGraph::Ring(8), LplbGraph::Cube(), LplbGraph::Hypercube(),
                              LplbGraph::Torus(2, 4)};
  LplbGraph graph = graphs[input.choice % 4];
  if (input.ranks % static_cast<int>(graph.sources[0].size()) != 0 ||
      input.spare % static_cast<int>(graph.sources.size()) != 0)
    graph = LplbGraph::Ring(8);
  return PlanLplbGraph(load, {.ranks = input.ranks, .slots_per_rank = input.slots(), .graph = graph});
}

uint32_t HashOf(const Placement& placement, bool any_order_of_ranks) {
  uint64_t value = 0xCBF29CE484222325;
  for (LayerPlacement layer : placement.layers) {
    for (std::vector<int>& rank : layer) std::sort(rank.begin(), rank.end());
    if (any_order_of_ranks) std::sort(layer.begin(), layer.end());
    for (std::vector<int>& rank : layer) {
      rank.push_back(-1);
      for (const int number : rank) value = (value ^ static_cast<uint64_t>(int64_t{number})) * 0x100000001B3;
    }
  }
  return static_cast<uint32_t>(value ^ (value >> 32));
}

constexpr int kCasesOfBalancer = 300;

// Number of inputs that the published file accepts and on which the placements differ.
void CountDifferences(Published balancer, int* differences, int* compared) {
  std::ifstream file(MOESAIC_SOURCE_DIR "/tests/golden/balancer_hashes.npy", std::ios::binary);
  const std::string npy{std::istreambuf_iterator<char>(file), {}};
  constexpr size_t kBytes = size_t{4} * kCasesOfBalancer * sizeof(uint32_t);
  ASSERT_GT(npy.size(), kBytes);
  const char* hashes = npy.data() + npy.size() - kBytes;
  *differences = *compared = 0;
  for (int number = 0; number < kCasesOfBalancer; ++number) {
    uint32_t golden = 0;
    const int row = static_cast<int>(balancer) * kCasesOfBalancer + number;
    std::memcpy(&golden, hashes + static_cast<size_t>(row) * sizeof(golden), sizeof(golden));
    if (golden == 0) continue;
    const auto plan = PlanCase(balancer, MakeCase(balancer, number));
    ASSERT_TRUE(plan.ok()) << number << ": " << plan.status();
    ++*compared;
    if (HashOf(*plan, balancer == Published::kFlashLb) == golden) continue;
    ++*differences;
  }
}

void ExpectAllEqual(Published balancer) {
  int differences = 0, compared = 0;
  CountDifferences(balancer, &differences, &compared);
  EXPECT_EQ(differences, 0);
  EXPECT_EQ(compared, kCasesOfBalancer);
}

TEST(PublishedBalancers, OmniPlacementEqualsThePublishedFile) { ExpectAllEqual(Published::kOmni); }

// The published file multiplies matrices with BLAS, and Numba may reorder its sums of f32: where two choices
// are almost equally good, rounding decides.
TEST(PublishedBalancers, FlashLbEqualsThePublishedFileUpToRounding) {
  int differences = 0, compared = 0;
  CountDifferences(Published::kFlashLb, &differences, &compared);
  EXPECT_LE(differences, 4);
  EXPECT_GT(compared, 250);
}

TEST(PublishedBalancers, SwiftBalanceEqualsThePublishedFile) { ExpectAllEqual(Published::kSwift); }

TEST(PublishedBalancers, LplbEqualsThePublishedFile) { ExpectAllEqual(Published::kLplb); }

TEST(PublishedBalancers, PlacementsAreCompleteAndDistinct) {
  const auto loads = GenerateLoads({.layers = 3, .workloads = 2});
  const LoadMatrix& load = loads->front().total;
  const std::vector<LoadMatrix> windows = {load, loads->back().total};
  for (const int ranks : {16, 32, 64}) {
    const int slots = 256 / ranks + 1;
    for (const auto& placement :
         {PlanOmniStatic(load, {.ranks = ranks, .slots_per_rank = slots, .redundant_layers = 2, .hosts = 4}),
          PlanFlashLb(windows, ranks, slots), PlanSwiftBalance(load, ranks, slots),
          PlanLplbGraph(load, {.ranks = ranks, .slots_per_rank = slots})}) {
      ASSERT_TRUE(placement.ok()) << placement.status();
      EXPECT_TRUE(CheckPlacement(*placement, "baseline", /*distinct=*/true).ok());
      EXPECT_LE(placement->max_slots(), slots);
    }
  }
}

// Example of FlashLB's pull request (vllm-ascend #3042), where EPLB reaches 232 and its search 205.
TEST(PublishedBalancers, MoesaicsPlanReachesTheExampleOfFlashLb) {
  const LoadMatrix load{1, 8, {600, 560, 120, 120, 20, 10, 10, 10}};
  const auto largest = [&](const Placement& placement) {
    const std::vector<double> loads = EqualShareLoads(placement.layers[0], load.layer(0));
    return *std::max_element(loads.begin(), loads.end());
  };
  EXPECT_NEAR(largest(FromEplb(*PlanEplb(load, {.replicas = 16, .gpus = 8}), 8)), 232, 1);
  EXPECT_LE(largest(*PlanFlashLb(std::vector<LoadMatrix>{load}, 8, 2)), 205);
  EXPECT_LE(largest(PlanPlacement(std::vector<LoadMatrix>{load}, {.slots = EqualSlots(16, 8)})->placement),
            205);
}

TEST(PublishedBalancers, RefuseSizesThatNeedTooMuchMemory) {
  const LoadMatrix load{1, 4097, std::vector<double>(4097, 1)};
  EXPECT_EQ(PlanFlashLb(std::span(&load, 1), 1, 4097).status().message(),
            "FlashLB compares all pairs of experts, which must be at most 4096, found 4097");
  EXPECT_EQ(PlanSwiftBalance(load, 4097, 1).status().message(),
            "SwiftBalance counts transfers of all pairs of ranks, which must be at most 4096, found 4097");
}

}  // namespace
}  // namespace moesaic::parallel
