// Measures what each option of a mix costs: all of them in one pass over the weights, for a model of any
// size.
//
// Some calibration tokens go through the unrounded model, and beside them a lane for each unit and option:
// the same tokens, with this unit's linears as the option makes them and all others unrounded. A lane leaves
// the first one where its unit stands and goes on through all layers behind. Its loss is the divergence of
// its predictions from the first lane's, KL in nats a token: the measure of the whole model's loss, so that
// losses of any two places compare, with whatever the layers behind make of an error, routers that choose
// other experts included. Divergence grows with the square of an error; errors of different units hardly
// correlate; so a mix loses about the sum.
//
// GPTQ would take many runs. Its loss is that of rounding to the nearest times the share of the outputs'
// squared error that it leaves (MeasureLoss, over all calibration tokens, on some rows of each linear and
// some experts of a layer), but for int8, whose activations' rounding it leaves as it is.
//
// fp16 stands for programs that compute in it: a magnitude over 65504 among the inputs and outputs of a
// unit's linears, or its weights, is an infinite loss. Its rounding is bf16's with three more bits: bf16's
// loss / 64. Where fp16 or fp32 is an option, the first lane computes in f32, so that bf16 has a loss as
// well.
//
// Where memory does not hold all lanes at once, there are several passes (mix_passes.h).
#pragma once

#include "quantizer/calibrate/analysis.h"
#include "quantizer/mixed/mix_passes.h"
#include "quantizer/mixed/mix_state.h"

namespace moesaic::quantizer {

/// Up to `tokens` tokens of `sequences`, cut into windows of 256 at most: first windows from all over them,
/// then the second ones, and so on.
std::vector<std::vector<int32_t>> MixSample(const std::vector<std::vector<int32_t>>& sequences,
                                            int64_t tokens);

/// How a mix is measured; none of it changes what comes out.
struct MixRun {
  AnalysisProgress progress = {};  // called with layers done and in all
  MixStore* store = nullptr;       // that takes what is measured; null: none
  MixState from = {};              // what it has of a run before
};

/// Measures the losses of `units`, whose linears are among `items`; MTP modules' stay unmeasured, with a loss
/// of 0: they draft, and their model decides. What comes out does not depend on `passes`, which are those of
/// the layers that `run.from` has no losses of.
StatusOr<Mix> MeasureMix(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                         const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, const std::vector<MixPass>& passes,
                         std::vector<MixUnit> units, const std::vector<std::vector<int32_t>>& sequences,
                         MixRun run);

}  // namespace moesaic::quantizer
