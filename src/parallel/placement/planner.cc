#include "parallel/placement/planner.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <thread>

#include "parallel/placement/layer_search.h"
#include "parallel/placement/migration.h"

namespace moesaic::parallel {
namespace {

// Placements with other replica counts, where ranks have few slots: with more of them, swaps and exchanges
// alone reach 0.2% above the mean. For several workloads, more than 12 fit the known ones better, but not
// unknown ones.
constexpr int kCountTries = 12, kCountTriesOfOneWorkload = 200;
constexpr double kFewSlots = 3;  // mean of ranks
// Largest number of pairs of a rank and an expert: LayerSearch has a byte for each, per thread.
constexpr int64_t kMaxHeld = int64_t{64} << 20;

// Weights of traffic and shares of max_moves among which predicted times choose.
constexpr double kTrafficWeights[] = {0, 1e-2, 1, 10, 1e2, 1e4, 1e12};
constexpr double kMoveShares[] = {0, 0.05, 0.2, 0.5, 1};
constexpr int kQuantileRounds = 3;
// Cells of the table that divides the budget of extra replicas.
constexpr int64_t kMaxBudgetCells = int64_t{50} << 20;

// `workloads` are scaled.
ScenarioLoads Scenarios(std::span<const LoadMatrix> workloads, std::span<const int> chosen, int layer) {
  ScenarioLoads result{.scenarios = static_cast<int>(chosen.size())};
  const int experts = workloads.front().experts, padded = result.padded();
  result.loads.assign(static_cast<size_t>(experts) * padded, 0);
  for (size_t w = 0; w < chosen.size(); ++w) {
    const std::span<const double> tokens = workloads[chosen[w]].layer(layer);
    for (int e = 0; e < experts; ++e)
      result.loads[static_cast<size_t>(e) * padded + w] = static_cast<float>(tokens[e]);
  }
  return result;
}

std::vector<int> Sorted(std::vector<int> values) {
  std::ranges::sort(values);
  return values;
}

Status CheckNodes(int experts, const PlannerOptions& options) {
  if (!(options.traffic_weight >= 0 && options.traffic_weight <= 1e15))
    return InvalidArgument("the weight of traffic must be from 0 to 1e15, found {}", options.traffic_weight);
  if (options.traffic_weight == 0 && options.routing == nullptr) return OkStatus();
  if (options.nodes < 1 || options.slots.size() % static_cast<size_t>(options.nodes) != 0)
    return InvalidArgument("nodes must divide the {} ranks, found {}", options.slots.size(), options.nodes);
  if (options.routing != nullptr) {
    RETURN_IF_ERROR(CheckRouting(*options.routing, experts));
    // Each thread has the tokens between all pairs of nodes.
    if (int64_t{options.nodes} * options.nodes > kMaxLoadValues)
      return InvalidArgument("nodes times nodes must be at most {} with a router, found {} nodes",
                             kMaxLoadValues, options.nodes);
  }
  if (options.traffic_weight == 0) return OkStatus();
  if (options.groups < 1 || experts % options.groups != 0)
    return InvalidArgument("groups must divide the {} experts, found {}", experts, options.groups);
  if (options.groups % options.nodes != 0)
    return InvalidArgument("nodes must divide the {} groups, found {}", options.groups, options.nodes);
  return OkStatus();
}

Status CheckMemory(int layers, const PlannerOptions& options) {
  if (options.all_slots.empty()) return OkStatus();
  if (options.all_slots.size() != options.slots.size())
    return InvalidArgument("{} ranks need as many numbers of slots over all layers, found {}",
                           options.slots.size(), options.all_slots.size());
  for (size_t rank = 0; rank < options.slots.size(); ++rank) {
    const int64_t least = int64_t{options.slots[rank]} * layers;
    if (options.all_slots[rank] < least)
      return InvalidArgument("the memory of rank {} must hold the {} slots of {} layers, found {} slots",
                             rank, least, layers, options.all_slots[rank]);
  }
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
  RETURN_IF_ERROR(CheckMemory(layers, options));
  if (!(options.quantile > 0 && options.quantile <= 1))
    return InvalidArgument("the quantile must be above 0 and at most 1, found {}", options.quantile);
  if (options.cost != nullptr) {
    RETURN_IF_ERROR(CheckCostModel(*options.cost, experts, static_cast<int>(options.slots.size())));
    if (options.traffic_weight > 0)
      return InvalidArgument("a weight of traffic and predicted times exclude each other");
  }
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
    speed_ = std::accumulate(speeds_.begin(), speeds_.end(), 0.0);
    for (const LoadMatrix& workload : workloads) loads_.push_back(ScaledLoad(workload, speed_));
    if (options.cost != nullptr) time_.emplace(*options.cost);
    if (options.current == nullptr && (options.cost != nullptr || options.routing != nullptr))
      sum_ = SumOfLoads(loads_);
    kept_ = static_cast<int>(std::ceil(options.quantile * static_cast<double>(loads_.size()) - 1e-9));
  }

