// The passes that measure a mix (mix_walk.h), and their memory.
//
// A variant consists of hidden states of all tokens. If memory does not hold all variants at once, several
// passes are made. Each has the variants of some layers and starts at the first of them, from the hidden
// states that the previous pass saved there. Every pass but the first therefore reads a part of the weights
// again.
#pragma once

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Maximum tokens of a window: many short texts are better than few long ones.
inline constexpr int kMixSampleLength = 256;
/// Values of a matrix that are rounded at a time: 4 MiB as f32, several tasks per core.
inline constexpr int64_t kMixSlabValues = int64_t{1} << 20;

/// Returns the dtype of the first variant's weights.
tensor::DType MixExactType(const MixSettings& mix);

/// True if `precision` needs a variant of its own. The first variant runs kept linears in `exact`.
bool NeedsVariant(const Precision& precision, tensor::DType exact);

/// True if fp16 is an option and bf16, from whose loss fp16's is derived, is not. fp16 then has a variant.
bool HalfAlone(const MixSettings& mix);

/// A pass from layer `first` to the end of the model, with variants for the groups and routers of layers
/// [first, end).
struct MixPass {
  int first = 0, end = 0;
  int64_t variants = 1;  // maximum number, including the first variant
  int64_t bytes = 0;     // maximum memory of the pass
};

/// Progress of earlier runs: layers before `first` are measured. `end` is the end of the unfinished pass that
/// starts there; 0: none.
struct MixBegun {
  int first = 0, end = 0;
  int64_t slack = 0;  // additional memory that the unfinished pass may use
};

/// Returns the fewest passes that measure the rest of a mix within `memory` bytes. The unfinished pass comes
/// first if it fits. Fails if the variants of some layer do not fit; the error states the memory that
/// suffices for every layer.
StatusOr<std::vector<MixPass>> PlanMixPasses(const models::DecoderSpec& spec,
                                             const std::vector<ModelItem>& items,
                                             const OutputSettings& settings, const MixBegun& begun,
                                             int64_t memory);

/// Returns the number of tokens for measuring losses.
int64_t MixSampleTokens(const OutputSettings& settings);

/// Returns the maximum bytes of hidden states that these passes keep at a time.
int64_t MixStateBytes(const models::DecoderSpec& spec, const OutputSettings& settings,
                      const std::vector<MixPass>& passes);

/// Returns the work of all variants for forecasts: tokens times the share of layers that they pass through.
double MixVariantTokens(const models::DecoderSpec& spec, const OutputSettings& settings);

}  // namespace moesaic::quantizer
