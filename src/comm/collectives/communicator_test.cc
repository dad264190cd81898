#include "comm/collectives/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "base/test_memory.h"
#include "comm/collectives/topology_test_support.h"
#include "comm/transport/local_transport.h"

namespace moesaic::comm {
namespace {

using tensor::DType;
using testing::AllOf;
using testing::HasSubstr;

constexpr Link kFast = {1e-6, 1e10}, kSlow = {2e-5, 1e8};

std::span<const std::byte> Bytes(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}
std::span<std::byte> Writable(std::vector<float>& values) {
  return std::as_writable_bytes(std::span(values));
}

std::vector<float> InputOf(int rank, int count) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::unique_ptr<Communicator> Make(Transport& transport, Topology topology,
                                   CommunicatorOptions options = {}) {
  StatusOr<std::unique_ptr<Communicator>> created =
      Communicator::Create(transport, std::move(topology), std::move(options));
  EXPECT_TRUE(created.ok()) << created.status().message();
  return std::move(*created);
}

// AllReduce of InputOf() on threads; results by rank.
std::vector<std::vector<float>> Reduce(const Topology& topology, int count,
                                       const CommunicatorOptions& options) {
  std::vector<std::vector<float>> results(topology.ranks());
  RunRanks(topology.ranks(), [&](Transport& transport) {
    const auto communicator = Make(transport, topology, options);
    const std::vector<float> input = InputOf(transport.rank(), count);
    std::vector<float>& output = results[transport.rank()];
    output.resize(count);
    const Status status = communicator->AllReduce(Bytes(input), Writable(output), DType::kF32);
    EXPECT_TRUE(status.ok()) << status.message();
  });
  return results;
}

TEST(CommunicatorTest, DeterministicSumsAreBitwiseEqualOnAllTopologies) {
  CommunicatorOptions options;
  options.deterministic = true;
  for (const int count : {1, 1000, 100'003}) {
    std::vector<float> expected = InputOf(0, count);
    for (int rank = 1; rank < 7; ++rank) {
      const std::vector<float> input = InputOf(rank, count);
      for (int i = 0; i < count; ++i) expected[i] += input[i];
    }
    for (const Topology& topology :
         {Topology::Flat(7, kFast), GroupTopology({1, 6}, kFast, kSlow),
          GroupTopology({3, 2, 2}, kFast, kSlow), Topology::Flat(7, {1e-9, 1e3})}) {
      for (const std::vector<float>& result : Reduce(topology, count, options)) {
        EXPECT_EQ(std::memcmp(result.data(), expected.data(), count * sizeof(float)), 0) << count;
      }
    }
  }
}

// The sum of two NaNs has the payload of one of them, which depends on the order of the operands.
TEST(CommunicatorTest, DeterministicResultsOfNaNsAndZerosAreBitwiseEqualOnAllRanks) {
  CommunicatorOptions options;
  options.deterministic = true;
  std::vector<std::vector<float>> inputs = {
      {NAN, 1.0F, -0.0F, 0.0F}, {1.0F, NAN, 0.0F, -0.0F}, {2.0F, 3.0F, -0.0F, 0.0F}};
  for (uint32_t rank = 0; rank < 3; ++rank) inputs[rank].push_back(std::bit_cast<float>(0x7fc00001 + rank));
  for (const int ranks : {2, 3}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      const ReduceKernel kernel = FindReduceKernel(DType::kF32, op).value();
      std::vector<float> expected = inputs[0];
      for (int rank = 1; rank < ranks; ++rank) {
        kernel(Writable(expected).data(), Bytes(inputs[rank]).data(), std::ssize(expected));
      }
      RunRanks(ranks, [&](Transport& transport) {
        const auto communicator = Make(transport, Topology::Flat(ranks, kFast), options);
        std::vector<float> output(expected.size());
        EXPECT_EQ(communicator->AllReduce(Bytes(inputs[transport.rank()]), Writable(output), DType::kF32, op),
                  OkStatus());
        EXPECT_EQ(std::memcmp(output.data(), expected.data(), output.size() * sizeof(float)), 0)
            << Name(op) << " on rank " << transport.rank() << " of " << ranks;
      });
    }
  }
}

TEST(CommunicatorTest, ResultsAreEqualOnAllRanksByEveryAlgorithm) {
  // The only NaN of each of the first elements is at a rank of its own; zeros of both signs follow.
  const auto input_of = [](int rank) {
    std::vector<float> input = InputOf(rank, 50);
    input[rank] = NAN;
    for (int i = 6; i < 9; ++i) input[i] = (rank + i) % 3 == 0 ? -0.0F : 0.0F;
    return input;
  };
  for (const int ranks : {2, 3, 4, 6}) {
    const PlanRequest request = {.collective = Collective::kAllReduce, .ranks = ranks, .count = 50};
    std::vector<int> order(ranks);
    std::iota(order.begin(), order.end(), 0);
    std::vector<RankTree> trees = {FlatTree(order), TreeOf(GroupTopology({1, ranks - 1}, kFast, kSlow))};
    if (ranks == 6) trees.push_back(TreeOf(GroupTopology({2, 1, 1, 2}, kFast, kSlow)));
    for (const RankTree& tree : trees) {
      for (const Algorithm top : {Algorithm::kRing, Algorithm::kPairwise, Algorithm::kHalving,
                                  Algorithm::kDoubling, Algorithm::kDirect, Algorithm::kLinear}) {
        const auto plan = std::make_shared<const Plan>(BuildPlan(request, tree, {.top = top}).value());
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
          std::vector<std::vector<float>> results(ranks, std::vector<float>(50));
          RunRanks(ranks, [&](Transport& transport) {
            const auto communicator = Make(transport, Topology::Flat(ranks, kFast));
            EXPECT_EQ(communicator->Run(plan, Bytes(input_of(transport.rank())),
                                        Writable(results[transport.rank()]), DType::kF32, op),
                      OkStatus());
          });
          for (int i = 0; i < ranks; ++i) EXPECT_TRUE(std::isnan(results[0][i])) << Name(top) << " " << i;
          for (int rank = 1; rank < ranks; ++rank) {
            EXPECT_EQ(std::memcmp(results[rank].data(), results[0].data(), 50 * sizeof(float)), 0)
                << Name(op) << " by " << plan->algorithm << " on rank " << rank << " of " << ranks;
          }
        }
      }
    }
  }
}

TEST(CommunicatorTest, DeterministicReduceScatterAddsInTheOrderOfRanks) {
  const std::vector<int64_t> counts = {5, 0, 301, 7};
  CommunicatorOptions options;
  options.deterministic = true;
  for (const Topology& topology : {Topology::Flat(4, kFast), GroupTopology({1, 3}, kFast, kSlow)}) {
    RunRanks(4, [&](Transport& transport) {
      const auto communicator = Make(transport, topology, options);
      const std::vector<float> input = InputOf(transport.rank(), 313);
      std::vector<float> output(counts[transport.rank()]);
      EXPECT_EQ(communicator->ReduceScatter(Bytes(input), Writable(output), counts, DType::kF32), OkStatus());
      const int64_t first = std::accumulate(counts.begin(), counts.begin() + transport.rank(), int64_t{0});
      for (size_t i = 0; i < output.size(); ++i) {
        float expected = InputOf(0, 313)[first + i];
        for (int rank = 1; rank < 4; ++rank) expected += InputOf(rank, 313)[first + i];
        EXPECT_EQ(output[i], expected);
      }
    });
  }
}

// Bounds of rule C12: each group's partial sum is rounded once, and the result of an AllReduce once more.
double StepOf(WireFormat wire) { return wire == WireFormat::kBf16 ? 0x1p-8 : 1.0 / 254 * (1 + 0x1p-15); }
constexpr double kRoundingOfF32 = 1e-5;
double PartsBound(WireFormat wire, double largest_partial, int groups) {
  return (groups - 1) * largest_partial * StepOf(wire);
}
double ErrorBound(WireFormat wire, double largest_partial, double largest_sum, int groups) {
  const double partials = PartsBound(wire, largest_partial, groups);
  return partials + (largest_sum + partials) * StepOf(wire) + kRoundingOfF32;
}

// Sums of InputOf() of groups of ranks, and their largest magnitudes.
struct GroupSums {
  std::vector<double> sum;
  double largest_partial = 0, largest_sum = 0;  // a sum of the first groups counts, too
};
GroupSums SumsOf(const std::vector<int>& sizes, int count) {
  GroupSums sums{.sum = std::vector<double>(count, 0)};
  int rank = 0;
  for (const int size : sizes) {
    std::vector<double> partial(count, 0);
    for (int i = 0; i < size; ++i, ++rank) {
      const std::vector<float> input = InputOf(rank, count);
      for (int k = 0; k < count; ++k) partial[k] += input[k];
    }
    for (int k = 0; k < count; ++k) {
      sums.largest_partial = std::max(sums.largest_partial, std::fabs(partial[k]));
      sums.largest_sum = std::max(sums.largest_sum, std::fabs(sums.sum[k] += partial[k]));
    }
  }
  return sums;
}

TEST(CommunicatorTest, CompressedSumsAreWithinTheirBoundAndEqualOnAllRanks) {
  const int count = 20'000;
  for (const std::vector<int>& sizes :
       {std::vector<int>{2, 2}, std::vector<int>{1, 3}, std::vector<int>{2, 2, 1}, std::vector<int>{1, 1}}) {
    const Topology topology =
        sizes == std::vector<int>{1, 1} ? Topology::Flat(2, kSlow) : GroupTopology(sizes, kFast, kSlow);
    const GroupSums sums = SumsOf(sizes, count);
    for (const WireFormat wire : {WireFormat::kBf16, WireFormat::kInt8}) {
      CommunicatorOptions options;
      options.compression = wire;
      const std::vector<std::vector<float>> results = Reduce(topology, count, options);
      const double bound =
          ErrorBound(wire, sums.largest_partial, sums.largest_sum, static_cast<int>(sizes.size()));
      double worst = 0;
      for (int k = 0; k < count; ++k) worst = std::max(worst, std::fabs(results[0][k] - sums.sum[k]));
      EXPECT_LE(worst, bound) << Name(wire);
      EXPECT_GT(worst, bound / 100) << "the encoding was not used";
      for (const std::vector<float>& result : results) EXPECT_EQ(result, results[0]);
    }
  }
}

TEST(CommunicatorTest, CompressedReduceScatterIsWithinItsBound) {
  const int count = 40'000;
  for (const std::vector<int>& sizes : {std::vector<int>{2, 2}, std::vector<int>{2, 2, 1}}) {
    const Topology topology = GroupTopology(sizes, kFast, kSlow);
    const int ranks = topology.ranks();
    const GroupSums sums = SumsOf(sizes, count);
    // Parts differ, and that of rank 1 is empty.
    std::vector<int64_t> counts(ranks, count / ranks);
    counts[0] += counts[1];
    counts[1] = 0;
    for (const WireFormat wire : {WireFormat::kBf16, WireFormat::kInt8}) {
      std::vector<double> worst(ranks, 0);
      RunRanks(ranks, [&](Transport& transport) {
        CommunicatorOptions options;
        options.compression = wire;
        const auto communicator = Make(transport, topology, options);
        const int rank = transport.rank();
        const std::vector<float> input = InputOf(rank, count);
        std::vector<float> output(counts[rank]);
        EXPECT_EQ(communicator->ReduceScatter(Bytes(input), Writable(output), counts, DType::kF32),
                  OkStatus());
        const int64_t first = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
        for (size_t k = 0; k < output.size(); ++k) {
          worst[rank] = std::max(worst[rank], std::fabs(output[k] - sums.sum[first + k]));
        }
      });
      const double bound = PartsBound(wire, sums.largest_partial, static_cast<int>(sizes.size()));
      EXPECT_LE(*std::ranges::max_element(worst), bound + kRoundingOfF32) << Name(wire);
      EXPECT_GT(*std::ranges::max_element(worst), bound / 100) << "the encoding was not used";
    }
  }
}

TEST(CommunicatorTest, AllReduceWorksInPlace) {
  RunRanks(3, [](Transport& transport) {
    const auto communicator = Make(transport, Topology::Flat(3, kFast));
    std::vector<float> values = {1.0F, static_cast<float>(transport.rank())};
    EXPECT_EQ(communicator->AllReduce(Bytes(values), Writable(values), DType::kF32), OkStatus());
    EXPECT_EQ(values, (std::vector<float>{3, 3}));
  });
}

// Calls that are equal to the one before skip the executor, on each rank by itself.
TEST(CommunicatorTest, RepeatedCallsOfTwoRanksMatchCallsOfAnyKind) {
  RunRanks(2, [](Transport& transport) {
    CommunicatorOptions options;
    options.check_calls = false;
    const auto communicator = Make(transport, Topology::Flat(2, kFast), options);
    for (int call = 0; call < 40; ++call) {
      const int count = call / 10 % 2 == 0 ? 3 : 3584, own = transport.rank() + 1;
      std::vector<float> input(count, static_cast<float>(own * call)), output(count);
      Status status;
      if ((call >> own) % 2 == 0) {
        status = communicator->AllReduce(Bytes(input), Writable(output), DType::kF32);
      } else if (call % 5 == 0) {
        status = communicator->StartAllReduce(Bytes(input), Writable(output), DType::kF32)->Wait();
      } else {
        output = input;
        status = communicator->AllReduce(Bytes(output), Writable(output), DType::kF32);
      }
      EXPECT_EQ(status, OkStatus());
      EXPECT_EQ(output, std::vector<float>(count, static_cast<float>(3 * call))) << call;
    }
    std::vector<float> input(4), shorter(3);
    EXPECT_FALSE(communicator->AllReduce(Bytes(input), Writable(shorter), DType::kF32).ok());
    EXPECT_EQ(communicator->Barrier(), OkStatus());
  });
}

TEST(CommunicatorTest, RefusesFaultyBuffersAndStaysUsable) {
  RunRanks(2, [](Transport& transport) {
    const auto communicator = Make(transport, Topology::Flat(2, kFast));
    std::vector<float> values(8, 1.0F), output(4);
    const std::span<std::byte> bytes = Writable(values);
    const auto fault = [](const Status& status) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      return std::string(status.message());
    };
    EXPECT_THAT(fault(communicator->AllReduce(bytes.first(16), bytes.subspan(8, 16), DType::kF32)),
                HasSubstr("must not overlap"));
    const std::vector<int64_t> halves = {2, 2};
    std::vector<int64_t> received(2);
    for (const Status& status :
         {communicator->Broadcast(bytes.first(16), bytes.subspan(8, 16), transport.rank(), DType::kF32),
          communicator->ReduceScatter(bytes.first(16), bytes.subspan(8, 8), halves, DType::kF32),
          communicator->AllGather(bytes.subspan(8, 8), bytes.first(16), halves, DType::kF32),
          communicator->AllToAll(bytes.first(16), bytes.subspan(8, 16), DType::kF32),
          communicator->AllToAllv(bytes.first(16), halves, bytes.subspan(8, 16), received, DType::kF32)}) {
      EXPECT_THAT(fault(status), HasSubstr("must not overlap"));
    }
    EXPECT_THAT(fault(communicator->AllReduce(bytes.first(12), Writable(output), DType::kF32)),
                HasSubstr("the input must have 16 bytes; found 12"));
    EXPECT_THAT(fault(communicator->Broadcast(bytes, Writable(output), 2, DType::kF32)),
                HasSubstr("found 2"));
    EXPECT_THAT(fault(communicator->AllReduce(bytes.subspan(1, 16), Writable(output), DType::kF32)),
                HasSubstr("aligned"));
    const std::vector<int64_t> counts = {-1, 1};
    EXPECT_THAT(fault(communicator->AllGather({}, Writable(output), counts, DType::kF32)),
                HasSubstr("found -1"));
    EXPECT_EQ(communicator->AllReduce(bytes.first(16), Writable(output), DType::kF32), OkStatus());
    EXPECT_EQ(output[3], 2.0F);
  });
}

