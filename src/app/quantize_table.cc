#include "app/quantize_table.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "app/output.h"
#include "app/table.h"

namespace moesaic::app {
namespace {

// Returns the source bytes that the passes of a mix's measurement read.
double PassBytes(const quantizer::QuantizePlan& plan) {
  double bytes = 0;
  for (const quantizer::MixPass& pass : plan.passes) {
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const bool read = plan.items[i].layer < 0 || plan.items[i].layer >= pass.first;
      if (read) bytes += static_cast<double>(plan.forms[i].bytes);
    }
  }
  return bytes;
}

// Returns the row about the measurement of a mix.
std::vector<std::string> MeasuringRow(const quantizer::OutputSettings& settings,
                                      const quantizer::QuantizePlan& plan) {
  int64_t variants = 0, memory = 0;
  std::vector<int> starts;
  for (const quantizer::MixPass& pass : plan.passes) {
    variants = std::max(variants, pass.variants);
    memory = std::max(memory, pass.bytes);
    starts.push_back(pass.first);
  }
  const std::string passes = starts.size() == 1 ? "one pass"
                                                : fmt::format("{} passes, from layers {} on,", starts.size(),
                                                              fmt::join(starts, ", "));
  return {"measuring",
          fmt::format("{} over the weights ({}) with up to {} variants of {} tokens, {} of memory", passes,
                      FormatBytes(PassBytes(plan)), variants, quantizer::MixSampleTokens(settings),
                      FormatBytes(static_cast<double>(memory)))};
}

// Returns the rows about calibration.
std::vector<std::vector<std::string>> CalibrationRows(const quantizer::OutputSettings& settings,
                                                      const quantizer::QuantizePlan& plan,
                                                      const quantizer::MachineRates& rates,
                                                      const quantizer::CalibrationForecast& calibration,
                                                      const quantizer::Forecast& forecast) {
  if (!settings.calibrated()) return {};
  // Shows short times in fractions of a second.
  const auto seconds = [](double value) {
    return value < 600 ? fmt::format("{:.1f} s", value) : FormatSeconds(value);
  };
  const double reading = PassBytes(plan) / rates.read;
  // GPTQ computes while the disk works; an analysis precedes the rounding.
  const double total = settings.gptq ? std::max(forecast.disk_seconds + reading, calibration.seconds())
                                     : forecast.seconds + std::max(reading, calibration.seconds());
  std::vector<std::vector<std::string>> rows;
  if (!plan.passes.empty()) rows.push_back(MeasuringRow(settings, plan));
  rows.push_back(
      {"calibration", fmt::format("{} tokens, {} at a time, {} of memory", settings.calibration.tokens,
                                  std::min<int64_t>(plan.limits.part_rows, settings.calibration.tokens),
                                  FormatBytes(static_cast<double>(plan.calibration_bytes)))});
  rows.push_back({"", fmt::format("Hessians {}, factors {}, rounding {}, forward {}",
                                  seconds(calibration.hessian_seconds), seconds(calibration.factor_seconds),
                                  seconds(calibration.round_seconds), seconds(calibration.forward_seconds))});
  rows.push_back({"in all", seconds(total)});
  return rows;
}

}  // namespace

std::string FormatSeconds(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto minutes = static_cast<int64_t>(seconds / 60 + 0.5);
  return minutes < 60 ? fmt::format("{} min", minutes)
                      : fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
}

void PrintPlan(const std::string& what, const std::string& model, const std::string& output,
               const quantizer::QuantizeOptions& options, const quantizer::QuantizePlan& plan,
               const quantizer::MachineRates& rates, const quantizer::Forecast& forecast,
               const quantizer::CalibrationForecast& calibration, bool has_weights) {
  const quantizer::OutputSettings& settings = options.output;
  const auto bytes = [](int64_t count) { return FormatBytes(static_cast<double>(count)); };
  const auto rate = [](double per_second) { return FormatBytes(per_second) + "/s"; };
  double rounded = 0, values = 0;
  size_t linears = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const auto elements = static_cast<double>(plan.items[i].elements());
    values += elements;
    if (plan.output.items[i].form != quantizer::Form::kRounded) continue;
    rounded += elements;
    ++linears;
  }
  const size_t units = plan.work.units.size();
  size_t most = 0;
  for (const quantizer::IoUnit& unit : plan.work.units) most = std::max(most, unit.end - unit.first);
  const auto alone = std::ranges::count(plan.work.units, true, &quantizer::IoUnit::alone);
  const int64_t free = quantizer::FreeBytes(output);
  std::vector<std::vector<std::string>> rows = {{"plan", what + " of " + model}};
  rows.push_back({"in", bytes(plan.source_bytes) +
                            (has_weights ? "" : ", as config.json has it (there are no weights here)")});
  if (forecast.reread_bytes > 0) {
    rows.push_back({"", fmt::format("{} of it twice, for scales that rows of two waves share",
                                    bytes(forecast.reread_bytes))});
  }
  rows.push_back({"out", fmt::format("{} in {} files", bytes(plan.output.bytes), plan.output.shards.size())});
  rows.push_back({"rounded", fmt::format("{} linears, {} of {} parameters", linears, FormatCount(rounded),
                                         FormatCount(values))});
  std::vector<std::string> waves;
  if (alone < std::ssize(plan.work.units)) {
    waves.push_back(
        fmt::format("{} in and {} out", bytes(plan.work.source_bytes), bytes(plan.work.output_bytes)));
  }
  if (alone > 0) {
    waves.push_back(fmt::format("{} of up to {} alone, for scales that linears share", alone,
                                bytes(plan.work.alone_bytes)));
  }
  rows.push_back({"waves", fmt::format("{} of up to {} matrices, {}", units, most, fmt::join(waves, "; "))});
  rows.push_back(
      {"memory", fmt::format("{} of buffers, --memory {}", bytes(plan.work.bytes()), bytes(options.memory))});
  rows.push_back({"disk", free >= plan.output.bytes ? bytes(free) + " free"
                                                    : fmt::format("{} free, {} are missing", bytes(free),
                                                                  bytes(plan.output.bytes - free))});
  rows.push_back(
      {"this machine", fmt::format("reads {}, writes {}, rounds {} values/s, copies {}", rate(rates.read),
                                   rate(rates.write), FormatCount(rates.round), rate(rates.copy))});
  if (settings.gptq) {
    rows.push_back(
        {"time", fmt::format("disk {}, while calibration computes", FormatSeconds(forecast.disk_seconds))});
  } else {
    rows.push_back(
        {"time", fmt::format("{}: disk {}, computing {}; limited by {}", FormatSeconds(forecast.seconds),
                             FormatSeconds(forecast.disk_seconds), FormatSeconds(forecast.compute_seconds),
                             forecast.disk_bound ? "the disk" : "computing")});
  }
  std::ranges::move(CalibrationRows(settings, plan, rates, calibration, forecast), std::back_inserter(rows));
  Print("{}", FormatTable(rows, /*markdown=*/false));
}

}  // namespace moesaic::app
