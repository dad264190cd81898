#include "engine/expert_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "parallel/batch_split.h"
#include "parallel/placement/balance.h"
#include "parallel/placement/planner.h"
#include "parallel/shard.h"

namespace moesaic::engine {
namespace {

using parallel::LayerPlacement;
using parallel::LivingPart;

constexpr double kMinDifference = 0.1;  // speeds that differ by less are equal: shared cores vary so much

// Largest load / speed of a rank over the mean in the worst workload, with tokens divided exactly over
// replicas.
double Balance(const LayerPlacement& layer, std::span<const parallel::LoadMatrix> workloads, int index,
               std::span<const double> speeds) {
  double worst = 1;
  for (const parallel::LoadMatrix& workload : workloads)
    worst = std::max(worst, parallel::SplitImbalance(layer, workload.layer(index), speeds));
  return worst;
}

// Predicted time of a batch in the worst workload, without moves.
double BatchSeconds(const LayerPlacement& layer, std::span<const parallel::LoadMatrix> workloads, int index,
                    const parallel::CostModel& model, const parallel::ExpertTime& time,
                    std::span<const double> speeds) {
  double worst = 0;
  for (const parallel::LoadMatrix& workload : workloads)
    worst = std::max(worst, parallel::PredictCost(layer, workload.layer(index), model, time, speeds).total());
  return worst;
}

// Most experts that one rank of `next` receives.
int MostReceived(const LayerPlacement& current, const LayerPlacement& next) {
  int most = 0;
  for (size_t rank = 0; rank < next.size(); ++rank) {
    most = std::max(most, static_cast<int>(std::ranges::count_if(next[rank], [&](int expert) {
                      return std::ranges::find(current[rank], expert) == current[rank].end();
                    })));
  }
  return most;
}

LayerPlacement Sorted(LayerPlacement layer) {
  for (std::vector<int>& experts : layer) std::ranges::sort(experts);
  return layer;
}

}  // namespace

std::vector<parallel::LoadMatrix> WorkloadsOf(const ExpertLoadStats& load, int parts, double least_tokens) {
  const auto layers = static_cast<int>(load.layers.size());
  std::vector<parallel::LoadMatrix> workloads = {
      {.layers = layers, .experts = load.experts, .tokens = load.recent}};
  const size_t windows = load.windows.size();
  parts = static_cast<int>(std::min<size_t>(static_cast<size_t>(parts), windows));
  for (int part = 0; part < parts && windows > 1; ++part) {
    parallel::LoadMatrix sum = {
        .layers = layers, .experts = load.experts, .tokens = std::vector<double>(load.recent.size(), 0.0)};
    for (size_t i = windows * part / parts; i < windows * (part + 1) / parts; ++i) {
      std::ranges::transform(*load.windows[i], sum.tokens, sum.tokens.begin(),
                             [](int64_t tokens, double all) { return all + static_cast<double>(tokens); });
    }
    bool enough = true;
    for (int layer = 0; layer < layers; ++layer) {
      const std::span<const double> loads = std::as_const(sum).layer(layer);
      enough &= std::accumulate(loads.begin(), loads.end(), 0.0) >= least_tokens;
    }
    if (enough) workloads.push_back(std::move(sum));
  }
  return workloads;
}

std::vector<double> MeasuredSpeeds(const parallel::Layout& layout, const std::vector<RankStats>& before,
                                   const std::vector<RankStats>& now, const std::vector<bool>& dead) {
  const auto members = static_cast<size_t>(layout.degrees().tensor * layout.degrees().data);
  std::vector<double> seconds(members, 0), speeds(members, 0);
  std::vector<int64_t> rows(members, 0);
  for (size_t i = 0; i < now.size(); ++i) {
    const int member = layout.IndexInExpertGroup(now[i].rank);
    const RankStats none, &old = i < before.size() ? before[i] : none;
    rows[member] += now[i].timed_rows - old.timed_rows;
    seconds[member] += now[i].timed_seconds - old.timed_seconds;
  }
  double fastest = 0, slowest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < members; ++i) {
    if (i < dead.size() && dead[i]) continue;
    if (rows[i] < kMinTimedRows || seconds[i] <= 0) return {};
    speeds[i] = static_cast<double>(rows[i]) / seconds[i];
    fastest = std::max(fastest, speeds[i]);
    slowest = std::min(slowest, speeds[i]);
  }
  if (slowest > fastest * (1 - kMinDifference)) return {};
  for (double& speed : speeds) speed = speed > 0 ? speed / fastest : 1;
  return speeds;
}

