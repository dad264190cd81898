#include "comm/collectives/conformance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <string_view>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/collectives/plan_checker.h"
#include "comm/collectives/plan_test_support.h"
#include "comm/collectives/real_sums.h"

namespace moesaic::comm {
namespace {

using tensor::DType;

constexpr std::array<DType, 8> kDTypes = {DType::kF32, DType::kBF16, DType::kF16, DType::kI32,
                                          DType::kI64, DType::kF64,  DType::kI8,  DType::kU8};
// With odd tails.
constexpr std::array<int64_t, 10> kCounts = {0, 1, 7, 33, 130, 1021, 4099, kLargeCount, 65537, (1 << 20) + 3};
constexpr int64_t kSeveralPieces = 65537;  // a message of a quarter of it has two pieces (PieceElements())
constexpr std::array<ReduceOp, 4> kOps = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax};

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ULL;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dULL;
  return x ^ (x >> 33);
}

// Small integers: sums of 9 ranks are exact in every type, also in bf16. Factors are powers of two.
int64_t ValueOf(int rank, int64_t index, ReduceOp op) {
  const uint64_t bits = Mix(static_cast<uint64_t>(rank) << 40 | static_cast<uint64_t>(index));
  return op == ReduceOp::kProduct ? 1 + static_cast<int64_t>(bits % 2) : static_cast<int64_t>(bits % 12);
}

void StoreValue(DType dtype, int64_t value, std::byte* at) {
  const auto store = [&](auto typed) { std::memcpy(at, &typed, sizeof(typed)); };
  switch (dtype) {
    case DType::kF64:
      return store(static_cast<double>(value));
    case DType::kF32:
      return store(static_cast<float>(value));
    case DType::kF16:
      return store(tensor::FloatToHalf(static_cast<float>(value)));
    case DType::kBF16:
      return store(tensor::ToBF16(static_cast<float>(value)));
    case DType::kI64:
      return store(value);
    case DType::kI32:
      return store(static_cast<int32_t>(value));
    default:
      return store(static_cast<uint8_t>(value));
  }
}

// Real numbers of 24 bits in [-1, 1).
float RealOf(int rank, int64_t index) {
  const uint64_t bits = Mix(static_cast<uint64_t>(rank) << 40 | static_cast<uint64_t>(index));
  return static_cast<float>(bits >> 40) * 0x1p-23F - 1;
}

int64_t Apply(ReduceOp op, int64_t a, int64_t b) {
  switch (op) {
    case ReduceOp::kSum:
      return a + b;
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
  }
  return 0;
}

// Reductions of the values of all ranks, computed once per element.
class Totals {
 public:
  explicit Totals(int ranks) : ranks_(ranks) {}

  int64_t At(int64_t index, ReduceOp op) {
    std::vector<int32_t>& known = known_[static_cast<size_t>(op)];
    for (int64_t next = std::ssize(known); next <= index; ++next) {
      int64_t value = ValueOf(0, next, op);
      for (int rank = 1; rank < ranks_; ++rank) value = Apply(op, value, ValueOf(rank, next, op));
      known.push_back(static_cast<int32_t>(value));
    }
    return known[static_cast<size_t>(index)];
  }

 private:
  const int ranks_;
  std::array<std::vector<int32_t>, kOps.size()> known_;  // by operation
};

