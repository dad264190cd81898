// Two low-latency micro-batches in virtual time: the experts of one run while messages of the other one
// travel.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include "comm/exchange/exchange.h"
#include "comm/exchange/exchange_test_support.h"

namespace moesaic::comm {
namespace {

constexpr int kRanks = 4, kExpertsPerRank = 4, kTokens = 32, kHidden = 256, kLayers = 4;
constexpr int kSteps = 2 * kLayers;  // a layer of one of the two micro-batches each
constexpr int kPolls = 64;           // in one computation

struct MicroBatch {
  std::vector<tensor::BF16> states;  // [kTokens, kHidden]: input of a layer, then its output
  std::vector<int32_t> ids;          // [kTokens, kRanks]
  int layers = 0;                    // dispatches that were begun
  std::optional<PendingDispatch> dispatch;
  RouteHandle handle;
  std::vector<float> y;
  std::optional<PendingCombine> combine;
};

// Each token has one expert on each rank, so that all ports carry equal bytes.
MicroBatch MakeMicroBatch(int rank, int index) {
  MicroBatch batch;
  for (int i = 0; i < kTokens * kHidden; ++i) {
    batch.states.push_back(tensor::ToBF16(static_cast<float>((7 * i + 13 * rank + index) % 31 - 15) / 16));
  }
  for (int token = 0; token < kTokens; ++token) {
    for (int owner = 0; owner < kRanks; ++owner) {
      batch.ids.push_back(owner * kExpertsPerRank + (token + rank + index) % kExpertsPerRank);
    }
  }
  return batch;
}

// One rank that takes two micro-batches through the layers of a model.
class TwoMicroBatches {
 public:
  TwoMicroBatches(LocalJob& job, int rank, ExpertExchange& exchange, double compute_s)
      : job_(job),
        rank_(rank),
        exchange_(exchange),
        compute_s_(compute_s),
        batches_{{MakeMicroBatch(rank, 0), MakeMicroBatch(rank, 1)}} {}

  void RunInTurn() {
    for (int step = 0; step < kSteps; ++step) {
      MicroBatch& batch = batches_[step % 2];
      BeginDispatch(batch);
      EndDispatch(batch);
      if (compute_s_ > 0) job_.Compute(rank_, compute_s_);
      BeginCombine(batch);
      EndCombine(batch);
    }
  }

  // While the experts of one micro-batch run, the sums of the other one return, and its next rows leave.
  void RunOverlapped() {
    BeginDispatch(batches_[0]);
    for (int step = 0; step < kSteps; ++step) {
      MicroBatch &own = batches_[step % 2], &other = batches_[(step + 1) % 2];
      EndDispatch(own);
      for (int poll = 0; poll < kPolls; ++poll) {
        Poll(other);
        job_.Compute(rank_, compute_s_ / kPolls);
      }
      // All ranks begin operations in one order, also where messages take longer than the computation.
      EndCombine(other);
      if (CanBegin(other)) BeginDispatch(other);
      BeginCombine(own);
    }
    EndCombine(batches_[(kSteps - 1) % 2]);
  }

  // Bits of the states of both micro-batches.
  std::vector<uint16_t> states() const {
    std::vector<uint16_t> bits;
    for (const MicroBatch& batch : batches_) {
      for (const tensor::BF16 value : batch.states) bits.push_back(value.bits);
    }
    return bits;
  }

 private:
  static bool CanBegin(const MicroBatch& batch) {
    return batch.layers < kLayers && !batch.dispatch.has_value() && !batch.combine.has_value();
  }

  void Poll(MicroBatch& batch) {
    if (batch.combine.has_value() && batch.combine->Poll()) EndCombine(batch);
    if (CanBegin(batch)) BeginDispatch(batch);
    if (batch.dispatch.has_value()) batch.dispatch->Poll();
  }

  void BeginDispatch(MicroBatch& batch) {
    ++batch.layers;
    auto begun = exchange_.BeginDispatch(RowsOf(std::span<const tensor::BF16>(batch.states)),
                                         {kTokens, kRanks, batch.ids, {}, {}});
    ASSERT_TRUE(begun.ok()) << begun.status();
    batch.dispatch.emplace(*std::move(begun));
  }