// Sums of these counts, or their bytes, are 0 modulo 2^64, which fits the empty buffers.
TEST(CommunicatorTest, CountsWhoseSumsOverflowAreRefused) {
  for (const bool checks : {false, true}) {
    RunRanks(4, [&](Transport& transport) {
      CommunicatorOptions options;
      options.check_calls = checks;
      const auto communicator = Make(transport, Topology::Flat(4, kFast), options);
      const std::vector<int64_t> counts(4, int64_t{1} << 62);
      std::vector<int64_t> received(4);
      EXPECT_EQ(communicator->AllToAllv({}, counts, {}, received, DType::kF32).code(),
                StatusCode::kInvalidArgument);
      EXPECT_EQ(communicator->AllGather({}, {}, counts, DType::kF32).code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(communicator->ReduceScatter({}, {}, counts, DType::kF32).code(),
                StatusCode::kInvalidArgument);
      EXPECT_EQ(communicator->Barrier(), OkStatus());
    });
  }
}

// Returns the bytes that are allocated while no rank is in a call.
int64_t LiveBytes(Communicator& communicator) {
  EXPECT_EQ(communicator.Barrier(), OkStatus());
  const int64_t bytes = base::live_bytes;
  EXPECT_EQ(communicator.Barrier(), OkStatus());
  return bytes;
}

// The scratch of a ReduceScatter has the size of its input.
TEST(CommunicatorTest, PlansOfManySizesKeepBoundedScratch) {
  constexpr int kSizes = 24;
  constexpr int64_t kBytes = 1 << 20;
  RunRanks(2, [](Transport& transport) {
    CommunicatorOptions options;
    options.idle_bytes = kBytes;
    const auto communicator = Make(transport, Topology::Flat(2, kFast), options);
    std::vector<float> input(kBytes / 4 + 2 * kSizes, 1.0F), output(input.size());
    const int64_t before = LiveBytes(*communicator);
    for (int64_t size = 0; size < kSizes; ++size) {
      const std::vector<int64_t> counts(2, kBytes / 8 + size);
      EXPECT_EQ(communicator->ReduceScatter(Bytes(input).first(8 * counts[0]),
                                            Writable(output).first(4 * counts[0]), counts, DType::kF32),
                OkStatus());
      EXPECT_EQ(output[counts[0] - 1], 2.0F);
    }
    // Idle plans, and staging of pieces: the barrier's plan is the last one.
    EXPECT_LT(LiveBytes(*communicator) - before, 2 * 2 * kBytes);
  });
}

// An AllReduce in place copies its input.
TEST(CommunicatorTest, CopiesOfManyCallsKeepBoundedMemory) {
  constexpr int kCalls = 8;
  constexpr int64_t kBytes = 1 << 20;
  RunRanks(2, [](Transport& transport) {
    CommunicatorOptions options;
    options.idle_bytes = kBytes;
    const auto communicator = Make(transport, Topology::Flat(2, kFast), options);
    std::vector<std::vector<float>> data(kCalls, std::vector<float>(kBytes / 4, 1.0F));
    const int64_t before = LiveBytes(*communicator);
    std::vector<CollectiveHandle> calls;
    for (auto& each : data)
      calls.push_back(*communicator->StartAllReduce(Bytes(each), Writable(each), DType::kF32));
    for (CollectiveHandle& call : calls) EXPECT_EQ(call.Wait(), OkStatus());
    calls.clear();
    // Two ranks, each with the copies of the last and of idle calls, and the scratch of plans.
    EXPECT_LT(LiveBytes(*communicator) - before, 2 * 5 * kBytes);
  });
}

TEST(CommunicatorTest, AHandleOutlivesItsCommunicator) {
  RunRanks(2, [](Transport& transport) {
    auto communicator = Make(transport, Topology::Flat(2, kFast));
    std::vector<float> input(1000, 1.0F), output(1000);
    CollectiveHandle first = *communicator->StartAllReduce(Bytes(input), Writable(output), DType::kF32);
    CollectiveHandle moved = std::move(first);
    EXPECT_TRUE(moved.valid());
    communicator.reset();
    EXPECT_FALSE(moved.valid());
    moved.Cancel();
  });
}

TEST(CommunicatorTest, TypesWithoutSumsAreRefused) {
  RunRanks(2, [](Transport& transport) {
    const auto communicator = Make(transport, Topology::Flat(2, kFast));
    std::vector<float> input(2), output(2);
    EXPECT_EQ(communicator->AllReduce(Bytes(input), Writable(output), DType::kF8E4M3).code(),
              StatusCode::kUnimplemented);
    EXPECT_EQ(communicator->AllToAll(Bytes(input), Writable(output), DType::kF8E4M3), OkStatus());
  });
}

TEST(CommunicatorTest, NamesARankThatCallsAnotherCollective) {
  std::mutex mutex;
  int named = 0;
  RunRanks(3, [&](Transport& transport) {
    CommunicatorOptions options;
    options.check_calls = true;
    options.time_limit_s = 20;
    const auto communicator = Make(transport, Topology::Flat(3, kFast), options);
    std::vector<float> input(4), output(4);
    Status status;
    if (transport.rank() == 1) {
      status = communicator->Broadcast(Bytes(input), Writable(output), 0, DType::kF32);
    } else {
      status = communicator->AllReduce(Bytes(input), Writable(output), DType::kF32);
    }
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    {
      const std::lock_guard lock(mutex);
      if (transport.rank() != 1 &&
          status.message().find("rank 1 made call 1: broadcast") != std::string::npos)
        ++named;
    }
    EXPECT_EQ(communicator->Barrier(), OkStatus()) << "later calls work";
  });
  EXPECT_EQ(named, 2);
}

// Makes a call whose buffers fit `counts`, elements by rank; an AllReduce has their sum. Checks that no
// memory except the output is written.
Status CallOfCounts(Communicator& communicator, Collective collective, const std::vector<int64_t>& counts) {
  constexpr int64_t kGuard = 1024;  // elements before and after the output
  constexpr float kUnwritten = -7;
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t own = counts[communicator.rank()];
  const std::vector<float> input(collective == Collective::kAllGather ? own : sum, 1.0F);
  const int64_t size = collective == Collective::kReduceScatter ? own : sum;
  std::vector<float> memory(size + 2 * kGuard, kUnwritten);
  const std::span<std::byte> output = std::as_writable_bytes(std::span(memory).subspan(kGuard, size));
  Status status;
  switch (collective) {
    case Collective::kReduceScatter:
      status = communicator.ReduceScatter(Bytes(input), output, counts, DType::kF32);
      break;
    case Collective::kAllGather:
      status = communicator.AllGather(Bytes(input), output, counts, DType::kF32);
      break;
    default:
      status = communicator.AllReduce(Bytes(input), output, DType::kF32);
  }
  const auto is_unwritten = [](float value) { return value == kUnwritten; };
  EXPECT_TRUE(std::all_of(memory.begin(), memory.begin() + kGuard, is_unwritten) &&
              std::all_of(memory.end() - kGuard, memory.end(), is_unwritten))
      << Name(collective) << " on rank " << communicator.rank() << " wrote beyond its output";
  EXPECT_EQ(std::count(input.begin(), input.end(), 1.0F), std::ssize(input));
  return status;
}

// Calls body(collective, counts, other counts) for lists that differ in one count.
void ForOtherCounts(
    int ranks,
    const std::function<void(Collective, const std::vector<int64_t>&, const std::vector<int64_t>&)>& body) {
  for (const Collective collective :
       {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
    for (const int64_t count : {4, 1000, 100'000}) {
      for (const int changed : {0, 1}) {
        std::vector<int64_t> counts(ranks, count), other = counts;
        other[changed] += 3;
        body(collective, counts, other);
      }
    }
  }
}

TEST(CommunicatorTest, SizesThatDifferBetweenRanksAreNamedIfCallsAreCompared) {
  ForOtherCounts(3, [](Collective collective, const auto& counts, const auto& other) {
    RunRanks(3, [&](Transport& transport) {
      CommunicatorOptions options;
      options.check_calls = true;
      const auto communicator = Make(transport, Topology::Flat(3, kFast), options);
      const int rank = transport.rank();
      const Status status = CallOfCounts(*communicator, collective, rank == 1 ? other : counts);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(fmt::format("rank {} made call 1: {}", rank, Name(collective))),
                        HasSubstr(fmt::format("; rank {} made call 1", rank == 1 ? 0 : 1)),
                        HasSubstr(collective == Collective::kAllReduce ? " elements" : "with other counts")));
      EXPECT_EQ(communicator->Barrier(), OkStatus()) << "later calls work";
    });
  });
}

// Time limits pass in virtual time, which advances while all ranks wait.
TEST(CommunicatorTest, SizesThatDifferBetweenRanksEndWithAnErrorIfCallsAreNotCompared) {
  for (const Topology& topology :
       {Topology::Flat(2, kFast), Topology::Flat(3, kFast), GroupTopology({1, 2}, kFast, kSlow)}) {
    ForOtherCounts(topology.ranks(), [&](Collective collective, const auto& counts, const auto& other) {
      std::atomic<int> errors = 0;
      const auto body = [&](Transport& transport) {
        CommunicatorOptions options, patient;
        options.check_calls = patient.check_calls = false;
        options.time_limit_s = 20;
        patient.time_limit_s = 1e6;
        patient.first_tag = Tag{1} << kCommunicatorTagBits;
        const auto communicator = Make(transport, topology, options);
        const auto later = Make(transport, topology, patient);
        EXPECT_EQ(CallOfCounts(*communicator, collective, counts), OkStatus());
        const Status status = CallOfCounts(*communicator, collective, transport.rank() == 1 ? other : counts);
        if (!status.ok()) {
          ++errors;
          EXPECT_TRUE(status.code() == StatusCode::kInvalidArgument ||
                      status.code() == StatusCode::kDeadlineExceeded)
              << status;
          EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(Name(collective))));
        }
        EXPECT_EQ(later->Barrier(), OkStatus()) << "no message of the call is left";
      };
      RunRanks(topology.ranks(), body, {.topology = &topology});
      EXPECT_GT(errors.load(), 0) << Name(collective) << " of " << counts[0] << " elements on "
                                  << topology.ranks();
    });
  }
}