// Value of an output element by the definition of the collective.
int64_t Expected(const PlanRequest& request, int rank, int64_t index, ReduceOp op, Totals& totals) {
  switch (request.collective) {
    case Collective::kBroadcast:
      return ValueOf(request.root, index, op);
    case Collective::kAllReduce:
      return totals.At(index, op);
    case Collective::kReduceScatter:
      for (int before = 0; before < rank; ++before) index += request.counts[before];
      return totals.At(index, op);
    case Collective::kAllGather: {
      int from = 0;
      for (; index >= request.counts[from]; ++from) index -= request.counts[from];
      return ValueOf(from, index, op);
    }
    case Collective::kAllToAll:
      return ValueOf(static_cast<int>(index / request.count), rank * request.count + index % request.count,
                     op);
    case Collective::kAllToAllv: {
      const auto count = [&](int from, int to) {
        return request.matrix[static_cast<size_t>(from) * request.ranks + to];
      };
      int from = 0;
      for (; index >= count(from, rank); ++from) index -= count(from, rank);
      for (int to = 0; to < rank; ++to) index += count(from, to);
      return ValueOf(from, index, op);
    }
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

std::vector<RankTree> GroupShapes(int ranks) {
  std::vector<RankTree> trees = {OneLevel(ranks)};
  if (ranks >= 3) trees.push_back(GroupTree({1, ranks - 1}));
  if (ranks >= 4) {
    std::vector<int> pairs(ranks / 2, 2);
    if (ranks % 2 == 1) pairs.push_back(1);
    trees.push_back(GroupTree(pairs));
    // Ports of unequal bandwidth: the second group owns little of a sum, or nothing.
    RankTree uneven = GroupTree({2, 1, ranks - 3});
    for (RankTree& child : uneven.children) child.port_bytes_per_s = 4e9;
    uneven.children[1].port_bytes_per_s = ranks % 2 == 0 ? 3e9 : 1e9;
    trees.push_back(std::move(uneven));
  }
  if (ranks >= 5) {  // three levels, and ranks in another order than that of the groups
    std::vector<int> even, odd;
    for (int rank = 0; rank < ranks; ++rank) (rank % 2 == 0 ? even : odd).push_back(rank);
    const auto middle = static_cast<int64_t>(even.size() / 2);
    std::vector<RankTree> halves;
    halves.push_back(FlatTree({even.begin(), even.begin() + middle}));
    halves.push_back(FlatTree({even.begin() + middle, even.end()}));
    std::vector<RankTree> top;
    top.push_back(Join(std::move(halves)));
    top.push_back(FlatTree(odd));
    trees.push_back(Join(std::move(top)));
  }
  return trees;
}

class Suite {
 public:
  Suite(Transport& transport, const ConformanceOptions& options)
      : transport_(transport), options_(options), totals_(transport.size()) {}

  ConformanceReport Run() {
    CommunicatorOptions options;
    options.time_limit_s = options_.time_limit_s;
    options.first_tag = options_.first_tag;
    options.check_calls = true;
    StatusOr<std::unique_ptr<Communicator>> created =
        Communicator::Create(transport_, Topology::Flat(transport_.size(), {2e-6, 1e10}), options);
    if (!created.ok()) {
      Count(created.status());
      return report_;
    }
    communicator_ = std::move(*created);
    RunAlgorithms();
    if (transport_.size() > 1) RunLossyPlans();
    for (int64_t i = 0; i < 6; ++i) {
      for (const Collective collective : kAllCollectives) RunPlanned(collective, SizeOf(i), i);
    }
    return report_;
  }

 private:
  void Count(const Status& status) {
    ++report_.runs;
    if (status.ok()) return;
    ++report_.failures;
    if (report_.first_failure.ok()) report_.first_failure = status;
  }

  // Large sizes are rare.
  int64_t SizeOf(int64_t sample) const {
    const uint64_t bits = Mix(static_cast<uint64_t>(sample) + 17 + (options_.seed << 32));
    if (bits % 97 == 0) return options_.max_count;
    if (bits % 13 == 0) return std::min<int64_t>(options_.max_count, 65537);
    return std::min(options_.max_count, kCounts[bits / 97 % (kCounts.size() - 2)]);
  }

  DType TypeOf(int64_t sample) const {
    return kDTypes[Mix(static_cast<uint64_t>(sample) + (options_.seed << 32)) % kDTypes.size()];
  }

  void RunAlgorithms() {
    int64_t sample = 0;
    for (const RankTree& tree : GroupShapes(transport_.size())) {
      for (const Collective collective : kAllCollectives) {
        for (const PlanShape& shape : ShapesOf(collective, tree)) {
          if (shape.wire != WireFormat::kExact) continue;  // RunLossyPlans()
          if (options_.is_whole) {
            RunAllSizes(collective, tree, shape, sample);
            continue;
          }
          for (int i = 0; i < options_.samples; ++i) {
            ++sample;
            RunAlgorithm(collective, tree, shape, SizeOf(sample), TypeOf(sample), sample);
          }
        }
      }
    }
  }

  void RunAllSizes(Collective collective, const RankTree& tree, const PlanShape& shape, int64_t& sample) {
    if (collective == Collective::kBarrier) {
      return RunAlgorithm(collective, tree, shape, 0, DType::kF32, ++sample);
    }
    for (const int64_t count : kCounts) {
      if (count > options_.max_count) continue;
      ++sample;
      const bool has_all_types = count <= kLargeCount || transport_.size() <= kFewRanks;
      for (const DType dtype : kDTypes) {
        if (!has_all_types && dtype != kDTypes[static_cast<size_t>(sample) % kDTypes.size()]) continue;
        RunAlgorithm(collective, tree, shape, count, dtype, sample);
      }
    }
  }

  void RunAlgorithm(Collective collective, const RankTree& tree, const PlanShape& shape, int64_t count,
                    DType dtype, int64_t sample) {
    PlanRequest request =
        MakeRequest(collective, transport_.size(), count, static_cast<unsigned>(sample % 4));
    Start(request, dtype, sample);
    StatusOr<std::shared_ptr<const Plan>> plan = CheckedPlan(request, tree, shape, sample);
    Status status = plan.status();
    if (plan.ok()) status = communicator_->Run(*plan, input_, output_, dtype_, op_);
    if (status.ok()) status = Compare(request);
    Count(Annotate(status, plan.ok() ? (*plan)->algorithm : "plan"));
  }

  static StatusOr<std::shared_ptr<const Plan>> ProvedPlan(const PlanRequest& request, const RankTree& tree,
                                                          const PlanShape& shape) {
    ASSIGN_OR_RETURN(Plan plan, BuildPlan(request, tree, shape));
    RETURN_IF_ERROR(CheckPlan(plan));
    return std::make_shared<const Plan>(std::move(plan));
  }

  // Types of equal size share the plan of a sample.
  StatusOr<std::shared_ptr<const Plan>> CheckedPlan(const PlanRequest& request, const RankTree& tree,
                                                    const PlanShape& shape, int64_t sample) {
    if (sample != checked_sample_) checked_.clear();
    checked_sample_ = sample;
    std::shared_ptr<const Plan>& checked = checked_[request.element_bytes];
    if (checked == nullptr) {
      ASSIGN_OR_RETURN(checked, ProvedPlan(request, tree, shape));
    }
    return checked;
  }

  // Sums whose messages between the children of the root, which may be ranks, are encoded. The first sample
  // of each plan is sent in several pieces, if its size allows it.
  void RunLossyPlans() {
    const std::array<PlanShape, 2> shapes = {
        PlanShape{.top = Algorithm::kPairwise, .wire = WireFormat::kBf16},
        PlanShape{.top = Algorithm::kPairwise, .segments = 2, .wire = WireFormat::kInt8}};
    int64_t sample = 0;
    for (const RankTree& tree : GroupShapes(transport_.size())) {
      for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter}) {
        for (const PlanShape& shape : shapes) {
          for (int i = 0; i < (options_.is_whole ? std::ssize(kCounts) : options_.samples); ++i) {
            ++sample;
            const int64_t sampled = i == 0 ? kSeveralPieces : SizeOf(sample);
            const int64_t count = options_.is_whole ? kCounts[static_cast<size_t>(i)] : sampled;
            RunLossyPlan(collective, tree, shape, std::min(count, options_.max_count), sample);
          }
        }
      }
    }
  }

  void RunLossyPlan(Collective collective, const RankTree& tree, const PlanShape& shape, int64_t count,
                    int64_t sample) {
    const PlanRequest request =
        MakeRequest(collective, transport_.size(), count, static_cast<unsigned>(sample % 4));
    dtype_ = DType::kF32;
    op_ = ReduceOp::kSum;
    const int64_t in = InputCount(request, transport_.rank()), out = OutputCount(request, transport_.rank());
    input_.resize(static_cast<size_t>(in) * sizeof(float));
    output_.assign(static_cast<size_t>(out) * sizeof(float), std::byte{0xa5});
    for (int64_t i = 0; i < in; ++i) {
      const float value = RealOf(transport_.rank(), i);
      std::memcpy(input_.data() + i * static_cast<int64_t>(sizeof(value)), &value, sizeof(value));
    }
    const StatusOr<std::shared_ptr<const Plan>> plan = ProvedPlan(request, tree, shape);
    Status status = plan.status();
    if (plan.ok()) status = communicator_->Run(*plan, input_, output_, dtype_, op_);
    if (status.ok()) {
      const Status equal = collective == Collective::kAllReduce ? CompareRanks() : OkStatus();
      status = CompareSums(request, tree, shape.wire);
      if (status.ok()) status = equal;
    }
    Count(Annotate(status, plan.ok() ? (*plan)->algorithm : "plan"));
  }

  Status CompareSums(const PlanRequest& request, const RankTree& tree, WireFormat wire) const {
    const bool is_all = request.collective == Collective::kAllReduce;
    const int rank = transport_.rank();
    const int64_t first =
        is_all ? 0 : std::accumulate(request.counts.begin(), request.counts.begin() + rank, int64_t{0});
    const int64_t count = OutputCount(request, rank);
    const RealSums sums(tree, first, count, RealOf);
    double largest_error = 0, largest_bound = 0;
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      float value = 0;
      std::memcpy(&value, output_.data() + i * sizeof(value), sizeof(value));
      const double error = std::fabs(static_cast<double>(value) - sums.At(i));
      const double bound = sums.BoundAt(i, wire, is_all);
      if (!(error <= bound)) {  // nor NaN
        return DataLoss("rank {} of {}: {} of {}: element {} is {}, more than {} from {}", rank,
                        request.ranks, Name(request.collective), count, i, value, bound, sums.At(i));
      }
      largest_error = std::max(largest_error, error);
      largest_bound = std::max(largest_bound, bound);
    }
    // Sums without an encoding are a thousand times as exact.
    constexpr int64_t kMany = 1000;
    if (count < kMany || largest_error > largest_bound / 100) return OkStatus();
    return DataLoss("rank {} of {}: {} of {}: {} was not used, the largest error is {}", rank, request.ranks,
                    Name(request.collective), count, Name(wire), largest_error);
  }

  // All ranks have the same bytes.
  Status CompareRanks() {
    const std::string_view bytes(reinterpret_cast<const char*>(output_.data()), output_.size());  // NOLINT
    const auto own = static_cast<int64_t>(std::hash<std::string_view>()(bytes));
    const std::vector<int64_t> counts(transport_.size(), 1);
    std::vector<int64_t> all(counts.size());
    RETURN_IF_ERROR(communicator_->AllGather(std::as_bytes(std::span(&own, 1)),
                                             std::as_writable_bytes(std::span(all)), counts, DType::kI64));
    const auto differs = std::ranges::find_if(all, [&](int64_t hash) { return hash != own; });
    if (differs == all.end()) return OkStatus();
    return DataLoss("rank {} of {}: the result differs from that of rank {}", transport_.rank(),
                    transport_.size(), differs - all.begin());
  }

  // Chooses the operation and fills the buffers.
  void Start(PlanRequest& request, DType dtype, int64_t sample) {
    dtype_ = dtype;
    op_ = kOps[Mix(static_cast<uint64_t>(sample) + (options_.seed << 32)) / 64 % kOps.size()];
    request.element_bytes = tensor::BlockOf(dtype_).bytes;
    const int64_t in = InputCount(request, transport_.rank()), out = OutputCount(request, transport_.rank());
    input_.assign(static_cast<size_t>(in * request.element_bytes), std::byte{0});
    output_.assign(static_cast<size_t>(out * request.element_bytes), std::byte{0xa5});
    for (int64_t i = 0; i < in; ++i) {
      StoreValue(dtype_, ValueOf(transport_.rank(), i, op_), input_.data() + i * request.element_bytes);
    }
  }

  Status Compare(const PlanRequest& request) {
    std::array<std::byte, 8> expected{};
    for (int64_t i = 0; i < OutputCount(request, transport_.rank()); ++i) {
      const int64_t value = Expected(request, transport_.rank(), i, op_, totals_);
      StoreValue(dtype_, value, expected.data());
      if (std::memcmp(expected.data(), output_.data() + i * request.element_bytes, request.element_bytes) ==
          0) {
        continue;
      }
      return DataLoss("rank {} of {}: {} ({}, {}) of {}: element {} differs from {}", transport_.rank(),
                      request.ranks, Name(request.collective), tensor::DTypeName(dtype_), Name(op_),
                      request.count, i, value);
    }
    return OkStatus();
  }

  StatusOr<CollectiveHandle> Call(const PlanRequest& request, std::vector<int64_t>& received) {
    const auto row = request.matrix.begin() + static_cast<int64_t>(transport_.rank()) * transport_.size();
    switch (request.collective) {
      case Collective::kBroadcast:
        return communicator_->StartBroadcast(input_, output_, request.root, dtype_);
      case Collective::kAllReduce:
        return communicator_->StartAllReduce(input_, output_, dtype_, op_);
      case Collective::kReduceScatter:
        return communicator_->StartReduceScatter(input_, output_, request.counts, dtype_, op_);
      case Collective::kAllGather:
        return communicator_->StartAllGather(input_, output_, request.counts, dtype_);
      case Collective::kAllToAll:
        return communicator_->StartAllToAll(input_, output_, dtype_);
      case Collective::kAllToAllv:
        received.resize(transport_.size());
        return communicator_->StartAllToAllv(input_, std::span<const int64_t>(&*row, transport_.size()),
                                             output_, received, dtype_);
      case Collective::kBarrier:
        return communicator_->StartBarrier();
    }
    return InvalidArgument("unknown collective");
  }

  void RunPlanned(Collective collective, int64_t count, int64_t sample) {
    PlanRequest request =
        MakeRequest(collective, transport_.size(), count, static_cast<unsigned>(sample % 4));
    Start(request, TypeOf(sample + 1000), sample + 1000);
    std::vector<int64_t> received;
    StatusOr<CollectiveHandle> handle = Call(request, received);
    Status status = handle.status();
    if (handle.ok()) {
      while (!handle->Test(&status)) transport_.Idle();
    }
    if (status.ok()) status = Compare(request);
    for (int from = 0; status.ok() && from < std::ssize(received); ++from) {
      const int64_t expected =
          request.matrix[static_cast<size_t>(from) * transport_.size() + transport_.rank()];
      if (received[from] != expected) {
        status =
            DataLoss("rank {}: received count of rank {} is {}", transport_.rank(), from, received[from]);
      }
    }
    Count(Annotate(status, "planned"));
  }

  Transport& transport_;
  const ConformanceOptions& options_;
  std::unique_ptr<Communicator> communicator_;
  std::vector<std::byte> input_, output_;
  DType dtype_ = DType::kF32;
  ReduceOp op_ = ReduceOp::kSum;
  Totals totals_;
  std::map<int, std::shared_ptr<const Plan>> checked_;  // by bytes of an element, of one sample
  int64_t checked_sample_ = -1;
  ConformanceReport report_;
};

}  // namespace

