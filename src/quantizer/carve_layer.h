// Carving one feed-forward network into experts, from its activations on calibration tokens.
#pragma once

#include "quantizer/calibration_stream.h"
#include "quantizer/carve_plan.h"
#include "quantizer/least_squares.h"

namespace moesaic::quantizer {

/// What an FFN became.
struct CarvedFfn {
  LayerPlan plan;
  RowMatrix down;  // [hidden, width], refitted
};

/// Carves `layer` on the FFN inputs of `stream` (which stands after the layer's attention), and adds the
/// carved FFN's output to the stream, so that later layers are fitted on what they will really see. Searches
/// for a plan unless one is `given`.
StatusOr<CarvedFfn> CarveFfn(const kernels::ExecContext& ctx, const models::DecoderSpec& spec,
                             const DenseLayer& layer, const CarveOptions& options, const LayerPlan* given,
                             CalibrationStream* stream, CarveLayerReport* report);

}  // namespace moesaic::quantizer
