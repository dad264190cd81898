#include "parallel/expert_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

#include "comm/transport/local_transport.h"
#include "parallel/counted_transport.h"

namespace moesaic::parallel {
namespace {

using comm::Transport;
using testing::HasSubstr;

constexpr int kHidden = 24, kExperts = 6, kTopK = 2;
constexpr double kLimitSeconds = 20;

// An output of an expert for one value of a row.
float Output(int expert, float x) { return x * static_cast<float>(expert + 1) - static_cast<float>(expert); }

struct Tokens {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
};

Tokens RandomTokens(uint32_t seed, int rows) {
  std::mt19937 random(seed);
  const auto uniform = [&] { return static_cast<float>(random() % 1000) / 1000; };
  Tokens tokens;
  for (int i = 0; i < rows * kHidden; ++i) tokens.x.push_back(uniform() - 0.5F);
  for (int row = 0; row < rows; ++row) {
    const auto first = static_cast<int32_t>(random() % kExperts);
    tokens.ids.insert(tokens.ids.end(),
                      {first, (first + 1 + static_cast<int32_t>(random() % (kExperts - 1))) % kExperts});
    tokens.weights.insert(tokens.weights.end(), {uniform(), uniform()});
  }
  return tokens;
}

using ByLayer = std::vector<std::vector<std::vector<int>>>;

std::unique_ptr<ExpertGroup> Join(Transport& end, const Layout& layout, const ByLayer& by_layer,
                                  const BatchSplitOptions& split = {}, int pass_layers = 0) {
  const auto topology = comm::Topology::Flat(layout.ranks(), {.latency_s = 1e-6, .bytes_per_s = 1e10});
  auto group = ExpertGroup::Create(end, topology, layout,
                                   {.hidden = kHidden,
                                    .experts = kExperts,
                                    .top_k = kTopK,
                                    .time_limit_s = kLimitSeconds,
                                    .split = split,
                                    .pass_layers = pass_layers},
                                   by_layer);
  EXPECT_TRUE(group.ok()) << Message(group.status());
  return *std::move(group);
}

constexpr int64_t kExpertBytes = 256;

// The weights of experts: bytes that name the expert.
std::vector<std::byte> RecordsOf(const std::vector<int>& own) {
  std::vector<std::byte> weights(own.size() * kExpertBytes);
  for (size_t i = 0; i < own.size(); ++i) {
    std::fill_n(weights.begin() + static_cast<std::ptrdiff_t>(i * kExpertBytes), kExpertBytes,
                static_cast<std::byte>(own[i]));
  }
  return weights;
}

// One layer for this rank's part of `tokens`; the result is the part's sums.
std::vector<float> RunLayer(ExpertGroup& group, int layer, const std::vector<int>& own, const Tokens& tokens,
                            int rows, const std::vector<std::byte>& records) {
  const Range part = group.OwnRows(rows);
  const auto at = [&](const auto& values, int width) {
    return std::span(values).subspan(part.first * width, part.count * width);
  };
  std::vector<float> out(part.count * kHidden);
  Status status = group.Begin(layer, at(tokens.x, kHidden), at(tokens.ids, kTopK), at(tokens.weights, kTopK),
                              {.data = records.data(), .bytes = kExpertBytes});
  EXPECT_TRUE(status.ok()) << Message(status);
  const auto received = group.Receive();
  EXPECT_TRUE(received.ok()) << Message(received.status());
  std::vector<float> y(received->count * kHidden);
  for (int row = 0; row < received->count; ++row) {
    for (int i = 0; i < kHidden; ++i) {
      const int expert =
          row < received->own
              ? own[received->expert[row]]
              : static_cast<int>(received->spilled[(received->expert[row] + 1) * kExpertBytes - 1]);
      y[row * kHidden + i] = Output(expert, received->x[row * kHidden + i]);
    }
  }
  status = group.Combine(y, out);
  EXPECT_TRUE(status.ok()) << Message(status);
  return out;
}

std::vector<float> RunLayer(ExpertGroup& group, int layer, const std::vector<int>& own, const Tokens& tokens,
                            int rows) {
  return RunLayer(group, layer, own, tokens, rows, RecordsOf(own));
}

std::vector<float> Expected(const Tokens& tokens, Range rows) {
  std::vector<float> sums;
  for (int row = rows.first; row < rows.end(); ++row) {
    for (int i = 0; i < kHidden; ++i) {
      float sum = 0;
      for (int slot = 0; slot < kTopK; ++slot) {
        sum += tokens.weights[row * kTopK + slot] *
               Output(tokens.ids[row * kTopK + slot], tokens.x[row * kHidden + i]);
      }
      sums.push_back(sum);
    }
  }
  return sums;
}

const ByLayer kUneven = {{{0}, {1, 2, 3}, {}, {4, 5}}, {{5, 4}, {3}, {2, 1}, {0}}};
const ByLayer kReplicas = {{{0, 1, 2}, {0, 3}, {0, 1, 4}, {2, 5}}};

class ExpertGroupTest : public testing::TestWithParam<int> {};

// The parameter is the limit of rows that replicas agree on: few rows travel in one message.
TEST_P(ExpertGroupTest, SumsTheOutputsOfAllExperts) {
  const Layout layout = *Layout::Create({.tensor = 2, .data = 2, .expert = 4});
  comm::RunRanks(4, [&](Transport& end) {
    for (const ByLayer& by_layer : {kUneven, kReplicas}) {
      const auto group = Join(end, layout, by_layer);
      const int replica = layout.At(end.rank()).replica;
      for (int step = 0; step < 6; ++step) {
        const int rows = step == replica ? 0 : 1 + step * 5;  // replicas are idle in turn
        const Tokens tokens = RandomTokens(10 * step + replica, rows);
        group->SetMostRows(GetParam());
        for (int layer = 0; layer < group->layers(); ++layer) {
          const auto sums = RunLayer(*group, layer, by_layer[layer][end.rank()], tokens, rows);
          const auto expected = Expected(tokens, group->OwnRows(rows));
          ASSERT_EQ(sums.size(), expected.size());
          for (size_t i = 0; i < sums.size(); ++i) ASSERT_NEAR(sums[i], expected[i], 1e-5) << "step " << step;
        }
      }
      EXPECT_GT(group->traffic().sent_rows, 0);
      ASSERT_EQ(group->traffic().levels.size(), 1U);
      EXPECT_GT(group->traffic().levels[0].bytes, 0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, ExpertGroupTest, testing::Values(0, 64));

// Replicas of experts are used in any proportion, and results do not depend on it.
TEST(ExpertGroup, LoadsMoveTokensBetweenReplicasButNotTheirSums) {
  const Layout layout = *Layout::Create({.data = 2, .expert = 2});
  const ByLayer both = {{{0, 1, 2, 3}, {0, 1, 4, 5}}};
  comm::RunRanks(2, [&](Transport& end) {
    const auto group = Join(end, layout, both, {.exact = false});
    const Tokens tokens = RandomTokens(7 + end.rank(), 40);
    const auto computed = [&] { return group->traffic().computed_rows; };
    const auto even = RunLayer(*group, 0, both[0][end.rank()], tokens, 40);
    const int64_t before = computed();
    // Experts 2 and 3 alone keep rank 0 busy: rank 1 takes all tokens of 0 and 1.
    ASSERT_TRUE(group->SetLoads(0, std::vector<double>{1, 1, 50, 50, 1, 1}).ok());
    EXPECT_EQ(RunLayer(*group, 0, both[0][end.rank()], tokens, 40), even);
    EXPECT_NE(computed() - before, before);
    EXPECT_THAT(Message(group->SetLoads(1, std::vector<double>(kExperts, 1))),
                HasSubstr("do not fit 1 layers"));
  });
}

// Tokens of one domain: two experts get most of them.
Tokens SkewedTokens(uint32_t seed, int rows) {
  Tokens tokens = RandomTokens(seed, rows);
  for (int row = 0; row < rows; ++row) {
    if (row % 8 == 0) continue;
    tokens.ids[row * kTopK] = row % 2 * 2;
    tokens.ids[row * kTopK + 1] = 1;
  }
  return tokens;
}

struct Outcome {
  std::vector<std::vector<float>> sums;  // [ranks]
  std::vector<int64_t> rows;             // [ranks] computed
  BatchSplitStats split;                 // of rank 0
};

Outcome RunSkewed(const LayerPlacement& experts, const BatchSplitOptions& split, int layers = 1) {
  constexpr int kRanks = 4, kRows = 64;
  const Layout layout = *Layout::Create({.data = kRanks, .expert = kRanks});
  Outcome outcome = {
      .sums = std::vector<std::vector<float>>(kRanks), .rows = std::vector<int64_t>(kRanks), .split = {}};
  comm::RunRanks(kRanks, [&](Transport& end) {
    const auto group = Join(end, layout, {experts}, split);
    const int rank = end.rank();
    for (int layer = 0; layer < layers; ++layer) {
      outcome.sums[rank] = RunLayer(*group, 0, experts[rank], SkewedTokens(20 + rank, kRows), kRows);
    }
    outcome.rows[rank] = group->traffic().computed_rows;
    if (rank == 0) outcome.split = group->traffic().split;
  });
  return outcome;
}

TEST(ExpertGroup, AnExactSplitEvensOutABatchAndKeepsItsSums) {
  const LayerPlacement experts = {{0, 1}, {1, 2}, {0, 2, 3}, {1, 4, 5}};
  const Outcome shares = RunSkewed(experts, {.exact = false}), exact = RunSkewed(experts, {});
  EXPECT_EQ(exact.sums, shares.sums);
  EXPECT_EQ(shares.split.splits, 0);
  EXPECT_EQ(exact.split.splits, 1);
  const int64_t busiest = std::ranges::max(exact.rows);
  EXPECT_EQ(busiest, exact.split.busiest_rows) << "as predicted";
  EXPECT_EQ(std::accumulate(exact.rows.begin(), exact.rows.end(), int64_t{0}), 4 * 64 * kTopK);
  EXPECT_LE(busiest, 4 * 64 * kTopK / 4 + 1) << "the replicas of these tokens allow an even split";
  EXPECT_LT(busiest, std::ranges::max(shares.rows));
}

TEST(ExpertGroup, SpilledExpertsComputeTheSameSums) {
  const LayerPlacement experts = {{0, 1, 2}, {3}, {4}, {5}};
  // Only rank 0 measures the time of a row, in the last layer but one, so that the last one is the same in
  // each run.
  constexpr int kLayers = RowTime::kColdBatches + 2;
  BatchSplitOptions split = {.exact = true, .spill_bytes = 8 * kExpertBytes, .spill_bytes_per_s = 1e18};
  const Outcome spilled = RunSkewed(experts, split, kLayers);
  split.spill_bytes = kExpertBytes - 1;
  const Outcome stayed = RunSkewed(experts, split, kLayers);
  EXPECT_EQ(spilled.sums, stayed.sums);
  EXPECT_EQ(stayed.split.spilled_bytes, 0);
  EXPECT_GE(spilled.split.spilled_bytes, 2 * kExpertBytes) << "rank 0 sends its busy experts";
  const int64_t of_layer = stayed.split.busiest_rows / kLayers;
  EXPECT_LT(spilled.split.busiest_rows, stayed.split.busiest_rows - of_layer * 2 / 3);
}

// Which weights are fetched depends on measured times; the sums never do. Experts change between passes. A
// rank that waits for a CPU measures slow rows, so that prefetching may save nothing: then the ranks run
// again. batch_split_test.cc has prefetches with given times.
TEST(ExpertGroup, PrefetchedWeightsComputeTheSameSums) {
  constexpr int kRanks = 4, kRows = 96, kPasses = 12, kMaxRuns = 20;
  const Layout layout = *Layout::Create({.data = kRanks, .expert = kRanks});
  const LayerPlacement before = {{0, 1, 2}, {3}, {4}, {5}}, after = {{3}, {0, 1, 2}, {4}, {5}};
  std::atomic<int64_t> prefetched = 0;
  const auto run_passes = [&](Transport& end) {
    const auto group =
        Join(end, layout, {before, before, before},
             {.spill_bytes = 8 * kExpertBytes, .spill_tolerance = 0, .spill_bytes_per_s = 1e18},
             /*pass_layers=*/3);
    const int rank = end.rank();
    const std::vector<std::byte> records[2] = {RecordsOf(before[rank]), RecordsOf(after[rank])};
    for (int pass = 0; pass < kPasses; ++pass) {
      const Tokens tokens = SkewedTokens(100 + 10 * pass + rank, kRows);
      for (int layer = 0; layer < 3; ++layer) {
        const bool changed = layer == 1 && pass >= kPasses / 2;
        if (changed && pass == kPasses / 2) {
          ASSERT_TRUE(group->SetExperts(layer, after).ok());
        }
        const auto sums =
            RunLayer(*group, layer, changed ? after[rank] : before[rank], tokens, kRows, records[changed]);
        const auto expected = Expected(tokens, group->OwnRows(kRows));
        for (size_t i = 0; i < sums.size(); ++i) ASSERT_NEAR(sums[i], expected[i], 1e-5) << "pass " << pass;
      }
    }
    prefetched += group->traffic().split.prefetched;
  };
  for (int run = 0; run < kMaxRuns && prefetched == 0 && !HasFailure(); ++run)
    comm::RunRanks(kRanks, run_passes);
  EXPECT_GT(prefetched, 0);
}

TEST(ExpertGroup, ShortBatchesSendNoCounts) {
  const Layout layout = *Layout::Create({.data = 2, .expert = 2});
  const ByLayer both = {{{0, 1, 2, 3}, {0, 1, 4, 5}}};
  comm::RunRanks(2, [&](Transport& end) {
    const auto group = Join(end, layout, both);
    const auto splits_of = [&](int rows) {
      group->SetMostRows(rows);
      const int64_t before = group->traffic().split.splits;
      RunLayer(*group, 0, both[0][end.rank()], RandomTokens(5, rows), rows);
      return group->traffic().split.splits - before;
    };
    EXPECT_EQ(splits_of(4), 0);
    EXPECT_EQ(splits_of(200), 1);
  });
}

// The counts of a rank that dies are waited for: the others end with its name, continue without it, and split
// exactly again.
TEST(ExpertGroup, ARankThatDiesDuringAnExactSplitIsExcluded) {
  constexpr int kRanks = 3, kRows = 48;
  const Layout layout = *Layout::Create({.data = kRanks, .expert = kRanks});
  const LayerPlacement experts = {{0, 1, 2, 3}, {0, 1, 4, 5}, {2, 3, 4, 5}};
  comm::LocalJob job(kRanks);
  comm::RunRanks(job, [&](Transport& end) {
    const int rank = end.rank();
    CountedTransport counted(end);
    const auto group = Join(counted, layout, {experts});
    const Tokens tokens = SkewedTokens(30 + rank, kRows);
    const auto expected = RunLayer(*group, 0, experts[rank], tokens, kRows);
    if (rank == 2) return job.Kill(2);
    const Status begun = group->Begin(0, tokens.x, tokens.ids, tokens.weights);
    EXPECT_THAT(Message(begun), HasSubstr("rank 2 died"));
    const int dead[] = {2};
    counted.Ignore(2);
    ASSERT_TRUE(group->SetDead(dead).ok());
    const int64_t before = group->traffic().split.splits;
    EXPECT_EQ(RunLayer(*group, 0, experts[rank], tokens, kRows), expected);
    EXPECT_EQ(group->traffic().split.splits, before + 1);
  });
}

TEST(ExpertGroup, ShortBatchesUseAllReplicas) {
  const Layout layout = *Layout::Create({.data = 2, .expert = 2});
  const ByLayer all = {{{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}}};
  comm::RunRanks(2, [&](Transport& end) {
    const auto group = Join(end, layout, all);
    Tokens tokens = RandomTokens(1, 8);
    std::fill(tokens.ids.begin(), tokens.ids.end(), 3);
    RunLayer(*group, 0, all[0][end.rank()], tokens, 8);
    EXPECT_EQ(group->traffic().computed_rows, 16) << "half of both ranks' rows";
  });
}

TEST(ExpertGroup, ADeadRankIsNamed) {
  const Layout layout = *Layout::Create({.data = 2, .expert = 2});
  const ByLayer halves = {{{0, 1, 2}, {3, 4, 5}}};
  comm::LocalJob job(2);
  const auto group = Join(job.end(0), layout, halves);
  job.Kill(1);
  const Tokens tokens = RandomTokens(1, 4);
  const Status begun = group->Begin(0, tokens.x, tokens.ids, tokens.weights);
  const Status failed = begun.ok() ? group->Receive().status() : begun;
  EXPECT_THAT(Message(failed), HasSubstr("rank 1 died"));
}

TEST(ExpertGroup, RefusesPlacementsWithoutAnExpert) {
  const Layout layout = *Layout::Create({.data = 2, .expert = 2});
  comm::LocalJob job(2);
  const auto topology = comm::Topology::Flat(2, {.latency_s = 1e-6, .bytes_per_s = 1e10});
  const auto group =
      ExpertGroup::Create(job.end(0), topology, layout,
                          {.hidden = kHidden, .experts = kExperts, .top_k = kTopK}, {{{0, 1, 2}, {3, 4}}});
  EXPECT_THAT(Message(group.status()), HasSubstr("no rank has expert 5"));
}

}  // namespace
}  // namespace moesaic::parallel
