#include "science/segments.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

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

// Consecutive edges of the caller that one task counts and places.
struct EdgePart {
  int64_t first = 0, last = 0;
  std::vector<int32_t> next;  // [segments]: edges per segment, then the position of the segment's next edge
  bool sorted = true;         // indices ascend, also from the part before
  bool valid = true;          // all values are in range
  int64_t fault = -1;         // position of the first index out of range, or -1
};

// Divides edges into one part per thread, as far as they are worth another array of counters.
std::vector<EdgePart> DivideEdges(int64_t edges, int64_t count, const runtime::ThreadPool* pool) {
  constexpr int64_t kMinEdges = 1 << 14;
  const int64_t threads = pool == nullptr ? 1 : pool->size();
  const int64_t parts = std::clamp<int64_t>(edges / std::max(kMinEdges, count), 1, threads);
  std::vector<EdgePart> divided(parts);
  for (int64_t i = 0; i < parts; ++i) {
    divided[i].first = edges * i / parts;
    divided[i].last = edges * (i + 1) / parts;
  }
  return divided;
}

void RunParts(runtime::ThreadPool* pool, std::vector<EdgePart>* parts,
              const std::function<void(EdgePart*)>& run) {
  if (parts->size() == 1) return run(parts->data());
  pool->Run(static_cast<int64_t>(parts->size()), [&](int64_t i, int) { run(&(*parts)[i]); });
}

template <typename Index>
void CountEdges(const Index* index, int64_t count, EdgePart* part) {
  part->next.assign(count, 0);
  bool sorted = true;
  int32_t* counts = part->next.data();
  Index last = part->first > 0 ? index[part->first - 1] : 0;
  for (int64_t e = part->first; e < part->last; ++e) {
    const Index i = index[e];
    if (i < 0 || static_cast<int64_t>(i) >= count) {
      part->fault = e;
      return;
    }
    sorted &= i >= last;
    last = i;
    ++counts[i];
  }
  part->sorted = sorted;
}

// Calls place(edge, position) for the edges of a part, in their order. Prefetches of the lines that are
// written do not make it faster on Zen 5.
template <typename Index, typename Place>
void PlaceEdges(const Index* index, EdgePart* part, const Place& place) {
  int32_t* next = part->next.data();
  for (int64_t e = part->first; e < part->last; ++e) place(e, next[index[e]]++);
}

template <typename Index>
void PlaceNumbers(const Index* index, EdgePart* part, EdgeVector* edge) {
  int32_t* to = edge->data();
  PlaceEdges(index, part, [to](int64_t e, int32_t p) { to[p] = static_cast<int32_t>(e); });
}

// Places the values of the edges, which are checked against [0, limit); with kNumbers also their numbers.
template <bool kNumbers, typename Index, typename Value>
void PlaceValues(const Index* index, EdgePart* part, const Value* values, int64_t limit, EdgeVector* edge,
                 EdgeVector* grouped) {
  int32_t *to_edge = edge->data(), *to_value = grouped->data();
  bool valid = true;
  PlaceEdges(index, part, [&](int64_t e, int32_t p) {
    const Value value = values[e];
    valid &= static_cast<uint64_t>(value) < static_cast<uint64_t>(limit);  // negative values are large
    if constexpr (kNumbers) to_edge[p] = static_cast<int32_t>(e);
    to_value[p] = static_cast<int32_t>(value);
  });
  part->valid = valid;
}

template <typename Value>
void CopyValues(const Value* values, EdgePart* part, int64_t limit, EdgeVector* copy) {
  int32_t* to = copy->data();
  bool valid = true;
  for (int64_t e = part->first; e < part->last; ++e) {
    valid &= static_cast<uint64_t>(values[e]) < static_cast<uint64_t>(limit);
    to[e] = static_cast<int32_t>(values[e]);
  }
  part->valid = valid;
}

// Calls run with the pointer of the caller's type.
template <typename Run>
auto WithIndex(const Indices& index, const Run& run) {
  return index.wide ? run(static_cast<const int64_t*>(index.data))
                    : run(static_cast<const int32_t*>(index.data));
}

