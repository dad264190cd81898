// The actions of `moesaic placement` on plans.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "app/input.h"
#include "app/interrupt.h"
#include "app/output.h"
#include "app/placement_flags.h"
#include "app/progress.h"
#include "app/table.h"
#include "parallel/placement/layer_cost.h"
#include "parallel/placement/planner.h"
#include "parallel/placement/published_balancers.h"
#include "runtime/atomic_file.h"

namespace moesaic::app {
namespace {

using parallel::LoadMatrix;
using parallel::Placement;
using parallel::PlacementFormat;
using parallel::PolicyResult;
using parallel::Workload;

StatusOr<std::vector<double>> Speeds(const PlacementFlags& flags) {
  std::vector<double> speeds;
  for (const std::string& text : flags.speeds) {
    double value = 0;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || rest != text.data() + text.size() || !(value >= 1e-6 && value <= 1e6))
      return InvalidArgument("--speeds must be numbers from 1e-6 to 1e6, found {}", text);
    speeds.push_back(value);
  }
  return speeds;
}

StatusOr<Placement> ReadPlan(const std::string& path, int ranks) {
  if (path != kStandardInput) return parallel::ReadPlacement(path, ranks);
  ASSIGN_OR_RETURN(const std::string bytes, ReadInput(path));
  return parallel::ParsePlacement(bytes, InputName(path), ranks);
}

struct MadePlan {
  Placement placement;
  std::string eplb_bytes;  // of --algorithm eplb: the arrays as EPLB orders them
  bool interrupted = false;
};

StatusOr<MadePlan> MakeEplb(const PlacementFlags& flags, const LoadMatrix& load, int slots) {
  ASSIGN_OR_RETURN(const parallel::EplbPlan plan,
                   parallel::PlanEplb(load, {slots, flags.groups, flags.nodes, flags.ranks}));
  return MadePlan{parallel::FromEplb(plan, flags.ranks), parallel::EplbBytes(plan), false};
}

StatusOr<MadePlan> MakeBaseline(const PlacementFlags& flags, std::span<const LoadMatrix> loads) {
  if (!flags.rank_slots.empty() || !flags.speeds.empty() || !flags.current.empty() ||
      flags.extra_replicas > 0 || flags.traffic_weight > 0 || !flags.cost.empty() || flags.quantile < 1 ||
      !flags.rank_memory.empty()) {
    return InvalidArgument(
        "--rank-slots, --speeds, --current, --extra-replicas, --traffic-weight, --cost, --quantile and "
        "--rank-memory need --algorithm moesaic, found {}",
        flags.algorithm);
  }
  const LoadMatrix sum = parallel::SumOfLoads(loads);
  const int slots = flags.slots > 0 ? flags.slots : sum.experts;
  if (flags.algorithm == "eplb") return MakeEplb(flags, sum, slots);
  if (slots % flags.ranks != 0)
    return InvalidArgument("--slots must be a multiple of the {} ranks for {}, found {}", flags.ranks,
                           flags.algorithm, slots);
  const int per_rank = slots / flags.ranks;
  StatusOr<Placement> placement =
      flags.algorithm == "omni"
          ? parallel::PlanOmniStatic(sum,
                                     {.ranks = flags.ranks, .slots_per_rank = per_rank, .hosts = flags.nodes})
      : flags.algorithm == "flashlb" ? parallel::PlanFlashLb(loads, flags.ranks, per_rank)
      : flags.algorithm == "swift"
          ? parallel::PlanSwiftBalance(sum, flags.ranks, per_rank)
          : parallel::PlanLplbGraph(sum, {.ranks = flags.ranks, .slots_per_rank = per_rank});
  RETURN_IF_ERROR(placement.status());
  return MadePlan{*std::move(placement), "", false};
}

// Slots over all layers that the memory of each rank holds; empty: no limit.
StatusOr<std::vector<int64_t>> SlotsInMemory(const PlacementFlags& flags, size_t ranks) {
  std::vector<int64_t> slots = flags.rank_memory;
  if (slots.empty()) return slots;
  if (flags.expert_bytes == 0) {
    return InvalidArgument("--rank-memory counts in experts: give --expert-bytes, too");
  }
  if (slots.size() != 1 && slots.size() != ranks) {
    return InvalidArgument("--rank-memory must be that of all ranks, or of each of the {} ranks, found {}",
                           ranks, slots.size());
  }
  slots.resize(ranks, slots.front());
  for (int64_t& slot : slots) slot /= flags.expert_bytes;
  return slots;
}

// Fills the empty slots of the placement in use, as the format of --out has none. Each added replica counts
// as a move.
Status FillEmptySlots(const LoadMatrix& load, parallel::PlannerOptions& options, Placement& filled) {
  const bool fits = filled.experts == load.experts && std::ssize(filled.layers) == load.layers &&
                    filled.ranks() == std::ssize(options.slots);
  if (!fits) return OkStatus();  // the planner refuses it
  const int added = parallel::FillSlots(load, options.slots, &filled);
  if (options.max_moves >= 0 && options.max_moves < added) {
    return InvalidArgument(
        "--max-moves must be at least {}, the slots of a layer that --current leaves empty, because the "
        "format of --out has no empty slots; found {}",
        added, options.max_moves);
  }
  if (added > 0)
    Tell("empty slots of {} get replicas, since the format of --out has none: up to {} in a layer\n",
         "--current", added);
  if (options.max_moves >= 0) options.max_moves -= added;
  options.current = &filled;
  return OkStatus();
}

StatusOr<MadePlan> MakeOurs(const PlacementFlags& flags, std::span<const LoadMatrix> loads,
                            std::optional<Placement> current, bool fills_slots) {
  parallel::PlannerOptions options{.slots = flags.rank_slots};
  if (options.slots.empty()) {
    options.slots = parallel::EqualSlots(flags.slots > 0 ? flags.slots : loads.front().experts, flags.ranks);
  } else if (flags.slots > 0 || (flags.ranks > 0 && flags.ranks != static_cast<int>(options.slots.size()))) {
    return InvalidArgument("--rank-slots names the slots of {} ranks; leave out --slots and other --ranks",
                           options.slots.size());
  }
  const int64_t total = std::accumulate(options.slots.begin(), options.slots.end(), int64_t{0});
  if (total < loads.front().experts) {
    return InvalidArgument("{} must hold the {} experts of a layer, found {} slots",
                           flags.rank_slots.empty() ? "--slots" : "--rank-slots", loads.front().experts,
                           total);
  }
  ASSIGN_OR_RETURN(options.speeds, Speeds(flags));
  if (!options.speeds.empty() && options.speeds.size() != options.slots.size()) {
    return InvalidArgument("--speeds must name {} ranks, found {}", options.slots.size(),
                           options.speeds.size());
  }
  options.extra_replicas = flags.extra_replicas;
  options.traffic_weight = flags.traffic_weight;
  options.nodes = flags.nodes;
  options.groups = flags.groups;
  const parallel::Routing routing = RoutingOf(flags);
  if (flags.nodes > 1 && flags.top_k > 0) options.routing = &routing;
  options.threads = flags.threads;
  options.quantile = flags.quantile;
  std::optional<parallel::CostModel> cost;
  if (!flags.cost.empty()) {
    ASSIGN_OR_RETURN(cost, parallel::ReadCostModel(flags.cost));
    options.cost = &*cost;
  }
  ASSIGN_OR_RETURN(options.all_slots, SlotsInMemory(flags, options.slots.size()));
  options.current = current ? &*current : nullptr;
  if (current && options.routing != nullptr)
    Tell("ranks keep the order of {}: all experts of exchanged ranks would move\n", "--current");
  options.max_moves = flags.max_moves;
  if (current && fills_slots) RETURN_IF_ERROR(FillEmptySlots(parallel::SumOfLoads(loads), options, *current));
  const InterruptGuard guard;
  Progress progress("planning");
  options.progress = [&](int done, int total) {
    progress.Show(done, total, fmt::format("{} of {} layers", done, total));
  };
  options.stop = Interrupted;
  ASSIGN_OR_RETURN(parallel::PlannedPlacement planned, parallel::PlanPlacement(loads, options));
  return MadePlan{std::move(planned.placement), "", planned.interrupted};
}

Status CheckPlanFits(const Placement& placement, const LoadMatrix& load) {
  if (placement.experts == load.experts && static_cast<int>(placement.layers.size()) == load.layers)
    return OkStatus();
  return InvalidArgument("the plan must have {} layers of {} experts as the loads, found {} of {}",
                         load.layers, load.experts, placement.layers.size(), placement.experts);
}

// Refuses a format that can't hold the plan before the plan is made.
Status CheckFormatFits(const PlacementFlags& flags, PlacementFormat format, int experts) {
  if (flags.first_layer > 0 && !parallel::CountsDenseLayers(format))
    return InvalidArgument(
        "--first-layer {} needs --format sglang or tensorrt-llm: others count MoE layers only",
        flags.first_layer);
  if (!parallel::NeedsEqualSlots(format)) return OkStatus();
  const int slots = flags.slots > 0 ? flags.slots : experts;
  const bool equal = flags.rank_slots.empty() ? flags.ranks > 0 && slots % flags.ranks == 0
                                              : std::equal(flags.rank_slots.begin() + 1,
                                                           flags.rank_slots.end(), flags.rank_slots.begin());
  if (equal && flags.extra_replicas == 0 && flags.rank_memory.empty()) return OkStatus();
  return InvalidArgument(
      "{}: this format needs equally many slots on all ranks and layers; use a multiple of the ranks for "
      "--slots, or --format moesaic",
      flags.out);
}

// Returns whether any load has tokens in the layer.
bool HasTokens(std::span<const Workload> loads, int layer) {
  return std::ranges::any_of(
      loads, [layer](const Workload& load) { return parallel::HasTokens(load.total, layer); });
}

// Loads with rows of dense layers have no tokens there, and files need no further rows for them.
Status CheckFirstLayer(const PlacementFlags& flags, std::span<const Workload> loads) {
  if (flags.first_layer == 0 || HasTokens(loads, 0)) return OkStatus();
  return InvalidArgument(
      "--first-layer {}: layer 0 of the loads has no tokens, so the loads have rows of dense layers; "
      "leave the flag out",
      flags.first_layer);
}

// OmniPlacement counts MoE layers only. Recorders that count dense ones, too, have no tokens for them.
Placement WithoutDenseLayers(const Placement& placement, std::span<const Workload> loads) {
  Placement moe{.experts = placement.experts};
  for (int layer = 0; layer < static_cast<int>(placement.layers.size()); ++layer) {
    if (HasTokens(loads, layer)) moe.layers.push_back(placement.layers[layer]);
  }
  const size_t left_out = placement.layers.size() - moe.layers.size();
  if (left_out > 0)
    Tell("OmniPlacement counts MoE layers only: {} layers without tokens are left out\n", left_out);
  return moe;
}

std::string Number(double value) { return fmt::format("{:.3f}", value); }

// The placement of --current, if it is given.
StatusOr<std::optional<Placement>> ReadCurrent(const PlacementFlags& flags, int ranks) {
  if (flags.current.empty()) return std::nullopt;
  ASSIGN_OR_RETURN(Placement current, ReadPlan(flags.current, ranks));
  return current;
}

}  // namespace

