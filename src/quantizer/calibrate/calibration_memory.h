// What calibration takes of memory and disk, told before it starts.
#pragma once

#include <limits>
#include <span>

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// What calibration may hold at once; less takes longer. Results do not depend on it, to the bit; only those
/// of a device depend on slab_values, which decides the shapes of its products.
struct CalibrationLimits {
  int part_rows = 2048;                    // CalibrationStream::part_rows()
  int64_t slab_values = int64_t{1} << 24;  // rounded at once (SlabRows)
  /// Linears outside of mixtures of experts with at least so many inputs have no Hessian beside their factor
  /// (Factorizer); above the model's hidden size.
  int in_order_inputs = std::numeric_limits<int>::max();

  bool GathersInOrder(int64_t inputs, bool routed) const { return !routed && inputs >= in_order_inputs; }
};

/// Whether a walk of the layers meets the item: linears but embeddings and heads, MTP modules' own among
/// them.
bool IsWalked(const ModelItem& item, const models::DecoderSpec& spec);

/// Scratch memory that factoring the item's Hessian and rounding it in one of these ways take at most, with
/// what rounding holds beside.
int64_t GptqScratchBytes(const ModelItem& item, std::span<const Precision> roundings, int threads,
                         const CalibrationLimits& limits);
/// The most of those items of `layer` that are rounded and walked.
int64_t GptqScratchBytes(const models::DecoderSpec& spec, std::span<const ModelItem> items, int layer,
                         std::span<const Precision> roundings, int threads, const CalibrationLimits& limits);

/// Memory that calibration takes at most, for GPTQ and for an analysis, beside the units.
int64_t CalibrationBytes(const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, int threads, const CalibrationLimits& limits);

/// Limits to choose from, those that take least time first.
std::vector<CalibrationLimits> LimitsFor(const models::DecoderSpec& spec, const OutputSettings& settings);

/// Bytes of one state.
int64_t StateBytes(const models::DecoderSpec& spec, const OutputSettings& settings);

}  // namespace moesaic::quantizer
