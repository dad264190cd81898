#include "quantizer/calibration_stream.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "kernels/kv_layer.h"
#include "models/model_info.h"
#include "models/weight_decl.h"

namespace moesaic::quantizer {
namespace {

constexpr int kBlock = kernels::kKvBlockTokens;

int64_t BlocksOf(int64_t tokens) { return (tokens + kBlock - 1) / kBlock; }

kernels::KvLayer LayerOf(const models::DecoderSpec& spec) {
  const models::KvSpec kv = models::KvOf(spec);
  return kernels::LayOutKv(tensor::DType::kF32, kv.heads, kv.key_dim, kv.value_dim, kv.shared);
}

}  // namespace

int64_t CalibrationStream::Bytes(const models::DecoderSpec& spec, int64_t tokens, int64_t longest) {
  // In the worst case every sequence of a batch leaves most of a block empty; taken as half.
  const int64_t blocks = 2 * BlocksOf(std::max<int64_t>(longest, kBatchTokens));
  return tokens * spec.hidden * static_cast<int64_t>(sizeof(float)) + blocks * LayerOf(spec).block_stride;
}

StatusOr<CalibrationStream> CalibrationStream::Create(const checkpoint::Checkpoint& source,
                                                      const models::DecoderSpec& spec,
                                                      const std::vector<std::vector<int32_t>>& sequences,
                                                      const kernels::ExecContext& ctx) {
  CalibrationStream stream;
  stream.spec_ = spec;
  int64_t blocks = 0, next = 0, batch_tokens = 0;
  int longest = 0;
  std::vector<int64_t> first_block;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto count = static_cast<int>(sequences[i].size());
    if (i == 0 || batch_tokens + count > kBatchTokens) {
      stream.batches_.push_back(i);
      next = batch_tokens = 0;
    }
    first_block.push_back(next);
    next += BlocksOf(count);
    batch_tokens += count;
    blocks = std::max(blocks, next);
    longest = std::max(longest, count);
    for (int position = 0; position < count; ++position) stream.positions_.push_back(position);
  }
  stream.batches_.push_back(sequences.size());
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

  stream.kv_ = LayerOf(spec);
  ASSIGN_OR_RETURN(stream.kv_memory_,
                   runtime::Buffer::Allocate(static_cast<size_t>(stream.kv_.block_stride * blocks), true));
  stream.kv_.base = stream.kv_memory_.data();
  ASSIGN_OR_RETURN(layers::RopeTable rope, layers::RopeTable::Create(spec.rope, longest));
  rope.Reserve(*ctx.pool, longest);
  stream.rope_.push_back(std::move(rope));
  ASSIGN_OR_RETURN(stream.hidden_,
                   runtime::Buffer::Allocate(sizeof(float) * stream.positions_.size() * spec.hidden, true));
  RETURN_IF_ERROR(stream.Embed(source, sequences, ctx));
  return stream;
}

// Reads the rows of the table that are used, one of each.
Status CalibrationStream::Embed(const checkpoint::Checkpoint& source,
                                const std::vector<std::vector<int32_t>>& sequences,
                                const kernels::ExecContext& ctx) {
  ASSIGN_OR_RETURN(const checkpoint::LinearSource table,
                   source.FindLinear(models::kEmbedding, spec_.vocab, spec_.hidden));
  std::map<int32_t, std::vector<int64_t>> places;
  int64_t row = 0;
  for (const std::vector<int32_t>& ids : sequences) {
    for (const int32_t id : ids) places[id].push_back(row++);
  }
  const std::vector<std::pair<int32_t, std::vector<int64_t>>> used(places.begin(), places.end());
  std::mutex mutex;
  Status failure;
  ctx.pool->Run(std::ssize(used), [&](int64_t i, int) {
    const auto& [id, rows] = used[i];
    float* first = hidden() + rows.front() * spec_.hidden;
    Status status = source.ReadLinearRows(table, id, 1, {first, static_cast<size_t>(spec_.hidden)});
    if (!status.ok()) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = std::move(status);
    }
    for (const int64_t other : rows) {
      if (other != rows.front()) std::copy_n(first, spec_.hidden, hidden() + other * spec_.hidden);
    }
  });
  return failure;
}

void CalibrationStream::ForBatches(const kernels::ExecContext& ctx, const Body& body) {
  for (size_t b = 0; b + 1 < batches_.size(); ++b) {
    std::vector<kernels::SequenceSlice> slices(slices_.begin() + static_cast<int64_t>(batches_[b]),
                                               slices_.begin() + static_cast<int64_t>(batches_[b + 1]));
    const int row = slices.front().row;
    const int rows = slices.back().row + slices.back().count - row;
    for (kernels::SequenceSlice& slice : slices) slice.row -= row;
    const layers::Step step{
        .ctx = ctx,
        .sequences = slices,
        .positions = std::span(positions_).subspan(static_cast<size_t>(row), static_cast<size_t>(rows))};
    body(step, kv_, hidden() + int64_t{row} * spec_.hidden);
  }
}

void CalibrationStream::AddAttention(const kernels::ExecContext& ctx, const DenseLayer& layer) {
  const layers::DecoderLayer half{.attention_norm = layer.input_norm.data(),
                                  .norm_eps = spec_.norm_eps,
                                  .hidden = spec_.hidden,
                                  .attention = layer.Attention(spec_, rope()),
                                  .ffn = {}};
  ForBatches(ctx, [&](const layers::Step& step, const kernels::KvLayer& kv, float* hidden) {
    half.AddAttention(step, kv, hidden);
  });
}

}  // namespace moesaic::quantizer