StatusOr<PlacementFormat> FormatOf(const PlacementFlags& flags) {
  if (flags.format == "moesaic") return PlacementFormat::kMoesaic;
  if (flags.format == "eplb") return PlacementFormat::kEplb;
  if (flags.format == "sglang") return PlacementFormat::kSglang;
  if (flags.format == "omni") return PlacementFormat::kOmni;
  if (flags.format == "tensorrt-llm") return PlacementFormat::kTensorRt;
  const std::string extension = std::filesystem::path(flags.out).extension().string();
  if (extension == ".npz") return PlacementFormat::kEplb;
  if (extension == ".npy") return PlacementFormat::kOmni;
  if (extension == ".yaml" || extension == ".yml") return PlacementFormat::kTensorRt;
  if (extension == ".json") return PlacementFormat::kMoesaic;
  return InvalidArgument(
      "--format is needed: the extension of --out is not .json, .npz, .npy or .yaml, found {}", flags.out);
}

Status RunPlacementPlan(const PlacementFlags& flags) {
  PlacementFormat format = PlacementFormat::kMoesaic;
  if (!flags.out.empty()) {
    ASSIGN_OR_RETURN(format, FormatOf(flags));
  }
  ASSIGN_OR_RETURN(const std::vector<Workload> loads, ReadLoads(flags));
  RETURN_IF_ERROR(CheckFormatFits(flags, format, loads.front().total.experts));
  RETURN_IF_ERROR(CheckFirstLayer(flags, loads));
  if (flags.algorithm != "moesaic" && flags.ranks < 1)
    return InvalidArgument("--ranks is needed by {}, found none", flags.algorithm);
  ASSIGN_OR_RETURN(const std::vector<double> speeds, Speeds(flags));
  const int ranks = flags.rank_slots.empty() ? flags.ranks : static_cast<int>(flags.rank_slots.size());
  ASSIGN_OR_RETURN(const std::optional<Placement> current, ReadCurrent(flags, ranks));
  const auto start = std::chrono::steady_clock::now();
  const bool fills_slots = !flags.out.empty() && parallel::NeedsEqualSlots(format);
  ASSIGN_OR_RETURN(const MadePlan plan, flags.algorithm == "moesaic"
                                            ? MakeOurs(flags, parallel::Totals(loads), current, fills_slots)
                                            : MakeBaseline(flags, parallel::Totals(loads)));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!flags.out.empty()) {
    std::string bytes = plan.eplb_bytes;
    if (format != PlacementFormat::kEplb || bytes.empty()) {
      ASSIGN_OR_RETURN(bytes, parallel::PlacementBytes(format == PlacementFormat::kOmni
                                                           ? WithoutDenseLayers(plan.placement, loads)
                                                           : plan.placement,
                                                       format, flags.first_layer));
    }
    RETURN_IF_ERROR(runtime::WriteFileAtomically(flags.out, bytes));
  }
  if (!flags.html.empty())
    RETURN_IF_ERROR(runtime::WriteFileAtomically(flags.html, PlanHtml(flags, plan.placement, speeds, loads)));
  if (plan.interrupted) Tell("interrupted: layers that were not done have the best placement found so far\n");
  RETURN_IF_ERROR(PrintBalance(flags, plan.placement, loads, speeds, current));
  if (!flags.json) Print("\nplanned by {} in {:.2f} s\n", flags.algorithm, seconds);
  if (flags.out.empty()) {
    Tell("the plan is not kept; --out FILE writes it\n");
  } else {
    Tell("written to {}\n", flags.out);
  }
  return plan.interrupted ? Cancelled("interrupted") : OkStatus();
}

