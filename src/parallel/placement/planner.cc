#include "parallel/placement/planner.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "parallel/placement/layer_search.h"

namespace moesaic::parallel {
namespace {

// Placements with other replica counts, where ranks have few slots or one workload is planned for. Elsewhere
// and beyond 12 they fit known workloads better, but not unknown ones.
constexpr int kCountTries = 12, kCountTriesOfOneWorkload = 60;
constexpr double kFewSlots = 3;  // mean of ranks

ScenarioLoads Scenarios(std::span<const LoadMatrix> workloads, int layer, double speed) {
  ScenarioLoads result{.scenarios = static_cast<int>(workloads.size())};
  const int experts = workloads.front().experts, padded = result.padded();
  result.loads.assign(static_cast<size_t>(experts) * padded, 0);
  for (size_t w = 0; w < workloads.size(); ++w) {
    const std::span<const double> tokens = workloads[w].layer(layer);
    const double scale = speed / std::accumulate(tokens.begin(), tokens.end(), 0.0);
    for (int e = 0; e < experts; ++e)
      result.loads[static_cast<size_t>(e) * padded + w] = static_cast<float>(tokens[e] * scale);
  }
  return result;
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

StatusOr<PlannedPlacement> PlanPlacement(std::span<const LoadMatrix> workloads,
                                         const PlannerOptions& options) {
  RETURN_IF_ERROR(CheckOptions(workloads, options));
  const int layers = workloads.front().layers;
  std::vector<double> speeds = options.speeds;
  if (speeds.empty()) speeds.assign(options.slots.size(), 1.0);
  const double total_speed = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  PlannedPlacement result{.placement = {.experts = workloads.front().experts}};
  result.placement.layers.resize(layers);
  const double slots = std::accumulate(options.slots.begin(), options.slots.end(), 0.0);
  const bool few_slots = slots < kFewSlots * static_cast<double>(options.slots.size());
  std::atomic<int> next = 0;
  std::atomic<bool> stopped = false;
  std::mutex mutex;
  int done = 0;
  const auto stop = [&] { return stopped.load(); };
  const auto work = [&] {
    for (int layer = next++; layer < layers; layer = next++) {
      const ScenarioLoads loads = Scenarios(workloads, layer, total_speed);
      LayerSearch search(loads, speeds, options.slots);
      if (options.current != nullptr) {
        search.Start(options.current->layers[layer]);
      } else {
        search.Place(search.ReplicaCounts());
        if (loads.scenarios == 1) {
          search.ImproveCounts(kCountTriesOfOneWorkload, stop);
        } else if (few_slots) {
          search.ImproveCounts(kCountTries, stop);
        }
      }
      search.Improve(options.max_steps, stop, options.current != nullptr ? options.max_moves : -1);
      result.placement.layers[layer] = search.layer();
      const std::lock_guard<std::mutex> lock(mutex);
      ++done;
      if (options.progress && !stopped && !options.progress(done, layers)) stopped = true;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min(options.threads, layers); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  result.interrupted = stopped;
  return result;
}

}  // namespace moesaic::parallel
