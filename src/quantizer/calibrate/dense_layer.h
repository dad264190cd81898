// One decoder layer of a dense Llama-like model. Carving loads one at a time.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "layers/decoder_layer.h"
#include "models/decoder_spec.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {

/// A matrix packed in bf16 together with its memory.
struct OwnedMatrix {
  runtime::Buffer memory;
  tensor::PackedMatrix matrix;
};

/// Packs f32 rows [n, k].
StatusOr<OwnedMatrix> PackMatrix(runtime::ThreadPool& pool, const float* values, int n, int k);

/// Weights of a layer: attention packed, the FFN both as stored (f32, row-major) and packed.
struct DenseLayer {
  std::vector<float> input_norm, post_attention_norm;  // [hidden]
  OwnedMatrix q, k, v, o;
  std::vector<float> gate, up;  // [width, hidden]
  std::vector<float> down;      // [hidden, width]
  OwnedMatrix gate_packed, up_packed, down_packed;

  static StatusOr<DenseLayer> Read(const checkpoint::Checkpoint& source, const models::DecoderSpec& spec,
                                   int layer, runtime::ThreadPool& pool);
  layers::GqaAttention Attention(const models::DecoderSpec& spec, const layers::RopeTable& rope) const;
};

/// Reads all rows of a linear's weight as f32 [out, in].
StatusOr<std::vector<float>> ReadWeight(const checkpoint::Checkpoint& source, const std::string& module,
                                        int out, int in);

}  // namespace moesaic::quantizer
