#include "quantizer/roofline.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "kernels/probe.h"
#include "quantizer/gptq/panel_product.h"
#include "quantizer/verify.h"

namespace moesaic::quantizer {
namespace {

using tensor::PackedFormat;

// Rates at peak count arithmetic operations only, two per multiply-add. A Hessian needs half of its products,
// a factor a third of the inputs' cube (three times that if multiplied in halves), feedback half of all
// products.
CalibrationRates RatesAtPeak(double bf16, double f32, bool halves) {
  CalibrationRates rates;
  rates.hessian.product = rates.round.rows.product = 1 / bf16;
  rates.factor.product = halves ? 1 / bf16 : 1 / (3 * f32);
  rates.forward = rates.forward_kept = 2 / bf16;
  rates.attention = 2 / f32;
  return rates;
}

// Rounding time of all linears, each at its precision's rate.
double RoundingSeconds(const QuantizePlan& plan, const MachineRates& rates) {
  double seconds = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const OutputItem& output = plan.output.items[i];
    if (output.form != Form::kRounded) continue;
    const auto values = static_cast<double>(plan.items[i].elements());
    const auto found = rates.rounds.find(output.precision.Name());
    seconds += values / (found != rates.rounds.end() ? found->second : rates.round);
  }
  return seconds;
}

}  // namespace

std::vector<std::pair<std::string, double>> StagesAt(const QuantizePlan& plan, const OutputSettings& settings,
                                                     const MachineRates& rates,
                                                     const CalibrationForecast* least) {
  std::vector<std::pair<std::string, double>> stages;
  if (!settings.gptq && rates.round > 0) stages.emplace_back("rounding", RoundingSeconds(plan, rates));
  if (least == nullptr) return stages;
  if (settings.gptq) {
    stages.emplace_back("hessians", least->hessian_seconds - least->gain_hessian_seconds);
    stages.emplace_back("factors", least->factor_seconds - least->gain_factor_seconds);
    stages.emplace_back("rounding", least->round_seconds);
  }
  // The measurement of a mix's gains is part of its analysis, including Hessians and factors.
  stages.emplace_back("forward",
                      least->forward_seconds + least->gain_hessian_seconds + least->gain_factor_seconds);
  return stages;
}

StatusOr<Roofline> MeasureRoofline(const checkpoint::Checkpoint& quantized,
                                   const checkpoint::Checkpoint& source, const kernels::KernelTable& kernels,
                                   runtime::ThreadPool& pool, double read_bytes, double written_bytes) {
  ASSIGN_OR_RETURN(const OutputSettings settings, SettingsOf(quantized, source));
  ASSIGN_OR_RETURN(const QuantizePlan plan, PlanQuantize(source, OptionsOf(settings)));
  ASSIGN_OR_RETURN(const MachineRates rates,
                   MeasureRates(source, settings, kernels, pool, quantized.path(), /*direct=*/false));
  Roofline roofline;
  const double read = read_bytes / rates.read, written = written_bytes / rates.write;
  roofline.disk_seconds = rates.same_disk ? read + written : std::max(read, written);
  roofline.rates =
      fmt::format("the disk reads {:.3g} GB/s and writes {:.3g}", 1e-9 * rates.read, 1e-9 * rates.write);
  if (!settings.gptq) {
    for (const auto& [precision, rate] : rates.rounds) {
      roofline.rates += fmt::format("; {:.3g}M values per second are rounded to {}", 1e-6 * rate, precision);
    }
  }
  roofline.stages = StagesAt(plan, settings, rates, nullptr);
  if (!settings.calibrated()) return roofline;
  double bf16 = 0, f32 = 0;
  for (const kernels::DotPeak& peak : kernels::MeasureDotPeaks(runtime::DetectCpu(), &pool)) {
    if (peak.format == PackedFormat::kF32) f32 = peak.all_threads;
    if (peak.format == PackedFormat::kBF16) bf16 = peak.all_threads;
  }
  if (!(f32 > 0)) return roofline;  // no vector instructions
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  const CalibrationForecast least =
      ForecastCalibration(plan, settings, RatesAtPeak(bf16, f32, MultipliesHalves(ctx)));
  roofline.stages = StagesAt(plan, settings, rates, &least);
  roofline.rates +=
      fmt::format("; bf16 dot products reach {:.3g} operations per second, f32 {:.3g}", bf16, f32);
  return roofline;
}

}  // namespace moesaic::quantizer
