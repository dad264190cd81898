#include "parallel/placement/comparison.h"

#include <algorithm>
#include <numeric>

#include "parallel/placement/balance.h"
#include "parallel/placement/planner.h"
#include "parallel/placement/published_balancers.h"

namespace moesaic::parallel {
namespace {

// Tokens per layer of the normalised loads. OmniPlacement's smoothing of ceil(load / 128) + 3 depends on
// them.
constexpr double kTokens = 1 << 20;

struct Policy {
  std::string name;
  bool always_split = false;
  std::function<StatusOr<Placement>(std::span<const LoadMatrix> workloads, const LoadMatrix& mean)> plan;
};

StatusOr<Placement> Eplb(const LoadMatrix& load, const CompareOptions& options, int groups, int nodes) {
  ASSIGN_OR_RETURN(const EplbPlan plan, PlanEplb(load, {options.slots, groups, nodes, options.ranks}));
  return FromEplb(plan, options.ranks);
}

std::vector<Policy> Policies(const CompareOptions& options) {
  using Loads = std::span<const LoadMatrix>;
  const int ranks = options.ranks, per_rank = options.slots / ranks;
  // Balancers whose ranks have equally many slots would plan with fewer of them.
  const auto equal = [options](auto plan) {
    return [options, plan](Loads loads, const LoadMatrix& mean) -> StatusOr<Placement> {
      if (options.slots % options.ranks == 0) return plan(loads, mean);
      return InvalidArgument("slots must be a multiple of the {} ranks, found {}", options.ranks,
                             options.slots);
    };
  };
  std::vector<Policy> policies;
  policies.push_back({"default", false, [ranks](Loads, const LoadMatrix& mean) -> StatusOr<Placement> {
                        return Placement{mean.experts, std::vector<LayerPlacement>(
                                                           mean.layers, InOrder(mean.experts, ranks))};
                      }});
  policies.push_back(
      {"eplb", false, [options](Loads, const LoadMatrix& mean) { return Eplb(mean, options, 1, 1); }});
  if (options.nodes > 1) {
    policies.push_back({"eplb-hierarchical", false, [options](Loads, const LoadMatrix& mean) {
                          return Eplb(mean, options, options.groups, options.nodes);
                        }});
  }
  policies.push_back({"omni", false, equal([options, per_rank](Loads, const LoadMatrix& mean) {
                        return PlanOmniStatic(
                            mean,
                            {.ranks = options.ranks, .slots_per_rank = per_rank, .hosts = options.nodes});
                      })});
  policies.push_back({"flashlb", false, equal([ranks, per_rank](Loads loads, const LoadMatrix&) {
                        return PlanFlashLb(loads, ranks, per_rank);
                      })});
  policies.push_back({"swift", false, equal([ranks, per_rank](Loads, const LoadMatrix& mean) {
                        return PlanSwiftBalance(mean, ranks, per_rank);
                      })});
  policies.push_back({"lplb", true, equal([ranks, per_rank](Loads, const LoadMatrix& mean) {
                        return PlanLplbGraph(mean, {.ranks = ranks, .slots_per_rank = per_rank});
                      })});
  policies.push_back({"moesaic", options.split || options.moves > 0,
                      [options](Loads loads, const LoadMatrix&) -> StatusOr<Placement> {
                        ASSIGN_OR_RETURN(
                            PlannedPlacement planned,
                            PlanPlacement(loads, {.slots = EqualSlots(options.slots, options.ranks),
                                                  .threads = options.threads,
                                                  .stop = options.stop}));
                        return std::move(planned.placement);
                      }});
  return policies;
}

class Sum {
 public:
  void Add(double imbalance, int moves = 0) {
    sum_ += imbalance;
    worst_ = std::max(worst_, imbalance);
    moves_ += moves;
    ++count_;
  }
  PolicyResult Result(std::string name, int ranks) const {
    return {std::move(name), sum_ / count_, worst_, static_cast<double>(moves_) / count_ / ranks, "", false};
  }

