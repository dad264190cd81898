#include "science/graph.h"

#include <mutex>

#include "base/check.h"

namespace moesaic::graph {
namespace {

void FillOwn(Adjacency* adjacency) {
  adjacency->own.resize(adjacency->edges());
  for (int32_t s = 0; s < adjacency->count(); ++s) {
    for (int32_t p = adjacency->ptr[s]; p < adjacency->ptr[s + 1]; ++p) adjacency->own[p] = s;
  }
}

// Copies sources in grouped order. Returns the first edge whose source is out of range, or -1.
template <typename Index>
int64_t CopyNeighbors(const Index* src, int64_t num_src, Adjacency* adjacency) {
  const int32_t edges = adjacency->edges();
  const int32_t* order = adjacency->edge_rows();
  adjacency->neighbor.resize(edges);
  bool valid = true;
  for (int32_t p = 0; p < edges; ++p) {
    const Index s = src[order != nullptr ? order[p] : p];
    valid &= s >= 0 && static_cast<int64_t>(s) < num_src;
    adjacency->neighbor[p] = static_cast<int32_t>(s);
  }
  if (valid) return -1;
  for (int32_t e = 0; e < edges; ++e) {
    if (src[e] < 0 || static_cast<int64_t>(src[e]) >= num_src) return e;
  }
  return -1;
}

Status Complete(Indices src, int64_t num_src, Adjacency* adjacency) {
  if (num_src < 0 || num_src > INT32_MAX - 1) {
    return InvalidArgument("the graph must have fewer than 2^31 source nodes, not {}", num_src);
  }
  const int64_t fault = src.wide ? CopyNeighbors(static_cast<const int64_t*>(src.data), num_src, adjacency)
                                 : CopyNeighbors(static_cast<const int32_t*>(src.data), num_src, adjacency);
  if (fault >= 0) return InvalidArgument("src[{}] must be in [0, {}), but is {}", fault, num_src, src[fault]);
  FillOwn(adjacency);
  return OkStatus();
}

}  // namespace

struct Graph::Plan {
  int32_t num_src = 0;
  Adjacency by_destination;
  std::once_flag once;
  Adjacency by_source;  // built by BySource()

  const Adjacency& BySource() {
    std::call_once(once, [this] {
      StatusOr<Segments> grouped =
          GroupByIndex(Indices::Of(by_destination.neighbor.data(), by_destination.edges()), num_src);
      MOESAIC_CHECK(grouped.ok());  // Complete() validated the sources
      // Positions of the grouped order are positions of by_destination: replace them by the caller's edges.
      static_cast<Segments&>(by_source) = *std::move(grouped);
      const int32_t edges = by_source.edges();
      by_source.neighbor.resize(edges);
      const bool keeps_order = by_source.edge.empty() && by_destination.edge.empty();
      std::vector<int32_t> edge(keeps_order ? 0 : edges);
      for (int32_t p = 0; p < edges; ++p) {
        const int32_t position = by_source.edge.empty() ? p : by_source.edge[p];
        by_source.neighbor[p] = by_destination.own[position];
        if (!keeps_order) edge[p] = by_destination.edge.empty() ? position : by_destination.edge[position];
      }
      by_source.edge = std::move(edge);
      FillOwn(&by_source);
    });
    return by_source;
  }
};

Graph::Graph() : plan_(std::make_shared<Plan>()) {}

StatusOr<Graph> Graph::FromCoo(Indices src, Indices dst, int64_t num_src, int64_t num_dst) {
  if (src.size != dst.size) {
    return InvalidArgument("src and dst must have one element per edge, but have {} and {}", src.size,
                           dst.size);
  }
  auto plan = std::make_shared<Plan>();
  ASSIGN_OR_RETURN(static_cast<Segments&>(plan->by_destination), GroupByIndex(dst, num_dst, "dst"));
  RETURN_IF_ERROR(Complete(src, num_src, &plan->by_destination));
  plan->num_src = static_cast<int32_t>(num_src);
  return Graph(std::move(plan), false);
}

StatusOr<Graph> Graph::FromCsc(Indices ptr, Indices src, int64_t num_src) {
  auto plan = std::make_shared<Plan>();
  ASSIGN_OR_RETURN(static_cast<Segments&>(plan->by_destination), SegmentsFromPtr(ptr, src.size));
  RETURN_IF_ERROR(Complete(src, num_src, &plan->by_destination));
  plan->num_src = static_cast<int32_t>(num_src);
  return Graph(std::move(plan), false);
}

int32_t Graph::num_src() const { return reversed_ ? plan_->by_destination.count() : plan_->num_src; }
int32_t Graph::num_dst() const { return reversed_ ? plan_->num_src : plan_->by_destination.count(); }
int32_t Graph::num_edges() const { return plan_->by_destination.edges(); }
const Adjacency& Graph::by_destination() const {
  return reversed_ ? plan_->BySource() : plan_->by_destination;
}
const Adjacency& Graph::by_source() const { return reversed_ ? plan_->by_destination : plan_->BySource(); }
Graph Graph::Reversed() const { return Graph(plan_, !reversed_); }

bool Graph::Matches(Indices src, Indices dst) const {
  const Adjacency& csc = plan_->by_destination;
  const Indices& from = reversed_ ? dst : src;
  const Indices& to = reversed_ ? src : dst;
  if (from.size != csc.edges() || to.size != csc.edges()) return false;
  for (int32_t p = 0; p < csc.edges(); ++p) {
    const int32_t e = csc.edge.empty() ? p : csc.edge[p];
    if (from[e] != csc.neighbor[p] || to[e] != csc.own[p]) return false;
  }
  return true;
}

}  // namespace moesaic::graph