TEST(CommunicatorTest, RecordsOfUnknownCallsAreDescribed) {
  RunRanks(2, [](Transport& transport) {
    std::array<std::byte, 32> record{}, got{};
    record.fill(std::byte{0xff});
    if (transport.rank() == 1) {
      const Tag tag = (1 << 4) + 9;  // of the comparison of the first call
      const TransferId receive = *transport.Receive(0, tag, got), send = *transport.Send(0, tag, record);
      EXPECT_TRUE(Wait(transport, receive, 20).ok() && Wait(transport, send, 20).ok());
      return;
    }
    CommunicatorOptions options;
    options.check_calls = true;
    const auto communicator = Make(transport, Topology::Flat(2, kFast), options);
    const Status status = communicator->Barrier();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("rank 1 made call 4294967295 of a kind that this version does not know"));
  });
}

TEST(CommunicatorTest, OtherRanksTimeOutIfARankDoesNotCall) {
  RunRanks(2, [](Transport& transport) {
    CommunicatorOptions options;
    options.time_limit_s = 0.05;
    options.check_calls = false;
    const auto communicator = Make(transport, Topology::Flat(2, kFast), options);
    if (transport.rank() == 1) return;
    std::vector<float> input(4), output(4);
    for (const auto& [call, waiting] : {std::pair("call 1 took longer", "rank 1 (receive)"),
                                        std::pair("call 2 took longer", "waiting for: rank 1")}) {
      const Status status = communicator->AllReduce(Bytes(input), Writable(output), DType::kF32);
      EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(call), HasSubstr(waiting)));
    }
  });
}

