// Plans of segmented reductions: edges grouped by node, and the division of the groups into tasks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "runtime/huge_pages.h"
#include "runtime/thread_pool.h"
#include "science/features.h"

namespace moesaic::graph {

/// Segments with more edges than this are reduced in parts of this many edges. The parts depend on the graph
/// alone, so results do not depend on the number of threads.
inline constexpr int32_t kHubEdges = 4096;

/// One number per edge. New elements are not initialized: plans write each once.
using EdgeVector = std::vector<int32_t, runtime::HugePageAllocator<int32_t>>;

/// Edges grouped by segment. Position p of the grouped order holds the caller's edge edge[p].
struct Segments {
  std::vector<int32_t> ptr = {0};  ///< [segments + 1]: segment s has positions [ptr[s], ptr[s + 1]).
  EdgeVector edge;                 ///< [edges], or empty if the caller's order is already grouped.
  std::vector<int32_t> hubs;       ///< Segments with more than kHubEdges edges, ascending.

  int32_t count() const { return static_cast<int32_t>(ptr.size()) - 1; }
  int32_t edges() const { return ptr.back(); }
  /// Returns the caller's number of the edge at a position.
  int64_t EdgeAt(int64_t position) const { return edge.empty() ? position : edge[position]; }
  const int32_t* edge_rows() const { return edge.empty() ? nullptr : edge.data(); }
};

/// Groups edges by index[e] in [0, count) with a stable counting sort. Fails with the position of the first
/// index out of range, or if there are 2^31 or more edges or segments. The order is the same for any number
/// of threads of `pool`; null: the caller's thread only.
StatusOr<Segments> GroupByIndex(Indices index, int64_t count, const char* name = "index",
                                runtime::ThreadPool* pool = nullptr);

/// Like GroupByIndex(), but also copies `values`, one per index, in grouped order into *grouped. This takes
/// one pass over the edges instead of two. Fails like GroupByIndex(), or with the position of the first value
/// out of [0, limit).
StatusOr<Segments> GroupWithValues(Indices index, int64_t count, const char* name, Indices values,
                                   int64_t limit, const char* values_name, EdgeVector* grouped,
                                   runtime::ThreadPool* pool = nullptr);

/// Returns segments with these boundaries. Fails unless ptr[0] = 0, ptr does not decrease, and ptr[last] =
/// edges.
StatusOr<Segments> SegmentsFromPtr(Indices ptr, int64_t edges, const char* name = "ptr");

/// Consecutive segments of one task.
struct SegmentRange {
  int32_t first, last;
};

/// Divides segments other than hubs into ranges of about equal cost, which counts edges and segments.
std::vector<SegmentRange> DivideByEdges(const Segments& segments, int threads);

/// Divides `items` positions into ranges for `threads` workers.
std::vector<SegmentRange> DivideEvenly(int64_t items, int threads, int64_t at_least);

}  // namespace moesaic::graph
