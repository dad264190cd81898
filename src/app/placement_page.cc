// HTML pages of `moesaic placement`.
#include <fmt/format.h>

#include "app/placement_flags.h"
#include "app/report_page.h"
#include "app/svg_plot.h"
#include "parallel/placement/balance.h"

namespace moesaic::app {
namespace {

constexpr size_t kPlottedLoads = 6;  // series of a plot that have colours of their own

std::string Ratio(double value) { return fmt::format("{:.3f}", value); }

}  // namespace

std::string ComparisonHtml(const PlacementFlags& flags, int slots,
                           const std::vector<parallel::PolicyResult>& results) {
  ReportSection section{.title = "Largest rank load over the mean"};
  section.notes = {flags.leave_one_out ? "Each workload is measured on a plan for the others."
                                       : "Workloads are measured on a plan for all of them."};
  section.table.push_back({"policy", "mean", "worst", "moves per rank"});
  std::vector<std::pair<std::string, double>> excess;
  for (const parallel::PolicyResult& result : results) {
    if (!result.error.empty()) continue;
    section.table.push_back(
        {result.name, Ratio(result.mean), Ratio(result.worst), fmt::format("{:.2f}", result.moves)});
    excess.emplace_back(result.name, result.mean - 1);
  }
  section.plots.push_back(
      {.caption = "Excess over perfect balance, mean over layers and workloads",
       .svg = BarPlot(excess, [](double value) { return fmt::format("{:.1f}%", 100 * value); })});
  return ReportHtml({.title = "Comparison of expert placements",
                     .facts = {{std::to_string(flags.ranks), "ranks"}, {std::to_string(slots), "slots"}},
                     .sections = {section}});
}

std::string FrontHtml(const PlacementFlags& flags, int slots,
                      const std::vector<parallel::FrontPoint>& points) {
  ReportSection section{.title = "Balance and traffic between nodes"};
  section.table.push_back({"policy", "traffic weight", "mean", "worst", "remote nodes", "dominated"});
  std::vector<std::pair<std::string, double>> excess, traffic;
  for (const parallel::FrontPoint& point : points) {
    section.table.push_back({point.name, fmt::format("{:g}", point.weight), Ratio(point.mean),
                             Ratio(point.worst), Ratio(point.remote_nodes), point.dominated ? "yes" : "no"});
    const std::string name = point.name == "moesaic" ? fmt::format("weight {:g}", point.weight) : point.name;
    excess.emplace_back(name, point.mean - 1);
    traffic.emplace_back(name, point.remote_nodes);
  }
  section.plots = {{.caption = "Excess over perfect balance, mean over layers and workloads",
                    .svg = BarPlot(excess, [](double value) { return fmt::format("{:.1f}%", 100 * value); })},
                   {.caption = "Other nodes that a token is sent to", .svg = BarPlot(traffic, Ratio)}};
  return ReportHtml({.title = "Front of expert placements",
                     .facts = {{std::to_string(flags.ranks), "ranks"},
                               {std::to_string(flags.nodes), "nodes"},
                               {std::to_string(slots), "slots"}},
                     .sections = {section}});
}

std::string PlanHtml(const PlacementFlags& flags, const parallel::Placement& placement,
                     const std::vector<double>& speeds, const std::vector<parallel::Workload>& loads) {
  std::vector<PlotSeries> equal, split;
  std::vector<std::string> names;
  for (size_t i = 0; i < loads.size() && i < kPlottedLoads; ++i) {
    names.push_back(loads[i].name);
    equal.push_back({loads[i].name});
    split.push_back({loads[i].name});
    for (int layer = 0; layer < loads[i].total.layers; ++layer) {
      if (!parallel::HasTokens(loads[i].total, layer)) continue;
      const auto tokens = loads[i].total.layer(layer);
      equal.back().points.emplace_back(layer, parallel::Imbalance(placement.layers[layer], tokens, speeds));
      split.back().points.emplace_back(layer,
                                       parallel::SplitImbalance(placement.layers[layer], tokens, speeds));
    }
  }
  ReportSection section{.title = "Balance per layer"};
  if (loads.size() > kPlottedLoads)
    section.notes = {fmt::format("Plots show the first {} of {} loads.", kPlottedLoads, loads.size())};
  section.plots = {
      {"Largest rank load over the mean, equal shares of replicas",
       PointPlot(equal, "layer", Ratio, false, true), names},
      {"The same with the exact split over replicas", PointPlot(split, "layer", Ratio, false, true), names}};
  return ReportHtml({.title = "Expert placement",
                     .subtitle = flags.action == "plan" ? "Planned by " + flags.algorithm : flags.plan,
                     .facts = {{std::to_string(placement.ranks()), "ranks"},
                               {std::to_string(placement.layers.size()), "layers"},
                               {std::to_string(placement.experts), "experts"},
                               {std::to_string(placement.max_slots()), "slots of a rank"}},
                     .sections = {section}});
}

}  // namespace moesaic::app
