#include "comm/exchange/exchange_cost.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "comm/exchange/routing_messages.h"
#include "comm/exchange/segment_pipeline.h"
#include "comm/topology/flow_simulator.h"

namespace moesaic::comm {
namespace {

// Where many messages end one after the other, those that end within a thousandth of the exchange's time end
// together.
constexpr size_t kManyFlows = 10000;
constexpr double kQuantumShare = 1e-3;

// Messages of all ranks as flows that depend on one another.
class FlowSchedule {
 public:
  explicit FlowSchedule(const Topology& topology) : topology_(topology) {}

  // Adds a message and returns its number. Both lists of earlier messages are optional.
  int Add(int from, int to, int64_t bytes, std::vector<int> after) {
    flows_.push_back({from, to, static_cast<double>(bytes), 0, std::move(after)});
    return static_cast<int>(flows_.size()) - 1;
  }
  StatusOr<double> Seconds() const {
    const double quantum_s = flows_.size() < kManyFlows ? 0 : kQuantumShare * Bound();
    ASSIGN_OR_RETURN(const std::vector<double> ends, SimulateFlows(topology_, flows_, quantum_s));
    return ends.empty() ? 0 : *std::max_element(ends.begin(), ends.end());
  }

 private:
  // Seconds of the channel with most bytes.
  double Bound() const {
    std::vector<double> bytes(topology_.channels().size(), 0);
    for (const ScheduledFlow& flow : flows_) {
      for (const int channel : topology_.Path(flow.from, flow.to)) bytes[channel] += flow.bytes;
    }
    double bound = 0;
    for (size_t channel = 0; channel < bytes.size(); ++channel)
      bound = std::max(bound, bytes[channel] / topology_.channels()[channel].bytes_per_s);
    return bound;
  }

