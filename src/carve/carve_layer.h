// Carving one feed-forward network into experts, from its activations on calibration tokens.
#pragma once

#include "carve/carve_plan.h"
#include "carve/least_squares.h"
#include "quantizer/calibrate/calibration_stream.h"

namespace moesaic::carve {

/// What an FFN became.
struct CarvedFfn {
  LayerPlan plan;
  RowMatrix down;  // [hidden, width], refitted
};

/// Carves `layer` on the FFN inputs of `stream` (which stands after the layer's attention), and adds the
/// carved FFN's output to the stream, so that later layers are fitted on what they will really see. Searches
/// for a plan unless one is `given`.
StatusOr<CarvedFfn> CarveFfn(const kernels::ExecContext& ctx, const models::DecoderSpec& spec,
                             const quantizer::DenseLayer& layer, const CarveOptions& options,
                             const LayerPlan* given, quantizer::CalibrationStream* stream,
                             CarveLayerReport* report);

}  // namespace moesaic::carve