ConformanceOptions ConformanceOf(int ranks, int large_ranks) {
  ConformanceOptions options;
  const char* const text = std::getenv("MOESAIC_CONFORMANCE");
  options.is_whole = text != nullptr && std::string_view(text) == "whole";
  if (text != nullptr && !options.is_whole) {
    char* end = nullptr;
    options.seed = std::strtoull(text, &end, 10);
    if (end == text || *end != '\0') {
      std::fprintf(stderr, "MOESAIC_CONFORMANCE must be whole or a seed, found \"%s\"\n", text);
      std::exit(2);
    }
  }
  constexpr int kLargeRanks = 5;  // shapes 2 + 2 + 1 and three levels
  if (ranks > (options.is_whole ? kLargeRanks : large_ranks)) options.max_count = kLargeCount;
  return options;
}

ConformanceReport CheckCollectives(Transport& transport, const ConformanceOptions& options) {
  return Suite(transport, options).Run();
}

Status CheckCollectivesOn(const RankRunner& runner, int max_ranks, int large_ranks, int samples,
                          int64_t* runs) {
  std::mutex mutex;
  Status failure;
  int64_t total = 0;
  for (int ranks = 1; ranks <= max_ranks; ++ranks) {
    ConformanceOptions options = ConformanceOf(ranks, large_ranks);
    options.samples = samples;
    runner(ranks, [&](Transport& transport) {
      const ConformanceReport report = CheckCollectives(transport, options);
      const std::lock_guard lock(mutex);
      if (failure.ok()) failure = report.first_failure;
      if (transport.rank() == 0) total += report.runs;
    });
  }
  if (runs != nullptr) *runs = total;
  return failure;
}

}  // namespace moesaic::comm