namespace {

// Plans one layer for the ranks that live and the experts that they have. Each dead rank keeps those of its
// experts that no other rank has, which routers leave out.
StatusOr<LayerPlacement> PlanForLiving(const LayerPlacement& current,
                                       std::span<const parallel::LoadMatrix> workloads, int index,
                                       const BalanceConditions& conditions,
                                       const parallel::PlannerOptions& options) {
  const LayerPlacement living = LivingPart(current, conditions.dead);
  std::vector<int> number(workloads.front().experts, -1), expert_of;  // of experts that living ranks have
  for (const std::vector<int>& experts : living) {
    for (const int expert : experts) number[expert] = 0;
  }
  for (size_t expert = 0; expert < number.size(); ++expert) {
    if (number[expert] < 0) continue;
    number[expert] = static_cast<int>(expert_of.size());
    expert_of.push_back(static_cast<int>(expert));
  }
  const auto count = static_cast<int>(expert_of.size());
  std::vector<parallel::LoadMatrix> loads;
  for (const parallel::LoadMatrix& workload : workloads) {
    parallel::LoadMatrix& own = loads.emplace_back(parallel::LoadMatrix{.layers = 1, .experts = count});
    for (const int expert : expert_of) own.tokens.push_back(workload.layer(index)[expert]);
  }
  parallel::Placement known = {.experts = count, .layers = {{}}};
  parallel::PlannerOptions planner = options;
  planner.slots.clear();
  planner.speeds.clear();
  for (size_t rank = 0; rank < living.size(); ++rank) {
    if (conditions.dead[rank]) continue;
    std::vector<int>& experts = known.layers[0].emplace_back();
    for (const int expert : living[rank]) experts.push_back(number[expert]);
    planner.slots.push_back(std::max(options.slots[rank], static_cast<int>(experts.size())));
    if (!options.speeds.empty()) planner.speeds.push_back(options.speeds[rank]);
  }
  planner.current = &known;
  ASSIGN_OR_RETURN(const parallel::PlannedPlacement planned, PlanPlacement(loads, planner));
  LayerPlacement next(current.size());
  std::vector<bool> kept(number.size(), false);
  for (size_t rank = 0, other = 0; rank < current.size(); ++rank) {
    if (!conditions.dead[rank]) {
      for (const int expert : planned.placement.layers[0][other]) next[rank].push_back(expert_of[expert]);
      ++other;
      continue;
    }
    for (const int expert : current[rank]) {
      if (number[expert] >= 0 || kept[expert]) continue;
      next[rank].push_back(expert);
      kept[expert] = true;
    }
  }
  return next;
}

// Plans all layers of `known`.
StatusOr<std::vector<LayerPlacement>> PlanLayers(const parallel::Placement& known,
                                                 std::span<const parallel::LoadMatrix> workloads,
                                                 const BalanceConditions& conditions,
                                                 const parallel::PlannerOptions& options) {
  if (conditions.dead.empty()) {
    ASSIGN_OR_RETURN(parallel::PlannedPlacement planned, PlanPlacement(workloads, options));
    return std::move(planned.placement.layers);
  }
  std::vector<LayerPlacement> layers;
  for (size_t i = 0; i < known.layers.size(); ++i) {
    ASSIGN_OR_RETURN(layers.emplace_back(),
                     PlanForLiving(known.layers[i], workloads, static_cast<int>(i), conditions, options));
  }
  return layers;
}

// Experts that only dead ranks have get no more tokens.
void DropLostLoads(const parallel::Placement& known, const BalanceConditions& conditions,
                   std::vector<parallel::LoadMatrix>& workloads) {
  for (size_t i = 0; i < known.layers.size() && !conditions.dead.empty(); ++i) {
    std::vector<bool> living(known.experts, false);
    for (const std::vector<int>& experts : LivingPart(known.layers[i], conditions.dead)) {
      for (const int expert : experts) living[expert] = true;
    }
    for (parallel::LoadMatrix& workload : workloads) {
      for (int expert = 0; expert < known.experts; ++expert) {
        if (!living[expert]) workload.tokens[i * known.experts + expert] = 0;
      }
    }
  }
}

}  // namespace