  PlannedPlacement Plan() {
    const int layers = loads_.front().layers;
    PlannedPlacement result{.placement = {.experts = loads_.front().experts}};
    result.placement.layers.resize(layers);
    const int64_t budget = ExtraBudget();
    SetLevels(budget);
    steps_ = budget > 0 ? layers * (2 + static_cast<int>(levels_.size())) : layers;
    if (budget > 0) {
      // Plans of all levels, from which the budget chooses; then those of the chosen ranks.
      std::vector<std::vector<LayerPlan>> plans(layers);
      ForEach(layers, [&](int layer) {
        plans[layer].push_back(PlanLayer(layer, options_.slots));
        for (const double level : levels_) plans[layer].push_back(PlanLayer(layer, SlotsAtLevel(level)));
      });
      const std::vector<int> levels = ChooseLevels(plans, budget);
      const std::vector<std::vector<int>> slots = GiveSlots(levels, plans);
      ForEach(layers, [&](int layer) {
        result.placement.layers[layer] = PlanOnSlots(layer, levels[layer], slots[layer], plans[layer]);
        CountStep();
      });
    } else {
      ForEach(layers,
              [&](int layer) { result.placement.layers[layer] = PlanLayer(layer, options_.slots).layer; });
    }
    if (OrdersRanks()) {
      ForEach(layers, [&](int layer) {
        LayerPlacement& planned = result.placement.layers[layer];
        if (!Stopped())
          planned = OrderRanks(std::move(planned), sum_.layer(layer), options_.speeds, options_.nodes,
                               *options_.routing);
      });
    }
    for (int layer = 0; options_.current != nullptr && layer < layers; ++layer) {
      LayerPlacement& planned = result.placement.layers[layer];
      planned = KeepSlots(options_.current->layers[layer], planned);
    }
    result.interrupted = stopped_;
    return result;
  }

 private:
  struct LayerPlan {
    LayerPlacement layer = {};
    double worst = 0;  // of the planned quantile: largest load of a rank, or predicted seconds
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

  bool Stopped() {
    if (options_.stop && options_.stop()) stopped_ = true;
    return stopped_;
  }

  bool OrdersRanks() const {
    return options_.routing != nullptr && options_.cost == nullptr && options_.current == nullptr;
  }

  void CountStep() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    if (options_.progress) options_.progress(std::min(done_, steps_), steps_);
  }

  // Replicas beyond `slots` of each layer.
  int64_t ExtraBudget() const {
    int64_t budget = options_.extra_replicas;
    if (options_.all_slots.empty()) return budget;
    int64_t memory = 0;
    for (size_t rank = 0; rank < options_.slots.size(); ++rank)
      memory += options_.all_slots[rank] - int64_t{options_.slots[rank]} * loads_.front().layers;
    return budget > 0 ? std::min(budget, memory) : memory;
  }

  // Levels above 1 are for budgets of more than one slot per rank and layer: up to twice their mean, so that
  // some layers can have more than others. A larger budget has all levels of a smaller one.
  void SetLevels(int64_t budget) {
    levels_ = {0.125, 0.25, 0.5, 1};
    const double mean =
        static_cast<double>(budget) / (static_cast<double>(options_.slots.size()) * loads_.front().layers);
    const int room = loads_.front().experts - *std::ranges::min_element(options_.slots);
    if (mean <= 1) return;
    for (int level = 2; level <= room && level <= 2 * mean; level += std::max(1, level / 3))
      levels_.push_back(level);
  }

  // `level` more slots on every rank, or one more on every 1/level-th rank.
  std::vector<int> SlotsAtLevel(double level) const {
    std::vector<int> slots = options_.slots;
    const int extra = static_cast<int>(level * static_cast<double>(slots.size()));
    for (int i = 0; i < extra; ++i) ++slots[static_cast<size_t>(i) * slots.size() / extra];
    return slots;
  }

