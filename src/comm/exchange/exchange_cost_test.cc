#include "comm/exchange/exchange_cost.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "comm/exchange/exchange_test_support.h"

namespace moesaic::comm {
namespace {

TEST(HitProbabilityTest, ExpectedGroupsGiveTheRatiosOfTheClosedFormula) {
  // Copies per remote rank divided by copies per remote node, for nodes x ranks of a uniform gate.
  const auto ratio = [](int experts, int k, int nodes, int ranks) {
    return ranks * HitProbability(experts, experts / (nodes * ranks), k) /
           HitProbability(experts, experts / nodes, k);
  };
  EXPECT_NEAR(ratio(256, 8, 2, 4), 2.66, 0.005);
  EXPECT_NEAR(ratio(256, 8, 2, 8), 3.27, 0.005);
  EXPECT_NEAR(ratio(256, 8, 4, 8), 2.01, 0.005);
  EXPECT_NEAR(ratio(64, 6, 4, 8), 1.72, 0.005);
  EXPECT_NEAR(ratio(8, 2, 2, 4), 1.27, 0.005);
  EXPECT_EQ(HitProbability(8, 8, 2), 1);
  EXPECT_EQ(HitProbability(8, 0, 2), 0);
}

// DeepEP's low-latency table: docs/legacy.md of deepseek-ai/DeepEP (H800, ConnectX-7 400 Gbit/s, 128 tokens
// per rank, hidden 7168, top-8, FP8 dispatch, bf16 combine, 8 ranks per node). Microseconds.
struct TableRow {
  int ranks;
  double dispatch_us, combine_us;
};
constexpr TableRow kTable[] = {{8, 77, 114},   {16, 118, 195},  {32, 155, 273},
                               {64, 173, 314}, {128, 192, 369}, {256, 194, 360}};

ExchangeSample SampleOf(int ranks, Payload payload, double us) {
  // One row per slot; a slot's rank is on the token's own node with probability 8 / ranks.
  const double bytes = 128.0 * 8 * static_cast<double>(WireRowBytes(payload, 7168));
  return {bytes * 8 / ranks, bytes * (1 - 8.0 / ranks), us * 1e-6};
}

TEST(LinkTimesTest, AFitOnEp8To64PredictsEp128And256Within10Percent) {
  for (const Payload payload : {Payload::kF8E4M3, Payload::kBf16}) {
    const auto us = [&](const TableRow& row) {
      return payload == Payload::kBf16 ? row.combine_us : row.dispatch_us;
    };
    std::vector<ExchangeSample> samples;
    for (const TableRow& row : kTable) {
      if (row.ranks <= 64) samples.push_back(SampleOf(row.ranks, payload, us(row)));
    }
    const auto fit = FitLinkTimes(samples);
    ASSERT_TRUE(fit.ok()) << fit.status();
    for (const TableRow& row : kTable) {
      const ExchangeSample sample = SampleOf(row.ranks, payload, us(row));
      const double predicted = fit->Predict(sample.inner_bytes, sample.outer_bytes);
      std::printf("%s EP%d: %.1f us, measured %.0f us (%+.1f%%)\n",
                  payload == Payload::kBf16 ? "combine" : "dispatch", row.ranks, predicted * 1e6, us(row),
                  100 * (predicted / sample.seconds - 1));
      EXPECT_NEAR(predicted / sample.seconds, 1, 0.1);
    }
    // The fitted bandwidth between nodes is near that of the network card, 50 GB/s.
    EXPECT_NEAR(1 / fit->outer_s_per_byte, 50e9, 5e9);
  }
}

// H200 with 50 GB/s per device between nodes: ai-dynamo/aiconfigurator@095f58a5,
// h200_sxm/comm/sglang/0.5.6.post2/wideep_deepep_ll_perf (128 tokens, 256 experts, 1 to 8 nodes of 8
// devices).
TEST(LinkTimesTest, AFitOn8To32H200PredictsSixtyFourWithin5Percent) {
  constexpr TableRow kMeasured[] = {
      {8, 39.8287, 72.3825}, {16, 102.1, 186.17}, {32, 142.97, 263.27}, {64, 166.77, 304.73}};
  for (const Payload payload : {Payload::kF8E4M3, Payload::kBf16}) {
    const auto us = [&](const TableRow& row) {
      return payload == Payload::kBf16 ? row.combine_us : row.dispatch_us;
    };
    std::vector<ExchangeSample> samples;
    for (const TableRow& row : kMeasured) samples.push_back(SampleOf(row.ranks, payload, us(row)));
    const ExchangeSample last = samples.back();
    samples.pop_back();
    const auto fit = FitLinkTimes(samples);
    ASSERT_TRUE(fit.ok()) << fit.status();
    EXPECT_NEAR(fit->Predict(last.inner_bytes, last.outer_bytes) / last.seconds, 1, 0.05);
  }
}

TEST(LinkTimesTest, AnExactModelIsRecovered) {
  const LinkTimes truth = {20e-6, 2e-12, 25e-12};
  std::vector<ExchangeSample> samples;
  for (const double share : {0.0, 0.02, 0.05, 0.3, 0.5, 0.9}) {
    samples.push_back({1e7 * (1 - share), 1e7 * share, truth.Predict(1e7 * (1 - share), 1e7 * share)});
  }
  const auto fit = FitLinkTimes(samples);
  ASSERT_TRUE(fit.ok()) << fit.status();
  for (const ExchangeSample& sample : samples) {
    EXPECT_NEAR(fit->Predict(sample.inner_bytes, sample.outer_bytes), sample.seconds, 1e-6 * sample.seconds);
  }
}

TEST(LinkTimesTest, ImpossibleSamplesAreRefused) {
  const std::vector<ExchangeSample> two = {{1, 0, 1}, {0, 1, 1}};
  EXPECT_EQ(FitLinkTimes(two).status().code(), StatusCode::kInvalidArgument);
  const std::vector<ExchangeSample> faulty = {{1, 0, 1}, {0, 1, 1}, {0, 0, 1}};
  EXPECT_EQ(FitLinkTimes(faulty).status().code(), StatusCode::kInvalidArgument);
}

const LevelTraffic& LevelOf(const std::vector<LevelTraffic>& levels, const std::string& name) {
  for (const LevelTraffic& level : levels) {
    if (level.level == name) return level;
  }
  ADD_FAILURE() << "no level " << name;
  return levels[0];
}

TEST(EstimateTest, BytesBetweenNodesAreThoseOfTheClosedFormula) {
  for (const auto& [shape, nodes, ranks] : {std::tuple("4+4", 2, 4), std::tuple("8+8+8+8", 4, 8)}) {
    const Topology topology = ShapeReader::Read(shape);
    const ExpertMap map = ExpertMap::Even(256, nodes * ranks);
    // Rows per token deviate by about 1: with 8192 tokens their mean, of 2.7 and more, deviates by 0.4%.
    const ExchangeWorkload workload{.tokens_per_rank = 8192 / (nodes * ranks)};
    ExchangeOptions options = {.dispatch_payload = Payload::kF8E4M3};
    const int64_t tokens = int64_t{nodes} * ranks * workload.tokens_per_rank;
    const double node_rows = static_cast<double>(tokens) * (nodes - 1) * HitProbability(256, 256 / nodes, 8);
    const double rank_rows =
        static_cast<double>(tokens) * (nodes - 1) * ranks * HitProbability(256, 256 / (nodes * ranks), 8);
    const auto forwarded = EstimateExchange(topology, map, workload, options);
    ASSERT_TRUE(forwarded.ok()) << forwarded.status();
    options.forwarding = Forwarding::kDirect;
    const auto direct = EstimateExchange(topology, map, workload, options);
    ASSERT_TRUE(direct.ok()) << direct.status();
    const auto dispatch_bytes = static_cast<double>(WireRowBytes(Payload::kF8E4M3, 7168));
    EXPECT_NEAR(
        static_cast<double>(LevelOf(forwarded->dispatch, "L0").row_bytes) / (node_rows * dispatch_bytes), 1,
        0.01);
    EXPECT_NEAR(static_cast<double>(LevelOf(forwarded->combine, "L0").row_bytes) / (node_rows * 14336), 1,
                0.01);
    EXPECT_NEAR(static_cast<double>(LevelOf(direct->dispatch, "L0").row_bytes) / (rank_rows * dispatch_bytes),
                1, 0.01);
    // Ids and weights are below 1% of the rows.
    EXPECT_LT(LevelOf(forwarded->dispatch, "L0").routing_bytes * 100,
              LevelOf(forwarded->dispatch, "L0").row_bytes);
    std::printf("%s: rows between nodes %.4f of the formula; direct / forwarded time %.2f\n", shape,
                static_cast<double>(LevelOf(forwarded->dispatch, "L0").rows) / node_rows,
                (direct->dispatch_s + direct->combine_s) / (forwarded->dispatch_s + forwarded->combine_s));
  }
}

// Two and four nodes with one network card of 200 Gbit/s each, and 25 or 50 GB/s per device inside: the inner
// links are as busy as the outer ones on 2x4, so that forwarding must overlap with arrivals.
TEST(EstimateTest, ForwardingBeatsDirectMessagesBy1Point84OnNodesWithOneNetworkCard) {
  for (const auto& [nodes, ranks, inner] : {std::tuple(2, 4, 50e9), std::tuple(4, 8, 25e9)}) {
    TopologyBuilder builder;
    const int root = builder.AddGroup(-1, "cluster", {.latency_s = 5e-6, .bytes_per_s = 25e9}, 0);
    for (int node = 0; node < nodes; ++node) {
      const int group = builder.AddGroup(root, "node", {.latency_s = 2e-6, .bytes_per_s = inner}, 0);
      for (int rank = 0; rank < ranks; ++rank) builder.AddDevice(group, 0, 0);
    }
    const Topology topology = builder.Finish("nodes", "test", {DeviceType{}});
    const ExpertMap map = ExpertMap::Even(256, nodes * ranks);
    const auto forwarded = EstimateExchange(topology, map, {.tokens_per_rank = 128}, {});
    const auto direct =
        EstimateExchange(topology, map, {.tokens_per_rank = 128}, {.forwarding = Forwarding::kDirect});
    ASSERT_TRUE(forwarded.ok() && direct.ok());
    const double ratio =
        (direct->dispatch_s + direct->combine_s) / (forwarded->dispatch_s + forwarded->combine_s);
    std::printf("%dx%d: direct / forwarded time %.2f\n", nodes, ranks, ratio);
    EXPECT_GE(ratio, 1.84);
  }
}

// The estimate is compared with the real exchange on virtual time.
TEST(EstimateTest, AgreesWithAnExecutionOnVirtualTime) {
  for (const char* shape : {"4", "4+4", "(2+2)+(1+3)"}) {
    const Topology topology = ShapeReader::Read(shape);
    const int ranks = topology.ranks();
    const ExchangeWorkload workload{.tokens_per_rank = 40, .k = 4, .hidden = 512};
    const ExpertMap map = ExpertMap::Even(32, ranks);
    for (const Forwarding forwarding : {Forwarding::kHierarchical, Forwarding::kDirect}) {
      const ExchangeOptions options = {.forwarding = forwarding, .segment_tokens = 8};
      const auto estimate = EstimateExchange(topology, map, workload, options);
      ASSERT_TRUE(estimate.ok()) << estimate.status();
      std::vector<double> dispatched(ranks), combined(ranks);
      std::vector<std::vector<LevelTraffic>> traffic(ranks), combine_traffic(ranks);
      RunRanks(ranks,
               [&](Transport& transport) {
                 const int rank = transport.rank();
                 // Ids of the workload, as the estimate draws them.
                 const TokenRoutes tokens =
                     *UniformTokens(topology, map, workload, options.replica_choice, rank);
                 std::vector<int32_t> ids;
                 for (const RouteEntry& entry : tokens.entries)
                   ids.push_back(map.physical(entry.physical).expert);
                 const std::vector<tensor::BF16> x(static_cast<size_t>(workload.tokens_per_rank) *
                                                   workload.hidden);
                 auto exchange = *ExpertExchange::Create(transport, topology, map, workload.hidden, options);
                 const double start = transport.Now();
                 const auto got = exchange->Dispatch(RowsOf(std::span(x)),
                                                     {workload.tokens_per_rank, workload.k, ids, {}, {}});
                 ASSERT_TRUE(got.ok()) << got.status();
                 dispatched[rank] = transport.Now() - start;
                 const std::vector<tensor::BF16> y(static_cast<size_t>(got->rows()) * workload.hidden);
                 std::vector<float> out(x.size());
                 ASSERT_TRUE(
                     exchange->Combine(RowsOf(std::span(y)), got->handle(), OutputOf(std::span(out))).ok());
                 combined[rank] = transport.Now() - start;
                 traffic[rank] = exchange->dispatch_traffic();
                 combine_traffic[rank] = exchange->combine_traffic();
               },
               {.topology = &topology});
      const double seconds = *std::max_element(combined.begin(), combined.end());
      const double predicted = estimate->dispatch_s + estimate->combine_s;
      // Combines begin on ranks that finished early, and headers travel apart from ids.
      EXPECT_NEAR(seconds / predicted, 1, 0.15) << shape << " " << static_cast<int>(forwarding);
      for (size_t level = 0; level < estimate->dispatch.size(); ++level) {
        const auto sum = [level](const std::vector<std::vector<LevelTraffic>>& of_ranks,
                                 int64_t LevelTraffic::*count) {
          int64_t total = 0;
          for (const std::vector<LevelTraffic>& levels : of_ranks) total += levels[level].*count;
          return total;
        };
        const LevelTraffic &dispatch = estimate->dispatch[level], &combine = estimate->combine[level];
        EXPECT_EQ(sum(traffic, &LevelTraffic::rows), dispatch.rows);
        EXPECT_EQ(sum(traffic, &LevelTraffic::routing_bytes), dispatch.routing_bytes);
        EXPECT_EQ(sum(combine_traffic, &LevelTraffic::rows), combine.rows);
        EXPECT_EQ(sum(combine_traffic, &LevelTraffic::row_bytes), combine.row_bytes);
      }
    }
  }
}

TEST(ExchangeBoundTest, IsTheTimeOfTheClosedFormulasRowsAtTheNodesPort) {
  const Topology topology = ShapeReader::Read("4+4+4+4");
  const ExpertMap map = ExpertMap::Even(256, 16);
  const ExchangeWorkload workload{.tokens_per_rank = 512};
  const ExchangeOptions options = {.dispatch_payload = Payload::kF8E4M3};
  const auto bound = BoundExchange(topology, map, workload, options);
  ASSERT_TRUE(bound.ok()) << bound.status();
  const Link& link = topology.groups()[0].link;
  const double rows = 512 * 12 * HitProbability(256, 64, 8);  // into one node
  const auto seconds = [&](Payload payload) {
    return link.latency_s + rows * static_cast<double>(WireRowBytes(payload, 7168)) / link.bytes_per_s;
  };
  // The bound is that of the fullest node.
  EXPECT_NEAR(bound->dispatch_s / seconds(Payload::kF8E4M3), 1, 0.02);
  EXPECT_NEAR(bound->combine_s / seconds(Payload::kBf16), 1, 0.02);
  EXPECT_FALSE(bound->dispatch_port.empty() || bound->combine_port.empty());
}

TEST(ExchangeBoundTest, NoForwardingOrReductionIsPredictedToBeFaster) {
  constexpr double kRounding = 1 - 1e-9;
  const ExchangeWorkload workload{.tokens_per_rank = 48, .k = 4, .hidden = 512};
  for (const char* shape : {"4", "4+4", "(2+2)+(1+3)", "1+7"}) {
    const Topology topology = ShapeReader::Read(shape);
    const ExpertMap map = ExpertMap::Even(32, topology.ranks());
    for (const Reduction reduction : {Reduction::kPartialSums, Reduction::kBySlot}) {
      const ExchangeOptions options = {.reduction = reduction, .segment_tokens = 8};
      const auto bound = BoundExchange(topology, map, workload, options);
      const auto ranked = RankForwardings(topology, map, workload, options);
      ASSERT_TRUE(bound.ok() && ranked.ok());
      for (const ForwardingCandidate& candidate : *ranked) {
        EXPECT_GE(candidate.estimate.dispatch_s, kRounding * bound->dispatch_s) << shape;
        EXPECT_GE(candidate.estimate.combine_s, kRounding * bound->combine_s) << shape;
      }
    }
  }
}

TEST(EstimateTest, ForwardingIsChosenWhereTheOuterLinkIsSlowAndNotInAFlatGroup) {
  const ExchangeWorkload workload{.tokens_per_rank = 32, .k = 8, .hidden = 2048};
  const Topology slow = ShapeReader::Read("4+4");
  const auto ranked = RankForwardings(slow, ExpertMap::Even(64, 8), workload, {});
  ASSERT_TRUE(ranked.ok()) << ranked.status();
  EXPECT_EQ(ranked->front().forwarding, Forwarding::kHierarchical);
  EXPECT_EQ(ranked->front().forward_levels, std::vector<std::string>{"L1"});
  const auto flat = RankForwardings(ShapeReader::Read("4"), ExpertMap::Even(64, 4), workload, {});
  ASSERT_TRUE(flat.ok()) << flat.status();
  EXPECT_EQ(flat->size(), 1U);
  EXPECT_EQ(flat->front().forwarding, Forwarding::kDirect);
}

}  // namespace
}  // namespace moesaic::comm
