#include "quantizer/calibrate/calibration_forecast.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "base/checksum.h"
#include "kernels/elementwise.h"
#include "kernels/exec_context.h"
#include "layers/linear.h"
#include "quantizer/calibrate/calibrated_run.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "quantizer/gptq/gptq.h"
#include "quantizer/mixed/mix_gain.h"
#include "quantizer/mixed/mix_passes.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {
namespace {

// Rows and tokens of the measurements, and the numbers of inputs that a line is fitted through.
constexpr int kOutputs = 1024, kFewOutputs = 128, kTokens = 1024;
constexpr int kFewInputs = 1024, kManyInputs = 8192;
constexpr double kMeasured = 0.3;  // seconds per measurement

// Measures seconds of `work` after one warm-up call.
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

// Returns the line through two measurements; `few` and `many` are seconds per value.
ProductTime LineThrough(double few, double many) {
  ProductTime time;
  time.product = std::max(0.0, (many - few) / (kManyInputs - kFewInputs));
  time.value = many - time.product * kManyInputs;
  if (time.value < 0) time = {.product = many / kManyInputs, .value = 0};
  return time;
}

// Rounds `count` rows of a linear stored in bf16 as a run does: codes, encoded bytes, their checksums and the
// run-time matrix.
Status RoundLikeARun(const kernels::ExecContext& ctx, const Grid& grid, const std::vector<tensor::BF16>& rows,
                     int count, int k, const HessianFactor& factor, std::vector<float>* slab) {
  slab->resize(static_cast<size_t>(count) * k);
  ctx.pool->Run(count, [&](int64_t row, int) {
    for (int64_t i = row * k; i < (row + 1) * k; ++i) (*slab)[i] = tensor::ToFloat(rows[i]);
  });
  GptqReport report;
  ASSIGN_OR_RETURN(const QuantizedMatrix matrix, RoundByGptq(ctx, grid, slab->data(), count, k, factor,
                                                             {.by_error = true, .importance = {}}, &report));
  const std::vector<StoredTensor> tensors = TensorsOf(grid, count, k);
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> out;
  for (const StoredTensor& tensor : tensors) {
    out.push_back(bytes.emplace_back(static_cast<size_t>(tensor.bytes())).data());
  }
  EncodeRows(*ctx.pool, matrix, tensors, out);
  for (int sums = 0; sums < 2; ++sums) {  // of the report and of the journal
    base::Xxh3 sum;
    sum.Add(bytes.front().data(), bytes.front().size());
  }
  ASSIGN_OR_RETURN(RuntimeMatrix runtime, RuntimeMatrix::OfRounded(grid, count, k));
  return runtime.Add(*ctx.pool, 0, matrix, tensors, out);
}

// Returns seconds per multiply-add.
StatusOr<double> ForwardTime(const kernels::ExecContext& ctx, const OwnedMatrix& matrix,
                             std::span<const float> tokens) {
  const int n = matrix.matrix.n(), k = matrix.matrix.k();
  std::vector<float> out(static_cast<size_t>(kTokens) * n);
  ASSIGN_OR_RETURN(const double seconds, SecondsOf([&] {
                     layers::Apply(ctx, {matrix.matrix}, tokens.data(), k, kTokens, out.data(), n);
                     return OkStatus();
                   }));
  return seconds / (double{kTokens} * n * k);
}

}  // namespace

