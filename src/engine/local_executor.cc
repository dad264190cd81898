#include "engine/local_executor.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.h"
#include "engine/speculative.h"
#include "kernels/kernel_table.h"
#include "kernels/kv_layer.h"

namespace moesaic::engine {
namespace {

std::vector<kernels::KvLayer> LayersOf(const cache::KvStore& store, int first_sparse, int decoder_layers) {
  const tensor::KvLayout& layout = store.layout();
  kernels::KvLayer layer = {layout};
  layer.block_stride = layout.block_bytes();  // a block contains all layers
  layer.key_summary_stride = layout.summary_stride();
  std::vector<kernels::KvLayer> layers;
  layers.reserve(layout.layers);
  for (int i = 0; i < layout.layers; ++i) {
    const bool sparse = i >= first_sparse && i < decoder_layers;
    layer.base = store.base() + i * layout.layer_bytes();
    layer.key_summaries = sparse ? store.summaries(i) : nullptr;
    layer.index = i;
    layers.push_back(layer);
  }
  return layers;
}

// Work between two readings of the traffic.
RankStats WorkBetween(const parallel::GroupTraffic& before, const parallel::GroupTraffic& after) {
  RankStats work = {
      .exchange_seconds = after.seconds - before.seconds,
      .bytes_sent = after.sent_bytes - before.sent_bytes,
      .sent_rows = after.experts.sent_rows - before.experts.sent_rows,
      .expert_rows = after.experts.computed_rows - before.experts.computed_rows,
      .expert_seconds = after.experts.computing_seconds - before.experts.computing_seconds,
      .splits = after.experts.split.splits - before.experts.split.splits,
      .split_seconds = after.experts.split.seconds - before.experts.split.seconds,
      .busiest_rows = after.experts.split.busiest_rows - before.experts.split.busiest_rows,
      .mean_rows = after.experts.split.mean_rows - before.experts.split.mean_rows,
      .spilled_experts = after.experts.split.spilled - before.experts.split.spilled,
      .spilled_bytes = after.experts.split.spilled_bytes - before.experts.split.spilled_bytes,
      .prefetched_experts = after.experts.split.prefetched - before.experts.split.prefetched,
      .used_prefetched_experts = after.experts.split.prefetched_used - before.experts.split.prefetched_used,
      .timed_rows = after.experts.timed_rows - before.experts.timed_rows,
      .timed_seconds = after.experts.timed_seconds - before.experts.timed_seconds};
  for (size_t i = 0; i < after.experts.levels.size(); ++i) {
    work.level_bytes[std::min<size_t>(i, kLinkLevels - 1)] +=
        after.experts.levels[i].bytes - before.experts.levels[i].bytes;
  }
  return work;
}

}  // namespace

// Reads the layers of attached blocks that rows are about to read.
class LocalExecutor::Pager : public layers::KvFetcher {
 public:
  explicit Pager(cache::KvStore& store) : store_(store) {}
  void Fetch(const kernels::KvLayer& kv, std::span<const kernels::SequenceSlice> slices) override {
    blocks_.clear();
    for (const kernels::SequenceSlice& slice : slices) {
      const int count = tensor::KvBlocksFor(slice.start + slice.count);
      blocks_.insert(blocks_.end(), slice.block_table, slice.block_table + count);
    }
    store_.Page(kv.index, blocks_);
  }

