#include "comm/exchange/exchange.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <tuple>

#include "comm/exchange/exchange_test_support.h"

namespace moesaic::comm {
namespace {

// Shapes with every number of ranks from 1 to 9.
constexpr const char* kShapes[] = {"1",       "2",
                                   "1+1",     "3",
                                   "1+2",     "4",
                                   "1+3",     "2+2",
                                   "5",       "2+2+1",
                                   "6",       "(2+1)+(1+2)",
                                   "7",       "3+4",
                                   "(1+1)+5", "(2+2)+(1+3)",
                                   "8",       "4+4",
                                   "9",       "(1+3)+(2+2)+1",
                                   "3+3+3",   "((1+2)+1)+(2+(1+2))"};

void Check(const Status& status) { ASSERT_TRUE(status.ok()) << status; }

// Errors of a sum of `terms` terms: bf16 rows are rounded once per hop, at most four times, and once as y.
double Tolerance(const ExchangeOptions& options, int terms) {
  return options.combine_payload == Payload::kBf16 ? 5 * std::ldexp(1, -8) : (terms + 6) * std::ldexp(1, -23);
}

// Rows must be in the order of the contract, with the values of their origin.
void CheckDispatched(const Dispatched& got, const std::vector<RankInput>& inputs, const ExpertMap& map,
                     int rank, const RandomInput& shape) {
  ASSERT_EQ(got.expert_begin().size(), static_cast<size_t>(map.local_experts(rank)) + 1);
  const int64_t bytes = shape.hidden * ElementBytes(got.payload());
  const int64_t scales = ScalesPerRow(got.payload(), shape.hidden);
  for (int local = 0; local < map.local_experts(rank); ++local) {
    const int expert = map.physical(map.PhysicalIndex(rank, local)).expert;
    std::tuple<int, int, int> last = {-1, -1, -1};
    for (int64_t row = got.expert_begin()[local]; row < got.expert_begin()[local + 1]; ++row) {
      const RowOrigin& from = got.origins()[row];
      const std::tuple<int, int, int> at = {from.source, from.token, from.slot};
      EXPECT_LT(last, at);
      last = at;
      const RankInput& input = inputs[from.source];
      const int64_t pair = int64_t{from.token} * shape.k + from.slot;
      EXPECT_EQ(input.ids[pair], expert);
      EXPECT_EQ(input.weights[pair], from.weight);
      std::vector<std::byte> wire(static_cast<size_t>(WireRowBytes(got.payload(), shape.hidden)));
      const auto x = std::span(input.x).subspan(int64_t{from.token} * shape.hidden, shape.hidden);
      EncodeRow(Payload::kF32, std::as_bytes(x).data(), shape.hidden, got.payload(), wire.data());
      EXPECT_EQ(std::memcmp(got.data().data() + row * bytes, wire.data(), bytes), 0);
      if (scales > 0) {
        EXPECT_EQ(std::memcmp(got.scales().data() + row * scales, wire.data() + bytes, 4 * scales), 0);
      }
    }
  }
}

void CheckSums(const std::vector<float>& out, const Expected& expected, double tolerance) {
  ASSERT_EQ(out.size(), expected.sum.size());
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(out[i], expected.sum[i], tolerance * expected.magnitude[i] + 1e-30) << "element " << i;
  }
}

std::vector<RankInput> Inputs(const RandomInput& shape, uint32_t seed, int ranks) {
  std::vector<RankInput> inputs;
  for (int rank = 0; rank < ranks; ++rank) inputs.push_back(MakeInput(shape, seed, rank));
  return inputs;
}

enum class Mode { kThroughput, kLowLatency };

// Dispatches, runs the experts and combines on all ranks; twice by a reused handle when `reuse`. Returns the
// outputs.
std::vector<std::vector<float>> RunAll(const Topology& topology, const ExpertMap& map,
                                       const RandomInput& shape, const std::vector<RankInput>& inputs,
                                       const ExchangeOptions& options, Mode mode, bool reuse = false) {
  std::vector<std::vector<float>> outputs(topology.ranks());
  std::atomic<int64_t> rows = 0;
  RunRanks(topology.ranks(), [&](Transport& transport) {
    const int rank = transport.rank();
    const RankInput& input = inputs[rank];
    auto exchange = ExpertExchange::Create(transport, topology, map, shape.hidden, options);
    Check(exchange.status());
    const TopK topk = input.topk(shape.k);
    const PayloadRows x = RowsOf(std::span(input.x));
    StatusOr<Dispatched> got = Cancelled("not run");
    if (mode == Mode::kLowLatency) {
      auto pending = (*exchange)->BeginDispatch(x, topk);
      Check(pending.status());
      got = pending->Finish();
    } else {
      got = (*exchange)->Dispatch(x, topk);
    }
    Check(got.status());
    CheckDispatched(*got, inputs, map, rank, shape);
    EXPECT_TRUE(got->dropped().empty());
    rows += got->rows();
    for (int round = 0; round < (reuse ? 2 : 1); ++round) {
      if (round > 0) {
        got = (*exchange)->Dispatch(x, got->handle());
        Check(got.status());
        CheckDispatched(*got, inputs, map, rank, shape);
      }
      const std::vector<float> y = RunExperts(map, rank, shape.hidden, *got);
      outputs[rank].assign(input.x.size(), -1);
      if (options.combine_payload == Payload::kBf16) {
        Check((*exchange)->Combine(RowsOf(std::span<const tensor::BF16>(ToBF16(y))), got->handle(),
                                   OutputOf(outputs[rank])));
      } else {
        Check((*exchange)->Combine(RowsOf(std::span(y)), got->handle(), OutputOf(outputs[rank])));
      }
      CheckSums(outputs[rank], BruteForce(input, shape, options.dispatch_payload),
                Tolerance(options, shape.k));
    }
  });
  int64_t pairs = 0;
  for (const RankInput& input : inputs)
    pairs += std::count_if(input.ids.begin(), input.ids.end(), [](int32_t id) { return id >= 0; });
  EXPECT_EQ(rows, pairs);
  return outputs;
}

class ExchangeShapeTest : public testing::TestWithParam<const char*> {};

TEST_P(ExchangeShapeTest, MatchesBruteForceForAllPayloadsModesAndReductions) {
  const Topology topology = ShapeReader::Read(GetParam());
  uint32_t seed = 1;
  for (const Payload payload : {Payload::kF32, Payload::kBf16, Payload::kInt8, Payload::kF8E4M3}) {
    for (const Reduction reduction : {Reduction::kPartialSums, Reduction::kBySlot}) {
      for (const Mode mode : {Mode::kThroughput, Mode::kLowLatency}) {
        for (const Payload back : {Payload::kF32, Payload::kBf16}) {
          SCOPED_TRACE(testing::Message()
                       << PayloadName(payload) << " " << static_cast<int>(reduction) << " mode "
                       << static_cast<int>(mode) << " back " << PayloadName(back));
          RandomInput shape;
          shape.hidden = seed % 2 == 0 ? 130 : 33;
          ExchangeOptions options = {
              .dispatch_payload = payload, .combine_payload = back, .reduction = reduction};
          options.segment_tokens = 1 + static_cast<int>(seed % 5);
          const ExpertMap map = seed % 3 == 0 ? ExpertMap::Even(shape.experts, topology.ranks())
                                              : UnevenMap(shape.experts, topology.ranks(), seed);
          RunAll(topology, map, shape, Inputs(shape, seed, topology.ranks()), options, mode, seed % 2 == 0);
          ++seed;
        }
      }
    }
  }
}

TEST_P(ExchangeShapeTest, DirectForwardingAndNamedLevelsGiveTheSameRows) {
  const Topology topology = ShapeReader::Read(GetParam());
  RandomInput shape;
  const ExpertMap map = UnevenMap(shape.experts, topology.ranks(), 3);
  const auto inputs = Inputs(shape, 77, topology.ranks());
  RunAll(topology, map, shape, inputs, {.forwarding = Forwarding::kDirect}, Mode::kThroughput, true);
  if (topology.depth() > 1)
    RunAll(topology, map, shape, inputs, {.forward_levels = {"L1"}}, Mode::kThroughput, true);
}

TEST_P(ExchangeShapeTest, ReductionBySlotIsBitwiseEqualToAFlatGroup) {
  const Topology topology = ShapeReader::Read(GetParam());
  const Topology flat = Topology::Flat(topology.ranks(), {.latency_s = 1e-6, .bytes_per_s = 1e9});
  RandomInput shape{.duplicates = true};
  const ExpertMap map = UnevenMap(shape.experts, topology.ranks(), 5);
  const auto inputs = Inputs(shape, 11, topology.ranks());
  for (const Payload back : {Payload::kF32, Payload::kBf16}) {
    ExchangeOptions options = {
        .combine_payload = back, .replica_choice = ReplicaChoice::kSpread, .reduction = Reduction::kBySlot};
    options.segment_tokens = 2;
    const auto deep = RunAll(topology, map, shape, inputs, options, Mode::kThroughput);
    EXPECT_EQ(deep, RunAll(flat, map, shape, inputs, options, Mode::kThroughput));
    EXPECT_EQ(deep, RunAll(flat, map, shape, inputs, options, Mode::kLowLatency));
  }
}

TEST_P(ExchangeShapeTest, PartialSumsAreBitwiseReproducibleForOneLayout) {
  const Topology topology = ShapeReader::Read(GetParam());
  RandomInput shape{.duplicates = true};
  const ExpertMap map = UnevenMap(shape.experts, topology.ranks(), 6);
  const auto inputs = Inputs(shape, 12, topology.ranks());
  const auto first = RunAll(topology, map, shape, inputs, {}, Mode::kThroughput);
  for (int repeat = 0; repeat < 3; ++repeat) {
    EXPECT_EQ(first, RunAll(topology, map, shape, inputs, {}, Mode::kThroughput));
  }
}

TEST_P(ExchangeShapeTest, NoTokensAnywhereIsAValidBatch) {
  const Topology topology = ShapeReader::Read(GetParam());
  RandomInput shape{.empty_ranks = 2};
  const ExpertMap map = ExpertMap::Even(shape.experts, topology.ranks());
  const auto inputs = Inputs(shape, 1, topology.ranks());
  RunAll(topology, map, shape, inputs, {}, Mode::kThroughput, true);
  RunAll(topology, map, shape, inputs, {}, Mode::kLowLatency, true);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExchangeShapeTest, testing::ValuesIn(kShapes),
                         [](const auto& info) { return "Shape" + std::to_string(info.index); });

TEST(ExchangeTest, RanksThatInterleaveGroupsAreServed) {
  // Rank r is in group r % 2.
  TopologyBuilder builder;
  const int root = builder.AddGroup(-1, "L0", {.latency_s = 1e-6, .bytes_per_s = 1e9}, 0);
  for (int i = 0; i < 2; ++i) {
    const int group = builder.AddGroup(root, "L1", {.latency_s = 1e-6, .bytes_per_s = 1e9}, 0);
    for (int j = 0; j < 3; ++j) builder.AddDevice(group, 0, 0);
  }
  const Topology topology = builder.Finish("interleaved", "test", {DeviceType{}}, {0, 3, 1, 4, 2, 5});
  RandomInput shape;
  RunAll(topology, UnevenMap(shape.experts, 6, 2), shape, Inputs(shape, 4, 6), {}, Mode::kThroughput, true);
}

TEST(ExchangeTest, QuantizedRowsOfTheCallerTravelUnchanged) {
  const Topology topology = ShapeReader::Read("1+2");
  const RandomInput shape{.hidden = 200, .empty_ranks = 0};
  const ExpertMap map = ExpertMap::Even(shape.experts, 3);
  const auto inputs = Inputs(shape, 21, 3);
  RunRanks(3, [&](Transport& transport) {
    const RankInput& input = inputs[transport.rank()];
    const int64_t scales = ScalesPerRow(Payload::kInt8, shape.hidden);
    std::vector<std::byte> data(input.tokens * shape.hidden);
    std::vector<float> scale(input.tokens * scales);
    std::vector<std::byte> wire(WireRowBytes(Payload::kInt8, shape.hidden));
    for (int64_t token = 0; token < input.tokens; ++token) {
      EncodeRow(Payload::kF32, std::as_bytes(std::span(input.x)).data() + 4 * token * shape.hidden,
                shape.hidden, Payload::kInt8, wire.data());
      std::memcpy(data.data() + token * shape.hidden, wire.data(), shape.hidden);
      std::memcpy(scale.data() + token * scales, wire.data() + shape.hidden, 4 * scales);
    }
    auto exchange =
        *ExpertExchange::Create(transport, topology, map, shape.hidden, {.dispatch_payload = Payload::kInt8});
    const auto got = exchange->Dispatch({Payload::kInt8, data, scale}, input.topk(shape.k));
    Check(got.status());
    CheckDispatched(*got, inputs, map, transport.rank(), shape);
  });
}

TEST(ExchangeTest, RowsAreAddedUnscaledWithoutWeights) {
  const Topology topology = ShapeReader::Read("2+2");
  RandomInput shape{.empty_ranks = 0};
  const ExpertMap map = ExpertMap::Even(shape.experts, 4);
  auto inputs = Inputs(shape, 31, 4);
  for (const Reduction reduction : {Reduction::kPartialSums, Reduction::kBySlot}) {
    RunRanks(4, [&](Transport& transport) {
      RankInput input = inputs[transport.rank()];
      const ExchangeOptions options = {.dispatch_payload = Payload::kF32,
                                       .combine_payload = Payload::kF32,
                                       .reduction = reduction,
                                       .apply_weights = false};
      auto exchange = *ExpertExchange::Create(transport, topology, map, shape.hidden, options);
      const auto got = exchange->Dispatch(RowsOf(std::span(input.x)), input.topk(shape.k));
      Check(got.status());
      const auto y = RunExperts(map, transport.rank(), shape.hidden, *got);
      std::vector<float> out(input.x.size());
      Check(exchange->Combine(RowsOf(std::span(y)), got->handle(), OutputOf(std::span(out))));
      std::fill(input.weights.begin(), input.weights.end(), 1.0F);
      CheckSums(out, BruteForce(input, shape, Payload::kF32), Tolerance(options, shape.k));
    });
  }
}

TEST(ExchangeTest, TheCallerMayChooseReplicas) {
  const Topology topology = ShapeReader::Read("2+2");
  const ExpertMap map = *ExpertMap::Create(2, {{0}, {1}, {0, 1}, {}});
  RunRanks(4, [&](Transport& transport) {
    auto exchange = *ExpertExchange::Create(transport, topology, map, 4, {});
    const std::vector<float> x = {1, 2, 3, 4};
    const std::vector<int32_t> ids = {0, 1}, replicas = {1, 1};
    const auto got = exchange->Dispatch(RowsOf(std::span(x)), {1, 2, ids, {}, replicas});
    Check(got.status());
    EXPECT_EQ(got->rows(), transport.rank() == 2 ? 8 : 0);
  });
}

TEST(ExchangeTest, LayoutCountsTokensPerRankGroupAndExpert) {
  const Topology topology = ShapeReader::Read("(1+1)+2");
  const ExpertMap map = ExpertMap::Even(8, 4);
  RunRanks(4, [&](Transport& transport) {
    auto exchange = *ExpertExchange::Create(transport, topology, map, 4, {});
    // Experts 0 and 1 are on rank 0; 4 and 7 on ranks 2 and 3, the second group.
    const std::vector<int32_t> ids = {0, 1, 4, 4, 7, -1};
    const auto layout = exchange->Layout({2, 3, ids, {}, {}});
    Check(layout.status());
    EXPECT_EQ(layout->tokens_per_rank, (std::vector<int64_t>{1, 0, 2, 1}));
    EXPECT_EQ(layout->tokens_per_group, (std::vector<int64_t>{1, 2}));
    EXPECT_EQ(layout->tokens_per_expert, (std::vector<int64_t>{1, 1, 0, 0, 2, 0, 0, 1}));
  });
}

TEST(ExchangeTest, MalformedInputNamesTheTokenAndTheSlot) {
  RunRanks(1, [&](Transport& transport) {
    const Topology topology = ShapeReader::Read("1");
    auto exchange =
        *ExpertExchange::Create(transport, topology, ExpertMap::Even(4, 1), 2, {.low_latency_tokens = 2});
    const std::vector<float> x(6);
    std::vector<int32_t> ids = {0, 1, 2, 4, -1, 3};
    const auto dispatch = [&](std::span<const float> rows, const TopK& topk) {
      const Status status = exchange->Dispatch(RowsOf(rows), topk).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      return Message(status);
    };
    EXPECT_EQ(dispatch(x, {3, 2, ids, {}, {}}),
              "exchange: token 1, slot 1: expert id must be -1 or in [0, 4), found 4");
    ids[3] = -2;
    EXPECT_EQ(dispatch(x, {3, 2, ids, {}, {}}),
              "exchange: token 1, slot 1: expert id must be -1 or in [0, 4), found -2");
    ids[3] = 0;
    std::vector<float> weights(6);
    weights[5] = NAN;
    EXPECT_EQ(dispatch(x, {3, 2, ids, weights, {}}), "exchange: token 2, slot 1: weight is NaN");
    EXPECT_EQ(dispatch(std::span(x).first(5), {3, 2, ids, {}, {}}),
              "exchange: x of 3 rows x 2 elements (f32) need 24 bytes, found 20");
    EXPECT_EQ(dispatch(x, {3, 3, ids, {}, {}}), "exchange: 3 tokens x top-3 need 9 ids, found 6");
    EXPECT_EQ(exchange->BeginDispatch(RowsOf(std::span(x)), {3, 2, ids, {}, {}}).status().message(),
              "exchange: low-latency buffers have 2 tokens per rank, found 3");
    EXPECT_EQ(exchange->Combine(RowsOf(std::span(x)), {}, {}).code(), StatusCode::kInvalidArgument);
    // The exchange is still usable.
    const auto got = exchange->Dispatch(RowsOf(std::span(x)), {3, 2, ids, {}, {}});
    Check(got.status());
    EXPECT_EQ(got->rows(), 5);
    // y has 5 rows, and the output has 3: they share one.
    std::vector<float> both(14);
    const auto combine = [&](size_t output_row) {
      return exchange->Combine(RowsOf(std::span<const float>(both).first(10)), got->handle(),
                               OutputOf(std::span(both).subspan(2 * output_row, 6)));
    };
    EXPECT_EQ(
        Message(combine(4)),
        "exchange: y and the output of a combine must not overlap, but share bytes from offset 0 of the "
        "output; pass another output");
    EXPECT_EQ(combine(0).code(), StatusCode::kInvalidArgument);
    std::vector<float> out(6);
    Check(exchange->Combine(RowsOf(std::span<const float>(both).first(10)), got->handle(),
                            OutputOf(std::span(out))));
  });
}

TEST(ExchangeTest, OptionsOutOfRangeAreRefused) {
  RunRanks(2, [&](Transport& transport) {
    const Topology topology = ShapeReader::Read("2");
    const auto create = [&](ExchangeOptions options, int hidden = 4, int ranks = 2) {
      return ExpertExchange::Create(transport, topology, ExpertMap::Even(4, ranks), hidden,
                                    std::move(options))
          .status()
          .code();
    };
    EXPECT_EQ(create({.combine_payload = Payload::kInt8}), StatusCode::kInvalidArgument);
    EXPECT_EQ(create({.segment_tokens = 0}), StatusCode::kInvalidArgument);
    EXPECT_EQ(create({.first_tag = 5}), StatusCode::kInvalidArgument);
    EXPECT_EQ(create({.time_limit_s = 0}), StatusCode::kInvalidArgument);
    EXPECT_EQ(create({.time_limit_s = NAN}), StatusCode::kInvalidArgument);
    EXPECT_EQ(create({.forward_levels = {"rack"}}), StatusCode::kNotFound);
    EXPECT_EQ(create({.layout_level = "rack"}), StatusCode::kNotFound);
    EXPECT_EQ(create({}, 0), StatusCode::kInvalidArgument);
    EXPECT_EQ(create({}, 4, 3), StatusCode::kInvalidArgument);
    EXPECT_EQ(create({}), StatusCode::kOk);
  });
}

TEST(ExchangeTest, RanksWithDifferentHiddenSizesGetAnErrorThatNamesThePeer) {
  std::atomic<int> named = 0;
  RunRanks(2, [&](Transport& transport) {
    const Topology topology = ShapeReader::Read("2");
    const int hidden = 4 + transport.rank();
    auto exchange =
        *ExpertExchange::Create(transport, topology, ExpertMap::Even(4, 2), hidden, {.time_limit_s = 2});
    const std::vector<float> x(hidden);
    const std::vector<int32_t> ids = {3 - 3 * transport.rank()};
    const auto got = exchange->Dispatch(RowsOf(std::span(x)), {1, 1, ids, {}, {}});
    EXPECT_FALSE(got.ok());
    named += Message(got.status()).find("differs on rank") != std::string::npos;
  });
  EXPECT_EQ(named, 2);
}

}  // namespace
}  // namespace moesaic::comm
