#include "parallel/placement/planner.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "parallel/placement/layer_search.h"
#include "parallel/placement/migration.h"

namespace moesaic::parallel {
namespace {

// Placements with other replica counts, where ranks have few slots or one workload is planned for. Elsewhere
// and beyond 12 they fit known workloads better, but not unknown ones.
constexpr int kCountTries = 12, kCountTriesOfOneWorkload = 200;
constexpr double kFewSlots = 3;  // mean of ranks
// Largest number of pairs of a rank and an expert: LayerSearch has a byte for each, per thread.
constexpr int64_t kMaxHeld = int64_t{64} << 20;

// `workloads` are scaled.
ScenarioLoads Scenarios(std::span<const LoadMatrix> workloads, int layer) {
  ScenarioLoads result{.scenarios = static_cast<int>(workloads.size())};
  const int experts = workloads.front().experts, padded = result.padded();
  result.loads.assign(static_cast<size_t>(experts) * padded, 0);
  for (size_t w = 0; w < workloads.size(); ++w) {
    const std::span<const double> tokens = workloads[w].layer(layer);
    for (int e = 0; e < experts; ++e)
      result.loads[static_cast<size_t>(e) * padded + w] = static_cast<float>(tokens[e]);
  }
  return result;
}

Status CheckNodes(int experts, const PlannerOptions& options) {
  if (!(options.traffic_weight >= 0 && options.traffic_weight <= 1e15))
    return InvalidArgument("the weight of traffic must be from 0 to 1e15, found {}", options.traffic_weight);
  if (options.traffic_weight == 0) return OkStatus();
  if (options.nodes < 1 || options.slots.size() % static_cast<size_t>(options.nodes) != 0)
    return InvalidArgument("nodes must divide the {} ranks, found {}", options.slots.size(), options.nodes);
  if (options.groups < 1 || experts % options.groups != 0)
    return InvalidArgument("groups must divide the {} experts, found {}", experts, options.groups);
  if (options.groups % options.nodes != 0)
    return InvalidArgument("nodes must divide the {} groups, found {}", options.groups, options.nodes);
  return OkStatus();
}

Status CheckOptions(std::span<const LoadMatrix> workloads, const PlannerOptions& options) {
  if (workloads.empty()) return InvalidArgument("a plan needs a workload");
  const int experts = workloads.front().experts, layers = workloads.front().layers;
  for (const LoadMatrix& workload : workloads) {
    if (workload.experts == experts && workload.layers == layers) continue;
    return InvalidArgument("workloads must have {} layers of {} experts as the first one, found {} of {}",
                           layers, experts, workload.layers, workload.experts);
  }
  if (options.slots.empty() || options.slots.size() > kMaxRanks)
    return InvalidArgument("ranks must be from 1 to {}, found {}", kMaxRanks, options.slots.size());
  if (!options.speeds.empty() && options.speeds.size() != options.slots.size())
    return InvalidArgument("{} ranks need as many speeds, found {}", options.slots.size(),
                           options.speeds.size());
  for (const double speed : options.speeds) {
    if (!(speed >= 1e-6 && speed <= 1e6))
      return InvalidArgument("speeds must be from 1e-6 to 1e6, found {}", speed);
  }
  int64_t total = 0;
  for (const int slots : options.slots) {
    if (slots < 0 || slots > kMaxExperts)
      return InvalidArgument("slots of a rank must be from 0 to {}, found {}", kMaxExperts, slots);
    total += std::min(slots, experts);
  }
  if (total < experts)
    return InvalidArgument("slots of all ranks must hold {} experts, found {}", experts, total);
  if (static_cast<int64_t>(options.slots.size()) * experts > kMaxHeld)
    return InvalidArgument("ranks times experts must be at most {}, found {}", kMaxHeld,
                           static_cast<int64_t>(options.slots.size()) * experts);
  RETURN_IF_ERROR(CheckNodes(experts, options));
  if (options.extra_replicas < 0)
    return InvalidArgument("extra replicas must not be negative, found {}", options.extra_replicas);
  if (options.current != nullptr) {
    const Placement& current = *options.current;
    if (current.experts != experts || static_cast<int>(current.layers.size()) != layers ||
        current.ranks() != static_cast<int>(options.slots.size()))
      return InvalidArgument(
          "the placement in use must have {} ranks, {} layers and {} experts, found {}, {} and {}",
          options.slots.size(), layers, experts, current.ranks(), current.layers.size(), current.experts);
    RETURN_IF_ERROR(CheckPlacement(current, "placement in use", /*distinct=*/true));
    for (const LayerPlacement& layer : current.layers) {
      for (size_t rank = 0; rank < layer.size(); ++rank) {
        if (static_cast<int>(layer[rank].size()) > options.slots[rank])
          return InvalidArgument("rank {} of the placement in use must have at most {} slots, found {}", rank,
                                 options.slots[rank], layer[rank].size());
      }
    }
  }
  return OkStatus();
}

}  // namespace

std::vector<int> EqualSlots(int total, int ranks) {
  std::vector<int> slots(ranks, total / ranks);
  for (int i = 0; i < total % ranks; ++i) ++slots[i];
  return slots;
}

namespace {

// Plans layers on several threads.
class Planner {
 public:
  Planner(std::span<const LoadMatrix> workloads, const PlannerOptions& options) : options_(options) {
    speeds_ = options.speeds;
    if (speeds_.empty()) speeds_.assign(options.slots.size(), 1.0);
    const double speed = std::accumulate(speeds_.begin(), speeds_.end(), 0.0);
    for (const LoadMatrix& workload : workloads) loads_.push_back(ScaledLoad(workload, speed));
  }

