#include "planner/layout_time.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/expert_draws.h"

namespace moesaic::planner {
namespace {

using parallel::Degrees;
using parallel::Layout;
using parallel::RankWork;

constexpr int kHidden = 1024;
constexpr double kMemoryRate = 1e11, kFlops = 1e13;

// `ranks` equal devices on links of this bandwidth.
comm::Topology Devices(int ranks, double bytes_per_s, double memory_gb = 100) {
  const std::string json = R"({"name":"test","source":"test","devices":{"d":{"flops":{"bf16":1e13},)"
                           R"("memory_gb_per_s":100,"memory_gb":)" +
                           std::to_string(memory_gb) +
                           R"(}},"tree":{"level":"node","link":{"latency_us":1,)" + R"("gb_per_s":)" +
                           std::to_string(bytes_per_s / 1e9) + R"(},"children":[{"count":)" +
                           std::to_string(ranks) + R"(,"device":"d"}]}})";
  return comm::Topology::Parse(json, "test").value();
}

// A dense model of 16 layers of 1 GB, divided evenly.
StatusOr<RankWork> DenseWork(const Layout& layout, int rank) {
  const Degrees& d = layout.degrees();
  const double share = 16e9 / (d.tensor * d.pipeline);
  return RankWork{.weight_bytes = share,
                  .layers = 16 / d.pipeline,
                  .has_embedding = layout.At(rank).stage == 0,
                  .read_bytes = share,
                  .flops_per_row = share};
}

LayoutPlanner DensePlanner(int ranks, double bytes_per_s, double memory_gb = 100) {
  return LayoutPlanner::Create(Devices(ranks, bytes_per_s, memory_gb), kHidden, "bf16", DenseWork).value();
}

TEST(LayoutPlanner, TensorParallelRanksDivideTheReadTime) {
  const LayoutPlanner one = DensePlanner(1, 1e11), four = DensePlanner(4, 1e11);
  const StepTime alone = one.Predict({}, {{}})->steps[0];
  EXPECT_DOUBLE_EQ(alone.seconds, 16e9 / kMemoryRate);
  EXPECT_EQ(alone.communication, 0);
  const StepTime shared = four.Predict({.tensor = 4}, {{}})->steps[0];
  EXPECT_NEAR(shared.seconds - shared.communication, 4e9 / kMemoryRate, 1e-9);
  EXPECT_GT(shared.communication, 33 * 1e-6) << "two sums per layer and one of the embedding";
}

TEST(LayoutPlanner, StagesShareOneStepButNotTheInterval) {
  const LayoutPlanner planner = DensePlanner(4, 1e11);
  const StepTime step = planner.Predict({.pipeline = 4}, {{}})->steps[0];
  EXPECT_NEAR(step.seconds, 16e9 / kMemoryRate, 1e-4);
  EXPECT_NEAR(step.interval, 4e9 / kMemoryRate, 1e-4);
}

TEST(LayoutPlanner, PrefillFlowsThroughStagesInParts) {
  const LayoutPlanner planner = DensePlanner(4, 1e11);
  const StepShape prefill = {.rows_per_sequence = 4096};
  const StepTime step = planner.Predict({.pipeline = 4}, {prefill})->steps[0];
  const double alone = 4096 * 16e9 / kFlops;
  EXPECT_GT(step.parts, 4);
  EXPECT_LT(step.seconds, alone / 2.5);
  EXPECT_GT(step.seconds, alone / 4);
}

TEST(LayoutPlanner, PrefersPipelinesOverSlowLinks) {
  const std::vector<StepShape> prefill = {{.rows_per_sequence = 4096}};
  EXPECT_EQ(DensePlanner(4, 1e12).Compare(prefill)->front().layout.degrees().tensor, 4);
  EXPECT_EQ(DensePlanner(4, 1e8).Compare(prefill)->front().layout.degrees().pipeline, 4);
}

TEST(LayoutPlanner, LayoutsThatDoNotFitComeLast) {
  const auto whole = DensePlanner(1, 1e11, 10).Compare({{}});
  ASSERT_TRUE(whole.ok());
  EXPECT_FALSE(whole->front().fits);
  EXPECT_LT(whole->front().free_bytes, 0);
  EXPECT_TRUE(DensePlanner(2, 1e11, 10).Compare({{}})->front().fits);
}

TEST(LayoutPlanner, RefusesTopologiesAndPlacementsThatItCannotPredict) {
  EXPECT_FALSE(LayoutPlanner::Create(comm::Topology::Flat(2, {}), kHidden, "bf16", DenseWork).ok());
  EXPECT_FALSE(DensePlanner(4, 1e11).Predict({.tensor = 2}, {{}}).ok());
}

// A model of 8 layers with 64 experts of 100 MB, whose attention has 50 MB and 1 MB of cache per token.
StatusOr<RankWork> SparseWork(const Layout& layout, int rank) {
  const Degrees& d = layout.degrees();
  const int layers = 8 / d.pipeline;
  const double shards = d.tensor;
  const int parts = d.data > 1 ? d.expert : 1;  // else ranks have slices of all experts
  const double slice = d.data > 1 ? 100e6 : 100e6 / shards;
  return RankWork{.weight_bytes = layers * (50e6 / shards + 64.0 / parts * slice),
                  .kv_bytes_per_token = 1e6 * layers / 8,
                  .layers = layers,
                  .has_embedding = layout.At(rank).stage == 0,
                  .read_bytes = layers * 50e6 / shards,
                  .flops_per_row = layers * 50e6 / shards,
                  .expert_layers = layers,
                  .all_experts = 64,
                  .top_k = 4,
                  .expert_bytes = slice,
                  .expert_flops_per_row = slice};
}

LayoutPlanner SparsePlanner(int ranks, double bytes_per_s) {
  return LayoutPlanner::Create(Devices(ranks, bytes_per_s), kHidden, "bf16", SparseWork).value();
}

TEST(LayoutPlanner, ReplicasThatDivideTheExpertsReadTheirOwnCachesAndExperts) {
  const LayoutPlanner planner = SparsePlanner(4, 1e11);
  const std::vector<StepShape> decode = {{.sequences = 8, .context = 10000}};
  const StepTime step = planner.Predict({.data = 4, .expert = 4}, decode)->steps[0];
  // 8 rows choose 4 of 64 experts each: the busiest of 4 ranks reads some of its 16, and 2 sequences.
  const double caches = 2 * 10000 * 1e6, attention = 8 * 50e6;
  EXPECT_GT(step.seconds, (caches + attention + 8 * 6 * 100e6) / kMemoryRate);
  EXPECT_LT(step.seconds, (caches + attention + 8 * 16 * 100e6) / kMemoryRate + step.communication);
  EXPECT_GT(step.communication, 8 * 2e-6) << "an exchange in each layer";
  // One sequence is on one replica, whose cache is not divided.
  const StepTime one = planner.Predict({.data = 4, .expert = 4}, {{.context = 10000}})->steps[0];
  EXPECT_GT(one.seconds, 10000 * 1e6 / kMemoryRate);
}

TEST(LayoutPlanner, LayoutsWithReplicasAreComparedForModelsWithExperts) {
  const auto with_replicas = [](const std::vector<LayoutPlanner::Prediction>& predictions) {
    return std::ranges::count_if(predictions, [](const auto& p) { return p.layout.degrees().data > 1; });
  };
  const std::vector<StepShape> decode = {{.sequences = 8, .context = 10000}};
  EXPECT_EQ(with_replicas(*SparsePlanner(4, 1e11).Compare(decode)), 3);  // DP4, DP2 x PP2, TP2 x DP2
  EXPECT_EQ(with_replicas(*DensePlanner(4, 1e11).Compare(decode)), 0);
  // Over slow links one exchange per layer with few bytes is cheaper than two sums over all ranks.
  EXPECT_EQ(SparsePlanner(4, 1e8).Compare(decode)->front().layout.degrees().tensor, 1);
}

// Slow devices, and as many that read their memory three times as fast.
LayoutPlanner UnequalPlanner(double first_memory_gb, int of_each = 1) {
  const auto device = [](double rate, double memory) {
    return R"({"flops":{"bf16":1e13},"memory_gb_per_s":)" + std::to_string(rate) + R"(,"memory_gb":)" +
           std::to_string(memory) + "}";
  };
  const std::string json = R"({"name":"test","source":"test","devices":{"slow":)" +
                           device(100, first_memory_gb) + R"(,"fast":)" + device(300, 100) +
                           R"(},"tree":{"level":"node","link":{"latency_us":1,"gb_per_s":10},)"
                           R"("children":[{"count":)" +
                           std::to_string(of_each) + R"(,"device":"slow"},{"count":)" +
                           std::to_string(of_each) + R"(,"device":"fast"}]}})";
  const auto work = [](const Layout& layout, int rank) -> StatusOr<RankWork> {
    const std::vector<int>& split = layout.split().layers;
    const int layers = split.empty() ? 16 / layout.degrees().pipeline : split[layout.At(rank).stage];
    return RankWork{.weight_bytes = layers * 1e9, .layers = layers, .read_bytes = layers * 1e9};
  };
  return LayoutPlanner::Create(comm::Topology::Parse(json, "test").value(), kHidden, "bf16", work).value();
}

TEST(LayoutPlanner, FasterDevicesGetMoreLayers) {
  const auto prediction = UnequalPlanner(100).Predict({.pipeline = 2}, {{}});
  ASSERT_TRUE(prediction.ok()) << Message(prediction.status());
  EXPECT_EQ(prediction->layout.split().layers, (std::vector<int>{4, 12}));
  EXPECT_NEAR(prediction->steps[0].interval, 4e9 / 1e11, 1e-4);
}

TEST(LayoutPlanner, EquallySlowDevicesAreRelievedOneAfterTheOther) {
  const auto prediction = UnequalPlanner(100, 2).Predict({.pipeline = 4}, {{}});
  ASSERT_TRUE(prediction.ok()) << Message(prediction.status());
  EXPECT_EQ(prediction->layout.split().layers, (std::vector<int>{2, 2, 6, 6}));
}

TEST(LayoutPlanner, LayersFitTheMemoryOfTheirDevices) {
  const auto prediction = UnequalPlanner(2.5).Predict({.pipeline = 2}, {{}});
  ASSERT_TRUE(prediction.ok()) << Message(prediction.status());
  EXPECT_EQ(prediction->layout.split().layers, (std::vector<int>{2, 14}));
  EXPECT_TRUE(prediction->fits);
}

TEST(LayoutPlanner, EqualDevicesKeepEqualStages) {
  EXPECT_TRUE(DensePlanner(4, 1e11).Predict({.pipeline = 4}, {{}})->layout.split().layers.empty());
}

TEST(ExpertDraws, OnePartUsesTheMean) {
  const ExpertUse use = BusiestPart(128, 8, 1, 1);
  EXPECT_NEAR(use.experts, 8, 1e-9);
  EXPECT_NEAR(use.rows, 8, 1e-9);
}

TEST(ExpertDraws, ABusiestPartHasMoreThanItsShare) {
  // Of 8 experts in two halves, the larger half has 5.09 on average (binomial distribution).
  EXPECT_NEAR(BusiestPart(128, 8, 2, 1).experts, 5.09, 0.3);
  const ExpertUse many = BusiestPart(128, 8, 2, 4096);
  EXPECT_NEAR(many.experts, 64, 1e-6);
  EXPECT_NEAR(many.rows, 4096 * 4, 1e-6);
}

}  // namespace
}  // namespace moesaic::planner