  void EndDispatch(MicroBatch& batch) {
    ASSERT_TRUE(batch.dispatch.has_value());
    const auto rows = batch.dispatch->Finish();
    batch.dispatch.reset();
    ASSERT_TRUE(rows.ok()) << rows.status();
    batch.handle = rows->handle();
    batch.y = RunExperts(exchange_.map(), rank_, kHidden, *rows);
  }

  void BeginCombine(MicroBatch& batch) {
    auto begun = exchange_.BeginCombine(RowsOf(std::span<const float>(batch.y)), batch.handle,
                                        OutputOf(std::span<tensor::BF16>(batch.states)));
    ASSERT_TRUE(begun.ok()) << begun.status();
    batch.combine.emplace(*std::move(begun));
  }

  void EndCombine(MicroBatch& batch) {
    if (!batch.combine.has_value()) return;
    const Status ended = batch.combine->Finish();
    batch.combine.reset();
    ASSERT_TRUE(ended.ok()) << ended;
  }

  LocalJob& job_;
  const int rank_;
  ExpertExchange& exchange_;
  const double compute_s_;
  std::array<MicroBatch, 2> batches_;
};

struct Played {
  double seconds = 0;                         // virtual, until the last rank has ended
  std::vector<std::vector<uint16_t>> states;  // by rank
};

Played Play(bool overlaps, double compute_s) {
  const Topology topology = Topology::Flat(kRanks, {.latency_s = 1e-6, .bytes_per_s = 1e8});
  const ExpertMap map = ExpertMap::Even(kRanks * kExpertsPerRank, kRanks);
  Played played{.states = std::vector<std::vector<uint16_t>>(kRanks)};
  std::vector<double> ends(kRanks);
  LocalJob job(kRanks, {.topology = &topology});
  RunRanks(job, [&](Transport& transport) {
    const int rank = transport.rank();
    const auto exchange = ExpertExchange::Create(
        transport, topology, map, kHidden, {.low_latency_tokens = kTokens, .low_latency_slots = kRanks});
    ASSERT_TRUE(exchange.ok()) << exchange.status();
    TwoMicroBatches batches(job, rank, **exchange, compute_s);
    if (overlaps) {
      batches.RunOverlapped();
    } else {
      batches.RunInTurn();
    }
    ends[rank] = transport.Now();
    played.states[rank] = batches.states();
  });
  played.seconds = *std::max_element(ends.begin(), ends.end());
  return played;
}

TEST(MicroBatchTest, ComputationOfOneHidesMessagesOfTheOther) {
  const double exchange_s = Play(/*overlaps=*/false, 0).seconds / kSteps;  // a dispatch and a combine
  struct Case {
    double compute, least_gain;  // relative to exchange_s, and to one after the other
  };
  for (const Case& at : {Case{0.5, 1.3}, Case{1, 1.6}, Case{1.25, 1.5}}) {
    const double compute_s = at.compute * exchange_s;
    const Played in_turn = Play(/*overlaps=*/false, compute_s), overlapped = Play(true, compute_s);
    const double gain = in_turn.seconds / overlapped.seconds;
    const double longer = std::max(compute_s, exchange_s), shorter = std::min(compute_s, exchange_s);
    std::printf(
        "computation %.3f ms, exchange %.3f ms: one after the other %.3f ms, overlapped %.3f ms (%.2fx), "
        "%d times the longer %.3f ms\n",
        compute_s * 1e3, exchange_s * 1e3, in_turn.seconds * 1e3, overlapped.seconds * 1e3, gain, kSteps,
        kSteps * longer * 1e3);
    EXPECT_NEAR(in_turn.seconds / (kSteps * (compute_s + exchange_s)), 1, 0.01);
    EXPECT_GE(gain, at.least_gain);
    EXPECT_GE(overlapped.seconds, 0.99 * kSteps * longer);
    // The first dispatch and the last combine, or a computation before the latter, overlap with nothing. Each
    // dispatch waits for two polls, 2/64 of a computation.
    EXPECT_LE(overlapped.seconds, 1.05 * (kSteps * longer + shorter));
    EXPECT_EQ(overlapped.states, in_turn.states);
  }
}

}  // namespace
}  // namespace moesaic::comm
