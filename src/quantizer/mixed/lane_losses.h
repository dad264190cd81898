// How far the predictions of a stream's lanes are from those of its first one.
#pragma once

#include <vector>

#include "checkpoint/checkpoint.h"
#include "quantizer/calibrate/calibration_stream.h"

namespace moesaic::quantizer {

/// Rows of the head that are in memory at a time: 16M values, of models of any size.
int LaneLossRows(const models::DecoderSpec& spec);

/// KL(first lane || lane) of the predictions that the hidden states of each lane make, in nats a token, by
/// lane. Final norm and head run in `exact`, bf16 or f32. The head is read once, `rows` of it at a time: each
/// adds to every token's sums of exponentials. What is not finite comes out as infinite. The stream's watch
/// is asked meanwhile.
StatusOr<std::vector<double>> LaneLosses(const kernels::ExecContext& ctx,
                                         const checkpoint::Checkpoint& source,
                                         const models::DecoderSpec& spec, tensor::DType exact, int rows,
                                         CalibrationStream& stream);

/// Memory that it takes at most, by LaneLossRows, of so many tokens of all lanes.
int64_t LaneLossBytes(const models::DecoderSpec& spec, tensor::DType exact, int64_t tokens);

}  // namespace moesaic::quantizer
