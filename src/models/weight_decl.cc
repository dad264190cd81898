#include "models/weight_decl.h"

#include <fmt/format.h>

namespace moesaic::models {
namespace {

class Declarer {
 public:
  Declarer(const DecoderSpec& spec, std::vector<RegionDecl>& out) : spec_(spec), out_(out) {}

  void Vector(const std::string& name, int64_t values) {
    out_.push_back({.name = name,
                    .precision = Precision::kF32,
                    .values = values,
                    .parts = {},
                    .mtp = mtp_,
                    .parameters = values});
  }

  RegionDecl& Stack(const std::string& name, int count, std::vector<PartDecl> parts) {
    RegionDecl region{.name = name, .count = count, .parts = std::move(parts), .mtp = mtp_};
    for (const PartDecl& part : region.parts) {
      if (!part.transposed) region.parameters += static_cast<int64_t>(part.n) * part.k * count;
    }
    out_.push_back(std::move(region));
    return out_.back();
  }

  static PartDecl Whole(const std::string& module, int n, int k) {
    return {.module = module, .module_out = n, .module_in = k, .n = n, .k = k};
  }

  RegionDecl& Matrix(const std::string& name, int n, int k, bool bias = false) {
    if (bias) Vector(name + ".bias", n);
    return Stack(name, 1, {Whole(name, n, k)});
  }

  // Declares gate, up and down of a SwiGLU network as one record; `prefix` ends with a dot.
  RegionDecl& Swiglu(const std::string& name, const std::string& prefix, int count, int intermediate) {
    return Stack(name, count,
                 {Whole(prefix + "gate_proj", intermediate, spec_.hidden),
                  Whole(prefix + "up_proj", intermediate, spec_.hidden),
                  Whole(prefix + "down_proj", spec_.hidden, intermediate)});
  }

  void Layer(int layer, bool moe) {
    const std::string prefix = LayerPrefix(layer);
    Vector(prefix + "input_layernorm.weight", spec_.hidden);
    spec_.attention.kind == AttentionSpec::Kind::kGqa ? Gqa(prefix + "self_attn.")
                                                      : Mla(prefix + "self_attn.");
    Vector(prefix + "post_attention_layernorm.weight", spec_.hidden);
    if (spec_.sandwich_norm) Vector(prefix + "pre_mlp_layernorm.weight", spec_.hidden);
    moe ? Moe(prefix + "mlp") : Mlp(prefix + "mlp");
    if (spec_.sandwich_norm) Vector(prefix + "post_mlp_layernorm.weight", spec_.hidden);
  }

  void Mtp(int layer) {
    mtp_ = true;
    const std::string prefix = LayerPrefix(layer);
    // The releases store copies of embedding and head in the module; other checkpoints omit them.
    Embedding(prefix + "embed_tokens").optional = true;
    Vector(prefix + "enorm.weight", spec_.hidden);
    Vector(prefix + "hnorm.weight", spec_.hidden);
    Matrix(prefix + "eh_proj", spec_.hidden, 2 * spec_.hidden);
    Layer(layer, spec_.is_moe.back());
    Vector(prefix + "shared_head.norm.weight", spec_.hidden);
    Matrix(prefix + "shared_head.head", spec_.vocab, spec_.hidden).optional = true;
  }

  RegionDecl& Embedding(const std::string& name) {
    RegionDecl& region = Matrix(name, spec_.vocab, spec_.hidden);
    region.precision = Precision::kFloat;
    region.touch = Touch::kRow;
    return region;
  }

 private:
  void Gqa(const std::string& prefix) {
    const AttentionSpec& a = spec_.attention;
    Matrix(prefix + "q_proj", a.heads * a.head_dim, spec_.hidden, a.qkv_bias);
    Matrix(prefix + "k_proj", a.kv_heads * a.head_dim, spec_.hidden, a.qkv_bias);
    Matrix(prefix + "v_proj", a.kv_heads * a.head_dim, spec_.hidden, a.qkv_bias);
    if (a.qk_norm) {
      Vector(prefix + "q_norm.weight", a.head_dim);
      Vector(prefix + "k_norm.weight", a.head_dim);
    }
    Matrix(prefix + "o_proj", spec_.hidden, a.heads * a.head_dim, a.o_bias);
  }