  const Topology& topology_;
  std::vector<ScheduledFlow> flows_;
};

// Adds headers and routing of all phases. Returns for each rank the messages that its rows wait for.
std::vector<std::vector<int>> AddRouting(const RouteTree& tree, std::span<const Route> routes,
                                         FlowSchedule* schedule, std::vector<TrafficCounter>* traffic) {
  std::vector<std::vector<int>> last(routes.size());
  for (int phase = 0; phase < tree.phases(); ++phase) {
    std::vector<std::vector<int>> next(routes.size());
    for (size_t rank = 0; rank < routes.size(); ++rank) {
      const int from = static_cast<int>(rank);
      for (const int peer : tree.Targets(from, phase)) {
        int64_t bytes = sizeof(RoutingHeader);
        (*traffic)[rank].CountRouting(peer, bytes);
        for (const RouteSend& send : routes[rank].sends) {
          if (send.phase != phase || send.peer != peer) continue;
          const auto body = static_cast<int64_t>(RouteBuilder::EncodedBytes(send));
          (*traffic)[rank].CountRouting(peer, body);
          bytes += body;
        }
        const int flow = schedule->Add(from, peer, bytes, last[rank]);
        next[rank].push_back(flow);
        next[peer].push_back(flow);
      }
    }
    for (size_t rank = 0; rank < routes.size(); ++rank) {
      if (!next[rank].empty()) last[rank] = std::move(next[rank]);
    }
  }
  return last;
}

// Numbers of the flows that bring a rank's rows, by phase and segment.
using Arrivals = std::vector<std::vector<std::vector<int>>>;  // [ranks][phases * segments]

struct RowMessages {
  int phases = 0, segments = 0;
  int64_t row_bytes = 0;
  bool by_slot = false;
};

RowMessages ShapeOf(std::span<const Route> routes, int64_t row_bytes, bool by_slot) {
  RowMessages shape{.row_bytes = row_bytes, .by_slot = by_slot};
  for (const Route& route : routes) {
    shape.phases = std::max(shape.phases, route.phases());
    shape.segments = std::max(shape.segments, route.segments);
  }
  return shape;
}

int64_t RowsOfSegment(const RouteSend& send, int segment, bool by_slot) {
  const auto rows_before = [&](int end) -> int64_t {
    const int32_t rows = end == 0 ? 0 : send.segment_end[std::min<size_t>(end, send.segment_end.size()) - 1];
    if (!by_slot) return rows;
    return rows == 0 ? 0 : send.entry_end[rows - 1];
  };
  return rows_before(segment + 1) - rows_before(segment);
}

// Adds the messages of rows of all ranks. Homeward messages go from a send's peer to its rank. As in
// SegmentPipeline, a segment waits for the same segment of earlier phases, and for the message to the same
// peer that is kWindow before it.
void AddRows(std::span<const Route> routes, const RowMessages& shape, PhaseOrder order,
             std::span<const std::vector<int>> start, FlowSchedule* schedule,
             std::vector<TrafficCounter>* traffic) {
  Arrivals arrivals(routes.size(),
                    std::vector<std::vector<int>>(static_cast<size_t>(shape.phases) * shape.segments));
  const bool outward = order == PhaseOrder::kOutward;
  for (int step = 0; step < shape.phases; ++step) {
    const int phase = outward ? step : shape.phases - 1 - step;
    for (size_t rank = 0; rank < routes.size(); ++rank) {
      for (const RouteSend& send : routes[rank].sends) {
        if (send.phase != phase) continue;
        const int from = outward ? static_cast<int>(rank) : send.peer,
                  to = outward ? send.peer : static_cast<int>(rank);
        std::vector<int> flows;
        for (int segment = 0; segment < shape.segments; ++segment) {
          const int64_t rows = RowsOfSegment(send, segment, shape.by_slot);
          if (rows == 0) continue;
          std::vector<int> after = start.empty() ? std::vector<int>() : start[from];
          for (int other = 0; other < shape.phases; ++other) {
            if (outward ? other >= phase : other <= phase) continue;
            const auto& earlier = arrivals[from][static_cast<size_t>(other) * shape.segments + segment];
            after.insert(after.end(), earlier.begin(), earlier.end());
          }
          if (flows.size() >= SegmentPipeline::kWindow)
            after.push_back(flows[flows.size() - SegmentPipeline::kWindow]);
          const int flow = schedule->Add(from, to, rows * shape.row_bytes, std::move(after));
          flows.push_back(flow);
          arrivals[to][static_cast<size_t>(phase) * shape.segments + segment].push_back(flow);
          (*traffic)[from].CountRows(to, rows, rows * shape.row_bytes);
        }
      }
    }
  }
}

std::vector<LevelTraffic> Totals(std::span<const TrafficCounter> counters) {
  std::vector<LevelTraffic> totals = counters[0].levels();
  for (size_t rank = 1; rank < counters.size(); ++rank) {
    for (size_t level = 0; level < totals.size(); ++level) {
      const LevelTraffic& from = counters[rank].levels()[level];
      totals[level].messages += from.messages;
      totals[level].rows += from.rows;
      totals[level].row_bytes += from.row_bytes;
      totals[level].routing_bytes += from.routing_bytes;
    }
  }
  return totals;
}

RouteTree TreeOf(const Topology& topology, const ExchangeOptions& options) {
  const std::vector<bool> dead(topology.ranks(), false);
  return options.forwarding == Forwarding::kDirect
             ? RouteTree::Direct(dead)
             : RouteTree::Hierarchical(topology, dead, options.forward_levels);
}

}  // namespace

StatusOr<TokenRoutes> UniformTokens(const Topology& topology, const ExpertMap& map,
                                    const ExchangeWorkload& workload, ReplicaChoice choice, int rank) {
  if (workload.k < 0 || workload.k > map.experts() || workload.tokens_per_rank < 0 || workload.hidden < 1) {
    return InvalidArgument(
        "exchange: a workload needs top-k in [0, {}], tokens and a hidden size, found {}, {} and {}",
        map.experts(), workload.k, workload.tokens_per_rank, workload.hidden);
  }
  std::seed_seq seed = {workload.seed, static_cast<uint32_t>(rank)};
  std::mt19937 random(seed);
  std::vector<int32_t> order(map.experts()), ids;
  std::iota(order.begin(), order.end(), 0);
  for (int token = 0; token < workload.tokens_per_rank; ++token) {
    for (int slot = 0; slot < workload.k; ++slot) {
      const auto left = static_cast<uint64_t>(map.experts() - slot);
      std::swap(order[slot], order[slot + static_cast<int>(random() * left >> 32)]);
      ids.push_back(order[slot]);
    }
  }
  TokenRoutes routes;
  const ReplicaChooser chooser(topology, map, rank, choice);
  RETURN_IF_ERROR(RouteTokens({workload.tokens_per_rank, workload.k, ids, {}, {}}, map, chooser, &routes));
  return routes;
}

StatusOr<std::vector<Route>> BuildRoutes(const RouteTree& tree, const ExpertMap& map,
                                         std::span<const TokenRoutes> tokens, int segment_tokens) {
  std::vector<Route> routes(tokens.size());
  std::vector<RouteBuilder> builders;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    builders.emplace_back(tree, map, static_cast<int>(rank), segment_tokens, &routes[rank]);
    builders.back().AddTokens(tokens[rank]);
  }
  std::vector<size_t> accepted(tokens.size(), 0);  // sends of earlier phases
  std::vector<std::byte> bytes;
  for (int phase = 0; phase < tree.phases(); ++phase) {
    for (RouteBuilder& builder : builders) builder.BeginPhase(phase);
    for (size_t rank = 0; rank < tokens.size(); ++rank) {
      for (; accepted[rank] < routes[rank].sends.size(); ++accepted[rank]) {
        const RouteSend& send = routes[rank].sends[accepted[rank]];
        bytes.clear();
        builders[rank].Encode(send, &bytes);
        RETURN_IF_ERROR(builders[send.peer].Accept(phase, static_cast<int>(rank),
                                                   static_cast<int32_t>(send.rows.size()), bytes));
      }
    }
  }
  for (RouteBuilder& builder : builders) builder.Finish();
  return routes;
}

