// Dispatch and combine against brute force on any transport. Faults are reported through GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/exchange/exchange_test_support.h"

namespace moesaic::comm {

/// Dispatches, runs the experts and combines in both modes and with all payloads, and compares the sums. Rows
/// are forwarded in the second of two groups. All ranks call it together; it uses tags from
/// kDefaultExchangeTags on.
inline void CheckDispatchAndCombine(Transport& transport) {
  const int ranks = transport.size(), rank = transport.rank();
  const Topology topology =
      ShapeReader::Read(ranks == 1 ? std::string("1") : "1+" + std::to_string(ranks - 1));
  const RandomInput shape;
  const ExpertMap map = UnevenMap(shape.experts, ranks, 3);
  ExchangeOptions options = {.combine_payload = Payload::kF32, .segment_tokens = 3};
  const double tolerance = (shape.k + 6) * 0x1p-23;  // of terms in f32
  uint32_t seed = 1;
  for (const bool low_latency : {false, true}) {
    for (const Payload payload : {Payload::kF32, Payload::kBf16, Payload::kInt8, Payload::kF8E4M3}) {
      SCOPED_TRACE(testing::Message() << PayloadName(payload) << ", low latency " << low_latency << ", rank "
                                      << rank << " of " << ranks);
      const RankInput input = MakeInput(shape, seed++, rank);
      options.dispatch_payload = payload;
      options.first_tag += Tag{1} << kExchangeTagBits;
      const auto exchange = ExpertExchange::Create(transport, topology, map, shape.hidden, options);
      ASSERT_TRUE(exchange.ok()) << exchange.status();
      StatusOr<Dispatched> got = Cancelled("not run");
      const PayloadRows x = RowsOf(std::span(input.x));
      if (low_latency) {
        auto pending = (*exchange)->BeginDispatch(x, input.topk(shape.k));
        ASSERT_TRUE(pending.ok()) << pending.status();
        got = pending->Finish();
      } else {
        got = (*exchange)->Dispatch(x, input.topk(shape.k));
      }
      ASSERT_TRUE(got.ok()) << got.status();
      const std::vector<float> y = RunExperts(map, rank, shape.hidden, *got);
      std::vector<float> out(input.x.size(), -1);
      const Status combined =
          (*exchange)->Combine(RowsOf(std::span(y)), got->handle(), OutputOf(std::span(out)));
      ASSERT_TRUE(combined.ok()) << combined;
      const Expected expected = BruteForce(input, shape, payload);
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_NEAR(out[i], expected.sum[i], tolerance * expected.magnitude[i] + 1e-30) << "element " << i;
      }
    }
  }
}

}  // namespace moesaic::comm
