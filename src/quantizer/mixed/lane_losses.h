// Measures the divergence of the predictions of a stream's lanes from those of the first lane.
#pragma once

#include <vector>

#include "checkpoint/checkpoint.h"
#include "quantizer/calibrate/calibration_stream.h"

namespace moesaic::quantizer {

/// Rows of the head that are in memory at a time: 16M values for models of any size.
int LaneLossRows(const models::DecoderSpec& spec);

/// Returns KL(first lane || lane) of the predictions from each lane's hidden states, in nats per token, by
/// lane. The final norm and the head run in `exact`, bf16 or f32. The head is read once, `rows` rows at a
/// time; each part adds to every token's sums of exponentials. A loss that is not finite is returned as
/// infinite. The stream's watch is called meanwhile.
StatusOr<std::vector<double>> LaneLosses(const kernels::ExecContext& ctx,
                                         const checkpoint::Checkpoint& source,
                                         const models::DecoderSpec& spec, tensor::DType exact, int rows,
                                         CalibrationStream& stream);

/// Maximum memory of LaneLosses with LaneLossRows, for `tokens` tokens of all lanes.
int64_t LaneLossBytes(const models::DecoderSpec& spec, tensor::DType exact, int64_t tokens);

}  // namespace moesaic::quantizer
