// Forecasts memory and disk space of calibration.
#pragma once

#include <limits>
#include <span>

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Limits of the memory that calibration holds at once. Lower limits take longer. Results do not depend on
/// them, with one exception: on a device, bits depend on slab_values, which decides the shapes of its
/// products.
struct CalibrationLimits {
  int part_rows = 2048;                    // CalibrationStream::part_rows()
  int64_t slab_values = int64_t{1} << 24;  // weights rounded at once (SlabRows)
  /// Minimum number of inputs of a linear outside of experts that has no Hessian besides its factor
  /// (Factorizer). It is above the model's hidden size.
  int in_order_inputs = std::numeric_limits<int>::max();

  bool GathersInOrder(int64_t inputs, bool routed) const { return !routed && inputs >= in_order_inputs; }
};

/// True if a walk of the layers visits the item: all linears except embeddings and heads, including those of
/// MTP modules.
bool IsWalked(const ModelItem& item, const models::DecoderSpec& spec);

/// Maximum scratch memory of factoring the item's Hessian and rounding it to any of `roundings`, including
/// the buffers of rounding.
int64_t GptqScratchBytes(const ModelItem& item, std::span<const Precision> roundings, int threads,
                         const CalibrationLimits& limits);
/// Maximum over the items of `layer` that are rounded and walked.
int64_t GptqScratchBytes(const models::DecoderSpec& spec, std::span<const ModelItem> items, int layer,
                         std::span<const Precision> roundings, int threads, const CalibrationLimits& limits);

/// Maximum memory of calibration, for GPTQ and for an analysis, in addition to the units.
int64_t CalibrationBytes(const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, int threads, const CalibrationLimits& limits);

/// Limits to choose from, fastest first.
std::vector<CalibrationLimits> LimitsFor(const models::DecoderSpec& spec, const OutputSettings& settings);

/// Bytes of one saved state.
int64_t StateBytes(const models::DecoderSpec& spec, const OutputSettings& settings);

}  // namespace moesaic::quantizer
