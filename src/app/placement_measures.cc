// Measures of a placement that `moesaic placement` prints.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "app/output.h"
#include "app/placement_flags.h"
#include "app/table.h"
#include "parallel/placement/balance.h"
#include "parallel/placement/layer_cost.h"
#include "parallel/placement/migration.h"
#include "parallel/placement/node_traffic.h"
#include "parallel/placement/token_split.h"

namespace moesaic::app {
namespace {

using parallel::LoadMatrix;
using parallel::Placement;
using parallel::Workload;

constexpr int kDefaultTopK = 8;  // of DeepSeek-V3 and Qwen3-MoE

std::string Decimals(double value) { return fmt::format("{:.3f}", value); }

// Mean and worst over loads and layers with tokens.
struct Balance {
  double mean = 0, worst = 0, split_mean = 0, split_worst = 0;
  int duplicates = 0, activated = 0;
  double remote_nodes = 0;
};

Balance MeasureBalance(const Placement& placement, std::span<const Workload> loads,
                       std::span<const double> speeds = {}, int nodes = 1,
                       const parallel::Routing& routing = {}) {
  Balance balance;
  int count = 0;
  for (const Workload& load : loads) {
    for (int layer = 0; layer < load.total.layers; ++layer) {
      if (!parallel::HasTokens(load.total, layer)) continue;
      ++count;
      const parallel::LayerPlacement& placed = placement.layers[layer];
      const double equal = parallel::Imbalance(placed, load.total.layer(layer), speeds);
      const double split = parallel::SplitImbalance(placed, load.total.layer(layer), speeds);
      balance.mean += equal;
      balance.split_mean += split;
      balance.worst = std::max(balance.worst, equal);
      balance.split_worst = std::max(balance.split_worst, split);
      balance.remote_nodes += parallel::RemoteNodes(placed, load.total.layer(layer), nodes, routing);
      balance.activated =
          std::max(balance.activated, parallel::ActivatedExperts(placed, load.total.layer(layer)));
    }
  }
  balance.mean /= count;
  balance.split_mean /= count;
  balance.remote_nodes /= count;
  for (const parallel::LayerPlacement& layer : placement.layers)
    balance.duplicates += parallel::DuplicateSlots(layer);
  return balance;
}

// Median time of the exact split of one batch of whole tokens, in microseconds.
double SplitMicroseconds(const Placement& placement, const LoadMatrix& load) {
  constexpr double kBatchTokens = 8 * 128;  // per rank: 128 tokens with 8 experts each
  const LoadMatrix batch = parallel::ScaledLoad(load, kBatchTokens * placement.ranks());
  std::vector<double> times;
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::span<const double> loads = batch.layer(layer);
    const std::vector<int64_t> tokens(loads.begin(), loads.end());
    parallel::TokenSplit split(placement.layers[layer], load.experts);
    const auto start = std::chrono::steady_clock::now();
    split.SplitTokens(tokens);
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

int64_t Replicas(const Placement& placement) {
  int64_t sum = 0;
  for (size_t layer = 0; layer < placement.layers.size(); ++layer)
    sum += placement.replicas(static_cast<int>(layer));
  return sum;
}

// Moves from the placement in use to another one.
struct MigrationSize {
  int64_t experts = 0, rounds = 0;
  int most_experts = 0, most_rounds = 0;  // of a layer
};

StatusOr<MigrationSize> MeasureMigration(const Placement& current, const Placement& next) {
  if (current.experts != next.experts || current.layers.size() != next.layers.size() ||
      current.ranks() != next.ranks()) {
    return InvalidArgument(
        "--current must have {} ranks, {} layers and {} experts as the plan, found {}, {} and {}",
        next.ranks(), next.layers.size(), next.experts, current.ranks(), current.layers.size(),
        current.experts);
  }
  MigrationSize size;
  for (size_t layer = 0; layer < next.layers.size(); ++layer) {
    ASSIGN_OR_RETURN(const std::vector<parallel::TransferRound> rounds,
                     parallel::PlanTransfers(current.layers[layer], next.layers[layer]));
    int experts = 0;
    for (const parallel::TransferRound& round : rounds) experts += static_cast<int>(round.size());
    size.experts += experts;
    size.rounds += static_cast<int64_t>(rounds.size());
    size.most_experts = std::max(size.most_experts, experts);
    size.most_rounds = std::max(size.most_rounds, static_cast<int>(rounds.size()));
  }
  return size;
}

// Predicted times of a load, mean over layers with tokens.
parallel::LayerCost MeanCost(const Placement& placement, const LoadMatrix& load,
                             const parallel::CostModel& model, const parallel::ExpertTime& time,
                             std::span<const double> speeds, const std::optional<Placement>& current) {
  parallel::LayerCost sum;
  int layers = 0;
  for (int layer = 0; layer < load.layers; ++layer) {
    if (!parallel::HasTokens(load, layer)) continue;
    const parallel::LayerCost cost =
        parallel::PredictCost(placement.layers[layer], load.layer(layer), model, time, speeds,
                              current ? &current->layers[layer] : nullptr);
    sum.compute_s += cost.compute_s;
    sum.exchange_s += cost.exchange_s;
    sum.move_s += cost.move_s;
    ++layers;
  }
  for (double* part : {&sum.compute_s, &sum.exchange_s, &sum.move_s}) *part /= std::max(1, layers);
  return sum;
}

}  // namespace

parallel::Routing RoutingOf(const PlacementFlags& flags) {
  return {.top_k = flags.top_k > 0 ? flags.top_k : kDefaultTopK,
          .groups = flags.groups,
          .top_groups = flags.top_groups > 0 ? flags.top_groups : flags.groups};
}

Status PrintBalance(const PlacementFlags& flags, const Placement& placement, std::span<const Workload> loads,
                    std::span<const double> speeds, const std::optional<Placement>& current) {
  std::optional<MigrationSize> migration;
  if (current) {
    ASSIGN_OR_RETURN(migration, MeasureMigration(*current, placement));
  }
  std::vector<std::vector<std::string>> rows = {
      {"load", "mean", "worst", "split mean", "split worst", "activated experts"}};
  nlohmann::ordered_json json = {{"layers", placement.layers.size()},
                                 {"ranks", placement.ranks()},
                                 {"replicas", Replicas(placement)},
                                 {"max_slots", placement.max_slots()}};
  json["loads"] = nlohmann::ordered_json::array();
  const bool nodes = flags.top_k > 0;
  if (nodes) {
    RETURN_IF_ERROR(parallel::CheckRouting(RoutingOf(flags), placement.experts));
    if (placement.ranks() % flags.nodes != 0)
      return InvalidArgument("--nodes must divide the {} ranks, found {}", placement.ranks(), flags.nodes);
    rows.front().emplace_back("remote nodes");
  }
  std::optional<parallel::CostModel> cost;
  std::optional<parallel::ExpertTime> time;
  if (!flags.cost.empty()) {
    ASSIGN_OR_RETURN(cost, parallel::ReadCostModel(flags.cost));
    RETURN_IF_ERROR(parallel::CheckCostModel(*cost, placement.experts, placement.ranks()));
    time.emplace(*cost);
    for (const char* column : {"compute us", "exchange us", "moves us"}) rows.front().emplace_back(column);
  }
  int duplicates = 0;
  for (const Workload& load : loads) {
    const Balance balance = MeasureBalance(placement, {&load, 1}, speeds, flags.nodes, RoutingOf(flags));
    duplicates = balance.duplicates;
    rows.push_back({load.name, Decimals(balance.mean), Decimals(balance.worst), Decimals(balance.split_mean),
                    Decimals(balance.split_worst), std::to_string(balance.activated)});
    if (nodes) rows.back().push_back(Decimals(balance.remote_nodes));
    json["loads"].push_back({{"name", load.name},
                             {"mean", balance.mean},
                             {"worst", balance.worst},
                             {"split_mean", balance.split_mean},
                             {"split_worst", balance.split_worst},
                             {"activated_experts", balance.activated},
                             {"split_us", SplitMicroseconds(placement, load.total)}});
    if (nodes) json["loads"].back()["remote_nodes"] = balance.remote_nodes;
    if (!cost) continue;
    const parallel::LayerCost times = MeanCost(placement, load.total, *cost, *time, speeds, current);
    for (const double seconds : {times.compute_s, times.exchange_s, times.move_s})
      rows.back().push_back(fmt::format("{:.1f}", 1e6 * seconds));
    json["loads"].back()["predicted_s"] = {{"compute", times.compute_s},
                                           {"exchange", times.exchange_s},
                                           {"moves", times.move_s},
                                           {"total", times.total()}};
  }
  json["repeated_replicas"] = duplicates;
  if (migration) {
    json["migration"] = {{"experts", migration->experts},
                         {"most_experts_of_a_layer", migration->most_experts},
                         {"rounds", migration->rounds},
                         {"most_rounds_of_a_layer", migration->most_rounds}};
  }
  if (flags.json) {
    WriteOutput(json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    return OkStatus();
  }
  Print("{} layers, {} ranks, up to {} slots of a rank, {} replicas, {} repeated on their rank\n\n{}",
        placement.layers.size(), placement.ranks(), placement.max_slots(), Replicas(placement), duplicates,
        FormatTable(rows, /*markdown=*/false));
  if (migration) {
    Print("\n{} experts move from {}, at most {} of a layer; at most {} per layer\n", migration->experts,
          flags.current, migration->most_experts, Counted(migration->most_rounds, "round"));
  }
  return OkStatus();
}

}  // namespace moesaic::app
