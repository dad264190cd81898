#include "science/graph.h"

#include <algorithm>

#include "base/check.h"

namespace moesaic::graph {
namespace {

Status CheckSources(int64_t num_src) {
  if (num_src >= 0 && num_src <= INT32_MAX - 1) return OkStatus();
  return InvalidArgument("the graph must have fewer than 2^31 source nodes, not {}", num_src);
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
      const EdgeVector& own = by_destination.own();
      const bool keeps_order = by_source.edge.empty() && by_destination.edge.empty();
      EdgeVector edge(keeps_order ? 0 : edges);
      for (int32_t p = 0; p < edges; ++p) {
        const int32_t position = by_source.edge.empty() ? p : by_source.edge[p];
        by_source.neighbor[p] = own[position];
        if (!keeps_order) edge[p] = by_destination.edge.empty() ? position : by_destination.edge[position];
      }
      by_source.edge = std::move(edge);
    });
    return by_source;
  }
};

const EdgeVector& Adjacency::BuildOwn() const {
  std::call_once(once_, [this] {
    own_.resize(edges());
    for (int32_t s = 0; s < count(); ++s) std::fill(own_.begin() + ptr[s], own_.begin() + ptr[s + 1], s);
    built_.store(true, std::memory_order_release);
  });
  return own_;
}

Graph::Graph() : plan_(std::make_shared<Plan>()) {}

StatusOr<Graph> Graph::FromCoo(Indices src, Indices dst, int64_t num_src, int64_t num_dst,
                               runtime::ThreadPool* pool) {
  if (src.size != dst.size) {
    return InvalidArgument("src and dst must have one element per edge, but have {} and {}", src.size,
                           dst.size);
  }
  auto plan = std::make_shared<Plan>();
  RETURN_IF_ERROR(CheckSources(num_src));
  Adjacency& csc = plan->by_destination;
  ASSIGN_OR_RETURN(static_cast<Segments&>(csc),
                   GroupWithValues(dst, num_dst, "dst", src, num_src, "src", &csc.neighbor, pool));
  plan->num_src = static_cast<int32_t>(num_src);
  return Graph(std::move(plan), false);
}

StatusOr<Graph> Graph::FromCsc(Indices ptr, Indices src, int64_t num_src) {
  auto plan = std::make_shared<Plan>();
  RETURN_IF_ERROR(CheckSources(num_src));
  Adjacency& csc = plan->by_destination;
  ASSIGN_OR_RETURN(static_cast<Segments&>(csc), SegmentsFromPtr(ptr, src.size));
  csc.neighbor.resize(src.size);
  for (int64_t e = 0; e < src.size; ++e) {
    const int64_t s = src[e];
    if (s < 0 || s >= num_src) return InvalidArgument("src[{}] must be in [0, {}), but is {}", e, num_src, s);
    csc.neighbor[e] = static_cast<int32_t>(s);
  }
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
  for (int32_t d = 0; d < csc.count(); ++d) {
    for (int32_t p = csc.ptr[d]; p < csc.ptr[d + 1]; ++p) {
      const int64_t e = csc.EdgeAt(p);
      if (from[e] != csc.neighbor[p] || to[e] != d) return false;
    }
  }
  return true;
}

}  // namespace moesaic::graph