TEST(CommunicatorTest, ADeadPeerIsNamed) {
  for (const int64_t sends : {0, 1, 5}) {
    LocalJob job(4);
    job.KillAtSend(2, sends);
    std::mutex mutex;
    int named = 0;
    RunRanks(job, [&](Transport& transport) {
      CommunicatorOptions options;
      options.time_limit_s = 20;
      const auto communicator = Make(transport, Topology::Flat(4, kFast), options);
      std::vector<float> input(50'000), output(50'000);
      Status status;
      for (int i = 0; i < 10 && status.ok(); ++i) {
        status = communicator->AllReduce(Bytes(input), Writable(output), DType::kF32);
      }
      EXPECT_FALSE(status.ok());
      const std::lock_guard lock(mutex);
      if (transport.rank() != 2 && status.code() == StatusCode::kUnavailable &&
          status.message().find("rank 2") != std::string::npos) {
        ++named;
      }
    });
    EXPECT_EQ(named, 3) << "also ranks that exchange no messages with it";
  }
}

TEST(CommunicatorTest, AsynchronousCallsRunSideBySideAndEndInAnyOrder) {
  RunRanks(4, [](Transport& transport) {
    const auto communicator = Make(transport, GroupTopology({1, 3}, kFast, kSlow));
    constexpr int kCalls = 6;
    std::array<std::vector<float>, kCalls> inputs, outputs;
    std::vector<CollectiveHandle> handles;
    for (int i = 0; i < kCalls; ++i) {
      inputs[i].assign(1000 * (kCalls - i), static_cast<float>(transport.rank() + i));
      outputs[i].resize(inputs[i].size());
      handles.push_back(*communicator->StartAllReduce(Bytes(inputs[i]), Writable(outputs[i]), DType::kF32));
    }
    for (int i = kCalls - 1; i >= 0; --i) {
      EXPECT_EQ(handles[i].Wait(), OkStatus());
      EXPECT_FALSE(handles[i].valid());
      EXPECT_EQ(outputs[i].back(), static_cast<float>(6 + 4 * i));
    }
  });
}

