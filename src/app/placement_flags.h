// Flags of `moesaic placement` and its actions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "parallel/placement/comparison.h"
#include "parallel/placement/placement.h"
#include "parallel/placement/placement_file.h"
#include "parallel/placement/traffic_front.h"

namespace moesaic::app {

struct PlacementFlags {
  std::string action;
  std::vector<std::string> files;
  int ranks = 0, slots = 0;
  int groups = 1, nodes = 1;
  int top_k = 0, top_groups = 0;  // 0: not given
  int threads = 2;
  bool json = false;
  std::string out, format, html;
  int first_layer = 0;
  // plan
  std::string algorithm = "moesaic";
  std::vector<int> rank_slots;
  std::vector<std::string> speeds;
  int extra_replicas = 0;
  std::string current;
  int max_moves = -1;
  double traffic_weight = 0;
  std::string cost;  // also of evaluate
  double quantile = 1;
  std::vector<int64_t> rank_memory;  // one of all ranks, or one for each
  int64_t expert_bytes = 0;
  bool windows = false;
  // evaluate
  std::string plan;
  // compare
  bool leave_one_out = false, split = false;
  double moves = 0;
  // generate
  int layers = 58, experts = 256, workloads = 6;
  std::string skew = "log-normal", drift = "mixtures";
  double spread = 0.9, correlation = 0.83;
  bool gives_correlation = false;  // on the command line
  int64_t seed = 1;
};

/// Returns the workloads of the files. With --windows, each window is a workload.
StatusOr<std::vector<parallel::Workload>> ReadLoads(const PlacementFlags& flags);

/// The format that --format names, or that the file name suggests.
StatusOr<parallel::PlacementFormat> FormatOf(const PlacementFlags& flags);

/// Routing of tokens that the flags describe.
parallel::Routing RoutingOf(const PlacementFlags& flags);

/// Prints a table or JSON with the balance of each load, and the moves from `current` if it is given.
Status PrintBalance(const PlacementFlags& flags, const parallel::Placement& placement,
                    std::span<const parallel::Workload> loads, std::span<const double> speeds,
                    const std::optional<parallel::Placement>& current);

// One function per action.
Status RunPlacementPlan(const PlacementFlags& flags);
Status RunPlacementEvaluate(const PlacementFlags& flags);
Status RunPlacementCompare(const PlacementFlags& flags);
Status RunPlacementFront(const PlacementFlags& flags);
Status RunPlacementConvert(const PlacementFlags& flags);
Status RunPlacementExplain(const PlacementFlags& flags);
Status RunPlacementGenerate(const PlacementFlags& flags);

/// Returns an HTML page with the printed `table` and the skew of each layer.
std::string ExplanationHtml(int ranks, const std::vector<std::vector<std::string>>& table,
                            const std::vector<parallel::Workload>& loads);
/// Returns an HTML page with a bar per compared placement.
std::string ComparisonHtml(const PlacementFlags& flags, int slots,
                           const std::vector<parallel::PolicyResult>& results);
/// Returns an HTML page with the points of a front.
std::string FrontHtml(const PlacementFlags& flags, int slots,
                      const std::vector<parallel::FrontPoint>& points);
/// Returns an HTML page with the balance of each layer under a plan.
std::string PlanHtml(const PlacementFlags& flags, const parallel::Placement& placement,
                     const std::vector<double>& speeds, const std::vector<parallel::Workload>& loads);

}  // namespace moesaic::app
