// HTML pages of `moesaic placement`.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "app/placement_flags.h"
#include "app/report_page.h"
#include "app/svg_plot.h"
#include "parallel/placement/balance.h"

namespace moesaic::app {
namespace {

constexpr size_t kPlottedLoads = 6;  // series of a plot that have colours of their own

constexpr size_t kHeatMaps = 3;  // each has a cell per rank and layer

std::string Ratio(double value) { return fmt::format("{:.3f}", value); }
std::string Percent(double value) { return fmt::format("{:.1f}%", 100 * value); }

// Mean and largest excess of a series' layers.
std::pair<double, double> MeanAndWorst(const PlotSeries& series) {
  double sum = 0, worst = 0;
  for (const auto& [layer, excess] : series.points) {
    sum += excess;
    worst = std::max(worst, excess);
  }
  return {sum / std::max<double>(1, static_cast<double>(series.points.size())), worst};
}

// Loads of ranks (columns) in layers (rows), over speed and the mean.
ReportPlot RankHeatMap(const parallel::Placement& placement, const std::vector<double>& speeds,
                       const parallel::Workload& load) {
  std::vector<std::vector<double>> cells;
  std::vector<int> layers;
  for (int layer = 0; layer < load.total.layers; ++layer) {
    if (!parallel::HasTokens(load.total, layer)) continue;
    std::vector<double> loads = parallel::EqualShareLoads(placement.layers[layer], load.total.layer(layer));
    const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
    const double speed = speeds.empty() ? static_cast<double>(loads.size())
                                        : std::accumulate(speeds.begin(), speeds.end(), 0.0);
    for (size_t rank = 0; rank < loads.size(); ++rank)
      loads[rank] *= speed / (total * (speeds.empty() ? 1 : speeds[rank]));
    cells.push_back(std::move(loads));
    layers.push_back(layer);
  }
  return {load.name, HeatPlot(cells, layers, "layer", "rank",
                              [](double value) { return fmt::format("{:.2f}", value); })};
}

}  // namespace

std::string ExplanationHtml(int ranks, const std::vector<std::vector<std::string>>& table,
                            const std::vector<parallel::Workload>& loads) {
  std::vector<PlotSeries> hottest;
  std::vector<std::string> names;
  for (size_t i = 0; i < loads.size() && i < kPlottedLoads; ++i) {
    names.push_back(loads[i].name);
    hottest.push_back({loads[i].name});
    const parallel::LoadMatrix& load = loads[i].total;
    for (int layer = 0; layer < load.layers; ++layer) {
      if (!parallel::HasTokens(load, layer)) continue;
      const auto tokens = load.layer(layer);
      const double sum = std::accumulate(tokens.begin(), tokens.end(), 0.0);
      hottest.back().points.emplace_back(
          layer, *std::max_element(tokens.begin(), tokens.end()) * load.experts / sum);
    }
  }
  ReportSection section{.title = "Skew of loads"};
  section.notes = {
      "Means over layers. The default order is the largest rank load over the mean. "
      "Correlation is that with the first load."};
  if (loads.size() > kPlottedLoads)
    section.notes.push_back(
        fmt::format("The plot has the first {} of {} loads.", kPlottedLoads, loads.size()));
  section.table = table;
  section.plots = {
      {"Load of the hottest expert over the mean", PointPlot(hottest, "layer", Ratio, false, true), names}};
  return ReportHtml({.title = "Loads of experts",
                     .facts = {{std::to_string(loads.front().total.layers), "layers"},
                               {std::to_string(loads.front().total.experts), "experts"},
                               {std::to_string(ranks), "ranks"}},
                     .sections = {section}});
}

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
  section.plots.push_back({.caption = "Excess over perfect balance, mean over layers and workloads",
                           .svg = BarPlot(excess, Percent)});
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
                    .svg = BarPlot(excess, Percent)},
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
      equal.back().points.emplace_back(layer,
                                       parallel::Imbalance(placement.layers[layer], tokens, speeds) - 1);
      split.back().points.emplace_back(layer,
                                       parallel::SplitImbalance(placement.layers[layer], tokens, speeds) - 1);
    }
  }
  ReportSection section{.title = "Balance per layer"};
  if (loads.size() > kPlottedLoads)
    section.notes = {
        fmt::format("The table and plots have the first {} of {} loads.", kPlottedLoads, loads.size())};
  section.table.push_back({"load", "mean", "worst", "split mean", "split worst"});
  for (size_t i = 0; i < equal.size(); ++i) {
    const auto [mean, worst] = MeanAndWorst(equal[i]);
    const auto [split_mean, split_worst] = MeanAndWorst(split[i]);
    section.table.push_back(
        {names[i], Ratio(1 + mean), Ratio(1 + worst), Ratio(1 + split_mean), Ratio(1 + split_worst)});
  }
  section.plots = {{"Excess of the largest rank load over the mean, equal shares of replicas",
                    PointPlot(equal, "layer", Percent, false, true), names},
                   {"The same with the exact split over replicas",
                    PointPlot(split, "layer", Percent, false, true), names}};
  ReportSection heat{.title = "Load of each rank and layer"};
  heat.notes = {"Load of a rank over the mean, equal shares of replicas; 1 is balanced."};
  if (loads.size() > kHeatMaps)
    heat.notes.push_back(fmt::format("Maps show the first {} of {} loads.", kHeatMaps, loads.size()));
  for (size_t i = 0; i < std::min(kHeatMaps, loads.size()); ++i)
    heat.plots.push_back(RankHeatMap(placement, speeds, loads[i]));
  return ReportHtml({.title = "Expert placement",
                     .subtitle = flags.action == "plan" ? "Planned by " + flags.algorithm : flags.plan,
                     .facts = {{std::to_string(placement.ranks()), "ranks"},
                               {std::to_string(placement.layers.size()), "layers"},
                               {std::to_string(placement.experts), "experts"},
                               {std::to_string(placement.max_slots()), "slots of a rank"}},
                     .sections = {section, heat}});
}

}  // namespace moesaic::app