StatusOr<CalibrationRates> MeasureCalibration(const kernels::ExecContext& ctx, const Grid& grid,
                                              int part_rows) {
  const std::vector<float> tokens = Noise(size_t{kTokens} * kManyInputs);
  std::vector<tensor::BF16> rows(size_t{kOutputs} * kManyInputs);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = tensor::ToBF16(tokens[i]);
  std::vector<float> slab;
  const int together = std::min(kTokens, part_rows);
  CalibrationRates rates;
  double hessians[2], factors[2], roundings[2];
  constexpr int kInputs[2] = {kFewInputs, kManyInputs};
  for (int i = 0; i < 2; ++i) {
    const int k = kInputs[i];
    ASSIGN_OR_RETURN(Hessian hessian, Hessian::Create(k));
    ASSIGN_OR_RETURN(hessians[i], SecondsOf([&] {
                       hessian.Add(ctx, {.f32 = tokens.data(), .stride = k, .count = together});
                       return OkStatus();
                     }));
    hessians[i] /= double{1} * together * k;
    Factorizer factorizer;
    const HessianFactor* factor = nullptr;
    ASSIGN_OR_RETURN(factors[i], SecondsOf([&]() -> Status {
                       ASSIGN_OR_RETURN(factor, factorizer.Factor(ctx, hessian, {}));
                       return OkStatus();
                     }));
    factors[i] /= double{1} * k * k;
    double of_rows[2];
    constexpr int kSlabs[2] = {kFewOutputs, kOutputs};
    for (int j = 0; j < 2; ++j) {
      ASSIGN_OR_RETURN(of_rows[j], SecondsOf([&] {
                         return RoundLikeARun(ctx, grid, rows, kSlabs[j], k, *factor, &slab);
                       }));
    }
    const double of_row = (of_rows[1] - of_rows[0]) / (kOutputs - kFewOutputs);
    rates.round.slab = std::max(0.0, of_rows[0] - kFewOutputs * of_row) / (double{1} * k * k);
    roundings[i] = of_row / k;
    if (k == kFewInputs) continue;
    const double half = double{1} * k * k / 2;
    ASSIGN_OR_RETURN(Hessian other, Hessian::Create(k));
    other.Add(ctx, {.f32 = tokens.data(), .stride = k, .count = together});
    ASSIGN_OR_RETURN(rates.shrink, SecondsOf([&] {
                       ShrinkTowards(ctx, other, &hessian);
                       return OkStatus();
                     }));
    ASSIGN_OR_RETURN(rates.clear, SecondsOf([&] {
                       other.Clear(ctx);
                       return OkStatus();
                     }));
    rates.shrink /= half;
    rates.clear /= half;
  }
  rates.hessian = LineThrough(hessians[0], hessians[1]);
  rates.factor = LineThrough(factors[0], factors[1]);
  rates.round.rows = LineThrough(roundings[0], roundings[1]);

  std::vector<float> normed(tokens.size());
  ASSIGN_OR_RETURN(rates.value, SecondsOf([&] {
                     kernels::RmsNorm(ctx, {.x = tokens.data(),
                                            .x_stride = kManyInputs,
                                            .weight = tokens.data(),
                                            .y = normed.data(),
                                            .y_stride = kManyInputs,
                                            .rows = kTokens,
                                            .n = kManyInputs,
                                            .eps = 1e-6F});
                     return OkStatus();
                   }));
  rates.value /= static_cast<double>(tokens.size());
  ASSIGN_OR_RETURN(RuntimeMatrix kept, RuntimeMatrix::OfKept(tensor::DType::kBF16, kOutputs, kManyInputs));
  kept.AddKept(*ctx.pool, 0, kOutputs, tokens.data());
  ASSIGN_OR_RETURN(rates.forward_kept, ForwardTime(ctx, kept.Take(), tokens));
  ASSIGN_OR_RETURN(RuntimeMatrix wide, RuntimeMatrix::OfKept(tensor::DType::kF32, kOutputs, kFewInputs));
  wide.AddKept(*ctx.pool, 0, kOutputs, tokens.data());
  ASSIGN_OR_RETURN(rates.attention, ForwardTime(ctx, wide.Take(), tokens));
  // Uses zeros, because time does not depend on values.
  ASSIGN_OR_RETURN(RuntimeMatrix rounded, RuntimeMatrix::OfRounded(grid, kOutputs, kManyInputs));
  ASSIGN_OR_RETURN(rates.forward, ForwardTime(ctx, rounded.Take(), tokens));
  return rates;
}

namespace {

// Seconds of a calibrated run and its work.
struct Sums {
  double hessian = 0, factor = 0, round = 0;
  double rounded = 0, kept = 0;  // multiply-adds of tokens and weights
  double values = 0;             // additional values that are loaded and stored
};

// Adds the work of linears. `tokens`: tokens that reach the linear; `all`: tokens of the layer.
class Counter {
 public:
  Counter(const QuantizePlan& plan, const OutputSettings& settings, const CalibrationRates& rates)
      : plan_(plan), settings_(settings), rates_(rates) {}

