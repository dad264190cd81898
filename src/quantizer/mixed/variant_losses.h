// Measures the divergence of the predictions of a stream's variants from those of the first variant.
#pragma once

#include <vector>

#include "checkpoint/checkpoint.h"
#include "kernels/exec_context.h"
#include "quantizer/calibrate/calibration_stream.h"

namespace moesaic::quantizer {

/// Returns the number of rows of the head that are in memory at a time: 16M values for models of any size.
int VariantLossRows(const models::DecoderSpec& spec);

/// Returns KL(first variant || variant) of the predictions from each variant's hidden states, in nats per
/// token, by variant. The final norm and the head run in `exact`, bf16 or f32. The head is read once, `rows`
/// rows at a time; each part adds to every token's sums of exponentials. A loss that is not finite is
/// returned as infinite. The stream's watch is called meanwhile.
StatusOr<std::vector<double>> VariantLosses(const kernels::ExecContext& ctx,
                                            const checkpoint::Checkpoint& source,
                                            const models::DecoderSpec& spec, tensor::DType exact, int rows,
                                            CalibrationStream& stream);

/// Returns the maximum memory in bytes of VariantLosses with VariantLossRows, for `tokens` tokens of all
/// variants.
int64_t VariantLossBytes(const models::DecoderSpec& spec, tensor::DType exact, int64_t tokens);

}  // namespace moesaic::quantizer
