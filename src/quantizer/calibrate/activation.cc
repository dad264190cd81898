#include "quantizer/calibrate/activation.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"
#include "kernels/kernel_table.h"
#include "kernels/rounding.h"
#include "tensor/static_scale.h"

namespace moesaic::quantizer {

using tensor::StaticScale;

namespace {

// A bin is the upper bits of a magnitude: its exponent and 5 bits of its mantissa, 32 bins per octave.
constexpr int kSizeShift = 18, kSizes = 0x7f800000 >> kSizeShift;
constexpr double kPercentileShare = 0.9999;
constexpr float kLargestCode = 127;

// Returns the middle of a bin.
double Middle(int size) {
  const auto low = std::bit_cast<float>(static_cast<uint32_t>(size) << kSizeShift);
  const auto high =
      std::bit_cast<float>((static_cast<uint32_t>(size) << kSizeShift) + (1U << kSizeShift) - 1);
  return 0.5 * (double{low} + high);
}

}  // namespace

ActivationRange::ActivationRange(int k) : largest_(k), counts_(kSizes) {}

void ActivationRange::Add(const kernels::ExecContext& ctx, const TokenSample& x,
                          std::span<const float> divisors) {
  MOESAIC_CHECK_EQ(x.k, std::ssize(largest_));
  MOESAIC_CHECK(divisors.empty() || std::ssize(divisors) == x.k);
  struct WorkerCounts {
    std::vector<float> largest;
    std::vector<int64_t> counts;
    int64_t zeros = 0;
  };
  std::vector<WorkerCounts> parts(ctx.pool->size());
  ctx.pool->Run(x.count, [&](int64_t t, int worker) {
    WorkerCounts& part = parts[worker];
    part.largest.resize(x.k);
    part.counts.resize(kSizes);
    for (int i = 0; i < x.k; ++i) {
      const float value = x.rows[t * x.k + i];
      const float magnitude = std::fabs(divisors.empty() ? value : value / divisors[i]);
      part.largest[i] = std::max(part.largest[i], magnitude);
      const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
      if (bits >= 0x7f800000U) continue;
      if (magnitude == 0) {
        ++part.zeros;
      } else {
        ++part.counts[bits >> kSizeShift];
      }
    }
  });
  for (const WorkerCounts& part : parts) {
    zeros_ += part.zeros;
    for (size_t i = 0; i < part.largest.size(); ++i) largest_[i] = std::max(largest_[i], part.largest[i]);
    for (size_t i = 0; i < part.counts.size(); ++i) counts_[i] += part.counts[i];
  }
}

float ActivationRange::Scale(RangeRule rule) const {
  const float largest = largest_.empty() ? 0 : *std::max_element(largest_.begin(), largest_.end());
  if (largest == 0) return 1;
  const int last =
      std::min<int>(static_cast<int>(std::bit_cast<uint32_t>(largest) >> kSizeShift), kSizes - 1);
  const auto scale_of = [](float clip) { return StaticScale::WithInverse(clip / kLargestCode); };
  if (rule == RangeRule::kLargest) return scale_of(largest);
  if (rule == RangeRule::kPercentile) {
    int64_t total = zeros_, above = 0;
    for (const int64_t count : counts_) total += count;
    for (int size = last; size >= 0; --size) {
      above += counts_[size];
      if (static_cast<double>(above) > (1 - kPercentileShare) * static_cast<double>(total)) {
        return scale_of(std::min(largest, static_cast<float>(Middle(size))));
      }
    }
    return scale_of(largest);
  }
  // Tries clipping from none to 1/64, in 32nds of an octave. A clipped value has an error of its excess;
  // others have step / sqrt(12) on average, and their own value below half a step.
  double least = HUGE_VAL;
  float best = largest;
  for (int at = 0; at <= 6 * 32; ++at) {
    const float clip = largest * std::exp2(-static_cast<float>(at) / 32);
    const double step = clip / kLargestCode;
    double error = 0;
    for (int size = 0; size <= last; ++size) {
      if (counts_[size] == 0) continue;
      const double value = std::min<double>(Middle(size), largest);
      const double each = value > clip ? value - clip : std::min(value, step / std::sqrt(12.0));
      error += static_cast<double>(counts_[size]) * each * each;
    }
    if (error < least) {
      least = error;
      best = clip;
    }
  }
  return scale_of(best);
}

std::vector<float> RoundActivations(const kernels::ExecContext& ctx, const TokenSample& x, float scale) {
  std::vector<float> rounded(static_cast<size_t>(x.count) * x.k);
  const kernels::Rounding& rounding = ctx.kernels->rounding[static_cast<int>(kernels::NumberGrid::kInt8)];
  const StaticScale of_tensor = StaticScale::Of(scale);
  ctx.pool->Run(x.count, [&](int64_t t, int) {
    const float* row = x.rows + t * x.k;
    std::vector<uint8_t> codes(x.k);
    float step = of_tensor.scale;
    if (of_tensor.is_set()) {
      std::vector<float> steps(x.k);  // x in steps, computed as the kernels do
      for (int i = 0; i < x.k; ++i) steps[i] = row[i] * of_tensor.inverse;
      rounding.encode(steps.data(), x.k, 1, codes.data());
    } else {
      step = std::bit_cast<float>(rounding.largest_bits(row, x.k)) / kLargestCode;
      if (step == 0) return;
      rounding.encode(row, x.k, step, codes.data());
    }
    for (int i = 0; i < x.k; ++i)
      rounded[t * x.k + i] = static_cast<float>(static_cast<int8_t>(codes[i])) * step;
  });
  return rounded;
}

ActivationChoice ChooseActivations(const kernels::ExecContext& ctx, const TokenSample& x,
                                   std::span<const WeightRows> weights, std::span<const WeightRows> rounded,
                                   float static_scale, double most) {
  MOESAIC_CHECK_EQ(weights.size(), rounded.size());
  MOESAIC_CHECK(static_scale > 0);
  const std::vector<float> by_tensor = RoundActivations(ctx, x, static_scale),
                           by_token = RoundActivations(ctx, x, 0);
  ActivationChoice choice;
  double squares = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::vector<float> exact = Outputs(ctx, x, weights[i]);
    const TokenSample tensor{by_tensor.data(), x.count, x.k}, token{by_token.data(), x.count, x.k};
    choice.static_loss += SquaredDistance(ctx, Outputs(ctx, tensor, rounded[i]), exact);
    choice.dynamic_loss += SquaredDistance(ctx, Outputs(ctx, token, rounded[i]), exact);
    squares += SquaredDistance(ctx, exact, std::vector<float>(exact.size()));
  }
  choice.is_static = choice.static_loss <= most * choice.dynamic_loss;
  if (squares > 0) {
    choice.static_loss /= squares;
    choice.dynamic_loss /= squares;
  }
  return choice;
}

}  // namespace moesaic::quantizer