// Edges counted by segment, and the parts in which they are placed.
struct CountedEdges {
  Segments segments;
  std::vector<EdgePart> parts;
  bool sorted = true;  // the order of the edges is already that of the groups
  // With two arrays, two parts have the edges of both, and each places one array: cores that write to one
  // array take lines from each other, as the edges of a segment are adjacent.
  bool paired = false;
};

StatusOr<CountedEdges> CountGroups(const Indices& index, int64_t count, const char* name, int arrays,
                                   runtime::ThreadPool* pool) {
  if (count < 0) return InvalidArgument("{} must have 0 or more nodes or segments, but has {}", name, count);
  if (count >= kLimit || index.size >= kLimit) {
    return InvalidArgument("{} has {} edges for {} nodes; each must be below 2^31", name, index.size, count);
  }
  CountedEdges counted;
  std::vector<EdgePart>& parts = counted.parts;
  parts = DivideEdges(index.size, count, pool);
  WithIndex(index, [&](const auto* data) {
    RunParts(pool, &parts, [&](EdgePart* part) { CountEdges(data, count, part); });
  });
  for (const EdgePart& part : parts) {
    if (part.fault >= 0) {
      return InvalidArgument("{}[{}] must be in [0, {}), but is {}", name, part.fault, count,
                             index[part.fault]);
    }
    counted.sorted &= part.sorted;
  }
  // The edges of a segment are placed part after part, so that the order does not depend on the parts.
  counted.paired = arrays == 2 && parts.size() % 2 == 0 && !counted.sorted;
  const size_t together = counted.paired ? 2 : 1;
  Segments& segments = counted.segments;
  segments.ptr.resize(count + 1);
  int32_t position = 0;
  for (int64_t s = 0; s < count; ++s) {
    for (size_t i = 0; i < parts.size(); i += together) {
      const int32_t begin = position;
      for (size_t k = i; k < i + together; ++k) position += std::exchange(parts[k].next[s], begin);
    }
    segments.ptr[s + 1] = position;
  }
  for (size_t i = 0; counted.paired && i < parts.size(); i += 2) {
    parts[i].last = parts[i + 1].last;
    parts[i + 1].first = parts[i].first;
  }
  FindHubs(&segments);
  return counted;
}

}  // namespace

StatusOr<Segments> GroupByIndex(Indices index, int64_t count, const char* name, runtime::ThreadPool* pool) {
  ASSIGN_OR_RETURN(CountedEdges counted, CountGroups(index, count, name, 1, pool));
  Segments& segments = counted.segments;
  if (!counted.sorted) {
    segments.edge.resize(index.size);
    WithIndex(index, [&](const auto* data) {
      RunParts(pool, &counted.parts, [&](EdgePart* part) { PlaceNumbers(data, part, &segments.edge); });
    });
  }
  return std::move(segments);
}

StatusOr<Segments> GroupWithValues(Indices index, int64_t count, const char* name, Indices values,
                                   int64_t limit, const char* values_name, EdgeVector* grouped,
                                   runtime::ThreadPool* pool) {
  ASSIGN_OR_RETURN(CountedEdges counted, CountGroups(index, count, name, 2, pool));
  Segments& segments = counted.segments;
  grouped->resize(index.size);
  if (!counted.sorted) segments.edge.resize(index.size);
  WithIndex(values, [&](const auto* from) {
    WithIndex(index, [&](const auto* data) {
      RunParts(pool, &counted.parts, [&](EdgePart* part) {
        if (counted.sorted) {
          CopyValues(from, part, limit, grouped);
        } else if (!counted.paired) {
          PlaceValues<true>(data, part, from, limit, &segments.edge, grouped);
        } else if ((part - counted.parts.data()) % 2 == 0) {
          PlaceNumbers(data, part, &segments.edge);
        } else {
          PlaceValues<false>(data, part, from, limit, &segments.edge, grouped);
        }
      });
    });
  });
  const bool valid = std::all_of(counted.parts.begin(), counted.parts.end(),
                                 [](const EdgePart& part) { return part.valid; });
  for (int64_t e = 0; e < index.size && !valid; ++e) {
    if (values[e] < 0 || values[e] >= limit)
      return InvalidArgument("{}[{}] must be in [0, {}), but is {}", values_name, e, limit, values[e]);
  }
  return std::move(segments);
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