  // Whether a plan stays as good if its ranks are exchanged.
  bool RanksAreEqual() const {
    const bool same_slots =
        std::ranges::count(options_.slots, options_.slots[0]) == std::ssize(options_.slots);
    const bool same_speeds = std::ranges::count(speeds_, speeds_[0]) == std::ssize(speeds_);
    const bool has_links = options_.cost != nullptr && !options_.cost->levels.empty();
    return same_slots && same_speeds && !has_links && options_.traffic_weight == 0 &&
           options_.current == nullptr;
  }

  // The plan of a layer whose level has been chosen. On equal ranks it is that of the level, so that a larger
  // budget never gives a worse result. Others are planned again for the ranks that have the extra slots.
  LayerPlacement PlanOnSlots(int layer, int level, const std::vector<int>& slots,
                             std::vector<LayerPlan>& plans) {
    if (slots == options_.slots) return std::move(plans[0].layer);
    const std::vector<int> of_level = SlotsAtLevel(levels_[level - 1]);
    if (!RanksAreEqual() || Sorted(of_level) != Sorted(slots)) return PlanLayer(layer, slots).layer;
    LayerPlacement placed(slots.size());
    std::map<int, size_t> next;  // by slots: first rank of the level's plan that is not used yet
    for (size_t rank = 0; rank < slots.size(); ++rank) {
      size_t& from = next[slots[rank]];
      while (of_level[from] != slots[rank]) ++from;
      placed[rank] = std::move(plans[level].layer[from++]);
    }
    return placed;
  }

  LayerPlan PlanLayer(int layer, const std::vector<int>& slots) {
    LayerPlan plan;
    if (options_.cost == nullptr) {
      plan = PlanWorkloads(layer, slots, options_.traffic_weight, options_.max_moves);
    } else {
      const bool homes = !options_.cost->levels.empty() && HasHomes();
      const bool moves = options_.current != nullptr && options_.cost->move_bytes_per_s > 0;
      for (const double weight : std::span(kTrafficWeights).first(homes ? std::size(kTrafficWeights) : 1)) {
        for (const double share : std::span(kMoveShares).last(moves ? std::size(kMoveShares) : 1)) {
          if (Stopped() && !plan.layer.empty()) break;
          LayerPlan next = PlanWorkloads(layer, slots, weight, MovesOf(share, slots));
          next.worst = PredictedSeconds(layer, next.layer);
          if (plan.layer.empty() || next.worst < plan.worst) plan = std::move(next);
        }
      }
      OrderForLinks(layer, plan);
    }
    plan.extra = std::accumulate(slots.begin(), slots.end(), 0) -
                 std::accumulate(options_.slots.begin(), options_.slots.end(), 0);
    CountStep();
    return plan;
  }

  // Exchanges ranks between the groups of each level of links, if that lowers the predicted time. With a
  // placement in use, all experts of exchanged ranks would move.
  void OrderForLinks(int layer, LayerPlan& plan) {
    if (options_.current != nullptr) return;
    for (const LinkLevel& level : options_.cost->levels) {
      if (level.groups == std::ssize(plan.layer)) continue;  // groups of one rank: any order is the same
      if (Stopped()) return;
      LayerPlacement ordered =
          OrderRanks(plan.layer, sum_.layer(layer), options_.speeds, level.groups, options_.cost->routing);
      const double seconds = PredictedSeconds(layer, ordered);
      if (seconds < plan.worst) plan = {.layer = std::move(ordered), .worst = seconds};
    }
  }

  // Moves of a share of the allowed ones; without a limit, of all slots.
  int MovesOf(double share, const std::vector<int>& slots) const {
    if (options_.current == nullptr || (share == 1 && options_.max_moves < 0)) return options_.max_moves;
    const int most =
        options_.max_moves >= 0 ? options_.max_moves : std::accumulate(slots.begin(), slots.end(), 0);
    return static_cast<int>(share * most);
  }

  double PredictedSeconds(int layer, const LayerPlacement& placed) const {
    const LayerPlacement* current = options_.current != nullptr ? &options_.current->layers[layer] : nullptr;
    std::vector<double> seconds;
    for (const LoadMatrix& load : loads_)
      seconds.push_back(
          PredictCost(placed, load.layer(layer), *options_.cost, *time_, speeds_, current).total());
    std::sort(seconds.begin(), seconds.end());
    return seconds[kept_ - 1];
  }

