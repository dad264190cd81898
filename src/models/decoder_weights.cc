#include "models/decoder_weights.h"

#include <cstring>

#include "base/round.h"

namespace moesaic::models {
namespace {

class Assembler {
 public:
  Assembler(const DecoderSpec& spec, parallel::Shard shard, const WeightMap& weights,
            const layers::RopeTable& rope, layers::MlaPath path, bool frame = false)
      : spec_(spec), shard_(std::move(shard)), weights_(weights), rope_(rope), path_(path), frame_(frame) {}

  layers::Linear Linear(const std::string& name) const {
    return {.weight = Matrix(name), .bias = OptionalVector(name + ".bias")};
  }

  layers::DecoderLayer Layer(int index, bool moe) {
    const std::string prefix = LayerPrefix(index);
    layers::DecoderLayer layer;
    layer.norm_eps = spec_.norm_eps;
    layer.hidden = spec_.hidden;
    layer.attention_norm = weights_.Vector(prefix + "input_layernorm.weight");
    const float* post_attention = weights_.Vector(prefix + "post_attention_layernorm.weight");
    if (spec_.sandwich_norm) {
      layer.attention_out_norm = post_attention;
      layer.ffn_norm = weights_.Vector(prefix + "pre_mlp_layernorm.weight");
      layer.ffn_out_norm = weights_.Vector(prefix + "post_mlp_layernorm.weight");
    } else {
      layer.ffn_norm = post_attention;
    }
    if (spec_.attention.kind == AttentionSpec::Kind::kGqa) {
      layer.attention = Gqa(prefix + "self_attn.");
    } else {
      layer.attention = Mla(prefix + "self_attn.");
    }
    if (moe) {
      layer.ffn = Moe(prefix + "mlp", index);
    } else {
      layer.ffn = Mlp(prefix + "mlp");
    }
    return layer;
  }

  // Returns `name` if the plan has that region, otherwise `fallback`.
  const std::string& Present(const std::string& name, const std::string& fallback) const {
    return weights_.Has(name) ? name : fallback;
  }

 private:
  // A frame's linears are not loaded.
  tensor::PackedMatrix Matrix(const std::string& name, int record = 0, int part = 0) const {
    return frame_ ? OptionalMatrix(name, record, part) : weights_.Matrix(name, record, part);
  }

  // Empty for a slice without columns, too.
  tensor::PackedMatrix OptionalMatrix(const std::string& name, int record, int part) const {
    return weights_.Has(name) ? weights_.Matrix(name, record, part) : tensor::PackedMatrix{};
  }

  const float* OptionalVector(const std::string& name) const {
    return weights_.Has(name) ? weights_.Vector(name) : nullptr;
  }

  layers::GqaAttention Gqa(const std::string& prefix) const {
    const AttentionSpec& a = spec_.attention;
    return {.q = Linear(prefix + "q_proj"),
            .k = Linear(prefix + "k_proj"),
            .v = Linear(prefix + "v_proj"),
            .o = Linear(prefix + "o_proj"),
            .q_norm = OptionalVector(prefix + "q_norm.weight"),
            .k_norm = OptionalVector(prefix + "k_norm.weight"),
            .norm_eps = spec_.norm_eps,
            .heads = shard_.heads.count,
            .kv_heads = shard_.kv_heads.count,
            .head_dim = a.head_dim,
            .scale = a.scale,
            .rope = &rope_};
  }

  layers::MlaAttention Mla(const std::string& prefix) const {
    const AttentionSpec& a = spec_.attention;
    layers::MlaAttention mla;
    if (a.q_lora_rank > 0) {
      mla.q_a = Linear(prefix + "q_a_proj");
      mla.q_a_norm = weights_.Vector(prefix + "q_a_layernorm.weight");
      mla.q_b = Linear(prefix + "q_b_proj");
    } else {
      mla.q = Linear(prefix + "q_proj");
    }
    mla.kv_a = Linear(prefix + "kv_a_proj_with_mqa");
    mla.kv_a_norm = weights_.Vector(prefix + "kv_a_layernorm.weight");
    for (int head = 0; head < shard_.heads.count; ++head) {
      mla.uk.push_back(weights_.Matrix(prefix + "kv_b_proj", head, 0));
      mla.uv.push_back(weights_.Matrix(prefix + "kv_b_proj", head, 1));
      mla.uk_t.push_back(weights_.Matrix(prefix + "kv_b_proj", head, 2));
    }
    mla.o = Linear(prefix + "o_proj");
    mla.norm_eps = a.latent_norm_eps;
    mla.heads = shard_.heads.count;
    mla.latent_dim = a.kv_lora_rank;
    mla.nope_dim = a.nope_dim;
    mla.rope_dim = a.rope_dim;
    mla.v_dim = a.v_dim;
    mla.scale = a.scale;
    mla.rope = &rope_;
    mla.path = path_;
    return mla;
  }

