// Dead and slow ranks, and operations in flight.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <random>
#include <thread>

#include "comm/exchange/exchange.h"
#include "comm/exchange/exchange_test_support.h"
#include "comm/exchange/routing_messages.h"

namespace moesaic::comm {
namespace {

// One step of a model: dispatch, experts, combine.
Status Step(ExpertExchange& exchange, int rank, const RankInput& input, const RandomInput& shape,
            bool low_latency, std::vector<float>* out, std::vector<DroppedPair>* dropped) {
  StatusOr<Dispatched> got = Cancelled("not run");
  if (low_latency) {
    ASSIGN_OR_RETURN(PendingDispatch pending,
                     exchange.BeginDispatch(RowsOf(std::span(input.x)), input.topk(shape.k)));
    got = pending.Finish();
  } else {
    got = exchange.Dispatch(RowsOf(std::span(input.x)), input.topk(shape.k));
  }
  RETURN_IF_ERROR(got.status());
  dropped->assign(got->dropped().begin(), got->dropped().end());
  const std::vector<float> y = RunExperts(exchange.map(), rank, shape.hidden, *got);
  out->assign(input.x.size(), 0);
  return exchange.Combine(RowsOf(std::span(y)), got->handle(), OutputOf(std::span(*out)));
}

const ExchangeOptions kExact = {.dispatch_payload = Payload::kF32,
                                .combine_payload = Payload::kF32,
                                .reduction = Reduction::kBySlot,
                                .time_limit_s = 5};

// A rank dies at a random message. The others report it, mask it and continue: rows of experts that are still
// alive are bitwise those of a run without faults.
TEST(ExchangeFaultTest, SurvivorsNameTheDeadRankAndContinueWithoutIt) {
  const char* const shapes[] = {"3", "1+3", "2+2+1", "(2+2)+(1+3)"};
  int failures = 0;
  for (uint32_t seed = 0; seed < 24; ++seed) {
    const Topology topology = ShapeReader::Read(shapes[seed % 4]);
    const int ranks = topology.ranks();
    std::mt19937 random(seed);
    const int victim = static_cast<int>(random() % ranks);
    const RandomInput shape{.hidden = 16, .empty_ranks = 0};
    const ExpertMap map =
        seed % 2 == 0 ? UnevenMap(shape.experts, ranks, seed) : ExpertMap::Even(shape.experts, ranks);
    std::vector<bool> lost(shape.experts, true);
    for (int physical = 0; physical < map.physical_experts(); ++physical) {
      if (map.physical(physical).rank != victim) lost[map.physical(physical).expert] = false;
    }
    LocalJob job(ranks);
    job.KillAtSend(victim, random() % 60);
    std::atomic<int> named = 0;
    RunRanks(job, [&](Transport& transport) {
      const int rank = transport.rank();
      const RankInput input = MakeInput(shape, seed, rank);
      auto exchange = *ExpertExchange::Create(transport, topology, map, shape.hidden, kExact);
      std::vector<float> out;
      std::vector<DroppedPair> dropped;
      Status status;
      for (int step = 0; step < 100 && status.ok(); ++step) {
        status = Step(*exchange, rank, input, shape, step % 3 == 2, &out, &dropped);
      }
      if (rank == victim) return;
      EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
      named += Message(status).find("rank " + std::to_string(victim)) != std::string::npos;
      const int dead[] = {victim};
      ASSERT_TRUE(exchange->SetDead(dead).ok());
      for (const bool low_latency : {false, true}) {
        status = Step(*exchange, rank, input, shape, low_latency, &out, &dropped);
        ASSERT_TRUE(status.ok()) << status;
        const Expected expected = BruteForce(input, shape, Payload::kF32, lost);
        for (size_t i = 0; i < out.size(); ++i) {
          ASSERT_NEAR(out[i], expected.sum[i], 9 * std::ldexp(expected.magnitude[i], -23) + 1e-30);
        }
        std::vector<DroppedPair> missing;
        for (int32_t at = 0; at < static_cast<int32_t>(input.ids.size()); ++at) {
          if (input.ids[at] >= 0 && lost[input.ids[at]])
            missing.push_back({at / shape.k, at % shape.k, input.ids[at]});
        }
        EXPECT_EQ(dropped, missing);
      }
    });
    EXPECT_EQ(named, ranks - 1) << "seed " << seed;
    ++failures;
  }
  EXPECT_EQ(failures, 24);
}

TEST(ExchangeFaultTest, TokensWithoutADeadExpertGiveTheSameBits) {
  const Topology topology = ShapeReader::Read("2+3");
  const RandomInput shape{.hidden = 32, .empty_ranks = 0};
  const ExpertMap map = ExpertMap::Even(shape.experts, 5);
  const int dead[] = {3};
  RunRanks(5, [&](Transport& transport) {
    const int rank = transport.rank();
    const RankInput input = MakeInput(shape, 9, rank);
    auto exchange = *ExpertExchange::Create(transport, topology, map, shape.hidden, kExact);
    std::vector<float> before, after;
    std::vector<DroppedPair> dropped;
    ASSERT_TRUE(Step(*exchange, rank, input, shape, false, &before, &dropped).ok());
    EXPECT_TRUE(dropped.empty());
    if (rank == 3) return;
    ASSERT_TRUE(exchange->SetDead(dead).ok());
    ASSERT_TRUE(Step(*exchange, rank, input, shape, false, &after, &dropped).ok());
    std::vector<bool> touched(input.tokens, false);
    for (const DroppedPair& pair : dropped) touched[pair.token] = true;
    for (int64_t token = 0; token < input.tokens; ++token) {
      const auto at = static_cast<std::ptrdiff_t>(token * shape.hidden);
      if (!touched[token]) {
        EXPECT_TRUE(std::equal(before.begin() + at, before.begin() + at + shape.hidden, after.begin() + at));
      }
    }
  });
}

TEST(ExchangeFaultTest, ARankThatNeverCallsIsNamedAfterTheTimeLimit) {
  const Topology topology = ShapeReader::Read("3");
  for (const bool low_latency : {false, true}) {
    std::atomic<int> waiting = 2, named = 0;
    RunRanks(3, [&](Transport& transport) {
      const int rank = transport.rank();
      const RandomInput shape{.hidden = 8, .empty_ranks = 0};
      const RankInput input = MakeInput(shape, 3, rank);
      ExchangeOptions options = kExact;
      options.time_limit_s = 1;
      auto exchange = *ExpertExchange::Create(transport, topology, ExpertMap::Even(shape.experts, 3),
                                              shape.hidden, options);
      std::vector<float> out;
      std::vector<DroppedPair> dropped;
      if (rank != 2) {
        const Status status = Step(*exchange, rank, input, shape, low_latency, &out, &dropped);
        EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
        named += Message(status).find("for rank 2") != std::string::npos;
        --waiting;
      }
      while (waiting > 0) std::this_thread::yield();
      // Messages that were sent before are not mistaken for new ones.
      ASSERT_TRUE(exchange->SetDead({}).ok());
      const Status status = Step(*exchange, rank, input, shape, !low_latency, &out, &dropped);
      EXPECT_TRUE(status.ok()) << status;
    });
    EXPECT_EQ(named, 2);
  }
}

TEST(ExchangeFaultTest, PollsEndAtTheTimeLimitAndAfterTheDeathOfARank) {
  for (const bool dies : {false, true}) {
    LocalJob job(3);
    std::atomic<int> waiting = 2, begun = 0;
    RunRanks(job, [&](Transport& transport) {
      const int rank = transport.rank();
      ExchangeOptions options = kExact;
      options.time_limit_s = dies ? 60 : 0.3;
      auto exchange =
          *ExpertExchange::Create(transport, ShapeReader::Read("3"), ExpertMap::Even(6, 3), 4, options);
      if (rank == 2) {
        if (dies) job.Kill(2);
        while (waiting > 0) std::this_thread::yield();
        return;
      }
      auto pending = exchange->BeginDispatch({}, {0, 2, {}, {}, {}});
      ++begun;
      while (begun < 2) std::this_thread::yield();
      if (pending.ok()) {
        const auto start = std::chrono::steady_clock::now();
        while (!pending->Poll() && std::chrono::steady_clock::now() - start < std::chrono::seconds(50)) {
          transport.Idle();
        }
        EXPECT_TRUE(pending->Poll());
      }
      const Status status = pending.ok() ? pending->Finish().status() : pending.status();
      EXPECT_EQ(status.code(), dies ? StatusCode::kUnavailable : StatusCode::kDeadlineExceeded) << status;
      EXPECT_NE(Message(status).find("rank 2"), std::string::npos) << status;
      --waiting;
    });
  }
}

TEST(ExchangeFaultTest, RanksInDifferentModesGetAnErrorThatNamesThePeer) {
  const Topology topology = ShapeReader::Read("2");
  RunRanks(2, [&](Transport& transport) {
    const int rank = transport.rank();
    const RandomInput shape{.hidden = 8, .empty_ranks = 0};
    const RankInput input = MakeInput(shape, 3, rank);
    auto exchange =
        *ExpertExchange::Create(transport, topology, ExpertMap::Even(shape.experts, 2), shape.hidden, kExact);
    std::vector<float> out;
    std::vector<DroppedPair> dropped;
    const Status status = Step(*exchange, rank, input, shape, rank == 0, &out, &dropped);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(Message(status).find(rank == 0 ? "rank 1 uses another mode" : "rank 0 uses another mode"),
              std::string::npos);
  });
}

// Peers announce the size of their routing. No memory is allocated for sizes that no routing has.
TEST(ExchangeFaultTest, ImpossibleSizesOfRoutingAreRefusedAndNameThePeer) {
  constexpr int32_t kMaxRows = std::numeric_limits<int32_t>::max();
  struct Announced {
    int32_t rows;
    int64_t bytes;
  };
  const ExchangeOptions options = kExact;
  for (const Announced announced : {Announced{kMaxRows, kMaxRows * kMaxRowRoutingBytes}, Announced{1, 8},
                                    Announced{1, kMaxRowRoutingBytes + 1}, Announced{-1, 16}}) {
    RunRanks(2, [&](Transport& transport) {
      const int peer = 1 - transport.rank();
      std::vector<std::byte> got(sizeof(RoutingHeader));
      if (transport.rank() == 1) {
        const RoutingHeader header = {.hidden = 4,
                                      .segment_tokens = static_cast<uint32_t>(options.segment_tokens),
                                      .payload = static_cast<uint16_t>(options.dispatch_payload),
                                      .rows = announced.rows,
                                      .bytes = announced.bytes};
        const TransferId receive = *transport.Receive(peer, options.first_tag, got);
        const TransferId send =
            *transport.Send(peer, options.first_tag, std::as_bytes(std::span(&header, 1)));
        EXPECT_TRUE(Wait(transport, send, 20).ok() && Wait(transport, receive, 20).ok());
        return;
      }
      auto exchange =
          *ExpertExchange::Create(transport, ShapeReader::Read("2"), ExpertMap::Even(4, 2), 4, options);
      const Status status = exchange->Dispatch({}, {0, 2, {}, {}, {}}).status();
      EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status;
      EXPECT_NE(Message(status).find("rank 1"), std::string::npos) << status;
    });
  }
}

TEST(ExchangeFaultTest, HandlesOfEarlierMasksAreRefused) {
  const Topology topology = ShapeReader::Read("2");
  RunRanks(2, [&](Transport& transport) {
    auto exchange = *ExpertExchange::Create(transport, topology, ExpertMap::Even(4, 2), 4, kExact);
    const std::vector<float> x = {1, 2, 3, 4};
    const std::vector<int32_t> ids = {0, 3};
    const auto got = exchange->Dispatch(RowsOf(std::span(x)), {1, 2, ids, {}, {}});
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_TRUE(exchange->SetDead({}).ok());
    EXPECT_EQ(exchange->Dispatch(RowsOf(std::span(x)), got->handle()).status().code(),
              StatusCode::kFailedPrecondition);
    std::vector<float> out(4);
    EXPECT_EQ(exchange->Combine(RowsOf(std::span(x)), got->handle(), OutputOf(std::span(out))).code(),
              StatusCode::kFailedPrecondition);
    const int own[] = {transport.rank()}, outside[] = {2};
    EXPECT_EQ(exchange->SetDead(own).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(exchange->SetDead(outside).code(), StatusCode::kInvalidArgument);
  });
}

TEST(LowLatencyTest, DispatchReturnsBeforeAnyPeerHasCalled) {
  const Topology topology = ShapeReader::Read("2");
  std::atomic<bool> begun = false;
  RunRanks(2, [&](Transport& transport) {
    const int rank = transport.rank();
    auto exchange = *ExpertExchange::Create(transport, topology, ExpertMap::Even(4, 2), 4, kExact);
    const std::vector<float> x = {1, 2, 3, 4};
    const std::vector<int32_t> ids = {0, 3};
    while (rank == 1 && !begun) std::this_thread::yield();
    auto pending = exchange->BeginDispatch(RowsOf(std::span(x)), {1, 2, ids, {}, {}});
    ASSERT_TRUE(pending.ok()) << pending.status();
    EXPECT_TRUE(rank == 1 || !pending->Poll());
    begun = true;
    while (!pending->Poll()) std::this_thread::yield();
    const auto got = pending->Finish();
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->rows(), 2);
  });
}

TEST(LowLatencyTest, TwoMicroBatchesOverlapAndAThirdIsRefused) {
  for (const char* name : {"1", "1+3", "(2+2)+(1+3)"}) {
    const Topology topology = ShapeReader::Read(name);
    RunRanks(topology.ranks(), [&](Transport& transport) {
      const int rank = transport.rank();
      const RandomInput shape{.hidden = 24};
      const ExpertMap map = UnevenMap(shape.experts, topology.ranks(), 4);
      auto exchange = *ExpertExchange::Create(transport, topology, map, shape.hidden, kExact);
      for (uint32_t round = 0; round < 20; ++round) {
        const RankInput a = MakeInput(shape, 2 * round, rank), b = MakeInput(shape, 2 * round + 1, rank);
        auto first = exchange->BeginDispatch(RowsOf(std::span(a.x)), a.topk(shape.k));
        auto second = exchange->BeginDispatch(RowsOf(std::span(b.x)), b.topk(shape.k));
        ASSERT_TRUE(first.ok() && second.ok());
        EXPECT_EQ(exchange->BeginDispatch(RowsOf(std::span(a.x)), a.topk(shape.k)).status().code(),
                  StatusCode::kFailedPrecondition);
        // The second micro-batch's rows travel while the first one's experts run, and so do the sums.
        const auto rows_a = first->Finish();
        ASSERT_TRUE(rows_a.ok()) << rows_a.status();
        const auto y_a = RunExperts(map, rank, shape.hidden, *rows_a);
        std::vector<float> out_a(a.x.size()), out_b(b.x.size());
        auto sums_a =
            exchange->BeginCombine(RowsOf(std::span(y_a)), rows_a->handle(), OutputOf(std::span(out_a)));
        const auto rows_b = second->Finish();
        ASSERT_TRUE(rows_b.ok()) << rows_b.status();
        const auto y_b = RunExperts(map, rank, shape.hidden, *rows_b);
        auto sums_b =
            exchange->BeginCombine(RowsOf(std::span(y_b)), rows_b->handle(), OutputOf(std::span(out_b)));
        ASSERT_TRUE(sums_a.ok() && sums_b.ok());
        ASSERT_TRUE(sums_b->Finish().ok());
        ASSERT_TRUE(sums_a->Finish().ok());
        for (const auto& [input, out] : {std::pair(&a, &out_a), std::pair(&b, &out_b)}) {
          const Expected expected = BruteForce(*input, shape, Payload::kF32);
          for (size_t i = 0; i < out->size(); ++i) {
            ASSERT_NEAR((*out)[i], expected.sum[i], 9 * std::ldexp(expected.magnitude[i], -23) + 1e-30);
          }
        }
      }
    });
  }
}

TEST(LowLatencyTest, AnAbandonedDispatchFreesItsBuffers) {
  const Topology topology = ShapeReader::Read("2");
  RunRanks(2, [&](Transport& transport) {
    auto exchange = *ExpertExchange::Create(transport, topology, ExpertMap::Even(4, 2), 4, kExact);
    const std::vector<float> x = {1, 2, 3, 4};
    const std::vector<int32_t> ids = {0, 3};
    for (int round = 0; round < 4; ++round) {
      auto pending = exchange->BeginDispatch(RowsOf(std::span(x)), {1, 2, ids, {}, {}});
      ASSERT_TRUE(pending.ok()) << pending.status();
    }
    ASSERT_TRUE(exchange->SetDead({}).ok());
    const auto got = exchange->Dispatch(RowsOf(std::span(x)), {1, 2, ids, {}, {}});
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->rows(), 2);
  });
}

}  // namespace
}  // namespace moesaic::comm