  // With a quantile, plans again without the workloads that are worst, as long as that helps the others. The
  // placement in use then is a plan like the others: the first plan is for all workloads, and may suit those
  // of the quantile less.
  LayerPlan PlanWorkloads(int layer, const std::vector<int>& slots, double weight, int max_moves) {
    const bool some = kept_ < static_cast<int>(loads_.size());
    std::vector<int> workloads = AllWorkloads();
    LayerPlan best;
    if (some && weight == 0 && options_.current != nullptr) {  // with a weight, Search() also lowers traffic
      best.layer = options_.current->layers[layer];
      const std::vector<double> worst = WorstOf(layer, best.layer, slots);
      best.worst = worst[ByWorst(worst)[kept_ - 1]];
    }
    for (int round = 0; round <= kQuantileRounds; ++round) {
      std::vector<double> worst(loads_.size());
      LayerPlan plan{.layer = Search(layer, workloads, slots, weight, max_moves, worst)};
      const std::vector<int> order = ByWorst(worst);
      plan.worst = worst[order[kept_ - 1]];
      if (best.layer.empty() || plan.worst < best.worst) {
        best = std::move(plan);
      } else if (round > 0) {
        break;
      }
      if (!some || Stopped()) break;
      workloads.assign(order.begin(), order.begin() + kept_);
      std::sort(workloads.begin(), workloads.end());
    }
    return best;
  }

  std::vector<int> AllWorkloads() const {
    std::vector<int> all(loads_.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  // Workloads in the order of their largest loads of a rank, the smallest first.
  std::vector<int> ByWorst(const std::vector<double>& worst) const {
    std::vector<int> order = AllWorkloads();
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return worst[a] < worst[b]; });
    return order;
  }

  // Largest load of a rank in each of all workloads.
  std::vector<double> WorstOf(int layer, const LayerPlacement& placed, const std::vector<int>& slots) const {
    const ScenarioLoads loads = LayerLoads(layer, AllWorkloads());
    LayerSearch measure(loads, speeds_, slots);
    measure.Start(placed);
    std::vector<double> worst;
    for (int s = 0; s < loads.scenarios; ++s) worst.push_back(measure.WorstIn(s));
    return worst;
  }

  // Plans for some workloads; `worst` gets the largest load of a rank in each of all workloads.
  LayerPlacement Search(int layer, std::span<const int> workloads, const std::vector<int>& slots,
                        double weight, int max_moves, std::vector<double>& worst) {
    const auto stop = [this] { return Stopped(); };
    const ScenarioLoads loads = LayerLoads(layer, workloads);
    LayerSearch search(loads, speeds_, slots, Homes(loads, weight));
    if (options_.current != nullptr) {
      search.Start(options_.current->layers[layer]);
    } else {
      PlaceAll(search);
      const double total = std::accumulate(slots.begin(), slots.end(), 0.0);
      if (total < kFewSlots * static_cast<double>(slots.size()))
        search.ImproveCounts(loads.scenarios == 1 ? kCountTriesOfOneWorkload : kCountTries, stop);
    }
    search.Improve(options_.max_steps, stop, options_.current != nullptr ? max_moves : -1);
    if (workloads.size() < loads_.size()) {
      worst = WorstOf(layer, search.layer(), slots);
    } else {
      for (int s = 0; s < loads.scenarios; ++s) worst[s] = search.WorstIn(s);
    }
    return search.layer();
  }

