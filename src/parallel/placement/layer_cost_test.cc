#include "parallel/placement/layer_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "parallel/placement/balance.h"
#include "parallel/placement/damaged_bytes.h"
#include "parallel/placement/load_generator.h"
#include "parallel/placement/planner.h"
#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

// A machine on which a batch is bound by reading weights, with two levels of links.
CostModel Machine() {
  return {.batch_tokens = 4096,
          .routing = {.top_k = 8, .groups = 8, .top_groups = 4},
          .tile_rows = 64,
          .tile_s = 4e-6,
          .read_s = 10e-6,
          .token_bytes = 14336,
          .levels = {{.groups = 4, .bytes_per_s = 50e9}, {.groups = 32, .bytes_per_s = 200e9}},
          .expert_bytes = 44e6,
          .move_bytes_per_s = 25e9,
          .interval_batches = 10000};
}

std::vector<LoadMatrix> CostLoads(int layers, int experts, int workloads, uint64_t seed) {
  return Totals(*GenerateLoads({.layers = layers, .experts = experts, .workloads = workloads, .seed = seed}));
}

double WorstSeconds(const Placement& placement, std::span<const LoadMatrix> loads, const CostModel& model,
                    const Placement* current = nullptr) {
  const ExpertTime time(model);
  double sum = 0;
  for (size_t layer = 0; layer < placement.layers.size(); ++layer) {
    double worst = 0;
    for (const LoadMatrix& load : loads) {
      worst = std::max(worst, PredictCost(placement.layers[layer], load.layer(static_cast<int>(layer)), model,
                                          time, {}, current != nullptr ? &current->layers[layer] : nullptr)
                                  .total());
    }
    sum += worst;
  }
  return sum;
}

TEST(ExpertTime, EqualsTheMeanOfDrawnBatches) {
  Random random(1);
  for (const double rows : {0.05, 0.7, 3.0, 15.9, 16.1, 60.0, 64.0, 200.0, 1000.0}) {
    const CostModel model{.batch_tokens = 1, .tile_rows = 64, .tile_s = 1, .read_s = 0.5};
    // A batch draws rows one after the other: exponential gaps make their number a Poisson variable.
    constexpr int kBatches = 20000;
    double sum = 0;
    for (int batch = 0; batch < kBatches; ++batch) {
      int drawn = 0;
      for (double at = -std::log(random.Uniform()); at < rows; at -= std::log(random.Uniform())) ++drawn;
      sum += (drawn + 63) / 64 + (drawn > 0 ? 0.5 : 0);
    }
    // Tiles deviate by sqrt(rows) / 64 + 0.5 at most: five standard deviations of the mean.
    EXPECT_NEAR(ExpertTime(model)(rows), sum / kBatches,
                5 * (std::sqrt(rows) / 64 + 0.75) / std::sqrt(kBatches))
        << rows;
  }
}

TEST(ExpertTime, RisesWithRowsAndStartsAtZero) {
  for (const int tile : {1, 2, 16, 128}) {
    const ExpertTime time({.batch_tokens = 1, .tile_rows = tile, .tile_s = 1e-6, .read_s = 1e-6});
    EXPECT_EQ(time(0), 0);
    double last = 0;
    for (double rows = 0.01; rows < 1e6; rows *= 1.07) {
      EXPECT_GE(time(rows), last) << tile << " " << rows;
      last = time(rows);
    }
    EXPECT_NEAR(time(1e9), 1e3 / tile, 1e-3);
  }
}

TEST(LayerCostOf, NamesTheSlowestRankTheBusiestNodeAndTheMoves) {
  const CostModel model{.batch_tokens = 100,
                        .routing = {.top_k = 1},
                        .tile_s = 1,
                        .read_s = 0,
                        .token_bytes = 10,
                        .levels = {{.groups = 2, .bytes_per_s = 100}},
                        .expert_bytes = 8,
                        .move_bytes_per_s = 2,
                        .interval_batches = 4};
  const LayerPlacement layer = {{0, 1}, {2, 3}}, current = {{0, 2}, {1, 3}};
  const std::vector<double> loads = {1, 1, 1, 5};
  const LayerCost cost =
      PredictCost(layer, loads, model, ExpertTime(model), std::vector<double>{1, 2}, &current);
  EXPECT_DOUBLE_EQ(cost.compute_s, 100 * 6.0 / 8 / 2);
  // Half of the tokens start on node 0. A token chooses each of node 1's experts on its own.
  EXPECT_DOUBLE_EQ(cost.exchange_s, 0.5 * (1 - 7.0 / 8 * 3 / 8) * 100 * 10 / 100);
  EXPECT_DOUBLE_EQ(cost.move_s, 8.0 / 2 / 4);
}

