#include "quantizer/calibrate/dense_layer.h"

namespace moesaic::quantizer {
namespace {

StatusOr<OwnedMatrix> ReadPacked(const checkpoint::Checkpoint& source, const std::string& module, int out,
                                 int in, runtime::ThreadPool& pool) {
  ASSIGN_OR_RETURN(const std::vector<float> values, ReadWeight(source, module, out, in));
  return PackMatrix(pool, values.data(), out, in);
}

}  // namespace

StatusOr<std::vector<float>> ReadWeight(const checkpoint::Checkpoint& source, const std::string& module,
                                        int out, int in) {
  ASSIGN_OR_RETURN(const checkpoint::LinearSource linear, source.FindLinear(module, out, in));
  std::vector<float> values(static_cast<size_t>(out) * in);
  RETURN_IF_ERROR(source.ReadLinearRows(linear, 0, out, values));
  return values;
}

StatusOr<OwnedMatrix> PackMatrix(runtime::ThreadPool& pool, const float* values, int n, int k) {
  const tensor::PackedLayout layout = tensor::PackedLayout::Of(tensor::PackedFormat::kBF16, n, k);
  ASSIGN_OR_RETURN(runtime::Buffer memory,
                   runtime::Buffer::Allocate(static_cast<size_t>(layout.total_bytes), /*huge=*/true));
  pool.Run((n + tensor::kPanelRows - 1) / tensor::kPanelRows, [&](int64_t panel, int) {
    const int row = static_cast<int>(panel) * tensor::kPanelRows;
    tensor::PackRows(layout, row, std::min(tensor::kPanelRows, n - row),
                     values + static_cast<int64_t>(row) * k, memory.data());
  });
  const tensor::PackedMatrix matrix{.layout = layout, .data = memory.data()};
  return OwnedMatrix{std::move(memory), matrix};
}

StatusOr<DenseLayer> DenseLayer::Read(const checkpoint::Checkpoint& source, const models::DecoderSpec& spec,
                                      int layer, runtime::ThreadPool& pool) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const std::string mlp = prefix + "mlp.", attention = prefix + "self_attn.";
  const int hidden = spec.hidden, width = spec.intermediate;
  const int q_dim = spec.attention.heads * spec.attention.head_dim;
  const int kv_dim = spec.attention.kv_heads * spec.attention.head_dim;
  const int64_t norm_shape[] = {hidden};
  DenseLayer result;
  ASSIGN_OR_RETURN(result.input_norm, source.ReadF32(prefix + "input_layernorm.weight", norm_shape));
  ASSIGN_OR_RETURN(result.post_attention_norm,
                   source.ReadF32(prefix + "post_attention_layernorm.weight", norm_shape));
  ASSIGN_OR_RETURN(result.q, ReadPacked(source, attention + "q_proj", q_dim, hidden, pool));
  ASSIGN_OR_RETURN(result.k, ReadPacked(source, attention + "k_proj", kv_dim, hidden, pool));
  ASSIGN_OR_RETURN(result.v, ReadPacked(source, attention + "v_proj", kv_dim, hidden, pool));
  ASSIGN_OR_RETURN(result.o, ReadPacked(source, attention + "o_proj", hidden, q_dim, pool));
  ASSIGN_OR_RETURN(result.gate, ReadWeight(source, mlp + "gate_proj", width, hidden));
  ASSIGN_OR_RETURN(result.up, ReadWeight(source, mlp + "up_proj", width, hidden));
  ASSIGN_OR_RETURN(result.down, ReadWeight(source, mlp + "down_proj", hidden, width));
  ASSIGN_OR_RETURN(result.gate_packed, PackMatrix(pool, result.gate.data(), width, hidden));
  ASSIGN_OR_RETURN(result.up_packed, PackMatrix(pool, result.up.data(), width, hidden));
  ASSIGN_OR_RETURN(result.down_packed, PackMatrix(pool, result.down.data(), hidden, width));
  return result;
}

layers::GqaAttention DenseLayer::Attention(const models::DecoderSpec& spec,
                                           const layers::RopeTable& rope) const {
  return {.q = {q.matrix},
          .k = {k.matrix},
          .v = {v.matrix},
          .o = {o.matrix},
          .heads = spec.attention.heads,
          .kv_heads = spec.attention.kv_heads,
          .head_dim = spec.attention.head_dim,
          .scale = spec.attention.scale,
          .rope = &rope};
}

}  // namespace moesaic::quantizer