  PlannedPlacement Plan() {
    const int layers = loads_.front().layers;
    PlannedPlacement result{.placement = {.experts = loads_.front().experts}};
    result.placement.layers.resize(layers);
    const bool uneven = options_.extra_replicas > 0;
    steps_ = uneven ? layers * (1 + static_cast<int>(std::size(kLevels))) : layers;
    if (uneven) {
      // Plans of all levels, from which the budget chooses.
      std::vector<std::vector<LayerPlan>> plans(layers);
      ForEach(layers, [&](int layer) {
        plans[layer].push_back(PlanLayer(layer, 0));
        for (const double level : kLevels) plans[layer].push_back(PlanLayer(layer, level));
      });
      const std::vector<int> chosen = ChooseLevels(plans);
      for (int layer = 0; layer < layers; ++layer)
        result.placement.layers[layer] = std::move(plans[layer][chosen[layer]].layer);
    } else {
      ForEach(layers, [&](int layer) { result.placement.layers[layer] = PlanLayer(layer, 0).layer; });
    }
    for (int layer = 0; options_.current != nullptr && layer < layers; ++layer) {
      LayerPlacement& planned = result.placement.layers[layer];
      planned = KeepSlots(options_.current->layers[layer], planned);
    }
    result.interrupted = stopped_;
    return result;
  }

 private:
  // Extra replicas of a layer per rank.
  static constexpr double kLevels[] = {0.125, 0.25, 0.5, 1};

  struct LayerPlan {
    LayerPlacement layer;
    double worst = 0;
    int extra = 0;
  };

  template <typename Work>
  void ForEach(int layers, const Work& work) {
    std::atomic<int> next = 0;
    const auto run = [&] {
      for (int layer = next++; layer < layers; layer = next++) work(layer);
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < std::min(options_.threads, layers); ++i) threads.emplace_back(run);
    run();
    for (std::thread& thread : threads) thread.join();
  }

  LayerPlan PlanLayer(int layer, double level) {
    const auto stop = [this] {
      if (options_.stop && options_.stop()) stopped_ = true;
      return stopped_.load();
    };
    std::vector<int> slots = options_.slots;
    const int extra = static_cast<int>(level * static_cast<double>(slots.size()));
    // One more slot on every 1/level-th rank.
    for (int i = 0; i < extra; ++i) ++slots[static_cast<size_t>(i) * slots.size() / extra];
    const ScenarioLoads loads = Scenarios(loads_, layer);
    LayerSearch search(loads, speeds_, slots, Homes(loads));
    if (options_.current != nullptr) {
      search.Start(options_.current->layers[layer]);
    } else {
      PlaceAll(search);
      const double total = std::accumulate(slots.begin(), slots.end(), 0.0);
      if (loads.scenarios == 1) {
        search.ImproveCounts(kCountTriesOfOneWorkload, stop);
      } else if (total < kFewSlots * static_cast<double>(slots.size())) {
        search.ImproveCounts(kCountTries, stop);
      }
    }
    search.Improve(options_.max_steps, stop, options_.current != nullptr ? options_.max_moves : -1);
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    if (options_.progress) options_.progress(done_, steps_);
    return {search.layer(), search.worst(), extra};
  }