// Four ranks on two nodes, each with one expert. A level's time is that of its group that receives most.
TEST(LayerCostOf, AddsTheTimesOfTwoLevelsOfLinks) {
  CostModel model{.batch_tokens = 100,
                  .routing = {.top_k = 1},
                  .tile_s = 1,
                  .token_bytes = 10,
                  .levels = {{.groups = 2, .bytes_per_s = 100}, {.groups = 4, .bytes_per_s = 200}}};
  const LayerPlacement layer = {{0}, {1}, {2}, {3}};
  const std::vector<double> loads = {1, 1, 1, 5};
  const double of_nodes = 0.5 * (1 - 7.0 / 8 * 3 / 8), of_ranks = 3.0 / 4 * 5 / 8;
  EXPECT_DOUBLE_EQ(PredictCost(layer, loads, model, ExpertTime(model)).exchange_s,
                   of_nodes * 1000 / 100 + of_ranks * 1000 / 200);
  model.levels.pop_back();
  EXPECT_DOUBLE_EQ(PredictCost(layer, loads, model, ExpertTime(model)).exchange_s, of_nodes * 1000 / 100);
}

TEST(PlannerCost, PlansForTimesAreFasterThanPlansForTokens) {
  const std::vector<LoadMatrix> loads = CostLoads(2, 256, 3, 1);
  CostModel model = Machine();
  for (const double tokens : {64.0, 4096.0}) {
    model.batch_tokens = tokens;
    const auto by_tokens = PlanPlacement(loads, {.slots = EqualSlots(288, 32)});
    const auto by_time = PlanPlacement(loads, {.slots = EqualSlots(288, 32), .cost = &model});
    ASSERT_TRUE(by_time.ok()) << by_time.status();
    EXPECT_TRUE(CheckPlacement(by_time->placement, "plan", /*distinct=*/true).ok());
    EXPECT_LT(WorstSeconds(by_time->placement, loads, model),
              WorstSeconds(by_tokens->placement, loads, model));
  }
}

// Groups of links that are not the homes of groups of experts: only the order of ranks differs.
TEST(PlannerCost, RanksAreOrderedForTheLevelsOfLinks) {
  const std::vector<LoadMatrix> loads = CostLoads(3, 64, 2, 9);
  CostModel model = Machine();
  model.routing = {.top_k = 4, .groups = 2, .top_groups = 1};
  model.levels.clear();
  const auto any = PlanPlacement(loads, {.slots = EqualSlots(80, 16), .cost = &model});
  model.levels = {{.groups = 4, .bytes_per_s = 5e9}, {.groups = 8, .bytes_per_s = 2e10}};
  const auto ordered = PlanPlacement(loads, {.slots = EqualSlots(80, 16), .cost = &model});
  ASSERT_TRUE(any.ok() && ordered.ok());
  for (int layer = 0; layer < 3; ++layer) {
    LayerPlacement a = any->placement.layers[layer], b = ordered->placement.layers[layer];
    std::ranges::sort(a);
    std::ranges::sort(b);
    EXPECT_EQ(a, b) << layer;
  }
  EXPECT_LT(WorstSeconds(ordered->placement, loads, model), WorstSeconds(any->placement, loads, model));
  const auto stays = PlanPlacement(
      loads, {.slots = EqualSlots(80, 16), .current = &any->placement, .max_moves = 0, .cost = &model});
  ASSERT_TRUE(stays.ok());
  EXPECT_EQ(stays->placement.layers, any->placement.layers) << "all experts of exchanged ranks would move";
}