TEST(CommunicatorTest, CancelledCallsDoNotDisturbLaterOnes) {
  RunRanks(3, [](Transport& transport) {
    const auto communicator = Make(transport, Topology::Flat(3, kFast));
    std::vector<float> input(100'000, 1.0F), output(100'000), second(100'000);
    {
      CollectiveHandle dropped = *communicator->StartAllReduce(Bytes(input), Writable(output), DType::kF32);
      if (transport.rank() == 0) dropped.Cancel();
    }
    EXPECT_EQ(communicator->AllReduce(Bytes(input), Writable(second), DType::kF32), OkStatus());
    EXPECT_EQ(second.back(), 3.0F);
  });
}

TEST(CommunicatorTest, AllToAllvNamesTheRankWithTooSmallAnOutput) {
  RunRanks(3, [](Transport& transport) {
    const auto communicator = Make(transport, Topology::Flat(3, kFast));
    const std::vector<int64_t> counts = {1, 2, 3};
    std::vector<float> input(6), output(transport.rank() == 2 ? 8 : 9);
    std::vector<int64_t> received(3);
    const Status status =
        communicator->AllToAllv(Bytes(input), counts, Writable(output), received, DType::kF32);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 2 receives 9 elements; its output has 8"));
  });
}

TEST(CommunicatorTest, CreateRefusesOptionsThatContradict) {
  RunRanks(2, [](Transport& transport) {
    CommunicatorOptions both;
    both.deterministic = true;
    both.compression = WireFormat::kBf16;
    EXPECT_FALSE(Communicator::Create(transport, Topology::Flat(2, kFast), both).ok());
    EXPECT_FALSE(Communicator::Create(transport, Topology::Flat(3, kFast), {}).ok());
    CommunicatorOptions tags;
    tags.first_tag = 5;
    EXPECT_FALSE(Communicator::Create(transport, Topology::Flat(2, kFast), tags).ok());
  });
}

TEST(CommunicatorTest, MoreRanksThanAPlanMayHaveAreRefused) {
  LocalJob job(kMaxCommunicatorRanks + 1);
  const Status status = Communicator::Create(job.end(0), Topology::Flat(job.ranks(), kFast), {}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 512 ranks; found 513"));
}

}  // namespace
}  // namespace moesaic::comm
