#include "quantizer/calibration_forecast.h"

#include <algorithm>

#include "layers/linear.h"
#include "quantizer/calibrated_run.h"
#include "quantizer/calibration_memory.h"
#include "quantizer/checksum.h"
#include "quantizer/gptq.h"
#include "quantizer/mix_walk.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {
namespace {

// Rows and tokens of what is measured, and the numbers of inputs that a line is drawn through.
constexpr int kOutputs = 1024, kTokens = 1024;
constexpr int kFewInputs = 1024, kManyInputs = 8192;
constexpr double kMeasured = 0.3;  // seconds of each kind

// Seconds of `work`, after a first round that warms up.
template <typename Work>
StatusOr<double> SecondsOf(const Work& work) {
  RETURN_IF_ERROR(work());
  const Clock::time_point start = Clock::now();
  double seconds = 0;
  int rounds = 0;
  for (; seconds < kMeasured; ++rounds) {
    RETURN_IF_ERROR(work());
    seconds = Since(start);
  }
  return seconds / rounds;
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

// The line through two measurements, `few` and `many` being seconds a value.
ProductTime LineThrough(double few, double many) {
  ProductTime time;
  time.product = std::max(0.0, (many - few) / (kManyInputs - kFewInputs));
  time.value = many - time.product * kManyInputs;
  if (time.value < 0) time = {.product = many / kManyInputs, .value = 0};
  return time;
}

// What becomes of a piece of a linear: codes, the file's bytes of them and their checksum, and the matrix
// that runs.
Status RoundLikeARun(const kernels::ExecContext& ctx, const Grid& grid, const float* rows, int k,
                     const HessianFactor& factor) {
  GptqReport report;
  ASSIGN_OR_RETURN(const QuantizedMatrix matrix, RoundByGptq(ctx, grid, rows, kOutputs, k, factor,
                                                             {.by_error = true, .importance = {}}, &report));
  const std::vector<StoredTensor> tensors = TensorsOf(grid, kOutputs, k);
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> out;
  for (const StoredTensor& tensor : tensors) {
    out.push_back(bytes.emplace_back(static_cast<size_t>(tensor.bytes())).data());
  }
  EncodeRows(*ctx.pool, matrix, tensors, out);
  Xxh3 sum;
  sum.Add(bytes.front().data(), bytes.front().size());
  ASSIGN_OR_RETURN(RuntimeMatrix runtime, RuntimeMatrix::OfRounded(grid, kOutputs, k));
  return runtime.Add(*ctx.pool, 0, matrix, tensors, out);
}

StatusOr<double> ForwardTime(const kernels::ExecContext& ctx, const OwnedMatrix& matrix,
                             std::span<const float> tokens) {
  std::vector<float> out(size_t{kTokens} * kOutputs);
  ASSIGN_OR_RETURN(const double seconds, SecondsOf([&] {
                     layers::Apply(ctx, {matrix.matrix}, tokens.data(), kFewInputs, kTokens, out.data(),
                                   kOutputs);
                     return OkStatus();
                   }));
  return seconds / (double{kTokens} * kOutputs * kFewInputs);
}

}  // namespace

StatusOr<CalibrationRates> MeasureCalibration(const kernels::ExecContext& ctx, const Grid& grid) {
  const std::vector<float> tokens = Noise(size_t{kTokens} * kManyInputs),
                           rows = Noise(size_t{kOutputs} * kManyInputs);
  double hessians[2], factors[2], roundings[2];
  constexpr int kInputs[2] = {kFewInputs, kManyInputs};
  for (int i = 0; i < 2; ++i) {
    const int k = kInputs[i];
    ASSIGN_OR_RETURN(Hessian hessian, Hessian::Create(k));
    ASSIGN_OR_RETURN(hessians[i], SecondsOf([&] {
                       hessian.Add(ctx, {.f32 = tokens.data(), .stride = k, .count = kTokens, .gates = {}});
                       return OkStatus();
                     }));
    Factorizer factorizer;
    const HessianFactor* factor = nullptr;
    ASSIGN_OR_RETURN(factors[i], SecondsOf([&]() -> Status {
                       ASSIGN_OR_RETURN(factor, factorizer.Factor(ctx, hessian, {}));
                       return OkStatus();
                     }));
    ASSIGN_OR_RETURN(roundings[i],
                     SecondsOf([&] { return RoundLikeARun(ctx, grid, rows.data(), k, *factor); }));
    hessians[i] /= double{kTokens} * k;
    factors[i] /= double{1} * k * k;
    roundings[i] /= double{kOutputs} * k;
  }
  CalibrationRates rates;
  rates.hessian = LineThrough(hessians[0], hessians[1]);
  rates.factor = LineThrough(factors[0], factors[1]);
  rates.round = LineThrough(roundings[0], roundings[1]);

  ASSIGN_OR_RETURN(RuntimeMatrix kept, RuntimeMatrix::OfKept(tensor::DType::kBF16, kOutputs, kFewInputs));
  kept.AddKept(*ctx.pool, 0, kOutputs, rows.data());
  ASSIGN_OR_RETURN(rates.forward_kept, ForwardTime(ctx, kept.Take(), tokens));
  ASSIGN_OR_RETURN(RuntimeMatrix wide, RuntimeMatrix::OfKept(tensor::DType::kF32, kOutputs, kFewInputs));
  wide.AddKept(*ctx.pool, 0, kOutputs, rows.data());
  ASSIGN_OR_RETURN(rates.attention, ForwardTime(ctx, wide.Take(), tokens));
  // Of zeros: time does not depend on values.
  ASSIGN_OR_RETURN(RuntimeMatrix rounded, RuntimeMatrix::OfRounded(grid, kOutputs, kFewInputs));
  ASSIGN_OR_RETURN(rates.forward, ForwardTime(ctx, rounded.Take(), tokens));
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
    round += rates.round.Seconds(n, k);
    if (i > 0 && item.fused >= 0 && plan.items[i - 1].fused == item.fused) continue;  // inputs were seen
    factor += rates.factor.Seconds(k, k);
    if (every) {
      hessian +=
          last ? rates.hessian.Seconds(all, k) : 0;  // gate and up: the layer's, which shared experts count
      continue;
    }
    hessian += rates.hessian.Seconds(tokens, k);
    if (item.routed && last && tokens < kPlenty * k) {
      hessian += rates.hessian.Seconds(std::min<double>(all, kStandIns), k);
    }
  }
  // Queries against keys and their mix of values, of half a sequence on average, twice a layer.
  const models::AttentionSpec& a = spec.attention;
  const double head =
      a.kind == models::AttentionSpec::Kind::kMla ? a.nope_dim + a.rope_dim + a.v_dim : 2 * a.head_dim;
  const double attention = all * static_cast<double>(settings.calibration.longest) * a.heads * head *
                           (spec.layers + spec.mtp_layers) * rates.attention;
  CalibrationForecast forecast;
  if (settings.gptq) {
    forecast = {hessian, factor, round, forward * rates.forward + attention};
  }
  if (settings.analyze.wanted()) forecast.forward_seconds += forward * rates.forward_kept + attention;
  if (settings.mix.wanted()) {
    // Under GPTQ all tokens go through the model once more, for Hessians and factors of attention's linears
    // and of some experts: taken as of all.
    if (settings.gptq) {
      forecast.forward_seconds *= 2;
      forecast.hessian_seconds *= 2;
      forecast.factor_seconds *= 2;
    }
    forecast.forward_seconds += forward / all * MixLaneTokens(spec, settings) * rates.forward_kept;
  }
  return forecast;
}

}  // namespace moesaic::quantizer