StatusOr<std::vector<PlannedMove>> PlanMoves(const PlacementByLayer& current, const ExpertLoadStats& load,
                                             const BalanceConditions& conditions,
                                             const ExpertBalanceOptions& options,
                                             const std::function<bool()>& stop) {
  parallel::Placement known{.experts = load.experts};
  for (const int layer : load.layers) known.layers.push_back(current.at(layer));
  const int ranks = known.ranks();
  std::vector<parallel::LoadMatrix> workloads =
      WorkloadsOf(load, options.workloads, options.least_tokens_per_rank * ranks);
  DropLostLoads(known, conditions, workloads);
  std::vector<double> speeds = conditions.speeds;  // with those of dead ranks
  if (!conditions.dead.empty()) {
    speeds.resize(ranks, 1);
    for (int rank = 0; rank < ranks; ++rank) {
      if (conditions.dead[rank]) speeds[rank] = parallel::kDeadSpeed;
    }
  }
  const double layers = static_cast<double>(load.layers.size());
  // Mean time of a rank's experts until the next plan, and for a batch.
  const double experts_s = conditions.expert_share * options.interval_s;
  const double batch_s = conditions.row_s * options.batch_tokens * conditions.routing.top_k * layers / ranks;
  const double batches = batch_s > 0 ? experts_s / batch_s : 0;
  // Ranks measure one rate, the time of a row in large batches. It includes started tiles and reads of
  // weights, but does not separate them, so that they are not counted again.
  const parallel::CostModel cost = {.batch_tokens = options.batch_tokens,
                                    .routing = conditions.routing,
                                    .tile_s = conditions.row_s,
                                    .token_bytes = conditions.token_bytes,
                                    .levels = options.levels,
                                    .expert_bytes = static_cast<double>(conditions.expert_bytes),
                                    .move_bytes_per_s = options.move_bytes_per_s,
                                    .interval_batches = std::max(1.0, batches)};
  const bool by_time = !options.levels.empty() && batch_s > 0 && conditions.dead.empty();
  parallel::PlannerOptions planner;
  planner.slots = parallel::EqualSlots(load.experts + options.redundant, ranks);
  planner.current = &known;
  planner.speeds = conditions.speeds;
  if (by_time) planner.cost = &cost;
  planner.threads = 1;  // ranks compute meanwhile
  planner.stop = stop;
  ASSIGN_OR_RETURN(const std::vector<LayerPlacement> planned,
                   PlanLayers(known, workloads, conditions, planner));
  std::vector<PlannedMove> moves;
  const parallel::ExpertTime time(cost);
  for (size_t i = 0; i < load.layers.size(); ++i) {
    const auto index = static_cast<int>(i);
    const std::span<const double> loads = workloads.front().layer(index);
    const LayerPlacement& old = known.layers[i];
    PlannedMove move{.layer = load.layers[i],
                     .next = Sorted(planned[i]),
                     .loads = {loads.begin(), loads.end()},
                     .speeds = conditions.speeds,
                     .before = Balance(LivingPart(old, conditions.dead), workloads, index, speeds)};
    move.after = Balance(LivingPart(move.next, conditions.dead), workloads, index, speeds);
    move.moved = MostReceived(old, move.next);
    // Times of the slowest rank until the next plan.
    double before_s = move.before * experts_s / layers, after_s = move.after * experts_s / layers;
    if (by_time) {
      before_s = batches * BatchSeconds(old, workloads, index, cost, time, conditions.speeds);
      after_s = batches * BatchSeconds(move.next, workloads, index, cost, time, conditions.speeds);
    }
    const double saved_s = before_s - after_s;
    const double cost_s =
        static_cast<double>(move.moved * conditions.expert_bytes) / options.move_bytes_per_s;
    const bool reduces = by_time ? saved_s > 0 : move.after < move.before;
    const bool pays = saved_s >= options.least_gain * before_s && saved_s > cost_s;
    if (move.moved > 0 && (options.least_gain == 0 ? reduces : pays)) moves.push_back(std::move(move));
  }
  std::ranges::stable_sort(moves, [](const PlannedMove& a, const PlannedMove& b) {
    return a.after / a.before < b.after / b.before;
  });
  return moves;
}

PlacementByLayer LoadedPlacement(const parallel::Layout& layout, const models::ModelInfo& info,
                                 const ExpertLoadStats& load) {
  const parallel::ModelShape shape{.layers = info.layers, .experts = info.experts, .moe_layers = load.layers};
  PlacementByLayer placement;
  for (const int layer : load.layers) placement[layer] = parallel::ExpertsByRank(layout, shape, layer);
  return placement;
}

}  // namespace moesaic::engine
