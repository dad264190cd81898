#include "app/report_sections.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "app/mix_table.h"
#include "app/report_headline.h"
#include "app/svg_plot.h"
#include "app/table.h"

namespace moesaic::app {
namespace {

using quantizer::LinearError;
using Linear = QuantizeRecord::Linear;
using Table = std::vector<std::vector<std::string>>;

constexpr size_t kMaxSeries = 6;  // number of colours of a plot

std::string Percent(double share) { return fmt::format("{:.4g} %", 100 * share); }
std::string Bytes(double bytes) { return FormatBytes(bytes); }
std::string Number(double value) { return fmt::format("{:.4g}", value); }

// Formats a number of ScoreJson, "n/a" if it is null.
std::string Shown(const nlohmann::json& report, const char* key, double scale, const char* unit) {
  const auto found = report.find(key);
  if (found == report.end() || found->is_null()) return "n/a";
  return fmt::format("{:.4g}{}", scale * found->get<double>(), unit);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

ReportSection Quality(const ReportInput& input) {
  ReportSection section{.title = "Quality"};
  if (input.quality.is_null()) {
    section.notes.push_back(fmt::format(
        "Not measured. `moesaic report {} --source MODEL --text FILE` runs both models over a text.",
        input.folder));
    return section;
  }
  const nlohmann::json& q = input.quality;
  section.notes.push_back(fmt::format(
      "Both models over {}: {} tokens in windows of {}, {} of them. ± is a standard error, "
      "windows taken as independent.",
      input.text, q["scored"].get<int64_t>(), q["window"].get<int>(), q["windows"].get<int64_t>()));
  section.table = {
      {"measure", "value"},
      {"KL(source || this), mean nats per token",
       Shown(q, "kl", 1, "") + " ± " + Shown(q, "kl_error", 1, "")},
      {"KL, median", Shown(q, "kl_median", 1, " nats")},
      {"KL, p99", Shown(q, "kl_p99", 1, " nats")},
      {"KL, largest", Shown(q, "kl_max", 1, " nats")},
      {"the same token is likeliest",
       Shown(q, "same_top", 100, "") + " ± " + Shown(q, "same_top_error", 100, " %")},
      {"perplexity of the source", Shown(q, "base_perplexity", 1, "")},
      {"perplexity", Shown(q, "perplexity", 1, "")},
      {"ratio of perplexities, paired", Shown(q, "ratio", 1, "")},
      {"its 95 % interval", Shown(q, "ratio_low", 1, "") + " to " + Shown(q, "ratio_high", 1, "")}};
  if (!q.contains("router_flips")) return section;
  const nlohmann::json& flips = q["router_flips"];
  section.table.push_back({"tokens and layers with other experts", Shown(flips, "share", 100, " %")});
  PlotSeries series{.name = "share"};
  for (const nlohmann::json& layer : flips["layers"]) {
    series.points.emplace_back(layer["layer"].get<double>(), layer["share"].get<double>());
    section.table.push_back(
        {fmt::format("  layer {}", layer["layer"].get<int>()), Shown(layer, "share", 100, " %")});
  }
  section.plots.push_back({"Router flips: the share of tokens whose routed experts differ, by layer",
                           PointPlot({series}, "layer", Percent, false, true),
                           {}});
  return section;
}

ReportSection Size(const ReportInput& input) {
  ReportSection section{.title = "Bytes"};
  const auto row = [](const char* what, const quantizer::TokenBytes& bytes) -> std::vector<std::string> {
    return {what, Bytes(static_cast<double>(bytes.total)), Bytes(static_cast<double>(bytes.active))};
  };
  section.table = {{"", "all tensors", "read per token"}};
  if (input.source_bytes) section.table.push_back(row("source", *input.source_bytes));
  section.table.push_back(row("this", input.bytes));
  if (input.source_bytes) {
    section.table.push_back(
        {"ratio",
         Number(static_cast<double>(input.bytes.total) / static_cast<double>(input.source_bytes->total)),
         Number(static_cast<double>(input.bytes.active) / static_cast<double>(input.source_bytes->active))});
  } else {
    section.notes.push_back(fmt::format("`--source MODEL` adds the checkpoint that it was made from."));
  }
  section.notes.push_back(
      "A token reads one row of the embedding, the routed experts that its router chooses, and all else "
      "once.");
  return section;
}

struct Sum {
  double error = 0, weight = 0, worst = 0;
  size_t count = 0;
  std::string where;
  void Add(const LinearError& linear) {
    error += linear.error;
    weight += linear.weight;
    ++count;
    if (linear.relative() < worst && count > 1) return;
    worst = linear.relative();
    where = linear.name;
  }
  double relative() const { return weight > 0 ? std::sqrt(error / weight) : 0; }
};

// Returns series by kind over layers: those with the largest values, at most one per colour.
std::vector<PlotSeries> LargestSeries(std::map<std::string, std::map<int, double>> kinds) {
  std::vector<PlotSeries> series;
  for (const auto& [kind, layers] : kinds) series.push_back({kind, {layers.begin(), layers.end()}});
  const auto largest = [](const PlotSeries& one) {
    double most = 0;
    for (const auto& [layer, value] : one.points) most = std::max(most, value);
    return most;
  };
  std::ranges::stable_sort(series, std::greater(), largest);
  if (series.size() > kMaxSeries) series.resize(kMaxSeries);
  return series;
}

std::vector<std::string> Names(const std::vector<PlotSeries>& series) {
  std::vector<std::string> names;
  for (const PlotSeries& one : series) names.push_back(one.name);
  return names;
}

ReportSection Weights(const ReportInput& input) {
  ReportSection section{.title = "Weights"};
  if (input.errors.empty()) {
    section.notes.push_back(fmt::format(
        "Not compared. `moesaic report {} --source MODEL` reads every linear of both.", input.folder));
    return section;
  }
  section.notes.push_back(
      "Relative error: the root of the squared differences from the source's weights, divided by the squared "
      "weights, after smoothing. If calibration chose the roundings, weights are "
      "deliberately further from the source than the nearest ones, because outputs count.");
  std::map<std::string, Sum> kinds;
  std::map<std::string, std::map<int, Sum>> by_layer;
  for (const LinearError& linear : input.errors) {
    kinds[linear.kind].Add(linear);
    by_layer[linear.kind][linear.layer].Add(linear);
  }
  section.table = {{"linears", "count", "relative error", "worst", "where"}};
  std::map<std::string, std::map<int, double>> plotted;
  for (const auto& [kind, sum] : kinds) {
    section.table.push_back({kind, std::to_string(sum.count), fmt::format("{:.5f}", sum.relative()),
                             fmt::format("{:.5f}", sum.worst), sum.where});
    for (const auto& [layer, of_layer] : by_layer[kind]) plotted[kind][layer] = of_layer.relative();
  }
  const std::vector<PlotSeries> series = LargestSeries(plotted);
  section.plots.push_back({plotted.size() > series.size()
                               ? "Relative error by layer, of the six kinds where it is largest"
                               : "Relative error by layer",
                           PointPlot(series, "layer", Number, false, true), Names(series)});
  return section;
}

bool IsExpert(const Linear& linear) { return linear.name.find(".experts.") != std::string::npos; }

ReportSection Missing(const char* title, const ReportInput& input) {
  return {.title = title,
          .notes = {
              fmt::format("Unknown: {} has no quantize.json of a calibrated run: `moesaic quantize MODEL -o "
                          "DIR --scheme S --method gptq --calibration FILE` writes one.",
                          input.folder)}};
}

ReportSection Coverage(const ReportInput& input) {
  if (!input.run || (!input.run->tokens && input.run->linears.empty())) return Missing("Calibration", input);
  ReportSection section{.title = "Calibration"};
  const QuantizeRecord& run = *input.run;
  if (run.tokens) {
    section.notes.push_back(
        fmt::format("{:.0f} tokens{}.", *run.tokens,
                    run.sequences ? fmt::format(" in {:.0f} sequences", *run.sequences) : ""));
  }
  std::map<int, std::map<std::string, double>> tokens;  // by layer and expert
  size_t shrunk = 0;
  double most_damping = 0;
  for (const Linear& linear : run.linears) {
    if (linear.shrinkage.value_or(0) > 0.5) ++shrunk;
    most_damping = std::max(most_damping, linear.damping.value_or(0));
    if (!IsExpert(linear) || !linear.tokens) continue;
    double& of_expert = tokens[linear.layer][linear.name.substr(0, linear.name.rfind('.'))];
    of_expert = std::max(of_expert, *linear.tokens);
  }
  if (!run.linears.empty()) {
    section.notes.push_back(fmt::format(
        "Of {} linears {} had too few tokens of their own, and their Hessians were drawn towards the "
        "layer's; the largest damping was {:.3g} of the mean diagonal.",
        run.linears.size(), shrunk, most_damping));
  }
  if (tokens.empty()) return section;
  section.table = {{"layer", "experts", "without a token", "fewest tokens", "median", "most"}};
  PlotSeries experts{.name = "experts"};
  for (const auto& [layer, of_layer] : tokens) {
    std::vector<double> counts;
    for (const auto& [expert, count] : of_layer) {
      counts.push_back(count);
      experts.points.emplace_back(layer, count);
    }
    const auto [least, most] = std::ranges::minmax(counts);
    section.table.push_back({std::to_string(layer), std::to_string(counts.size()),
                             std::to_string(std::ranges::count(counts, 0.0)), FormatCount(least),
                             FormatCount(Median(counts)), FormatCount(most)});
  }
  section.plots.push_back({"Tokens of each routed expert, by layer; experts without any have no point",
                           PointPlot({experts}, "layer", FormatCount, true, false),
                           {}});
  return section;
}

ReportSection MixSection(const ReportInput& input) {
  const quantizer::Mix& mix = *input.run->mix;
  ReportSection section{.title = "Mix"};
  section.notes.push_back(fmt::format(
      "Losses of each precision group alone, with all others unrounded: KL in nats per token over {} "
      "calibration tokens. The mix has {:.3f} bits per weight; {}.",
      mix.tokens, mix.bits,
      mix.exact ? "no other choice within the budget has a smaller sum"
                : "it may differ from the optimum by one step of a group"));
  section.notes.push_back(
      input.quality.is_null()
          ? fmt::format("Predicted: {:.4g} nats per token, the sum of the chosen losses. "
                        "`--source MODEL --text FILE` measures it.",
                        mix.loss)
          : fmt::format("Predicted: {:.4g} nats per token, the sum of the chosen losses; measured on {}: {}.",
                        mix.loss, input.text, Shown(input.quality, "kl", 1, "")));
  for (std::string& note : MixNotes(mix)) section.notes.push_back(std::move(note));
  section.table = MixTable(mix);
  section.plots = MixPlots(mix);
  return section;
}

ReportSection Losses(const ReportInput& input) {
  ReportSection section{.title = "Losses"};
  std::map<std::string, std::map<int, std::vector<double>>> of_nearest;
  for (const Linear& linear : input.run->linears) {
    if (!linear.of_nearest) continue;
    of_nearest[(IsExpert(linear) && !linear.kind.starts_with("experts.") ? "experts." : "") + linear.kind]
              [linear.layer]
                  .push_back(*linear.of_nearest);
  }
  if (of_nearest.empty()) {
    section.notes.push_back("quantize.json has no losses; `--method gptq` records them.");
    return section;
  }
  section.notes.push_back(
      "The squared error of a linear's outputs over the calibration, as a share of that of rounding to the "
      "nearest: below 1 is better.");
  section.table = {{"linears", "count", "median, relative to nearest", "worst"}};
  std::map<std::string, std::map<int, double>> plotted;
  for (const auto& [kind, layers] : of_nearest) {
    std::vector<double> all;
    for (const auto& [layer, values] : layers) {
      plotted[kind][layer] = Median(values);
      all.insert(all.end(), values.begin(), values.end());
    }
    section.table.push_back(
        {kind, std::to_string(all.size()), Number(Median(all)), Number(std::ranges::max(all))});
  }
  const std::vector<PlotSeries> series = LargestSeries(plotted);
  section.plots.push_back({"Loss relative to rounding to the nearest, by layer (medians)",
                           PointPlot(series, "layer", Number, false, true), Names(series)});
  return section;
}

// Adds the run's times and the times at this machine's rates, for comparison.
void AddRoofline(const QuantizeRecord& run, const quantizer::Roofline& roofline, ReportSection* section) {
  double computing = 0, least = 0;
  std::map<std::string, double> took;
  for (const auto& [name, seconds] : run.stages) {
    if (name == "read" || name == "write") continue;
    computing += seconds;
    took[name == "analysis" ? "forward" : name] += seconds;
  }
  const auto row = [](const std::string& what, double at_rates, double seconds) -> std::vector<std::string> {
    return {what, fmt::format("{:.2f}", at_rates), fmt::format("{:.2f}", seconds),
            seconds > 0 ? Percent(at_rates / seconds) : "n/a"};
  };
  section->table = {{"what", "at this machine's rates, seconds", "took", "share"}};
  for (const auto& [name, seconds] : roofline.stages) {
    least += seconds;
    section->table.push_back(
        row(name == "forward" && took.contains("forward") ? "forward, analysis" : name, seconds, took[name]));
  }
  section->table.push_back(row("processor, of all computing", least, computing));
  section->table.push_back(row("processor, of the run", least, run.seconds.value_or(0)));
  section->table.push_back(row("disk, of the run", roofline.disk_seconds, run.seconds.value_or(0)));
  section->notes.push_back(fmt::format(
      "Measured now, on this machine: {}. A source in the page cache is read faster than the disk is.{}",
      roofline.rates, run.analyzed ? " The seconds of the disk exclude the reads of the analysis." : ""));
}

// Explains why a run's times cover a part of its work.
std::string Resumed(const QuantizeRecord& run) {
  if (run.resumed_units.value_or(0) == 0) {
    return "the time of the analysis covers only its part after the run was resumed.";
  }
  return fmt::format(
      "times and bytes moved cover only the units after the run was resumed; {:.0f}{} were done "
      "earlier.",
      *run.resumed_units, run.units ? fmt::format(" of {:.0f}", *run.units) : "");
}

ReportSection RooflineSection(const ReportInput& input) {
  ReportSection section{.title = "Roofline"};
  if (input.run->resumed()) {
    section.notes.push_back("Not measured: " + Resumed(*input.run));
  } else if (!input.run->device.empty()) {
    section.notes.push_back(fmt::format(
        "Not measured: Hessians, factors and rounding ran on a device, {}, whose rates are not measured.",
        input.run->device));
  } else if (input.roofline) {
    AddRoofline(*input.run, *input.roofline, &section);
  } else {
    section.notes.push_back(fmt::format(
        "Not measured. `moesaic report {} --source MODEL --roofline` measures this machine for some seconds.",
        input.folder));
  }
  return section;
}

// Returns the moved bytes as a share of the minimum, if all moved bytes are known.
std::string ShareMoved(const QuantizeRecord& run) {
  if (run.analyzed) return " by the waves, in addition to the reads of the analysis";
  const double least = run.source_bytes.value_or(0) + run.output_bytes.value_or(0);
  if (run.resumed() || !run.source_bytes || !run.output_bytes || least <= 0) return "";
  return fmt::format(", {:.3f} x the minimum bytes", (*run.read_bytes + *run.written_bytes) / least);
}

ReportSection Time(const ReportInput& input) {
  const QuantizeRecord& run = *input.run;
  ReportSection section{.title = "Time"};
  const auto seconds = [](double value) { return fmt::format("{:.1f} s", value); };
  section.table = {{"stage", "seconds"}};
  for (const auto& [name, value] : run.stages) section.table.push_back({name, fmt::format("{:.2f}", value)});
  if (run.seconds) section.table.push_back({"in all", fmt::format("{:.2f}", *run.seconds)});
  if (!run.stages.empty()) section.plots.push_back({"Seconds by stage", BarPlot(run.stages, seconds), {}});
  if (!run.device.empty()) {
    section.notes.push_back(fmt::format("Hessians, factors and rounding ran on a device: {}.", run.device));
  }
  if (run.peak_bytes)
    section.notes.push_back(fmt::format("Peak resident memory: {}.", Bytes(*run.peak_bytes)));
  if (run.read_bytes && run.written_bytes) {
    section.notes.push_back(fmt::format("{} were read and {} written{}.", Bytes(*run.read_bytes),
                                        Bytes(*run.written_bytes), ShareMoved(run)));
  }
  if (run.resumed()) section.notes.push_back("Partial: " + Resumed(run));
  if (!run.settings.empty()) section.notes.push_back("Settings of the run: " + run.settings);
  return section;
}

}  // namespace

Report MakeReport(const ReportInput& input) {
  Report report{.title = "Quantized: " + input.folder,
                .subtitle = Headline(input),
                .origin = input.source.empty() ? "" : "Made from " + input.source + "."};
  report.facts.emplace_back(Bytes(static_cast<double>(input.bytes.total)), "all tensors");
  report.facts.emplace_back(Bytes(static_cast<double>(input.bytes.active)), "read per token");
  if (!input.quality.is_null()) {
    report.facts.emplace_back(Shown(input.quality, "kl", 1, ""), "mean KL, nats per token");
    report.facts.emplace_back(Shown(input.quality, "same_top", 100, " %"), "the same token is likeliest");
    report.facts.emplace_back(Shown(input.quality, "ratio", 1, ""), "perplexity, of the source's");
  }
  report.sections.push_back(Quality(input));
  report.sections.push_back(Size(input));
  report.sections.push_back(Weights(input));
  report.sections.push_back(Coverage(input));
  if (!input.run) return report;
  if (input.run->mix) report.sections.push_back(MixSection(input));
  if (input.run->tokens || !input.run->linears.empty()) report.sections.push_back(Losses(input));
  report.sections.push_back(Time(input));
  report.sections.push_back(RooflineSection(input));
  return report;
}

}  // namespace moesaic::app
