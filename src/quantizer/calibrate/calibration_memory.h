// Forecasts memory and disk space of calibration.
#pragma once

#include <limits>
#include <span>

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Limits of the memory that calibration uses at once. Lower limits need less memory and take longer. Results
/// are identical to the bit for all limits, except on a GptqAccelerator, where slab_values decides the shapes
/// of matrix products and thus their rounding.
struct CalibrationLimits {
  int part_rows = 2048;  // tokens that pass a layer together, CalibrationStream::part_rows()
  int64_t slab_values = int64_t{1} << 24;  // weights of a linear rounded at once, in whole rows (SlabRows)
  /// Linears outside of experts with at least this many inputs are factored without a separate Hessian: their
  /// factor is built in place from the inputs (see Factorizer::FromInputs), which reads the inputs more
  /// often. A value above the model's hidden size, so that only the widest linears are affected.
  int in_order_inputs = std::numeric_limits<int>::max();

  /// True if a linear of `inputs` inputs is factored without a separate Hessian. `routed`: it is part of a
  /// routed expert.
  bool GathersInOrder(int64_t inputs, bool routed) const { return !routed && inputs >= in_order_inputs; }
};

/// True if a walk of the layers visits the item: all linears except embeddings and heads, including those of
/// MTP modules.
bool IsWalked(const ModelItem& item, const models::DecoderSpec& spec);

/// Returns the maximum bytes of scratch memory to factor the item's Hessian and to round the item to any of
/// `roundings` on `threads` threads.
int64_t GptqScratchBytes(const ModelItem& item, std::span<const Precision> roundings, int threads,
                         const CalibrationLimits& limits);
/// Returns the maximum of GptqScratchBytes over the items of `layer` that are rounded and walked.
int64_t GptqScratchBytes(const models::DecoderSpec& spec, std::span<const ModelItem> items, int layer,
                         std::span<const Precision> roundings, int threads, const CalibrationLimits& limits);

/// Returns the maximum bytes that calibration uses at once, for GPTQ or for an analysis. The buffers of I/O
/// units (work_plan.h) are not included.
int64_t CalibrationBytes(const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, int threads, const CalibrationLimits& limits);

/// Returns the limits that a plan may choose from, fastest first. The first that fit the memory are used.
std::vector<CalibrationLimits> LimitsFor(const models::DecoderSpec& spec, const OutputSettings& settings);

/// Returns the bytes of one saved state: hidden states of all calibration tokens, in f32.
int64_t StateBytes(const models::DecoderSpec& spec, const OutputSettings& settings);

}  // namespace moesaic::quantizer