 private:
  double sum_ = 0, worst_ = 0;
  int64_t moves_ = 0;
  int count_ = 0;
};

Status CheckComparison(std::span<const Workload> workloads, const CompareOptions& options) {
  if (workloads.empty()) return InvalidArgument("a comparison needs a workload");
  if (options.leave_one_out && workloads.size() < 2)
    return InvalidArgument("leaving one out needs two workloads or more, found {}", workloads.size());
  if (options.ranks < 1 || options.ranks > kMaxRanks)
    return InvalidArgument("ranks must be from 1 to {}, found {}", kMaxRanks, options.ranks);
  const LoadMatrix& first = workloads.front().total;
  for (const Workload& workload : workloads) {
    if (workload.total.layers == first.layers && workload.total.experts == first.experts) continue;
    return InvalidArgument("{}: must have {} layers of {} experts as {}, found {} of {}", workload.name,
                           first.layers, first.experts, workloads.front().name, workload.total.layers,
                           workload.total.experts);
  }
  if (options.slots < first.experts)
    return InvalidArgument("slots must be at least the {} experts, found {}", first.experts, options.slots);
  if (int64_t{options.slots} * first.layers > kMaxLoadValues)
    return InvalidArgument("slots of all layers must be at most {}, found {} per layer", kMaxLoadValues,
                           options.slots);
  if (!(options.moves >= 0 && options.moves <= first.experts))
    return InvalidArgument("moves per rank must be from 0 to {}, found {}", first.experts, options.moves);
  return OkStatus();
}

}  // namespace

StatusOr<std::vector<PolicyResult>> ComparePolicies(std::span<const Workload> workloads,
                                                    const CompareOptions& options) {
  RETURN_IF_ERROR(CheckComparison(workloads, options));
  std::vector<LoadMatrix> loads;
  for (const Workload& workload : workloads) loads.push_back(ScaledLoad(workload.total, kTokens));
  const int count = static_cast<int>(loads.size()), layers = loads.front().layers;
  const int max_moves = static_cast<int>(options.moves * options.ranks + 1e-9);
  const auto stopped = [&] { return options.stop && options.stop(); };
  const std::vector<Policy> policies = Policies(options);
  int done = 0;
  const int plans = options.leave_one_out ? count : 1;
  // Cancelled: `stop` returned true. Other errors: the policy can't plan these sizes.
  const auto measure = [&](const Policy& policy, Sum& plain, Sum& split) -> Status {
    const bool ours = policy.name == "moesaic";
    for (int plan = 0; plan < plans; ++plan) {
      if (options.progress) options.progress(done++, plans * static_cast<int>(policies.size()));
      if (stopped()) return Cancelled("interrupted");
      std::vector<LoadMatrix> known;
      for (int w = 0; w < count; ++w) {
        if (!options.leave_one_out || w != plan) known.push_back(loads[w]);
      }
      ASSIGN_OR_RETURN(const Placement placement, policy.plan(known, SumOfLoads(known)));
      for (int w = options.leave_one_out ? plan : 0; w < (options.leave_one_out ? plan + 1 : count); ++w) {
        for (int layer = 0; layer < layers; ++layer) {
          if (stopped()) return Cancelled("interrupted");
          if (!HasTokens(workloads[w].total, layer)) continue;
          const LayerPlacement& placed = placement.layers[layer];
          const std::span<const double> tokens = loads[w].layer(layer);
          int moved = 0;
          if (ours && max_moves > 0) {
            const double imbalance = SpillImbalance(placed, tokens, max_moves, moved);
            plain.Add(imbalance, moved);
          } else {
            plain.Add(policy.always_split ? SplitImbalance(placed, tokens) : Imbalance(placed, tokens));
          }
          if (options.split && !policy.always_split) split.Add(SplitImbalance(placed, tokens));
        }
      }
    }
    return OkStatus();
  };
  std::vector<PolicyResult> results;
  for (const Policy& policy : policies) {
    Sum plain, split;
    const Status status = measure(policy, plain, split);
    if (!status.ok()) {
      results.push_back(
          {policy.name, 0, 0, 0, Message(status), /*interrupted=*/status.code() == StatusCode::kCancelled});
      continue;
    }
    results.push_back(plain.Result(policy.name, options.ranks));
    if (options.split && !policy.always_split)
      results.push_back(split.Result(policy.name + "+split", options.ranks));
  }
  return results;
}

}  // namespace moesaic::parallel
