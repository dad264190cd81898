// Measures the loss of each option of a mix in one pass over the weights, for models of any size.
//
// Some calibration tokens pass through the unrounded model. For each precision group and option, a variant
// carries the same tokens with this group in the option's precision and all others unrounded. A variant
// starts at the group's layer and continues through all later layers. Its loss is the KL divergence of its
// predictions from those of the first variant, in nats per token. Losses of different groups therefore have
// the same unit, and include the reactions of later layers and routers. Divergence grows with the square of
// an error, and errors of different groups are nearly uncorrelated, so the loss of a mix is about the sum.
//
// GPTQ would need many runs. Its loss is that of rounding to the nearest times the remaining share of the
// outputs' squared error (MeasureLoss, over all calibration tokens, on some rows of each linear and some
// experts of a layer). int8 is an exception: its loss is mostly that of activations and is not reduced.
//
// fp16 stands for programs that compute in fp16: a magnitude over 65504 among the weights, inputs or outputs
// of a group's linears is an infinite loss. fp16 has three more bits than bf16, so its rounding loss is
// bf16's / 64. If fp16 or fp32 is an option, the first variant computes in f32, so that bf16 has a loss as
// well.
//
// If memory does not hold all variants at once, there are several passes (mix_passes.h).
#pragma once

#include "kernels/exec_context.h"
#include "quantizer/calibrate/analysis.h"
#include "quantizer/mixed/mix_passes.h"
#include "quantizer/mixed/mix_state.h"

namespace moesaic::quantizer {

/// Returns up to `tokens` tokens of `sequences`, cut into windows of at most 256: first the first windows of
/// sequences spread over all of them, then the second windows, and so on.
std::vector<std::vector<int32_t>> MixSample(const std::vector<std::vector<int32_t>>& sequences,
                                            int64_t tokens);

/// Parameters of a measurement that do not affect its result.
struct MixRun {
  AnalysisProgress progress = {};  // called with the number of layers done and in all
  MixStore* store = nullptr;       // stores measurements; null: none
  MixState from = {};              // measurements of an earlier run
};

/// Measures the losses of `units`, whose linears are among `items`. MTP modules are not measured and have a
/// loss of 0, because they only draft. `passes` must cover the layers without losses in `run.from`; the
/// result does not depend on them.
StatusOr<Mix> MeasureMix(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                         const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, const std::vector<MixPass>& passes,
                         std::vector<PrecisionGroup> units,
                         const std::vector<std::vector<int32_t>>& sequences, MixRun run);

}  // namespace moesaic::quantizer
