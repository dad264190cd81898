#include "parallel/placement/traffic_front.h"

#include <algorithm>

#include "parallel/placement/balance.h"
#include "parallel/placement/planner.h"

namespace moesaic::parallel {
namespace {

// From balance only to all experts at home.
constexpr double kWeights[] = {0, 1e-4, 1e-2, 1e-1, 1, 10, 1e2, 1e3, 1e4, 1e6, 1e12};

FrontPoint Measure(std::string name, double weight, const Placement& placement,
                   std::span<const Workload> workloads, const FrontOptions& options) {
  FrontPoint point{std::move(name), weight};
  int count = 0;
  for (const Workload& workload : workloads) {
    for (int layer = 0; layer < workload.total.layers; ++layer) {
      if (!HasTokens(workload.total, layer)) continue;
      const std::span<const double> tokens = workload.total.layer(layer);
      const double imbalance = Imbalance(placement.layers[layer], tokens);
      point.mean += imbalance;
      point.worst = std::max(point.worst, imbalance);
      point.remote_nodes += RemoteNodes(placement.layers[layer], tokens, options.nodes, options.routing);
      ++count;
    }
  }
  point.mean /= count;
  point.remote_nodes /= count;
  return point;
}

void MarkDominated(std::vector<FrontPoint>& points) {
  constexpr double kRounding = 1e-9;
  for (FrontPoint& point : points) {
    point.dominated = std::any_of(points.begin(), points.end(), [&](const FrontPoint& other) {
      const double mean = other.mean - point.mean, nodes = other.remote_nodes - point.remote_nodes;
      return mean <= kRounding && nodes <= kRounding && (mean < -kRounding || nodes < -kRounding);
    });
  }
}

}  // namespace

StatusOr<std::vector<FrontPoint>> PlanFront(std::span<const Workload> workloads,
                                            const FrontOptions& options) {
  if (workloads.empty()) return InvalidArgument("a front needs a workload");
  RETURN_IF_ERROR(CheckRouting(options.routing, workloads.front().total.experts));
  if (options.nodes < 2) return InvalidArgument("nodes must be 2 or more, found {}", options.nodes);
  if (options.ranks < 1 || options.ranks > kMaxRanks || options.slots < 1)
    return InvalidArgument("ranks must be from 1 to {}, found {}", kMaxRanks, options.ranks);
  std::vector<LoadMatrix> loads = Totals(workloads);
  std::vector<FrontPoint> points;
  const int total = static_cast<int>(std::size(kWeights));
  for (const double weight : kWeights) {
    ASSIGN_OR_RETURN(const PlannedPlacement plan,
                     PlanPlacement(loads, {.slots = EqualSlots(options.slots, options.ranks),
                                           .traffic_weight = weight,
                                           .nodes = options.nodes,
                                           .groups = options.routing.groups,
                                           .routing = &options.routing,
                                           .threads = options.threads,
                                           .stop = options.stop}));
    if (plan.interrupted) return Cancelled("interrupted");
    const FrontPoint point = Measure("moesaic", weight, plan.placement, workloads, options);
    const bool known = std::any_of(points.begin(), points.end(), [&](const FrontPoint& other) {
      return other.mean == point.mean && other.remote_nodes == point.remote_nodes;
    });
    if (!known) points.push_back(point);
    if (options.progress) options.progress(static_cast<int>(&weight - kWeights) + 1, total);
  }
  std::stable_sort(points.begin(), points.end(),
                   [](const FrontPoint& a, const FrontPoint& b) { return a.remote_nodes > b.remote_nodes; });
  // EPLB plans for one load: the mean of the workloads' shares.
  constexpr double kShare = 1 << 20;
  for (LoadMatrix& load : loads) load = ScaledLoad(load, kShare);
  const LoadMatrix sum = SumOfLoads(loads);
  for (const bool hierarchical : {false, true}) {
    const StatusOr<EplbPlan> plan = PlanEplb(sum, {.replicas = options.slots,
                                                   .groups = hierarchical ? options.routing.groups : 1,
                                                   .nodes = hierarchical ? options.nodes : 1,
                                                   .gpus = options.ranks});
    if (!plan.ok()) continue;  // sizes that EPLB refuses
    points.push_back(Measure(hierarchical ? "eplb-hierarchical" : "eplb", 0, FromEplb(*plan, options.ranks),
                             workloads, options));
  }
  MarkDominated(points);
  return points;
}

}  // namespace moesaic::parallel
