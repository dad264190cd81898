#include "engine/executor.h"

#include "base/check.h"
#include "kernels/kv_layer.h"

namespace moesaic::engine {
namespace {

std::vector<kernels::KvLayer> LayersOf(const cache::KvPool& blocks, int first_sparse, int decoder_layers) {
  const tensor::KvLayout& layout = blocks.layout();
  kernels::KvLayer layer = {layout};
  layer.block_stride = layout.block_bytes();  // a block contains all layers
  layer.digest_stride = layout.summary_stride();
  std::vector<kernels::KvLayer> layers;
  layers.reserve(layout.layers);
  for (int i = 0; i < layout.layers; ++i) {
    const bool sparse = i >= first_sparse && i < decoder_layers;
    layer.base = blocks.base() + i * layout.layer_bytes();
    layer.digests = sparse ? blocks.summaries(i) : nullptr;
    layer.index = i;
    layers.push_back(layer);
  }
  return layers;
}

}  // namespace

Executor::Executor(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
                   const cache::KvPool& blocks, int first_sparse_layer)
    : model_(model),
      kernels_(kernels),
      threads_(threads),
      layers_(LayersOf(blocks, first_sparse_layer, model.info().layers)) {}

StatusOr<std::span<const float>> Executor::Run(std::span<const ExecutorRows> batch, bool want_hidden,
                                               int64_t* experts_read, models::RouteTap* routes) {
  tokens_.clear();
  logit_rows_.clear();
  slices_.clear();
  for (const ExecutorRows& rows : batch) {
    const int first_row = static_cast<int>(tokens_.size());
    const int count = static_cast<int>(rows.tokens.size() + rows.drafts.size());
    MOESAIC_CHECK_LT(0, count);
    MOESAIC_CHECK_LE(tensor::KvBlocksFor(rows.start + count), static_cast<int>(rows.block_table.size()));
    slices_.push_back({.block_table = rows.block_table.data(),
                       .start = rows.start,
                       .count = count,
                       .row = first_row,
                       .sparsity = rows.sparsity});
    tokens_.insert(tokens_.end(), rows.tokens.begin(), rows.tokens.end());
    tokens_.insert(tokens_.end(), rows.drafts.begin(), rows.drafts.end());
    for (int i = rows.first_logits; i < count; ++i) logit_rows_.push_back(first_row + i);
  }
  const size_t wanted = logit_rows_.size() * model_.info().vocab_size;
  if (logits_.size() < wanted) logits_.resize(wanted);
  const std::span<float> logits(logits_.data(), wanted);
  hidden_.resize(want_hidden ? tokens_.size() * model_.info().hidden_size : 0);
  scratch_.Reset();
  const kernels::ExecContext context = {.kernels = &kernels_, .pool = &threads_, .scratch = &scratch_};
  RETURN_IF_ERROR(
      model_.Forward(context, {.tokens = tokens_, .sequences = slices_, .logit_rows = logit_rows_}, layers_,
                     {.logits = logits, .hidden = hidden_, .experts_read = experts_read, .routes = routes}));
  return logits;
}

StatusOr<std::span<const float>> Executor::RunMtp(std::span<const MtpRows> batch) {
  tokens_.clear();
  logit_rows_.clear();
  slices_.clear();
  mtp_in_.clear();
  for (const MtpRows& rows : batch) {
    const int first_row = static_cast<int>(tokens_.size());
    const int count = static_cast<int>(rows.tokens.size());
    MOESAIC_CHECK_LT(0, count);
    MOESAIC_CHECK_LE(tensor::KvBlocksFor(rows.start + count), static_cast<int>(rows.block_table.size()));
    slices_.push_back(
        {.block_table = rows.block_table.data(), .start = rows.start, .count = count, .row = first_row});
    tokens_.insert(tokens_.end(), rows.tokens.begin(), rows.tokens.end());
    mtp_in_.insert(mtp_in_.end(), rows.hidden.begin(), rows.hidden.end());
    if (rows.want_logits) logit_rows_.push_back(first_row + count - 1);
  }
  const size_t wanted = logit_rows_.size() * model_.info().vocab_size;
  if (logits_.size() < wanted) logits_.resize(wanted);
  const std::span<float> logits(logits_.data(), wanted);
  mtp_hidden_.resize(mtp_in_.size());
  scratch_.Reset();
  const kernels::ExecContext context = {.kernels = &kernels_, .pool = &threads_, .scratch = &scratch_};
  RETURN_IF_ERROR(model_.ForwardMtp(context, /*depth=*/0,
                                    {.tokens = tokens_, .sequences = slices_, .logit_rows = logit_rows_},
                                    mtp_in_, layers_, {.logits = logits, .hidden = mtp_hidden_}));
  return logits;
}

void Executor::MakeDigests(std::span<const int32_t> blocks) {
  slices_.clear();
  for (const int32_t& block : blocks) {
    slices_.push_back({.block_table = &block, .start = 0, .count = tensor::kKvBlockTokens});
  }
  scratch_.Reset();
  const kernels::ExecContext context = {.kernels = &kernels_, .pool = &threads_, .scratch = &scratch_};
  for (const kernels::KvLayer& layer : layers_) kernels::BuildDigests(context, {layer, slices_});
}

}  // namespace moesaic::engine
