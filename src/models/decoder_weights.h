// Puts a decoder's layers together from a DecoderSpec and the weights it declares.
#pragma once

#include <vector>

#include "layers/decoder_layer.h"
#include "models/weight_map.h"

namespace moesaic::models {

/// One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437 section 2.2).
struct MtpModule {
  tensor::PackedMatrix embedding;         // [vocab, hidden], often the main model's
  const float* embedding_norm = nullptr;  // enorm, [hidden]
  const float* hidden_norm = nullptr;     // hnorm, [hidden]
  layers::Linear project;                 // eh_proj, [hidden, 2 * hidden]: normed embedding first
  layers::DecoderLayer layer;
  const float* final_norm = nullptr;  // [hidden]
  layers::Linear head;                // [vocab, hidden], often the main model's
};

struct DecoderWeights {
  tensor::PackedMatrix embedding;  // [vocab, hidden]
  std::vector<layers::DecoderLayer> layers;
  const float* final_norm = nullptr;  // [hidden]
  layers::Linear head;                // [vocab, hidden]
  std::vector<MtpModule> mtp;
};

/// Views of `weights` and of `rope`, which must outlive the result.
DecoderWeights Assemble(const DecoderSpec& spec, const WeightMap& weights, const layers::RopeTable& rope,
                        layers::MlaPath mla_path);

/// The frame of layer `layer` from the weights of PlanFrame: a layer whose linears that can be quantized are
/// empty, and whose experts are none.
layers::DecoderLayer AssembleFrame(const DecoderSpec& spec, const WeightMap& weights,
                                   const layers::RopeTable& rope, int layer);

}  // namespace moesaic::models
