// What calibration takes of memory and disk, told before it starts.
#pragma once

#include "quantizer/output_plan.h"

namespace moesaic::quantizer {

/// Whether a walk of the layers meets the item: linears but embeddings and heads, MTP modules' own among
/// them.
bool IsWalked(const ModelItem& item, const models::DecoderSpec& spec);

/// Memory that calibration takes at most, for GPTQ and for an analysis, beside the units.
int64_t CalibrationBytes(const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, int threads);

/// Bytes of one state.
int64_t StateBytes(const models::DecoderSpec& spec, const OutputSettings& settings);

}  // namespace moesaic::quantizer
