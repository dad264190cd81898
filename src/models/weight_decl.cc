#include "models/weight_decl.h"

#include <fmt/format.h>

namespace moesaic::models {
namespace {

using parallel::Range;

Range Times(Range range, int size) { return {range.first * size, range.count * size}; }

class Declarer {
 public:
  Declarer(const DecoderSpec& spec, const parallel::Shard& shard, std::vector<RegionDecl>& out)
      : spec_(spec), shard_(shard), out_(out) {}

  void Vector(const std::string& name, int64_t values) {
    VectorSlice(name, values, {0, static_cast<int>(values)});
  }

  void VectorSlice(const std::string& name, int64_t values, Range slice) {
    if (slice.count == 0) return;
    out_.push_back({.name = name,
                    .precision = Precision::kF32,
                    .values = slice.count,
                    .first_value = slice.first,
                    .tensor_values = values,
                    .parts = {},
                    .mtp = mtp_,
                    .parameters = slice.count});
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

  static PartDecl Rows(PartDecl part, Range rows) {
    part.first_row = rows.first;
    part.n = rows.count;
    return part;
  }

  static PartDecl Columns(PartDecl part, Range columns) {
    part.first_column = columns.first;
    part.k = columns.count;
    return part;
  }

  RegionDecl& Matrix(const std::string& name, int n, int k, bool bias = false) {
    if (bias) Vector(name + ".bias", n);
    return Stack(name, 1, {Whole(name, n, k)});
  }

  // Rows of a matrix: some of its outputs.
  RegionDecl& RowSlice(const std::string& name, int n, int k, Range rows, bool bias = false) {
    if (bias) VectorSlice(name + ".bias", n, rows);
    return Stack(name, 1, {Rows(Whole(name, n, k), rows)});
  }

  // Columns of a matrix: outputs are partial sums, to which one rank adds the bias.
  RegionDecl& ColumnSlice(const std::string& name, int n, int k, Range columns, bool bias = false) {
    if (bias && shard_.adds_bias) Vector(name + ".bias", n);
    return Stack(name, 1, {Columns(Whole(name, n, k), columns)});
  }

  // Declares gate, up and down of a SwiGLU network as one record per expert; `prefix` ends with a dot.
  // Without columns or experts there is no region.
  void Swiglu(const std::string& name, const std::string& prefix, int intermediate, Range columns,
              const std::vector<int32_t>* experts = nullptr) {
    const int count = experts == nullptr ? 1 : static_cast<int>(experts->size());
    if (columns.count == 0 || count == 0) return;
    std::vector<PartDecl> parts = {Rows(Whole(prefix + "gate_proj", intermediate, spec_.hidden), columns),
                                   Rows(Whole(prefix + "up_proj", intermediate, spec_.hidden), columns),
                                   Columns(Whole(prefix + "down_proj", spec_.hidden, intermediate), columns)};
    const bool is_subset = experts != nullptr && count < spec_.moe.experts;
    for (PartDecl& part : parts) {
      if (is_subset) part.records = *experts;
    }
    RegionDecl& region = Stack(name, count, std::move(parts));
    if (experts != nullptr) region.touch = Touch::kTopK;
  }

  void Layer(int layer, bool moe) {
    const std::string prefix = LayerPrefix(layer);
    Vector(prefix + "input_layernorm.weight", spec_.hidden);
    spec_.attention.kind == AttentionSpec::Kind::kGqa ? Gqa(prefix + "self_attn.")
                                                      : Mla(prefix + "self_attn.");
    Vector(prefix + "post_attention_layernorm.weight", spec_.hidden);
    if (spec_.sandwich_norm) Vector(prefix + "pre_mlp_layernorm.weight", spec_.hidden);
    moe ? Moe(prefix + "mlp", shard_.ExpertsOf(layer)) : Mlp(prefix + "mlp");
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
    Head(prefix + "shared_head.head").optional = true;
  }

  RegionDecl& Head(const std::string& name) {
    return RowSlice(name, spec_.vocab, spec_.hidden, shard_.vocab);
  }

  RegionDecl& Embedding(const std::string& name) {
    RegionDecl& region = RowSlice(name, spec_.vocab, spec_.hidden, shard_.vocab);
    region.precision = Precision::kFloat;
    region.touch = Touch::kRow;
    return region;
  }

 private:
  void Gqa(const std::string& prefix) {
    const AttentionSpec& a = spec_.attention;
    const Range heads = Times(shard_.heads, a.head_dim), kv_heads = Times(shard_.kv_heads, a.head_dim);
    RowSlice(prefix + "q_proj", a.heads * a.head_dim, spec_.hidden, heads, a.qkv_bias);
    RowSlice(prefix + "k_proj", a.kv_heads * a.head_dim, spec_.hidden, kv_heads, a.qkv_bias);
    RowSlice(prefix + "v_proj", a.kv_heads * a.head_dim, spec_.hidden, kv_heads, a.qkv_bias);
    if (a.qk_norm) {
      Vector(prefix + "q_norm.weight", a.head_dim);
      Vector(prefix + "k_norm.weight", a.head_dim);
    }
    ColumnSlice(prefix + "o_proj", spec_.hidden, a.heads * a.head_dim, heads, a.o_bias);
  }

  void Mla(const std::string& prefix) {
    const AttentionSpec& a = spec_.attention;
    const int q_dim = a.heads * (a.nope_dim + a.rope_dim);
    const Range heads = Times(shard_.heads, a.nope_dim + a.rope_dim);
    if (a.q_lora_rank > 0) {
      Matrix(prefix + "q_a_proj", a.q_lora_rank, spec_.hidden);
      Vector(prefix + "q_a_layernorm.weight", a.q_lora_rank);
      RowSlice(prefix + "q_b_proj", q_dim, a.q_lora_rank, heads);
    } else {
      RowSlice(prefix + "q_proj", q_dim, spec_.hidden, heads);
    }
    Matrix(prefix + "kv_a_proj_with_mqa", a.kv_lora_rank + a.rope_dim, spec_.hidden);
    Vector(prefix + "kv_a_layernorm.weight", a.kv_lora_rank);
    // kv_b_proj by heads: uk and uv project latents to keys and values; the transposed uk projects queries
    // into the latent space.
    const int head_rows = a.nope_dim + a.v_dim;
    const PartDecl whole{.module = prefix + "kv_b_proj",
                         .module_out = static_cast<int64_t>(a.heads) * head_rows,
                         .module_in = a.kv_lora_rank,
                         .first_row = static_cast<int64_t>(shard_.heads.first) * head_rows,
                         .record_rows = head_rows};
    PartDecl uk = whole, uv = whole, uk_t = whole;
    uk.n = a.nope_dim, uk.k = a.kv_lora_rank;
    uv.first_row += a.nope_dim, uv.n = a.v_dim, uv.k = a.kv_lora_rank;
    uk_t.n = a.kv_lora_rank, uk_t.k = a.nope_dim, uk_t.transposed = true;
    Stack(prefix + "kv_b_proj", shard_.heads.count, {uk, uv, uk_t}).precision = Precision::kFloat;
    ColumnSlice(prefix + "o_proj", spec_.hidden, a.heads * a.v_dim, Times(shard_.heads, a.v_dim));
  }

  void Mlp(const std::string& name) {
    if (spec_.mlp_bias) {
      VectorSlice(name + ".gate_proj.bias", spec_.intermediate, shard_.intermediate);
      VectorSlice(name + ".up_proj.bias", spec_.intermediate, shard_.intermediate);
      if (shard_.adds_bias) Vector(name + ".down_proj.bias", spec_.hidden);
    }
    Swiglu(name, name + ".", spec_.intermediate, shard_.intermediate);
  }

  void Moe(const std::string& name, const std::vector<int32_t>& experts) {
    const MoeSpec& moe = spec_.moe;
    Matrix(name + ".gate", moe.experts, spec_.hidden).precision = Precision::kF32;
    if (moe.choice_bias) Vector(name + ".gate.e_score_correction_bias", moe.experts);
    Swiglu(name + ".experts", name + ".experts.{}.", moe.intermediate, shard_.expert_intermediate, &experts);
    if (moe.shared_intermediate > 0) {
      Swiglu(name + ".shared_experts", name + ".shared_experts.", moe.shared_intermediate,
             shard_.shared_intermediate);
    }
  }

  const DecoderSpec& spec_;
  const parallel::Shard& shard_;
  std::vector<RegionDecl>& out_;
  bool mtp_ = false;
};

}  // namespace

std::string PartDecl::Module(int record) const {
  const size_t mark = module.find("{}");
  if (mark == std::string::npos) return module;
  if (!records.empty()) record = records[record];
  return module.substr(0, mark) + std::to_string(record) + module.substr(mark + 2);
}

std::string LayerPrefix(int layer) { return fmt::format("model.layers.{}.", layer); }

parallel::ModelShape ShapeOf(const DecoderSpec& spec) {
  const AttentionSpec& a = spec.attention;
  const bool mla = a.kind == AttentionSpec::Kind::kMla;
  std::vector<int> moe_layers;
  for (int layer = 0; layer < spec.layers; ++layer) {
    if (spec.is_moe[layer]) moe_layers.push_back(layer);
  }
  return {.layers = spec.layers,
          .heads = a.heads,
          .kv_heads = mla ? 0 : a.kv_heads,
          .head_columns = mla ? a.v_dim : a.head_dim,
          .vocab = spec.vocab,
          .intermediate = spec.intermediate,
          .shared_intermediate = spec.moe.shared_intermediate,
          .expert_intermediate = spec.moe.intermediate,
          .experts = spec.moe.experts,
          .moe_layers = std::move(moe_layers)};
}

std::vector<RegionDecl> DeclareWeights(const DecoderSpec& spec, bool separate_head) {
  return DeclareWeights(spec, separate_head, parallel::WholeModel(ShapeOf(spec)));
}

std::vector<RegionDecl> DeclareWeights(const DecoderSpec& spec, bool separate_head,
                                       const parallel::Shard& shard) {
  std::vector<RegionDecl> regions;
  Declarer declare(spec, shard, regions);
  // A tied head and MTP modules read the embedding.
  const bool head_reads_it = (spec.tied && !separate_head) || spec.mtp_layers > 0;
  if (shard.has_embedding || (shard.has_head && head_reads_it)) declare.Embedding(kEmbedding);
  for (int layer = shard.layers.first; layer < shard.layers.end(); ++layer) {
    declare.Layer(layer, spec.is_moe[layer]);
  }
  if (!shard.has_head) return regions;
  declare.Vector(kFinalNorm, spec.hidden);
  if (!spec.tied) {
    declare.Head(kHead);
  } else if (separate_head) {
    RegionDecl& head = declare.Head(kHead);
    head.parts[0].module = kEmbedding;
    head.parameters = 0;
  }
  for (int depth = 0; depth < spec.mtp_layers; ++depth) declare.Mtp(spec.layers + depth);
  return regions;
}

}  // namespace moesaic::models