  void Add(size_t i) {
    const ModelItem& item = plan_.items[i];
    const models::DecoderSpec& spec = plan_.spec;
    const auto all = static_cast<double>(settings_.calibration.tokens);
    const double tokens = item.routed ? all * spec.moe.top_k / spec.moe.experts : all;
    const auto n = static_cast<double>(item.shape[0]), k = static_cast<double>(item.shape[1]);
    const bool down = item.name.ends_with(".down_proj"), last = down || item.name.ends_with(".o_proj");
    const bool rounded = plan_.output.items[i].form == Form::kRounded;
    // The Hessians of later linears in the layer run a linear again, and q_a_proj twice.
    double runs = tokens;
    if (!last) runs += tokens;
    if (item.name.ends_with(".q_a_proj")) runs += tokens;
    (rounded ? sums_.rounded : sums_.kept) += runs * n * k;
    // Inputs are normed or gathered for each of these runs; outputs are written to memory.
    sums_.values += runs * (k + n);
    if (item.routed && down) sums_.values += tokens * 3 * n;  // sums of the layer
    if (!rounded) return;
    const auto rows = static_cast<double>(EvenRows(item.shape[0], SlabRows(item, plan_.limits.slab_values)));
    sums_.round += rates_.round.Seconds(n, k, std::ceil(n / rows));
    // The inputs of fused linears are counted once.
    if (i > 0 && item.fused >= 0 && plan_.items[i - 1].fused == item.fused) return;
    sums_.factor += rates_.factor.Seconds(k, k);
    const double half = k * k / 2;
    AddHessian(tokens, k);
    if (plan_.limits.GathersInOrder(item.shape[1], item.routed) && down) {
      sums_.rounded += all * 2 * n * k;  // gate and up again
    }
    if (!item.routed) return;
    if (down && tokens >= kPlenty * k) return;
    sums_.factor += rates_.shrink * half;
    if (!down) return;
    const double stand_ins = std::min<double>(all, kStandIns);
    AddHessian(stand_ins, k);
    sums_.rounded += stand_ins * 2 * n * k;  // through gate and up
    sums_.values += stand_ins * 2 * (n + k);
  }

  const Sums& sums() const { return sums_; }

 private:
  void AddHessian(double tokens, double k) {
    sums_.hessian += rates_.hessian.Seconds(tokens, k) + rates_.clear * k * k / 2;
  }

  const QuantizePlan& plan_;
  const OutputSettings& settings_;
  const CalibrationRates& rates_;
  Sums sums_;
};

// True if the measurement of a mix's gains samples the item; it skips MTP modules.
bool IsSampled(const ModelItem& item, const models::DecoderSpec& spec) {
  if (spec.mtp_layers > 0 && item.layer >= spec.layers) return false;
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = item.name.find(kExperts);
  if (!item.routed || at == std::string::npos) return true;
  int expert = 0;
  const char* const digits = item.name.data() + at + kExperts.size();
  std::from_chars(digits, item.name.data() + item.name.size(), expert);
  return StandsForExperts(expert, spec.moe.experts);
}

}  // namespace

CalibrationForecast ForecastCalibration(const QuantizePlan& plan, const OutputSettings& settings,
                                        const CalibrationRates& rates) {
  const models::DecoderSpec& spec = plan.spec;
  const auto all = static_cast<double>(settings.calibration.tokens);
  Counter counter(plan, settings, rates);
  for (size_t i = 0; i < plan.items.size(); ++i) {
    if (IsWalked(plan.items[i], spec)) counter.Add(i);
  }
  const Sums& sums = counter.sums();
  const double products = sums.rounded + sums.kept, through = sums.values * rates.value;
  // Queries times keys and their weighted sum of values, over half a sequence on average, twice per layer.
  const models::AttentionSpec& a = spec.attention;
  const double head =
      a.kind == models::AttentionSpec::Kind::kMla ? a.nope_dim + a.rope_dim + a.v_dim : 2 * a.head_dim;
  const double attention = all * static_cast<double>(settings.calibration.longest) * a.heads * head *
                           (spec.layers + spec.mtp_layers) * rates.attention;
  CalibrationForecast forecast;
  if (settings.gptq) {
    forecast.hessian_seconds = sums.hessian;
    forecast.factor_seconds = sums.factor;
    forecast.round_seconds = sums.round;
    forecast.forward_seconds =
        sums.rounded * rates.forward + sums.kept * rates.forward_kept + attention + through;
  }
  if (settings.analyze.wanted()) {
    forecast.forward_seconds += products * rates.forward_kept + attention + through;
  }
  if (settings.mix.wanted()) {
    // Under GPTQ all tokens pass through the model again, for Hessians and factors of the samples.
    if (settings.gptq) {
      Counter sampled(plan, settings, rates);
      for (size_t i = 0; i < plan.items.size(); ++i) {
        if (IsWalked(plan.items[i], spec) && IsSampled(plan.items[i], spec)) sampled.Add(i);
      }
      forecast.forward_seconds *= 2;
      forecast.gain_hessian_seconds = sampled.sums().hessian;
      forecast.gain_factor_seconds = sampled.sums().factor;
      forecast.hessian_seconds += forecast.gain_hessian_seconds;
      forecast.factor_seconds += forecast.gain_factor_seconds;
    }
    forecast.forward_seconds += products / all * MixVariantTokens(spec, settings) * rates.forward_kept;
  }
  return forecast;
}

}  // namespace moesaic::quantizer
