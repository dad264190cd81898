#include "comm/collectives/plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

namespace moesaic::comm {
namespace {

constexpr std::array<std::string_view, 7> kCollectiveNames = {
    "broadcast", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_allv", "barrier"};

int64_t Sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Number of elements whose bytes can be counted.
int64_t MostElements(const PlanRequest& request) {
  return std::numeric_limits<int64_t>::max() / std::max(1, request.element_bytes);
}

Status ValidateCounts(const PlanRequest& request, const std::vector<int64_t>& counts, size_t size) {
  if (counts.size() != size) {
    return InvalidArgument("{}: expected {} counts, one per rank or pair; found {}", Name(request.collective),
                           size, counts.size());
  }
  int64_t left = MostElements(request);
  for (size_t i = 0; i < size; ++i) {
    if (counts[i] < 0) {
      return InvalidArgument("{}: count {} is negative; found {}", Name(request.collective), i, counts[i]);
    }
    if (counts[i] > left) {
      return InvalidArgument("{}: counts must be at most {} in all; the sum exceeds it at count {}, found {}",
                             Name(request.collective), MostElements(request), i, counts[i]);
    }
    left -= counts[i];
  }
  return OkStatus();
}

}  // namespace

std::string_view Name(Collective collective) { return kCollectiveNames[static_cast<size_t>(collective)]; }

StatusOr<Collective> CollectiveOf(std::string_view name) {
  const auto found = std::ranges::find(kCollectiveNames, name);
  if (found == kCollectiveNames.end()) return InvalidArgument("unknown collective \"{}\"", name);
  return static_cast<Collective>(found - kCollectiveNames.begin());
}

std::string_view Name(PlanBuffer buffer) {
  static constexpr std::array<std::string_view, 3> kNames = {"input", "output", "scratch"};
  return kNames[static_cast<size_t>(buffer)];
}

std::string_view Name(WireFormat wire) {
  static constexpr std::array<std::string_view, 3> kNames = {"exact", "bf16", "int8"};
  return kNames[static_cast<size_t>(wire)];
}

Status ValidateRequest(const PlanRequest& request) {
  if (request.ranks < 1) return InvalidArgument("plan: expected at least one rank; found {}", request.ranks);
  if (request.root < 0 || request.root >= request.ranks) {
    return InvalidArgument("plan: root must be a rank below {}; found {}", request.ranks, request.root);
  }
  if (request.count < 0) {
    return InvalidArgument("{}: count must not be negative; found {}", Name(request.collective),
                           request.count);
  }
  const int64_t most = MostElements(request) / request.ranks;
  if (request.count > most) {
    return InvalidArgument("{}: count must be at most {}; found {}", Name(request.collective), most,
                           request.count);
  }
  const auto ranks = static_cast<size_t>(request.ranks);
  switch (request.collective) {
    case Collective::kReduceScatter:
    case Collective::kAllGather:
      return ValidateCounts(request, request.counts, ranks);
    case Collective::kAllToAllv:
      return ValidateCounts(request, request.matrix, ranks * ranks);
    default:
      return OkStatus();
  }
}

int64_t InputCount(const PlanRequest& request, int rank) {
  switch (request.collective) {
    case Collective::kBroadcast:
      return rank == request.root ? request.count : 0;
    case Collective::kAllReduce:
      return request.count;
    case Collective::kReduceScatter:
      return Sum(request.counts);
    case Collective::kAllGather:
      return request.counts[rank];
    case Collective::kAllToAll:
      return request.count * request.ranks;
    case Collective::kAllToAllv: {
      const auto row = request.matrix.begin() + static_cast<int64_t>(rank) * request.ranks;
      return std::accumulate(row, row + request.ranks, int64_t{0});
    }
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

int64_t OutputCount(const PlanRequest& request, int rank) {
  switch (request.collective) {
    case Collective::kBroadcast:
    case Collective::kAllReduce:
      return request.count;
    case Collective::kReduceScatter:
      return request.counts[rank];
    case Collective::kAllGather:
      return Sum(request.counts);
    case Collective::kAllToAll:
      return request.count * request.ranks;
    case Collective::kAllToAllv: {
      int64_t sum = 0;
      for (int from = 0; from < request.ranks; ++from) {
        sum += request.matrix[static_cast<size_t>(from) * request.ranks + rank];
      }
      return sum;
    }
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

}  // namespace moesaic::comm