Status RunPlacementEvaluate(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const Placement placement, ReadPlan(flags.plan, flags.ranks));
  ASSIGN_OR_RETURN(const std::vector<Workload> loads, ReadLoads(flags));
  RETURN_IF_ERROR(CheckPlanFits(placement, loads.front().total));
  ASSIGN_OR_RETURN(const std::vector<double> speeds, Speeds(flags));
  if (!speeds.empty() && static_cast<int>(speeds.size()) != placement.ranks())
    return InvalidArgument("--speeds must name the {} ranks of the plan, found {}", placement.ranks(),
                           speeds.size());
  if (!flags.html.empty())
    RETURN_IF_ERROR(runtime::WriteFileAtomically(flags.html, PlanHtml(flags, placement, speeds, loads)));
  ASSIGN_OR_RETURN(const std::optional<Placement> current, ReadCurrent(flags, placement.ranks()));
  return PrintBalance(flags, placement, loads, speeds, current);
}

Status RunPlacementCompare(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<Workload> loads, ReadLoads(flags));
  parallel::CompareOptions options{.ranks = flags.ranks,
                                   .slots = flags.slots > 0 ? flags.slots : loads.front().total.experts,
                                   .nodes = flags.nodes,
                                   .groups = flags.groups,
                                   .leave_one_out = flags.leave_one_out,
                                   .split = flags.split,
                                   .moves = flags.moves,
                                   .threads = flags.threads};
  std::vector<PolicyResult> results;
  {
    const InterruptGuard guard;
    Progress progress("comparing");
    options.progress = [&](int done, int total) {
      progress.Show(done, total, fmt::format("{} of {} plans", done, total));
    };
    options.stop = Interrupted;
    ASSIGN_OR_RETURN(results, parallel::ComparePolicies(loads, options));
  }
  std::vector<std::string> missing;
  for (const PolicyResult& result : results) {
    if (result.interrupted) missing.push_back(result.name);
  }
  if (!missing.empty()) Tell("interrupted: not finished: {}\n", fmt::join(missing, ", "));
  if (missing.size() == results.size()) return Cancelled("interrupted");
  if (!flags.html.empty())
    RETURN_IF_ERROR(runtime::WriteFileAtomically(flags.html, ComparisonHtml(flags, options.slots, results)));
  std::vector<std::vector<std::string>> rows = {{"policy", "mean", "worst", "moves per rank"}};
  nlohmann::ordered_json policies = nlohmann::ordered_json::object();
  nlohmann::ordered_json refused = nlohmann::ordered_json::object();
  for (const PolicyResult& result : results) {
    if (result.interrupted) continue;
    if (!result.error.empty()) {
      Tell("{}: {}\n", result.name, result.error);
      refused[result.name] = result.error;
      continue;
    }
    rows.push_back(
        {result.name, Number(result.mean), Number(result.worst), fmt::format("{:.2f}", result.moves)});
    policies[result.name] = {
        {"mean", result.mean}, {"worst", result.worst}, {"moves_per_rank", result.moves}};
  }
  if (flags.json) {
    nlohmann::ordered_json all = {{"ranks", options.ranks},
                                  {"slots", options.slots},
                                  {"leave_one_out", flags.leave_one_out},
                                  {"policies", policies},
                                  {"refused", refused}};
    if (!missing.empty()) all["interrupted"] = missing;
    WriteOutput(all.dump(2) + "\n");
  } else {
    Print("{}, {} of {} experts, {} ranks, {} slots\n\n{}", Counted(std::ssize(loads), "workload"),
          Counted(loads.front().total.layers, "layer"), loads.front().total.experts, options.ranks,
          options.slots, FormatTable(rows, /*markdown=*/false));
  }
  return missing.empty() ? OkStatus() : Cancelled("interrupted");
}

