// The hidden states of all calibration tokens, taken through a model layer by layer.
#pragma once

#include <vector>

#include "models/decoder_spec.h"
#include "quantizer/dense_layer.h"

namespace moesaic::quantizer {

class CalibrationStream {
 public:
  /// Starts with the embeddings of all tokens of `sequences`.
  static StatusOr<CalibrationStream> Create(const checkpoint::Checkpoint& source,
                                            const models::DecoderSpec& spec,
                                            const std::vector<std::vector<int32_t>>& sequences,
                                            const kernels::ExecContext& ctx);

  /// hidden += attention(norm(hidden)) of this layer.
  void AddAttention(const kernels::ExecContext& ctx, const DenseLayer& layer);

  int tokens() const { return static_cast<int>(positions_.size()); }
  float* hidden() { return hidden_.as<float>(); }  // [tokens, spec.hidden]

 private:
  CalibrationStream() = default;
  models::DecoderSpec spec_;
  std::vector<int32_t> positions_;              // [tokens]
  std::vector<int32_t> blocks_;                 // block numbers of the sequences that attend at once
  std::vector<kernels::SequenceSlice> slices_;  // point into blocks_
  runtime::Buffer hidden_, kv_memory_;
  kernels::KvLayer kv_;                  // of one layer and the sequences that attend at once
  std::vector<layers::RopeTable> rope_;  // one; a vector since it has no empty state
};

}  // namespace moesaic::quantizer
