#include "quantizer/calibration_forecast.h"

#include <algorithm>

#include "layers/linear.h"
#include "quantizer/calibrated_run.h"
#include "quantizer/calibration_memory.h"
#include "quantizer/gptq.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {
namespace {

// A matrix of an expert, and as many tokens as one run of them has.
constexpr int kOutputs = 512, kInputs = 2048, kTokens = 1024;
constexpr double kMeasured = 0.4;  // seconds of each kind

// Multiply-adds a second of `work`, which has `each` of them, after a first round that warms up.
template <typename Work>
StatusOr<double> RateOf(double each, const Work& work) {
  RETURN_IF_ERROR(work());
  const Clock::time_point start = Clock::now();
  double seconds = 0;
  int rounds = 0;
  for (; seconds < kMeasured; ++rounds) {
    RETURN_IF_ERROR(work());
    seconds = Since(start);
  }
  return each * rounds / seconds;
}

std::vector<float> Noise(size_t count) {
  std::vector<float> values(count);
  uint32_t state = 1;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = (static_cast<float>(state >> 8) * 0x1p-24F - 0.5F) * 0.1F;
  }
  return values;
}

}  // namespace

StatusOr<CalibrationRates> MeasureCalibration(const kernels::ExecContext& ctx, const Grid& grid) {
  const std::vector<float> tokens = Noise(size_t{kTokens} * kInputs),
                           rows = Noise(size_t{kOutputs} * kInputs);
  constexpr double kSquare = double{kInputs} * kInputs;
  CalibrationRates rates;
  ASSIGN_OR_RETURN(Hessian hessian, Hessian::Create(kInputs));
  ASSIGN_OR_RETURN(rates.hessian, RateOf(kTokens * kSquare, [&] {
                     hessian.Add(ctx,
                                 {.f32 = tokens.data(), .stride = kInputs, .count = kTokens, .gates = {}});
                     return OkStatus();
                   }));
  ASSIGN_OR_RETURN(rates.factor,
                   RateOf(kInputs * kSquare, [&] { return FactorHessian(ctx, hessian, {}).status(); }));
  ASSIGN_OR_RETURN(const HessianFactor factor, FactorHessian(ctx, hessian, {}));
  ASSIGN_OR_RETURN(rates.round, RateOf(kOutputs * kSquare, [&] {
                     GptqReport report;
                     return RoundByGptq(ctx, grid, rows.data(), kOutputs, kInputs, factor,
                                        {.by_error = true, .importance = {}}, &report)
                         .status();
                   }));
  ASSIGN_OR_RETURN(RuntimeMatrix packed, RuntimeMatrix::OfKept(tensor::DType::kBF16, kOutputs, kInputs));
  packed.AddKept(*ctx.pool, 0, kOutputs, rows.data());
  const OwnedMatrix matrix = packed.Take();
  std::vector<float> out(size_t{kTokens} * kOutputs);
  ASSIGN_OR_RETURN(rates.forward, RateOf(double{kTokens} * kOutputs * kInputs, [&] {
                     layers::Apply(ctx, {matrix.matrix}, tokens.data(), kInputs, kTokens, out.data(),
                                   kOutputs);
                     return OkStatus();
                   }));
  return rates;
}

CalibrationForecast ForecastCalibration(const QuantizePlan& plan, const OutputSettings& settings,
                                        const CalibrationRates& rates) {
  const models::DecoderSpec& spec = plan.spec;
  const auto all = static_cast<double>(settings.calibration.tokens);
  const double routed = spec.moe.experts > 0 ? all * spec.moe.top_k / spec.moe.experts : 0;
  double hessian = 0, factor = 0, round = 0, forward = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const ModelItem& item = plan.items[i];
    if (!IsWalked(item, spec)) continue;
    const auto n = static_cast<double>(item.shape[0]), k = static_cast<double>(item.shape[1]);
    const double tokens = item.routed ? routed : all;
    // What is behind a linear in its layer makes it run once more.
    const bool last = item.name.ends_with(".down_proj") || item.name.ends_with(".o_proj");
    // Every token goes through the gate and up of every expert, for down's Hessian.
    const bool every = item.routed && settings.rare_experts == RareExperts::kAll;
    forward += (last ? tokens : tokens + (every ? all : tokens)) * n * k;
    if (plan.output.items[i].form != Form::kRounded) continue;
    round += n * k * k;
    if (i > 0 && item.fused >= 0 && plan.items[i - 1].fused == item.fused) continue;  // inputs were seen
    factor += k * k * k;
    if (every) {
      hessian += last ? all * k * k : 0;  // gate and up: the layer's, which shared experts count
      continue;
    }
    hessian += tokens * k * k;
    if (item.routed && last && tokens < kPlenty * k) hessian += std::min<double>(all, kStandIns) * k * k;
  }
  // Queries against keys and their mix of values, of half a sequence on average, twice a layer.
  const models::AttentionSpec& a = spec.attention;
  const double head =
      a.kind == models::AttentionSpec::Kind::kMla ? a.nope_dim + a.rope_dim + a.v_dim : 2 * a.head_dim;
  forward += all * static_cast<double>(settings.calibration.longest) * a.heads * head *
             (spec.layers + spec.mtp_layers);
  CalibrationForecast forecast;
  if (settings.gptq) {
    forecast = {hessian / rates.hessian, factor / rates.factor, round / rates.round, forward / rates.forward};
  }
  if (settings.analyze.wanted()) forecast.forward_seconds += forward / rates.forward;
  return forecast;
}

}  // namespace moesaic::quantizer
