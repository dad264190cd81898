#include "app/mix_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "app/svg_plot.h"
#include "app/table.h"

namespace moesaic::app {
namespace {

using quantizer::Mix;
using quantizer::MixOption;
using quantizer::PrecisionGroup;
using MixRows = std::vector<std::vector<std::string>>;

// Returns the precisions in the order of the first group's options.
std::vector<std::string> Precisions(const Mix& mix) {
  std::vector<std::string> names;
  for (const PrecisionGroup& group : mix.units) {
    for (const MixOption& option : group.options) {
      const std::string name = option.precision.Name();
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

// Returns "mlp.experts" of "model.layers.3.mlp.experts".
std::string KindOfGroup(const std::string& name) {
  size_t at = 0;
  for (int dots = 0; dots < 3 && at != std::string::npos; ++dots) at = name.find('.', at) + 1;
  return name.substr(at);
}

std::string LossText(const MixOption& option) {
  if (option.overflows()) return fmt::format("overflow ({:.3g})", option.largest);
  return std::isfinite(option.loss) ? fmt::format("{:.3g}", option.loss) : "not finite";
}

std::string ChosenName(const PrecisionGroup& group) {
  return group.chosen < 0 ? "" : group.options[group.chosen].precision.Name();
}

}  // namespace

MixRows MixSummary(const Mix& mix) {
  MixRows rows = {{"precision", "groups", "weights", "bytes", "loss"}};
  for (const std::string& name : Precisions(mix)) {
    size_t groups = 0;
    double weights = 0, bytes = 0, loss = 0;
    for (const PrecisionGroup& group : mix.units) {
      if (ChosenName(group) != name) continue;
      ++groups;
      weights += static_cast<double>(group.weights);
      bytes += static_cast<double>(group.options[group.chosen].bytes);
      loss += group.options[group.chosen].loss;
    }
    rows.push_back({name, std::to_string(groups), FormatCount(weights), FormatBytes(bytes),
                    fmt::format("{:.3g}", loss)});
  }
  return rows;
}

MixRows MixTable(const Mix& mix) {
  const std::vector<std::string> names = Precisions(mix);
  MixRows rows = {{"group", "weights"}};
  rows[0].insert(rows[0].end(), names.begin(), names.end());
  rows[0].emplace_back("chosen");
  for (const PrecisionGroup& group : mix.units) {
    std::vector<std::string>& row = rows.emplace_back();
    row = {group.name, FormatCount(static_cast<double>(group.weights))};
    for (const std::string& name : names) {
      const auto option =
          std::ranges::find(group.options, name, [](const MixOption& o) { return o.precision.Name(); });
      row.push_back(option == group.options.end() ? "-" : !group.measured ? "?" : LossText(*option));
    }
    row.push_back(ChosenName(group));
  }
  return rows;
}

std::vector<std::string> MixNotes(const Mix& mix) {
  std::vector<std::string> notes;
  for (const PrecisionGroup& group : mix.units) {
    for (const MixOption& option : group.options) {
      if (std::isfinite(option.loss)) continue;
      const std::string why =
          option.overflows()
              ? fmt::format("overflows (its largest magnitude is {:.3g}, the limit 65504)", option.largest)
              : "makes the predictions non-finite";
      notes.push_back(
          fmt::format("{}: {} {}; it gets {}", group.name, option.precision.Name(), why, ChosenName(group)));
    }
  }
  std::map<std::string, std::vector<const quantizer::RouterFinding*>> routers;
  for (const quantizer::RouterFinding& router : mix.routers)
    routers[router.precision.Name()].push_back(&router);
  for (const auto& [name, found] : routers) {
    double loss = 0, saved = 0, flips = 0;
    size_t kept = 0;
    for (const quantizer::RouterFinding* router : found) {
      loss += router->loss;
      saved += static_cast<double>(router->saved);
      flips += router->flips / static_cast<double>(found.size());
      kept += router->kept ? 1 : 0;
    }
    notes.push_back(fmt::format(
        "routers are kept: in {} they would save {} and lose {:.3g} nats per token, and {:.3g} % "
        "of tokens and layers would go to other experts; at this budget's price per byte {} of {} "
        "are worth keeping",
        name, FormatBytes(saved), loss, 100 * flips, kept, found.size()));
  }
  return notes;
}

std::vector<ReportPlot> MixPlots(const Mix& mix) {
  std::map<std::string, std::map<std::string, PlotSeries>> kinds;
  for (const PrecisionGroup& group : mix.units) {
    if (!group.measured) continue;
    for (const MixOption& option : group.options) {
      if (!std::isfinite(option.loss) || option.loss <= 0) continue;
      const std::string name = option.precision.Name();
      PlotSeries& series = kinds[KindOfGroup(group.name)][name];
      series.name = name;
      series.points.emplace_back(group.layer, option.loss);
    }
  }
  std::vector<ReportPlot> plots;
  for (const auto& [kind, by_precision] : kinds) {
    std::vector<PlotSeries> series;
    std::vector<std::string> names;
    for (const std::string& name : Precisions(mix)) {
      const auto found = by_precision.find(name);
      if (found == by_precision.end() || series.size() == 6) continue;
      series.push_back(found->second);
      names.push_back(name);
    }
    plots.push_back({fmt::format("Loss of {} alone, nats per token, by layer", kind),
                     PointPlot(
                         series, "layer", [](double value) { return fmt::format("{:.3g}", value); },
                         /*logarithmic=*/true, /*joined=*/true),
                     names});
  }
  return plots;
}

}  // namespace moesaic::app