  // Places replicas. With homes, the counts of nodes that hold their own experts only are tried as well.
  static void PlaceAll(LayerSearch& search) {
    search.Place(search.ReplicaCounts());
    const std::vector<int> at_home = search.HomeReplicaCounts();
    if (at_home.empty()) return;
    const LayerPlacement anywhere = search.layer();
    const double objective = search.objective();
    search.Place(at_home);
    if (search.objective() > objective) search.Start(anywhere);
  }

  // Homes of experts: groups are packed on nodes as experts on ranks.
  HomeNodes Homes(const ScenarioLoads& loads) const {
    HomeNodes homes{.weight = options_.traffic_weight};
    if (homes.weight == 0) return homes;
    const int nodes = options_.nodes, groups = options_.groups;
    const size_t padded = loads.padded(), size = static_cast<size_t>(loads.experts() / groups);
    ScenarioLoads group_loads{.scenarios = loads.scenarios};
    group_loads.loads.assign(groups * padded, 0);
    for (size_t e = 0; e < size * groups; ++e) {
      for (size_t s = 0; s < padded; ++s)
        group_loads.loads[e / size * padded + s] += loads.loads[e * padded + s];
    }
    std::vector<double> speeds(nodes, 0);
    for (size_t rank = 0; rank < speeds_.size(); ++rank) {
      homes.of_rank.push_back(static_cast<int>(rank * nodes / speeds_.size()));
      speeds[homes.of_rank.back()] += speeds_[rank];
    }
    LayerSearch packing(group_loads, speeds, std::vector<int>(nodes, groups / nodes));
    packing.Place(std::vector<int>(groups, 1));
    homes.of_expert.resize(size * groups);
    for (int node = 0; node < nodes; ++node) {
      for (const int group : packing.layer()[node])
        std::fill_n(homes.of_expert.begin() + static_cast<std::ptrdiff_t>(group * size), size, node);
    }
    return homes;
  }

  // Spends the budget on the steps of the largest gain per replica. A step may skip levels, as gains needn't
  // shrink.
  std::vector<int> ChooseLevels(const std::vector<std::vector<LayerPlan>>& plans) const {
    std::vector<int> chosen(plans.size(), 0);
    int budget = options_.extra_replicas;
    for (;;) {
      double best = 0;
      size_t best_layer = 0;
      int best_level = -1;
      for (size_t layer = 0; layer < plans.size(); ++layer) {
        const LayerPlan& now = plans[layer][chosen[layer]];
        for (int level = chosen[layer] + 1; level < static_cast<int>(plans[layer].size()); ++level) {
          const LayerPlan& next = plans[layer][level];
          const int cost = next.extra - now.extra;
          if (cost <= 0 || cost > budget) continue;
          const double gain = (now.worst - next.worst) / cost;
          if (gain <= best) continue;
          best = gain;
          best_layer = layer;
          best_level = level;
        }
      }
      if (best_level < 0) return chosen;
      budget -= plans[best_layer][best_level].extra - plans[best_layer][chosen[best_layer]].extra;
      chosen[best_layer] = best_level;
    }
  }

  const PlannerOptions& options_;
  std::vector<double> speeds_;
  std::vector<LoadMatrix> loads_;
  std::atomic<bool> stopped_ = false;
  std::mutex mutex_;
  int done_ = 0, steps_ = 0;
};

}  // namespace

StatusOr<PlannedPlacement> PlanPlacement(std::span<const LoadMatrix> workloads,
                                         const PlannerOptions& options) {
  RETURN_IF_ERROR(CheckOptions(workloads, options));
  return Planner(workloads, options).Plan();
}

}  // namespace moesaic::parallel