 private:
  cache::KvStore& store_;
  std::vector<int32_t> blocks_;
};

LocalExecutor::LocalExecutor(models::Model& model, const kernels::KernelTable& kernels,
                             runtime::ThreadPool& threads, cache::KvStore& store, int first_sparse_layer)
    : model_(model),
      kernels_(kernels),
      threads_(threads),
      store_(store),
      layers_(
          LayersOf(store, first_sparse_layer - model.info().own_layers.first, model.info().own_layers.count)),
      pager_(std::make_unique<Pager>(store)) {
  store_.SetSummaryBuilder([this](std::span<const int32_t> blocks) { BuildSummaries(blocks); });
}

LocalExecutor::~LocalExecutor() = default;

StepLimits LocalExecutor::limits() const {
  return {.blocks = store_.blocks(),
          .swap_slots = store_.slots(cache::KvArea::kSwap),
          .warm_slots = store_.slots(cache::KvArea::kWarm),
          .layers = model_.info().layers + model_.info().mtp_layers,
          .vocab_size = model_.info().vocab_size,
          .hidden_size = model_.info().hidden_size};
}

// The layer of this rank's store that the model's layer has; -1: another rank has it. Layers of MTP modules
// follow those of the decoder.
int LocalExecutor::StoredLayer(int layer) const {
  const models::ModelInfo& info = model_.info();
  const parallel::Range own = info.own_layers;
  if (layer >= own.first && layer < own.end()) return layer - own.first;
  const int module = layer - info.layers;
  return module >= 0 && module < info.own_mtp_layers ? own.count + module : -1;
}

void LocalExecutor::ApplyOps(const cache::KvOps& ops) {
  const auto names_layer = [](const cache::KvOp& op) { return op.kind == cache::KvOpKind::kClear; };
  if (std::ranges::none_of(ops, names_layer)) return store_.Apply(ops, &kv_);
  cache::KvOps own = ops;
  for (cache::KvOp& op : own) {
    if (names_layer(op)) op.layer = StoredLayer(op.layer);
  }
  std::erase_if(own, [&](const cache::KvOp& op) { return names_layer(op) && op.layer < 0; });
  store_.Apply(own, &kv_);
}

StatusOr<StepResult> LocalExecutor::Finish() {
  const StepBatch& batch = *started_;
  const auto begin = std::chrono::steady_clock::now();
  const parallel::GroupTraffic traffic = model_.traffic();
  if (outputs_.size() > 1) {
    outputs_.push_front(std::move(outputs_.back()));
    outputs_.pop_back();
  }
  outputs_.front().rows.clear();
  for (const uint64_t sequence : batch.ended) kept_.erase(sequence);
  ApplyOps(batch.ops_before);
  StepResult result;
  const bool is_joint = batch.joint.number > 0;
  if (is_joint && batch.joint.number != joint_ + 1) {
    return InvalidArgument("the replicas are not in lockstep: step {} follows step {}", batch.joint.number,
                           joint_);
  }
  if (is_joint) joint_ = batch.joint.number;
  if (is_joint && batch.joint.move != move_) {
    RETURN_IF_ERROR(model_.ApplyExpertMove(batch.joint.move));
    move_ = batch.joint.move;
  }
  if (!batch.rows.empty() || is_joint) {
    const kernels::SparsityCounters before = counters_;
    const Status computed = Compute(batch, &result);
    store_.TakePaged(&kv_);
    if (!computed.ok() || kv_.damaged_block >= 0) counters_ = before;
    RETURN_IF_ERROR(computed);
  }
  if (kv_.damaged_block < 0) ApplyOps(batch.ops_after);
  const parallel::GroupTraffic after = model_.traffic();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  result.ranks = {WorkBetween(traffic, after)};
  result.ranks.front().step_seconds = seconds.count();
  result.sparsity = counters_;
  result.kv = std::exchange(kv_, {});
  result.move = model_.AdvanceExpertMove(/*in_step=*/true);
  return result;
}

StatusOr<std::span<const float>> LocalExecutor::FetchLogitsOf(int later, std::span<const int32_t> rows) {
  const size_t width = model_.info().own_vocab.count;
  if (later < 0 || later >= std::ssize(outputs_)) {
    return InvalidArgument(
        "logits of the last {} batches are kept, but those before {} later ones are fetched", outputs_.size(),
        later);
  }
  const Logits& kept = outputs_[later];
  fetched_.clear();
  for (const int32_t row : rows) {
    if (row < 0 || static_cast<size_t>(row) >= kept.rows.size()) {
      return InvalidArgument("the last batch has logits of {} rows, but row {} is fetched", kept.rows.size(),
                             row);
    }
    const auto begin = kept.values.begin() + static_cast<ptrdiff_t>(row * width);
    fetched_.insert(fetched_.end(), begin, begin + static_cast<ptrdiff_t>(width));
  }
  return std::span<const float>(fetched_);
}

// Fills slices_, sparsity_ and the rows with logits.
void LocalExecutor::LayOutRows(const StepBatch& batch) {
  slices_.clear();
  sparsity_.assign(batch.rows.size(), {});  // slices refer to its elements
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    const BatchRows& rows = batch.rows[i];
    kernels::RowSparsity* sparsity = nullptr;
    if (rows.sparsity >= 0) {
      sparsity = &sparsity_[i];
      *sparsity = {.settings = batch.sparsity[rows.sparsity], .counters = &counters_};
      if (sparsity->settings.reuse > 1) {
        std::unique_ptr<kernels::KeptChoices>& kept = kept_[rows.sequence];
        if (kept == nullptr) {
          const tensor::KvLayout& layout = store_.layout();
          kept = std::make_unique<kernels::KeptChoices>(layout.layers, layout.heads,
                                                        KeptChoicesPerHead(sparsity->settings.reuse));
        }
        sparsity->kept = kept.get();
      }
    }
    slices_.push_back({.block_table = batch.block_tables.data() + rows.first_block,
                       .start = rows.start,
                       .count = rows.count,
                       .row = rows.first_token,
                       .sparsity = sparsity});
    for (int r = rows.first_logits; r < rows.count; ++r)
      outputs_.front().rows.push_back(rows.first_token + r);
  }
}