StatusOr<ExchangeEstimate> EstimateExchange(const Topology& topology, const ExpertMap& map,
                                            const ExchangeWorkload& workload,
                                            const ExchangeOptions& options) {
  const RouteTree tree = TreeOf(topology, options);
  std::vector<TokenRoutes> tokens;
  std::vector<TrafficCounter> dispatch, combine;
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    ASSIGN_OR_RETURN(tokens.emplace_back(),
                     UniformTokens(topology, map, workload, options.replica_choice, rank));
    dispatch.emplace_back(topology, rank);
    combine.emplace_back(topology, rank);
  }
  ASSIGN_OR_RETURN(const std::vector<Route> routes, BuildRoutes(tree, map, tokens, options.segment_tokens));
  ExchangeEstimate estimate;
  FlowSchedule outward(topology), homeward(topology);
  const auto start = AddRouting(tree, routes, &outward, &dispatch);
  AddRows(routes, ShapeOf(routes, WireRowBytes(options.dispatch_payload, workload.hidden), false),
          PhaseOrder::kOutward, start, &outward, &dispatch);
  AddRows(routes,
          ShapeOf(routes, WireRowBytes(options.combine_payload, workload.hidden),
                  options.reduction == Reduction::kBySlot),
          PhaseOrder::kHomeward, {}, &homeward, &combine);
  ASSIGN_OR_RETURN(estimate.dispatch_s, outward.Seconds());
  ASSIGN_OR_RETURN(estimate.combine_s, homeward.Seconds());
  estimate.dispatch = Totals(dispatch);
  estimate.combine = Totals(combine);
  return estimate;
}

std::vector<std::string> InnerLevels(const Topology& topology) {
  std::vector<std::string> levels;
  for (const Group& group : topology.groups()) {
    if (group.parent < 0 || group.children.empty()) continue;
    if (std::find(levels.begin(), levels.end(), group.level) == levels.end()) levels.push_back(group.level);
  }
  return levels;
}

StatusOr<std::vector<ForwardingCandidate>> RankForwardings(const Topology& topology, const ExpertMap& map,
                                                           const ExchangeWorkload& workload,
                                                           ExchangeOptions options) {
  const std::vector<std::string> levels = InnerLevels(topology);
  std::vector<ForwardingCandidate> candidates;
  for (uint32_t set = 0; set < uint32_t{1} << std::min<size_t>(levels.size(), 6); ++set) {
    ForwardingCandidate candidate;
    for (size_t level = 0; level < levels.size(); ++level) {
      if (set >> level & 1U) candidate.forward_levels.push_back(levels[level]);
    }
    candidate.forwarding = set == 0 ? Forwarding::kDirect : Forwarding::kHierarchical;
    options.forwarding = candidate.forwarding;
    options.forward_levels = candidate.forward_levels;
    ASSIGN_OR_RETURN(candidate.estimate, EstimateExchange(topology, map, workload, options));
    candidates.push_back(std::move(candidate));
  }
  std::stable_sort(
      candidates.begin(), candidates.end(), [](const ForwardingCandidate& a, const ForwardingCandidate& b) {
        return a.estimate.dispatch_s + a.estimate.combine_s < b.estimate.dispatch_s + b.estimate.combine_s;
      });
  return candidates;
}

}  // namespace moesaic::comm
