// The passes in which a mix is measured (mix_walk.h), and their memory.
//
// A lane is hidden states of all tokens. Where memory does not hold all lanes at once, those of some layers'
// units go in a pass of their own, from the first of these layers on: the first lane's hidden states there
// were kept by the pass before. So all passes but the first read a part of the weights again.
#pragma once

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Tokens of a window, at most: rather more texts than longer ones.
inline constexpr int kMixSampleLength = 256;
/// Values of a matrix that are rounded at a time: 4 MiB as f32, several tasks for every core.
inline constexpr int64_t kMixSlabValues = int64_t{1} << 20;

/// The type that the first lane's weights have.
tensor::DType MixExactType(const MixSettings& mix);

/// Whether `precision` is a lane of its own: the first lane runs what is kept as `exact`.
bool NeedsLane(const Precision& precision, tensor::DType exact);

/// Whether fp16 is an option and bf16, by whose loss fp16's is told, is none: it has a lane all the same.
bool HalfAlone(const MixSettings& mix);

/// One pass: from layer `first` to the model's end, with lanes for the units and routers of layers [first,
/// end).
struct MixPass {
  int first = 0, end = 0;
  int64_t lanes = 1;  // at most, with the first one
  int64_t bytes = 0;  // of memory that the pass takes at most
};

/// What is measured already: of layers before `first`; and the end of a pass under way that began there, 0:
/// none.
struct MixBegun {
  int first = 0, end = 0;
  int64_t slack = 0;  // memory that this pass may take beyond what new ones may
};

/// The fewest passes that measure what is left of a mix within `memory` bytes; the pass under way is the
/// first, if it fits. Refuses what does not do for the lanes of some
/// layer; the error says how much does for those of any.
StatusOr<std::vector<MixPass>> PlanMixPasses(const models::DecoderSpec& spec,
                                             const std::vector<ModelItem>& items,
                                             const OutputSettings& settings, const MixBegun& begun,
                                             int64_t memory);

/// Tokens over which losses are measured.
int64_t MixSampleTokens(const OutputSettings& settings);

/// Bytes of hidden states that these passes save at a time, at most.
int64_t MixStateBytes(const models::DecoderSpec& spec, const OutputSettings& settings,
                      const std::vector<MixPass>& passes);

/// Tokens that all lanes together take through how much of the model: rows times layers, as a share of the
/// layers. For forecasts.
double MixLaneTokens(const models::DecoderSpec& spec, const OutputSettings& settings);

}  // namespace moesaic::quantizer