Status RunPlacementFront(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const std::vector<Workload> loads, ReadLoads(flags));
  parallel::FrontOptions options{.ranks = flags.ranks,
                                 .slots = flags.slots > 0 ? flags.slots : loads.front().total.experts,
                                 .nodes = flags.nodes,
                                 .routing = RoutingOf(flags),
                                 .threads = flags.threads};
  std::vector<parallel::FrontPoint> points;
  {
    const InterruptGuard guard;
    Progress progress("planning");
    options.progress = [&](int done, int total) {
      progress.Show(done, total, fmt::format("{} of {} plans", done, total));
    };
    options.stop = Interrupted;
    ASSIGN_OR_RETURN(points, parallel::PlanFront(loads, options));
  }
  if (!flags.html.empty())
    RETURN_IF_ERROR(runtime::WriteFileAtomically(flags.html, FrontHtml(flags, options.slots, points)));
  std::vector<std::vector<std::string>> rows = {
      {"policy", "traffic weight", "mean", "worst", "remote nodes", "dominated"}};
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const parallel::FrontPoint& point : points) {
    const bool ours = point.name == "moesaic";
    rows.push_back({point.name, ours ? fmt::format("{:g}", point.weight) : "-", Number(point.mean),
                    Number(point.worst), Number(point.remote_nodes), point.dominated ? "yes" : "no"});
    json.push_back({{"policy", point.name},
                    {"traffic_weight", point.weight},
                    {"mean", point.mean},
                    {"worst", point.worst},
                    {"remote_nodes", point.remote_nodes},
                    {"dominated", point.dominated}});
  }
  if (flags.json) {
    WriteOutput(json.dump(2) + "\n");
  } else {
    Print("{}, {} of {} experts, {} ranks on {}, {} slots\n\n{}", Counted(std::ssize(loads), "workload"),
          Counted(loads.front().total.layers, "layer"), loads.front().total.experts, options.ranks,
          Counted(options.nodes, "node"), options.slots, FormatTable(rows, /*markdown=*/false));
  }
  return OkStatus();
}

Status RunPlacementConvert(const PlacementFlags& flags) {
  ASSIGN_OR_RETURN(const PlacementFormat format, FormatOf(flags));
  ASSIGN_OR_RETURN(const Placement placement, ReadPlan(flags.files.front(), flags.ranks));
  ASSIGN_OR_RETURN(const std::string bytes, parallel::PlacementBytes(placement, format, flags.first_layer));
  RETURN_IF_ERROR(runtime::WriteFileAtomically(flags.out, bytes));
  Tell("written to {}\n", flags.out);
  return OkStatus();
}

}  // namespace moesaic::app
