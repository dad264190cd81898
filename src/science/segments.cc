#include "science/segments.h"

#include <algorithm>
#include <limits>

namespace moesaic::graph {
namespace {

constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
constexpr int kTasksPerThread = 8;
constexpr int64_t kMinTaskCost = 2048;  // about the cost of starting a task, in edges of 16 columns

void FindHubs(Segments* segments) {
  for (int32_t s = 0; s < segments->count(); ++s) {
    if (segments->ptr[s + 1] - segments->ptr[s] > kHubEdges) segments->hubs.push_back(s);
  }
}

// Counts edges per segment into ptr[index + 1]. Returns whether the indices are ascending; the position of
// the first index out of range goes to *fault, or -1.
template <typename Index>
bool CountEdges(const Index* index, int64_t size, int64_t count, std::vector<int32_t>* ptr, int64_t* fault) {
  *fault = -1;
  bool sorted = true;
  Index last = 0;
  int32_t* counts = ptr->data() + 1;
  for (int64_t e = 0; e < size; ++e) {
    const Index i = index[e];
    if (i < 0 || static_cast<int64_t>(i) >= count) {
      *fault = e;
      return false;
    }
    sorted &= i >= last;
    last = i;
    ++counts[i];
  }
  return sorted;
}

template <typename Index>
void PlaceEdges(const Index* index, int64_t size, std::vector<int32_t> next, EdgeVector* edge) {
  edge->resize(size);
  for (int64_t e = 0; e < size; ++e) (*edge)[next[index[e]]++] = static_cast<int32_t>(e);
}

// PlaceEdges() with the values of the edges. Returns whether all values are in [0, limit).
template <typename Index, typename Value>
bool PlaceWithValues(const Index* index, int64_t size, std::vector<int32_t> next, const Value* values,
                     int64_t limit, EdgeVector* edge, EdgeVector* grouped) {
  edge->resize(size);
  grouped->resize(size);
  int32_t *to_edge = edge->data(), *to_value = grouped->data(), *at = next.data();
  bool valid = true;
  for (int64_t e = 0; e < size; ++e) {
    const Value value = values[e];
    valid &= static_cast<uint64_t>(value) < static_cast<uint64_t>(limit);  // negative values are large
    const int32_t p = at[index[e]]++;
    to_edge[p] = static_cast<int32_t>(e);
    to_value[p] = static_cast<int32_t>(value);
  }
  return valid;
}

template <typename Value>
bool CopyValues(const Value* values, int64_t size, int64_t limit, EdgeVector* copy) {
  copy->resize(size);
  bool valid = true;
  for (int64_t e = 0; e < size; ++e) {
    valid &= static_cast<uint64_t>(values[e]) < static_cast<uint64_t>(limit);
    (*copy)[e] = static_cast<int32_t>(values[e]);
  }
  return valid;
}

// Calls run with the pointer of the caller's type.
template <typename Run>
auto WithIndex(const Indices& index, const Run& run) {
  return index.wide ? run(static_cast<const int64_t*>(index.data))
                    : run(static_cast<const int32_t*>(index.data));
}

// The boundaries of the groups. *sorted tells whether the order of the edges is already that of the groups.
StatusOr<Segments> CountGroups(const Indices& index, int64_t count, const char* name, bool* sorted) {
  if (count < 0 || count >= kLimit || index.size >= kLimit) {
    return InvalidArgument("{} has {} edges for {} nodes; each must be below 2^31", name, index.size, count);
  }
  Segments segments;
  segments.ptr.assign(count + 1, 0);
  int64_t fault = -1;
  *sorted = WithIndex(
      index, [&](const auto* data) { return CountEdges(data, index.size, count, &segments.ptr, &fault); });
  if (fault >= 0) {
    return InvalidArgument("{}[{}] must be in [0, {}), but is {}", name, fault, count, index[fault]);
  }
  for (int64_t s = 0; s < count; ++s) segments.ptr[s + 1] += segments.ptr[s];
  FindHubs(&segments);
  return segments;
}

}  // namespace

StatusOr<Segments> GroupByIndex(Indices index, int64_t count, const char* name) {
  bool sorted = false;
  ASSIGN_OR_RETURN(Segments segments, CountGroups(index, count, name, &sorted));
  if (!sorted) {
    WithIndex(index, [&](const auto* data) { PlaceEdges(data, index.size, segments.ptr, &segments.edge); });
  }
  return segments;
}

StatusOr<Segments> GroupWithValues(Indices index, int64_t count, const char* name, Indices values,
                                   int64_t limit, const char* values_name, EdgeVector* grouped) {
  bool sorted = false;
  ASSIGN_OR_RETURN(Segments segments, CountGroups(index, count, name, &sorted));
  const bool valid = WithIndex(values, [&](const auto* from) {
    if (sorted) return CopyValues(from, index.size, limit, grouped);
    return WithIndex(index, [&](const auto* data) {
      return PlaceWithValues(data, index.size, segments.ptr, from, limit, &segments.edge, grouped);
    });
  });
  for (int64_t e = 0; e < index.size && !valid; ++e) {
    if (values[e] < 0 || values[e] >= limit)
      return InvalidArgument("{}[{}] must be in [0, {}), but is {}", values_name, e, limit, values[e]);
  }
  return segments;
}

StatusOr<Segments> SegmentsFromPtr(Indices ptr, int64_t edges, const char* name) {
  if (ptr.size < 1) return InvalidArgument("{} needs one element or more, but has {}", name, ptr.size);
  if (edges >= kLimit || ptr.size >= kLimit) {
    return InvalidArgument("{} has {} segments of {} edges; each must be below 2^31", name, ptr.size - 1,
                           edges);
  }
  Segments segments;
  segments.ptr.resize(ptr.size);
  int64_t last = 0;
  for (int64_t s = 0; s < ptr.size; ++s) {
    const int64_t p = ptr[s];
    if (s == 0 && p != 0) return InvalidArgument("{}[0] must be 0, but is {}", name, p);
    if (p < last) return InvalidArgument("{}[{}] must be {} or more, but is {}", name, s, last, p);
    if (p > edges) return InvalidArgument("{}[{}] must be at most {}, but is {}", name, s, edges, p);
    segments.ptr[s] = static_cast<int32_t>(p);
    last = p;
  }
  if (last != edges) {
    return InvalidArgument("the last element of {} must be the number of edges, {}, but is {}", name, edges,
                           last);
  }
  FindHubs(&segments);
  return segments;
}

std::vector<SegmentRange> DivideByEdges(const Segments& segments, int threads) {
  std::vector<SegmentRange> ranges;
  const std::vector<int32_t>& ptr = segments.ptr;
  const int64_t total = int64_t{segments.edges()} + segments.count();
  const int64_t cost = std::max(kMinTaskCost, total / (int64_t{threads} * kTasksPerThread) + 1);
  size_t hub = 0;
  int32_t first = 0;
  while (first < segments.count()) {
    if (hub < segments.hubs.size() && segments.hubs[hub] == first) {
      ++hub;
      ++first;
      continue;
    }
    const int32_t end = hub < segments.hubs.size() ? segments.hubs[hub] : segments.count();
    // The cost of [first, s) is ptr[s] - ptr[first] + s - first, which grows with s.
    int32_t low = first + 1, high = end;
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (int64_t{ptr[middle]} - ptr[first] + middle - first >= cost) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    ranges.push_back({first, low});
    first = low;
  }
  return ranges;
}

std::vector<SegmentRange> DivideEvenly(int64_t items, int threads, int64_t at_least) {
  std::vector<SegmentRange> ranges;
  const int64_t size = std::max(at_least, items / (int64_t{threads} * kTasksPerThread) + 1);
  for (int64_t first = 0; first < items; first += size) {
    ranges.push_back({static_cast<int32_t>(first), static_cast<int32_t>(std::min(items, first + size))});
  }
  return ranges;
}

}  // namespace moesaic::graph