  layers::Mlp Mlp(const std::string& name) const {
    return {.gate = {OptionalMatrix(name, 0, 0), OptionalVector(name + ".gate_proj.bias")},
            .up = {OptionalMatrix(name, 0, 1), OptionalVector(name + ".up_proj.bias")},
            .down = {OptionalMatrix(name, 0, 2), OptionalVector(name + ".down_proj.bias")},
            .hidden = spec_.hidden};
  }

  layers::MoeLayer Moe(const std::string& name, int decoder_layer) {
    const MoeSpec& moe = spec_.moe;
    const std::vector<int32_t>& own = shard_.ExpertsOf(decoder_layer);
    layers::MoeLayer layer;
    layer.index = moe_layers_++;
    layer.router = {.gate = Linear(name + ".gate"),
                    .choice_bias = OptionalVector(name + ".gate.e_score_correction_bias"),
                    .top_k = moe.top_k,
                    .scoring = moe.scoring,
                    .group_score = moe.group_score,
                    .groups = moe.groups,
                    .top_groups = moe.top_groups,
                    .normalize = moe.normalize,
                    .scale = moe.scale};
    if (frame_) return layer;
    if (weights_.Has(name + ".experts")) layer.experts = weights_.Experts(name + ".experts");
    if (static_cast<int>(own.size()) < moe.experts) {
      layer.local_expert.assign(moe.experts, -1);
      for (size_t i = 0; i < own.size(); ++i) layer.local_expert[own[i]] = static_cast<int32_t>(i);
    }
    layer.shared_gate = OptionalMatrix(name + ".shared_experts", 0, 0);
    layer.shared_up = OptionalMatrix(name + ".shared_experts", 0, 1);
    layer.shared_down = OptionalMatrix(name + ".shared_experts", 0, 2);
    return layer;
  }

  const DecoderSpec& spec_;
  parallel::Shard shard_;
  const WeightMap& weights_;
  const layers::RopeTable& rope_;
  layers::MlaPath path_;
  bool frame_;
  int moe_layers_ = 0;  // assembled so far
};

// Compares whole matrices of equal shape: all slices, or any one image.
bool SameBytes(const tensor::PackedMatrix& a, const tensor::PackedMatrix& b) {
  const int slices = base::CeilDiv(a.layout.panels(), a.image_panels());
  for (int slice = 0; slice < slices; ++slice) {
    const int64_t at = slice * a.image_stride;
    if (std::memcmp(a.data + at, b.data + at, a.layout.total_bytes) != 0) return false;
  }
  return true;
}

// Checkpoints of DeepSeek-V3 store the head a second time in the MTP module. Sharing one matrix saves cache
// and, for mapped files, memory: the module runs right after the head.
bool IsCopy(const tensor::PackedMatrix& a, const tensor::PackedMatrix& b) {
  return a.data != b.data && a.layout.format == b.layout.format && a.layout.n == b.layout.n &&
         a.layout.k == b.layout.k && a.first_row == b.first_row && a.input_scale == b.input_scale &&
         SameBytes(a, b);
}

}  // namespace

DecoderWeights Assemble(const DecoderSpec& spec, const parallel::Shard& shard, const WeightMap& weights,
                        const layers::RopeTable& rope, layers::MlaPath mla_path) {
  Assembler assemble(spec, shard, weights, rope, mla_path);
  DecoderWeights decoder;
  if (shard.has_embedding) decoder.embedding = weights.Matrix(kEmbedding);
  for (int i = shard.layers.first; i < shard.layers.end(); ++i) {
    decoder.layers.push_back(assemble.Layer(i, spec.is_moe[i]));
  }
  if (!shard.has_head) return decoder;
  decoder.final_norm = weights.Vector(kFinalNorm);
  const std::string head = assemble.Present(kHead, kEmbedding);
  decoder.head = assemble.Linear(head);
  for (int i = spec.layers; i < spec.layers + spec.mtp_layers; ++i) {
    const std::string prefix = LayerPrefix(i);
    decoder.mtp.push_back({.embedding = weights.Matrix(assemble.Present(prefix + "embed_tokens", kEmbedding)),
                           .embedding_norm = weights.Vector(prefix + "enorm.weight"),
                           .hidden_norm = weights.Vector(prefix + "hnorm.weight"),
                           .project = assemble.Linear(prefix + "eh_proj"),
                           .layer = assemble.Layer(i, spec.is_moe.back()),
                           .final_norm = weights.Vector(prefix + "shared_head.norm.weight"),
                           .head = assemble.Linear(assemble.Present(prefix + "shared_head.head", head))});
    layers::Linear& own = decoder.mtp.back().head;
    if (IsCopy(own.weight, decoder.head.weight)) own.weight = decoder.head.weight;
  }
  return decoder;
}

layers::DecoderLayer AssembleFrame(const DecoderSpec& spec, const WeightMap& weights,
                                   const layers::RopeTable& rope, int layer) {
  const bool moe = layer < spec.layers ? spec.is_moe[layer] : spec.is_moe.back();
  return Assembler(spec, parallel::WholeModel(ShapeOf(spec)), weights, rope, layers::MlaPath::kAuto,
                   /*frame=*/true)
      .Layer(layer, moe);
}

}  // namespace moesaic::models