TEST(PlannerCost, ExpertsStayWhereMovesCostMoreThanTheyGain) {
  const std::vector<LoadMatrix> loads = CostLoads(1, 64, 2, 3);
  const Placement start{64, {InOrder(64, 8)}};
  CostModel model = Machine();
  model.levels = {{.groups = 8, .bytes_per_s = 50e9}};
  double last = 1e9;
  for (const double batches : {1.0, 100.0, 1e4, 1e6}) {
    model.interval_batches = batches;
    const auto plan =
        PlanPlacement(loads, {.slots = std::vector<int>(8, 9), .current = &start, .cost = &model});
    ASSERT_TRUE(plan.ok()) << plan.status();
    if (batches == 1) {
      EXPECT_EQ(plan->placement.layers, start.layers);
    }
    const double seconds = WorstSeconds(plan->placement, loads, model, &start);
    EXPECT_LE(seconds, last);
    last = seconds;
  }
  EXPECT_LT(last, WorstSeconds(start, loads, model));
}

TEST(PlannerQuantile, LeavesOutTheWorkloadsThatFitLeast) {
  constexpr int kPlannedLayers = 6;
  const auto generated = GenerateLoads(
      {.layers = kPlannedLayers, .experts = 64, .workloads = 4, .drift = Drift::kIndependent, .seed = 5});
  const std::vector<LoadMatrix> loads = Totals(*generated);
  // Sum over layers of the third smallest imbalance of the four workloads.
  const auto third = [&](const Placement& placement) {
    double sum = 0;
    for (int layer = 0; layer < kPlannedLayers; ++layer) {
      std::vector<double> worst;
      for (const LoadMatrix& load : loads)
        worst.push_back(Imbalance(placement.layers[layer], load.layer(layer)));
      std::sort(worst.begin(), worst.end());
      sum += worst[2];
    }
    return sum;
  };
  const auto all = PlanPlacement(loads, {.slots = EqualSlots(72, 24)});
  const auto most = PlanPlacement(loads, {.slots = EqualSlots(72, 24), .quantile = 0.75});
  ASSERT_TRUE(most.ok()) << most.status();
  EXPECT_LT(third(most->placement), third(all->placement));
  EXPECT_FALSE(PlanPlacement(loads, {.slots = EqualSlots(72, 24), .quantile = 0}).ok());
}

TEST(PlannerMemory, RanksStayWithinTheirMemoryAndUseIt) {
  const std::vector<LoadMatrix> loads = CostLoads(6, 64, 2, 7);
  std::vector<int64_t> memory(8, 6 * 8 + 3);
  memory[2] = 6 * 8;       // no room beyond the experts
  memory[5] = 6 * 8 + 12;  // more than one further slot in each layer
  const auto plan = PlanPlacement(loads, {.slots = EqualSlots(64, 8), .all_slots = memory});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(CheckPlacement(plan->placement, "plan", /*distinct=*/true).ok());
  int64_t replicas = 0;
  for (int rank = 0; rank < 8; ++rank) {
    int64_t used = 0;
    for (const LayerPlacement& layer : plan->placement.layers)
      used += static_cast<int64_t>(layer[rank].size());
    EXPECT_LE(used, memory[rank]) << rank;
    replicas += used;
  }
  EXPECT_GT(replicas, 6 * 64 + 12);
  memory[2] = 47;
  EXPECT_EQ(PlanPlacement(loads, {.slots = EqualSlots(64, 8), .all_slots = memory}).status().message(),
            "the memory of rank 2 must hold the 48 slots of 6 layers, found 47 slots");
}

// Sum over layers of the largest imbalance in any workload.
double SumOfWorst(const Placement& placement, std::span<const LoadMatrix> loads) {
  double sum = 0;
  for (int layer = 0; layer < loads.front().layers; ++layer) {
    double worst = 0;
    for (const LoadMatrix& load : loads)
      worst = std::max(worst, Imbalance(placement.layers[layer], load.layer(layer)));
    sum += worst;
  }
  return sum;
}

