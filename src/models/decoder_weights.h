// Assembles a decoder's layers from a DecoderSpec and its weights.
#pragma once

#include <vector>

#include "layers/decoder_layer.h"
#include "models/weight_map.h"

namespace moesaic::models {

/// One multi-token-prediction module (DeepSeek-V3, arXiv 2412.19437 section 2.2).
struct MtpModule {
  tensor::PackedMatrix embedding;         // [vocab, hidden], often the same matrix as the main model's
  const float* embedding_norm = nullptr;  // enorm, [hidden]
  const float* hidden_norm = nullptr;     // hnorm, [hidden]
  layers::Linear project;                 // eh_proj, [hidden, 2 * hidden]: normed embedding first
  layers::DecoderLayer layer;
  const float* final_norm = nullptr;  // [hidden]
  layers::Linear head;                // [vocab, hidden], often the same matrix as the main model's
};

struct DecoderWeights {
  tensor::PackedMatrix embedding;  // [vocab, hidden]
  std::vector<layers::DecoderLayer> layers;
  const float* final_norm = nullptr;  // [hidden]
  layers::Linear head;                // [vocab, hidden]
  std::vector<MtpModule> mtp;
};

/// Returns views of `weights` and `rope`, which must outlive the result. `weights` are those of `shard`,
/// which has `layers` layers; a rank without embedding or head has empty matrices.
DecoderWeights Assemble(const DecoderSpec& spec, const parallel::Shard& shard, const WeightMap& weights,
                        const layers::RopeTable& rope, layers::MlaPath mla_path);

/// Assembles the frame of layer `layer` from the weights of PlanFrame. The layer has empty matrices for
/// quantizable linears and no experts.
layers::DecoderLayer AssembleFrame(const DecoderSpec& spec, const WeightMap& weights,
                                   const layers::RopeTable& rope, int layer);

}  // namespace moesaic::models