Status LocalExecutor::Compute(const StepBatch& batch, StepResult* result) {
  const models::ModelInfo& info = model_.info();
  const bool mtp = batch.kind == StepKind::kMtp;
  if (mtp && info.own_mtp_layers == 0) return OkStatus();  // the last stage has the module
  LayOutRows(batch);
  Logits& kept = outputs_.front();
  const size_t wanted = kept.rows.size() * info.own_vocab.count;
  if (kept.values.size() < wanted) kept.values.resize(wanted);
  const std::span<float> logits(kept.values.data(), wanted);
  const bool want_hidden = (mtp || batch.want_hidden) && info.own_vocab.count > 0;
  hidden_.resize(want_hidden ? batch.tokens.size() * info.hidden_size : 0);
  scratch_.Reset();
  const kernels::ExecContext context = {.kernels = &kernels_, .pool = &threads_, .scratch = &scratch_};
  const models::ForwardBatch forward = {.tokens = batch.tokens,
                                        .sequences = slices_,
                                        .logit_rows = kept.rows,
                                        .fetcher = store_.pages() && !mtp ? pager_.get() : nullptr,
                                        .joint = batch.joint,
                                        .divides = batch.divides};
  const models::ForwardOutput output = {.logits = logits,
                                        .hidden = hidden_,
                                        .experts_read = batch.count_experts ? &result->experts_read : nullptr,
                                        .routes = batch.want_routes ? &result->routes : nullptr};
  RETURN_IF_ERROR(mtp ? model_.ForwardMtp(context, /*depth=*/0, forward, batch.hidden, layers_, output)
                      : model_.Forward(context, forward, layers_, output));
  result->logits = logits;
  result->hidden = hidden_;
  return OkStatus();
}

void LocalExecutor::BuildSummaries(std::span<const int32_t> blocks) {
  std::vector<kernels::SequenceSlice> slices;
  for (const int32_t& block : blocks) {
    slices.push_back({.block_table = &block, .start = 0, .count = tensor::kKvBlockTokens});
  }
  scratch_.Reset();
  const kernels::ExecContext context = {.kernels = &kernels_, .pool = &threads_, .scratch = &scratch_};
  for (const kernels::KvLayer& layer : layers_) kernels::BuildKeySummaries(context, {layer, slices});
}

}  // namespace moesaic::engine