  ScenarioLoads LayerLoads(int layer, std::span<const int> workloads) const {
    ScenarioLoads loads = Scenarios(loads_, workloads, layer);
    if (!time_) return loads;
    loads.time = &*time_;
    loads.rows = options_.cost->rows() / speed_;
    for (const int w : workloads) {
      double sum = 0;
      for (const double load : loads_[w].layer(layer)) sum += (*time_)(load * loads.rows);
      loads.scale.push_back(sum > 0 ? speed_ / sum : 0);
    }
    return loads;
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

  int HomeNodeCount() const {
    return options_.cost != nullptr ? options_.cost->levels.front().groups : options_.nodes;
  }
  int HomeGroups() const {
    return options_.cost != nullptr ? options_.cost->routing.groups : options_.groups;
  }
  bool HasHomes() const { return HomeNodeCount() > 1 && HomeGroups() % HomeNodeCount() == 0; }

  // Homes of experts: groups are packed on nodes as experts on ranks.
  HomeNodes Homes(const ScenarioLoads& loads, double weight) const {
    HomeNodes homes{.weight = weight};
    if (homes.weight == 0) return homes;
    const int nodes = HomeNodeCount(), groups = HomeGroups();
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

  // Chooses a level of each layer so that the sum of their largest loads is smallest within the budget: a
  // table over layers and replicas. A larger budget never makes the sum larger.
  static std::vector<int> ChooseLevels(const std::vector<std::vector<LayerPlan>>& plans, int64_t budget) {
    const size_t layers = plans.size();
    int64_t most = 0, unit = 0;
    for (const LayerPlan& plan : plans.front()) {
      most = std::max<int64_t>(most, plan.extra);
      unit = std::gcd(unit, int64_t{plan.extra});
    }
    if (unit == 0) return std::vector<int>(layers, 0);
    budget = std::min(budget, most * static_cast<int64_t>(layers));
    unit = std::max(unit, budget * static_cast<int64_t>(layers) / kMaxBudgetCells);
    const auto cells = static_cast<size_t>(budget / unit + 1);
    std::vector<double> sums(cells, 0), next(cells);
    std::vector<std::vector<char>> levels(layers, std::vector<char>(cells, 0));
    for (size_t layer = 0; layer < layers; ++layer) {
      for (size_t cell = 0; cell < cells; ++cell) {
        next[cell] = sums[cell] + plans[layer][0].worst;
        for (size_t level = 1; level < plans[layer].size(); ++level) {
          const auto cost = static_cast<size_t>((plans[layer][level].extra + unit - 1) / unit);
          if (cost > cell || sums[cell - cost] + plans[layer][level].worst >= next[cell]) continue;
          next[cell] = sums[cell - cost] + plans[layer][level].worst;
          levels[layer][cell] = static_cast<char>(level);
        }
      }
      sums.swap(next);
    }
    std::vector<int> chosen(layers);
    size_t cell = cells - 1;
    for (size_t layer = layers; layer-- > 0;) {
      chosen[layer] = levels[layer][cell];
      if (chosen[layer] > 0)
        cell -= static_cast<size_t>((plans[layer][chosen[layer]].extra + unit - 1) / unit);
    }
    return chosen;
  }

  // Slots of each rank and layer: extra slots go to the ranks with most memory left, and to all ranks in
  // turn. A rank without memory leaves its slot to the others.
  std::vector<std::vector<int>> GiveSlots(const std::vector<int>& levels,
                                          const std::vector<std::vector<LayerPlan>>& plans) const {
    const size_t ranks = options_.slots.size();
    std::vector<int64_t> left(ranks, 0);
    for (size_t rank = 0; rank < ranks && !options_.all_slots.empty(); ++rank)
      left[rank] =
          options_.all_slots[rank] - int64_t{options_.slots[rank]} * static_cast<int64_t>(plans.size());
    std::vector<std::vector<int>> slots(plans.size(), options_.slots);
    const int experts = loads_.front().experts;
    size_t turn = 0;
    for (size_t layer = 0; layer < plans.size(); ++layer) {
      int extra = plans[layer][levels[layer]].extra;
      std::vector<size_t> order(ranks);
      for (size_t i = 0; i < ranks; ++i) order[i] = (turn + i) % ranks;
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return left[a] > left[b]; });
      for (bool given = true; extra > 0 && given;) {
        given = false;
        for (const size_t rank : order) {
          const bool full = slots[layer][rank] >= experts;
          if (extra == 0 || full || (!options_.all_slots.empty() && left[rank] <= 0)) continue;
          ++slots[layer][rank];
          --left[rank];
          --extra;
          given = true;
          turn = rank + 1;
        }
      }
    }
    return slots;
  }

  const PlannerOptions& options_;
  std::vector<double> speeds_;
  double speed_ = 0;  // of all ranks
  std::optional<ExpertTime> time_;
  int kept_ = 1;  // workloads of the quantile
  std::vector<LoadMatrix> loads_;
  LoadMatrix sum_;              // of loads_, for the order of ranks
  std::vector<double> levels_;  // extra replicas of a layer per rank, among which the budget chooses
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