TEST(PlannerMemory, SeveralFurtherSlotsOfARankAndLayerAreUsed) {
  constexpr int kPlannedLayers = 3, kOfRank = 4;  // slots without further ones
  const std::vector<LoadMatrix> loads = CostLoads(kPlannedLayers, 64, 6, 11);
  const auto with = [&](int further) {
    const auto plan =
        PlanPlacement(loads, {.slots = EqualSlots(64, 16),
                              .all_slots = std::vector<int64_t>(16, kPlannedLayers * (kOfRank + further))});
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(CheckPlacement(plan->placement, "plan", /*distinct=*/true).ok());
    for (int rank = 0; rank < 16; ++rank) {
      int used = 0;
      for (const LayerPlacement& layer : plan->placement.layers) used += static_cast<int>(layer[rank].size());
      EXPECT_LE(used, kPlannedLayers * (kOfRank + further)) << rank;
    }
    return plan->placement;
  };
  const Placement one = with(1), three = with(3);
  EXPECT_LT(SumOfWorst(three, loads), SumOfWorst(one, loads));
  EXPECT_GT(three.max_slots(), kOfRank + 1);
}

TEST(PlannerMemory, RanksWithMemoryTakeTheSlotsOfOthers) {
  const std::vector<LoadMatrix> loads = CostLoads(2, 64, 6, 11);
  std::vector<int64_t> memory(16, 2 * 4);
  memory[3] = memory[9] = 2 * (4 + 8);
  const auto plan = PlanPlacement(loads, {.slots = EqualSlots(64, 16), .all_slots = memory});
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (int rank = 0; rank < 16; ++rank) {
    const size_t used = plan->placement.layers[0][rank].size() + plan->placement.layers[1][rank].size();
    EXPECT_LE(used, static_cast<size_t>(memory[rank])) << rank;
    if (memory[rank] > 8) {
      EXPECT_GT(used, 2U * (4 + 1)) << rank;
    }
  }
}

TEST(PlannerMemory, RandomMemoryIsNeverExceeded) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Random random(seed);
    const int experts = 4 + random.Below(28), ranks = 2 + random.Below(8), layers = 1 + random.Below(3);
    PlannerOptions options{.slots = EqualSlots(experts + random.Below(8), ranks), .threads = 1};
    for (const int slots : options.slots)
      options.all_slots.push_back(int64_t{layers} * slots + random.Below(4 * layers));
    if (seed % 2 == 0) options.extra_replicas = 1 + random.Below(2 * ranks * layers);
    if (seed % 3 == 0) {
      for (int rank = 0; rank < ranks; ++rank) options.speeds.push_back(0.5 + random.Uniform());
    }
    const auto plan = PlanPlacement(CostLoads(layers, experts, 1 + random.Below(3), seed), options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_TRUE(CheckPlacement(plan->placement, "plan", /*distinct=*/true).ok()) << seed;
    int64_t replicas = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t used = 0;
      for (const LayerPlacement& layer : plan->placement.layers)
        used += static_cast<int64_t>(layer[rank].size());
      EXPECT_LE(used, options.all_slots[rank]) << seed;
      replicas += used;
    }
    const int slots = std::accumulate(options.slots.begin(), options.slots.end(), 0);
    if (options.extra_replicas > 0) {
      EXPECT_LE(replicas, layers * slots + options.extra_replicas) << seed;
    }
  }
}

TEST(PlannerMemory, MoreExtraReplicasNeverBalanceWorse) {
  constexpr double kRounding = 1e-6;  // of a layer: the planner compares f32 sums of loads whose mean is 1
  const std::vector<LoadMatrix> loads = CostLoads(6, 64, 1, 9);
  double last = 1e9;
  for (const int extra : {0, 3, 8, 12, 24, 48, 60, 96, 192}) {
    const auto plan = PlanPlacement(loads, {.slots = EqualSlots(64, 8), .extra_replicas = extra});
    double sum = 0;
    for (int layer = 0; layer < 6; ++layer)
      sum += Imbalance(plan->placement.layers[layer], loads[0].layer(layer));
    EXPECT_LE(sum, last + 6 * kRounding) << extra;
    last = sum;
  }
  EXPECT_LT(last, 6 * 1.05);
}

