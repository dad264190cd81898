#include "layers/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::layers {
namespace {

// Blends interpolated and original frequencies. Dimensions that rotate more than beta_fast times over the
// original context keep theirs; those that rotate less than beta_slow times are divided by `factor`.
void ScaleYarn(const RopeSpec& spec, std::vector<float>& frequencies) {
  auto dimension_of = [&](double rotations) {
    return spec.dim * std::log(spec.original_context / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(spec.theta));
  };
  const double low = std::max(std::floor(dimension_of(spec.beta_fast)), 0.0);
  double high = std::min(std::ceil(dimension_of(spec.beta_slow)), spec.dim - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    const double original = frequencies[i];
    frequencies[i] = static_cast<float>(original / spec.factor * ramp + original * (1 - ramp));
  }
}

// Llama 3.1: low frequencies are divided by `factor`, high ones kept, and those between are blended.
void ScaleLlama3(const RopeSpec& spec, std::vector<float>& frequencies) {
  const double low_wavelength = spec.original_context / spec.low_freq_factor;
  const double high_wavelength = spec.original_context / spec.high_freq_factor;
  for (float& frequency : frequencies) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < high_wavelength) continue;
    if (wavelength > low_wavelength) {
      frequency = static_cast<float>(frequency / spec.factor);
      continue;
    }
    const double smooth = (spec.original_context / wavelength - spec.low_freq_factor) /
                          (spec.high_freq_factor - spec.low_freq_factor);
    frequency = static_cast<float>((1 - smooth) * frequency / spec.factor + smooth * frequency);
  }
}

}  // namespace

std::vector<float> RopeFrequencies(const RopeSpec& spec) {
  std::vector<float> frequencies(spec.dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = static_cast<float>(std::pow(spec.theta, -2.0 * static_cast<double>(i) / spec.dim));
  }
  switch (spec.scaling) {
    case RopeSpec::Scaling::kNone:
      break;
    case RopeSpec::Scaling::kLinear:
      for (float& frequency : frequencies) frequency = static_cast<float>(frequency / spec.factor);
      break;
    case RopeSpec::Scaling::kYarn:
      ScaleYarn(spec, frequencies);
      break;
    case RopeSpec::Scaling::kLlama3:
      ScaleLlama3(spec, frequencies);
      break;
  }
  return frequencies;
}

StatusOr<RopeTable> RopeTable::Create(const RopeSpec& spec, int context) {
  RopeTable table;
  table.frequencies_ = RopeFrequencies(spec);
  table.factor_ = static_cast<float>(spec.attention_factor);
  table.half_ = spec.dim / 2;
  table.context_ = context;
  table.interleaved_ = spec.interleaved;
  const size_t bytes = static_cast<size_t>(context) * table.half_ * sizeof(float);
  ASSIGN_OR_RETURN(table.cos_, runtime::Buffer::Allocate(bytes, /*huge=*/false));
  ASSIGN_OR_RETURN(table.sin_, runtime::Buffer::Allocate(bytes, /*huge=*/false));
  return table;
}

void RopeTable::Reserve(runtime::ThreadPool& pool, int positions) {
  MOESAIC_CHECK_LE(positions, context_);
  if (positions <= filled_) return;
  // Tables grow by multiples of 1024 positions: enough work per task, and decode steps seldom trigger it.
  constexpr int kRun = 1024;
  const int end = std::min(base::RoundUp(positions, kRun), context_);
  const int first = filled_;
  pool.Run(base::CeilDiv(end - first, kRun), [&](int64_t task, int) {
    const int from = first + static_cast<int>(task) * kRun;
    for (int p = from; p < std::min(from + kRun, end); ++p) {
      float* cos = cos_.as<float>() + static_cast<int64_t>(p) * half_;
      float* sin = sin_.as<float>() + static_cast<int64_t>(p) * half_;
      for (int i = 0; i < half_; ++i) {
        const double angle = static_cast<float>(p) * frequencies_[i];  // an f32 product, see RopeFrequencies
        cos[i] = static_cast<float>(std::cos(angle)) * factor_;
        sin[i] = static_cast<float>(std::sin(angle)) * factor_;
      }
    }
  });
  filled_ = end;
}

}  // namespace moesaic::layers