  void Mla(const std::string& prefix) {
    const AttentionSpec& a = spec_.attention;
    const int q_dim = a.heads * (a.nope_dim + a.rope_dim);
    if (a.q_lora_rank > 0) {
      Matrix(prefix + "q_a_proj", a.q_lora_rank, spec_.hidden);
      Vector(prefix + "q_a_layernorm.weight", a.q_lora_rank);
      Matrix(prefix + "q_b_proj", q_dim, a.q_lora_rank);
    } else {
      Matrix(prefix + "q_proj", q_dim, spec_.hidden);
    }
    Matrix(prefix + "kv_a_proj_with_mqa", a.kv_lora_rank + a.rope_dim, spec_.hidden);
    Vector(prefix + "kv_a_layernorm.weight", a.kv_lora_rank);
    // kv_b_proj by heads: uk and uv project latents to keys and values; the transposed uk projects queries
    // into the latent space.
    const int head_rows = a.nope_dim + a.v_dim;
    const PartDecl whole{.module = prefix + "kv_b_proj",
                         .module_out = static_cast<int64_t>(a.heads) * head_rows,
                         .module_in = a.kv_lora_rank,
                         .record_rows = head_rows};
    PartDecl uk = whole, uv = whole, uk_t = whole;
    uk.n = a.nope_dim, uk.k = a.kv_lora_rank;
    uv.first_row = a.nope_dim, uv.n = a.v_dim, uv.k = a.kv_lora_rank;
    uk_t.n = a.kv_lora_rank, uk_t.k = a.nope_dim, uk_t.transposed = true;
    Stack(prefix + "kv_b_proj", a.heads, {uk, uv, uk_t}).precision = Precision::kFloat;
    Matrix(prefix + "o_proj", spec_.hidden, a.heads * a.v_dim);
  }

  void Mlp(const std::string& name) {
    if (spec_.mlp_bias) {
      Vector(name + ".gate_proj.bias", spec_.intermediate);
      Vector(name + ".up_proj.bias", spec_.intermediate);
      Vector(name + ".down_proj.bias", spec_.hidden);
    }
    Swiglu(name, name + ".", 1, spec_.intermediate);
  }

  void Moe(const std::string& name) {
    const MoeSpec& moe = spec_.moe;
    Matrix(name + ".gate", moe.experts, spec_.hidden).precision = Precision::kF32;
    if (moe.choice_bias) Vector(name + ".gate.e_score_correction_bias", moe.experts);
    Swiglu(name + ".experts", name + ".experts.{}.", moe.experts, moe.intermediate).touch = Touch::kTopK;
    if (moe.shared_intermediate > 0) {
      Swiglu(name + ".shared_experts", name + ".shared_experts.", 1, moe.shared_intermediate);
    }
  }

  const DecoderSpec& spec_;
  std::vector<RegionDecl>& out_;
  bool mtp_ = false;
};

}  // namespace

std::string PartDecl::Module(int record) const {
  const size_t mark = module.find("{}");
  if (mark == std::string::npos) return module;
  return module.substr(0, mark) + std::to_string(record) + module.substr(mark + 2);
}

std::string LayerPrefix(int layer) { return fmt::format("model.layers.{}.", layer); }

std::vector<RegionDecl> DeclareWeights(const DecoderSpec& spec, bool separate_head) {
  std::vector<RegionDecl> regions;
  Declarer declare(spec, regions);
  declare.Embedding(kEmbedding);
  for (int layer = 0; layer < spec.layers; ++layer) declare.Layer(layer, spec.is_moe[layer]);
  declare.Vector(kFinalNorm, spec.hidden);
  if (!spec.tied) {
    declare.Matrix(kHead, spec.vocab, spec.hidden);
  } else if (separate_head) {
    RegionDecl& head = declare.Matrix(kHead, spec.vocab, spec.hidden);
    head.parts[0].module = kEmbedding;
    head.parameters = 0;
  }
  for (int depth = 0; depth < spec.mtp_layers; ++depth) declare.Mtp(spec.layers + depth);
  return regions;
}

}  // namespace moesaic::models
