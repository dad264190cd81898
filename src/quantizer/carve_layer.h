// Carving one feed-forward network into experts, from its activations on calibration tokens.
#pragma once

#include <vector>

#include "quantizer/calibration_stream.h"
#include "quantizer/carve.h"
#include "quantizer/least_squares.h"
#include "quantizer/router_fit.h"

namespace moesaic::quantizer {

/// What an FFN was cut into. Neurons are rows of gate and up and columns of down.
struct CarvedFfn {
  std::vector<int> shared;                // neurons of the shared expert, ascending
  std::vector<std::vector<int>> experts;  // [routed][slice] neurons, ascending
  LinearRouter router;
  RowMatrix down;  // [hidden, width], refitted
};

/// Carves `layer` on the FFN inputs of `stream` (which stands after the layer's attention), and adds the
/// carved FFN's output to the stream, so that later layers are fitted on what they will really see.
StatusOr<CarvedFfn> CarveFfn(const kernels::ExecContext& ctx, const models::DecoderSpec& spec,
                             const DenseLayer& layer, const CarveOptions& options, CalibrationStream* stream,
                             CarveLayerReport* report);

}  // namespace moesaic::quantizer
