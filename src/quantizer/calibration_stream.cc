#include "quantizer/calibration_stream.h"

#include <algorithm>
#include <numeric>

#include "kernels/kv_layer.h"

namespace moesaic::quantizer {
namespace {

// Sequences that attend at once: few, so that scratch memory and the KV blocks, which the next ones
// overwrite, stay small beside the stream itself.
constexpr size_t kSequencesAtOnce = 16;

}  // namespace

StatusOr<CalibrationStream> CalibrationStream::Create(const checkpoint::Checkpoint& source,
                                                      const models::DecoderSpec& spec,
                                                      const std::vector<std::vector<int32_t>>& sequences,
                                                      const kernels::ExecContext& ctx) {
  constexpr int kBlock = kernels::kKvBlockTokens;
  CalibrationStream stream;
  stream.spec_ = spec;
  int blocks = 0, next = 0, longest = 0;
  std::vector<int> first_block;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto count = static_cast<int>(sequences[i].size());
    if (i % kSequencesAtOnce == 0) next = 0;
    first_block.push_back(next);
    next += (count + kBlock - 1) / kBlock;
    blocks = std::max(blocks, next);
    longest = std::max(longest, count);
    for (int position = 0; position < count; ++position) stream.positions_.push_back(position);
  }
  if (longest > spec.context) {
    return InvalidArgument("calibration sequences may have {} tokens, found {}", spec.context, longest);
  }
  stream.blocks_.resize(static_cast<size_t>(blocks));
  std::iota(stream.blocks_.begin(), stream.blocks_.end(), 0);
  int row = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto count = static_cast<int>(sequences[i].size());
    stream.slices_.push_back(
        {.block_table = stream.blocks_.data() + first_block[i], .start = 0, .count = count, .row = row});
    row += count;
  }

  const models::AttentionSpec& attention = spec.attention;
  stream.kv_ =
      kernels::LayOutKv(tensor::DType::kF32, attention.kv_heads, attention.head_dim, attention.head_dim,
                        /*shared=*/false);
  ASSIGN_OR_RETURN(stream.kv_memory_,
                   runtime::Buffer::Allocate(static_cast<size_t>(stream.kv_.block_stride * blocks), true));
  stream.kv_.base = stream.kv_memory_.data();
  ASSIGN_OR_RETURN(layers::RopeTable rope, layers::RopeTable::Create(spec.rope, longest));
  rope.Reserve(*ctx.pool, longest);
  stream.rope_.push_back(std::move(rope));

  ASSIGN_OR_RETURN(stream.hidden_,
                   runtime::Buffer::Allocate(sizeof(float) * stream.positions_.size() * spec.hidden, true));
  ASSIGN_OR_RETURN(const std::vector<float> table,
                   ReadWeight(source, "model.embed_tokens", spec.vocab, spec.hidden));
  float* out = stream.hidden();
  for (const std::vector<int32_t>& ids : sequences) {
    for (const int32_t id : ids) {
      out = std::copy_n(table.data() + static_cast<int64_t>(id) * spec.hidden, spec.hidden, out);
    }
  }
  return stream;
}

void CalibrationStream::AddAttention(const kernels::ExecContext& ctx, const DenseLayer& layer) {
  const layers::GqaAttention attention = layer.Attention(spec_, rope_[0]);
  for (size_t first = 0; first < slices_.size(); first += kSequencesAtOnce) {
    const size_t count = std::min(kSequencesAtOnce, slices_.size() - first);
    std::vector<kernels::SequenceSlice> slices(slices_.begin() + static_cast<int64_t>(first),
                                               slices_.begin() + static_cast<int64_t>(first + count));
    const int row = slices.front().row;
    const int rows = slices.back().row + slices.back().count - row;
    for (kernels::SequenceSlice& slice : slices) slice.row -= row;
    layers::ScratchScope scratch(ctx);
    float* hidden_rows = hidden() + static_cast<int64_t>(row) * spec_.hidden;
    auto* normed = scratch.Take<float>(static_cast<int64_t>(rows) * spec_.hidden);
    kernels::RmsNorm(ctx, {.x = hidden_rows,
                           .x_stride = spec_.hidden,
                           .weight = layer.input_norm.data(),
                           .y = normed,
                           .y_stride = spec_.hidden,
                           .rows = rows,
                           .n = spec_.hidden,
                           .eps = spec_.norm_eps});
    const layers::Step step{
        .ctx = ctx,
        .sequences = slices,
        .positions = std::span(positions_).subspan(static_cast<size_t>(row), static_cast<size_t>(rows))};
    attention.Forward(step, normed, kv_, hidden_rows, /*accumulate=*/true);
  }
}

}  // namespace moesaic::quantizer
