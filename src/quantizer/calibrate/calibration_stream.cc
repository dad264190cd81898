#include "quantizer/calibrate/calibration_stream.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/exec_context.h"
#include "kernels/kv_layer.h"
#include "layers/linear.h"
#include "models/model_info.h"
#include "models/weight_decl.h"
#include "quantizer/format/runtime_matrix.h"

namespace moesaic::quantizer {
namespace {

constexpr int kStreamBlock = kernels::kKvBlockTokens;

int64_t BlocksOf(int64_t tokens) { return base::CeilDiv(tokens, kStreamBlock); }

kernels::KvLayer LayerOf(const models::DecoderSpec& spec) {
  const models::KvSpec kv = models::KvOf(spec);
  return kernels::LayOutKv(tensor::DType::kF32, kv.heads, kv.key_dim, kv.value_dim, kv.shared);
}

}  // namespace

Status ReadEmbeddings(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                      const std::string& module, int rows, int width, std::span<const int32_t> tokens,
                      float* x) {
  ASSIGN_OR_RETURN(const checkpoint::LinearSource table, source.FindLinear(module, rows, width));
  std::map<int32_t, std::vector<int64_t>> places;
  for (size_t i = 0; i < tokens.size(); ++i) places[tokens[i]].push_back(static_cast<int64_t>(i));
  const std::vector<std::pair<int32_t, std::vector<int64_t>>> used(places.begin(), places.end());
  std::mutex mutex;
  Status failure;
  constexpr int64_t kTogether = 4096;  // rows whose pages are mapped at once
  for (int64_t begin = 0; begin < std::ssize(used); begin += kTogether) {
    ctx.pool->Run(std::min(kTogether, std::ssize(used) - begin), [&](int64_t i, int) {
      const auto& [id, at] = used[begin + i];
      float* first = x + at.front() * width;
      Status status = source.ReadLinearRows(table, id, 1, {first, static_cast<size_t>(width)});
      if (!status.ok()) {
        const std::lock_guard<std::mutex> lock(mutex);
        failure = std::move(status);
      }
      for (const int64_t other : at) {
        if (other != at.front()) std::copy_n(first, width, x + other * width);
      }
    });
    source.ForgetMaps();
  }
  return failure;
}

int64_t CalibrationStream::Bytes(const models::DecoderSpec& spec, int64_t tokens, int64_t longest) {
  // In the worst case every sequence of a batch leaves most of a block empty; half of that is assumed.
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
    stream.ids_.insert(stream.ids_.end(), sequences[i].begin(), sequences[i].end());
  }
  stream.batches_.push_back(sequences.size());
  if (longest > spec.context) {
    return InvalidArgument("calibration sequences may have at most {} tokens, found {}", spec.context,
                           longest);
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

  stream.longest_ = longest;
  stream.kv_ = LayerOf(spec);
  ASSIGN_OR_RETURN(stream.kv_memory_,
                   runtime::Buffer::Allocate(static_cast<size_t>(stream.kv_.block_stride * blocks), true));
  stream.kv_.base = stream.kv_memory_.data();
  ASSIGN_OR_RETURN(layers::RopeTable rope, layers::RopeTable::Create(spec.rope, longest));
  rope.Reserve(*ctx.pool, longest);
  stream.rope_.push_back(std::move(rope));
  ASSIGN_OR_RETURN(stream.hidden_,
                   runtime::Buffer::Allocate(sizeof(float) * stream.positions_.size() * spec.hidden, true));
  RETURN_IF_ERROR(
      ReadEmbeddings(ctx, source, models::kEmbedding, spec.vocab, spec.hidden, stream.ids_, stream.hidden()));
  return stream;
}

bool CalibrationStream::Continues() {
  constexpr double kSeconds = 0.25;
  if (watch_ && watched_.ok() && Since(asked_) >= kSeconds) {
    asked_ = Clock::now();
    watched_ = watch_();
  }
  return watched_.ok();
}

void CalibrationStream::ForVariants(const kernels::ExecContext& ctx, int variants, const Body& body) {
  for (int variant = 0; variant < variants; ++variant) {
    float* first = hidden() + int64_t{variant} * variant_tokens() * spec_.hidden;
    for (size_t b = 0; b + 1 < batches_.size() && Continues(); ++b) {
      std::vector<kernels::SequenceSlice> slices(slices_.begin() + static_cast<int64_t>(batches_[b]),
                                                 slices_.begin() + static_cast<int64_t>(batches_[b + 1]));
      const int row = slices.front().row;
      const int rows = slices.back().row + slices.back().count - row;
      for (kernels::SequenceSlice& slice : slices) slice.row -= row;
      const layers::Step step{
          .ctx = ctx,
          .sequences = slices,
          .positions = std::span(positions_).subspan(static_cast<size_t>(row), static_cast<size_t>(rows))};
      body(step, kv_, first + int64_t{row} * spec_.hidden);
    }
  }
}

void CalibrationStream::ForPartsOf(const kernels::ExecContext& ctx, int variants, const PartBody& body) {
  ForVariants(ctx, variants, [&](const layers::Step& whole, const kernels::KvLayer&, float* x) {
    for (int first = 0; first < whole.rows() && Continues(); first += part_rows_) {
      const auto rows = static_cast<size_t>(std::min(part_rows_, whole.rows() - first));
      const layers::Step part{.ctx = ctx,
                              .sequences = {},
                              .positions = whole.positions.subspan(static_cast<size_t>(first), rows)};
      body(part, x + int64_t{first} * spec_.hidden);
    }
  });
}

Status CalibrationStream::ReserveVariants(int most) {
  const size_t of_variant = sizeof(float) * positions_.size() * static_cast<size_t>(spec_.hidden);
  ASSIGN_OR_RETURN(runtime::Buffer larger,
                   runtime::Buffer::Allocate(of_variant * static_cast<size_t>(most), true));
  std::memcpy(larger.data(), hidden_.data(), of_variant * static_cast<size_t>(variants_));
  hidden_ = std::move(larger);
  most_variants_ = most;
  return OkStatus();
}

int CalibrationStream::AddVariant() {
  MOESAIC_CHECK_LT(variants_, most_variants_);
  const int64_t of_variant = int64_t{variant_tokens()} * spec_.hidden;
  std::copy_n(hidden(), of_variant, hidden() + variants_ * of_variant);
  return variants_++;
}

Status CalibrationStream::EnterMtp(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                                   int depth) {
  const int width = spec_.hidden;
  const std::string prefix = models::LayerPrefix(spec_.layers + depth);
  const std::string before = depth == 0
                                 ? models::kFinalNorm
                                 : models::LayerPrefix(spec_.layers + depth - 1) + "shared_head.norm.weight";
  const std::string table = prefix + "embed_tokens";
  const int64_t shape[] = {width};
  ASSIGN_OR_RETURN(const std::vector<float> final_norm, source.ReadF32(before, shape));
  ASSIGN_OR_RETURN(const std::vector<float> embedding_norm, source.ReadF32(prefix + "enorm.weight", shape));
  ASSIGN_OR_RETURN(const std::vector<float> hidden_norm, source.ReadF32(prefix + "hnorm.weight", shape));
  ASSIGN_OR_RETURN(RuntimeMatrix packed, RuntimeMatrix::OfKept(tensor::DType::kBF16, width, 2 * width));
  RETURN_IF_ERROR(packed.ReadKept(*ctx.pool, source, prefix + "eh_proj"));
  const OwnedMatrix project = packed.Take();

  std::vector<int32_t> next(ids_.begin() + 1, ids_.end());
  next.push_back(ids_.back());
  for (const kernels::SequenceSlice& slice : slices_) {
    const int last = slice.row + slice.count - 1;
    next[last] = ids_[last];
  }
  Status status;
  int64_t row = 0;
  ForParts(ctx, [&](const layers::Step& step, float* x) {
    layers::ScratchScope scratch(ctx);
    const int rows = step.rows();
    auto* embedded = scratch.Take<float>(int64_t{rows} * width);
    auto* joined = scratch.Take<float>(int64_t{rows} * 2 * width);
    if (status.ok()) {
      status = ReadEmbeddings(ctx, source, source.Has(table + ".weight") ? table : models::kEmbedding,
                              spec_.vocab, width, std::span(next).subspan(row, rows), embedded);
    }
    row += rows;
    kernels::RmsNormParams norm{.x = x,
                                .x_stride = width,
                                .weight = final_norm.data(),
                                .y = x,
                                .y_stride = width,
                                .rows = rows,
                                .n = width,
                                .eps = spec_.norm_eps};
    kernels::RmsNorm(ctx, norm);
    norm.weight = hidden_norm.data();
    norm.y = joined + width;
    norm.y_stride = 2 * width;
    kernels::RmsNorm(ctx, norm);
    norm.x = embedded;
    norm.weight = embedding_norm.data();
    norm.y = joined;
    kernels::RmsNorm(ctx, norm);
    layers::Apply(ctx, {project.matrix}, joined, 2 * width, rows, x, width);
  });
  return status;
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
