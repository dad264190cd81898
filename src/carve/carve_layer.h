// Carves one feed-forward network into experts, given its activations on calibration tokens.
#pragma once

#include "carve/carve_plan.h"
#include "carve/least_squares.h"
#include "kernels/exec_context.h"
#include "quantizer/calibrate/calibration_stream.h"

namespace moesaic::carve {

/// A carved FFN.
struct CarvedFfn {
  LayerPlan plan;
  RowMatrix down;  // [hidden, width], refitted
};

/// Carves `layer` on the FFN inputs of `stream`, whose hidden states must include the layer's attention. Adds
/// the output of the carved FFN to the stream, so that later layers are fitted to their real inputs. Searches
/// for a plan unless one is `given`.
StatusOr<CarvedFfn> CarveFfn(const kernels::ExecContext& ctx, const models::DecoderSpec& spec,
                             const quantizer::DenseLayer& layer, const CarveOptions& options,
                             const LayerPlan* given, quantizer::CalibrationStream* stream,
                             CarveLayerReport* report);

}  // namespace moesaic::carve