TEST(PlannerMemory, MoreMemoryNeverBalancesWorse) {
  constexpr double kRounding = 1e-6;  // of a layer: the planner compares f32 sums of loads whose mean is 1
  constexpr int kPlannedLayers = 4, kOfRank = 8;  // slots without further ones
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const std::vector<LoadMatrix> loads = CostLoads(kPlannedLayers, 64, 3, seed);
    double last = 1e9;
    for (const int further : {0, 1, 2, 3, 5, 8, 12, 20}) {  // slots of a rank over all layers
      const std::vector<int64_t> memory(8, kPlannedLayers * kOfRank + further);
      const auto plan = PlanPlacement(loads, {.slots = EqualSlots(64, 8), .all_slots = memory});
      ASSERT_TRUE(plan.ok()) << plan.status();
      const double sum = SumOfWorst(plan->placement, loads);
      EXPECT_LE(sum, last + kPlannedLayers * kRounding)
          << "seed " << seed << ", " << further << " further slots";
      last = sum;
    }
    EXPECT_LT(last, kPlannedLayers * 1.1) << seed;
  }
}

// A plan with a budget has more slots on some ranks than `slots`. It is a placement in use of its largest
// number of slots.
TEST(PlannerMemory, APlanOfABudgetStaysWithoutMoves) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const std::vector<LoadMatrix> loads = CostLoads(4, 64, 2, seed);
    const auto first = PlanPlacement(loads, {.slots = EqualSlots(64, 8), .extra_replicas = 12});
    ASSERT_TRUE(first.ok()) << first.status();
    const int most = first->placement.max_slots();
    ASSERT_GT(most, 8);
    const auto again = PlanPlacement(
        loads, {.slots = std::vector<int>(8, most), .current = &first->placement, .max_moves = 0});
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->placement.layers, first->placement.layers) << seed;
    EXPECT_EQ(
        PlanPlacement(loads, {.slots = EqualSlots(64, 8), .extra_replicas = 12, .current = &first->placement})
            .status()
            .code(),
        StatusCode::kInvalidArgument);
  }
}

TEST(CostFile, ReadsAllMembersAndNamesWrongOnes) {
  const auto model = ParseCostModel(
      R"({"batch_tokens": 4096, "top_k": 8, "groups": 8, "top_groups": 4, "tile_rows": 64, "tile_s": 4e-6,
          "read_s": 1e-5, "token_bytes": 14336, "expert_bytes": 44e6, "move_bytes_per_s": 25e9,
          "interval_batches": 1e4, "levels": [{"groups": 4, "bytes_per_s": 5e10}]})",
      "cost.json");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(CheckCostModel(*model, 256, 32).ok());
  EXPECT_EQ(model->levels[0].groups, 4);
  const auto message = [](const char* text) {
    return std::string(ParseCostModel(text, "cost.json").status().message());
  };
  EXPECT_EQ(message(R"({"batch_tokens": 1})"), "cost.json: tile_s is missing");
  EXPECT_EQ(message(R"({"batch_tokens": "1", "tile_s": 1})"), "cost.json: batch_tokens must be a number");
  EXPECT_EQ(message(R"({"batch_tokens": 1, "tile_s": 1, "top_k": 1.5})"),
            "cost.json: top_k must be a whole number, found 1.5");
  EXPECT_EQ(message(R"({"batch_tokens": 1, "tile_s": 1, "levels": [1]})"),
            "cost.json: levels must be objects");
  EXPECT_EQ(CheckCostModel(*model, 256, 30).message(), "groups of a level must divide the 30 ranks, found 4");
  CostModel many = *model;
  many.levels[0].groups = 32768;
  EXPECT_EQ(CheckCostModel(many, 256, 65536).message(),
            "groups times groups of a level must be at most 33554432, found 32768 groups");
}

TEST(CostFile, DamagedFilesEndInAnErrorOrAModel) {
  const std::string good =
      R"({"batch_tokens": 4096, "top_k": 8, "tile_rows": 64, "tile_s": 4e-6, "levels": [{"groups": 4, "bytes_per_s": 5e10}]})";
  Random random(3);
  for (int i = 0; i < 3000; ++i) {
    const auto model = ParseCostModel(Damaged(good, random), "cost.json");
    if (!model.ok()) continue;
    const Status checked = CheckCostModel(*model, 256, 32);
    EXPECT_EQ(checked.ok(), checked.message().empty());
  }
}

}  // namespace
}  // namespace moesaic::parallel
