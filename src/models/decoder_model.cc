#include "models/decoder_model.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise.h"
#include "layers/embedding.h"

namespace moesaic::models {

using kernels::ExecContext;
using kernels::KvLayer;
using kernels::SequenceSlice;
using layers::ScratchScope;
using layers::Step;

namespace {

// Appends the choices of a later part's rows, layer by layer.
void AppendRoutes(RouteTap part, RouteTap* all) {
  if (all->layers.empty()) {
    *all = std::move(part);
    return;
  }
  for (size_t i = 0; i < part.layers.size(); ++i) {
    std::vector<int32_t>& ids = all->layers[i].ids;
    ids.insert(ids.end(), part.layers[i].ids.begin(), part.layers[i].ids.end());
  }
}

}  // namespace

DecoderModel::DecoderModel(DecoderSpec spec, parallel::Shard shard, WeightMap weights, ModelInfo info,
                           layers::RopeTable rope, std::shared_ptr<parallel::RankGroups> groups)
    : spec_(std::move(spec)),
      shard_(std::move(shard)),
      groups_(std::move(groups)),
      weights_(std::move(weights)),
      info_(std::move(info)),
      rope_(std::move(rope)) {}

StatusOr<std::unique_ptr<DecoderModel>> DecoderModel::Create(DecoderSpec spec, parallel::Shard shard,
                                                             WeightMap weights, ModelInfo info,
                                                             layers::MlaPath mla_path,
                                                             std::shared_ptr<parallel::RankGroups> groups) {
  ASSIGN_OR_RETURN(layers::RopeTable rope, layers::RopeTable::Create(spec.rope, spec.context));
  auto* raw = new DecoderModel(std::move(spec), std::move(shard), std::move(weights), std::move(info),
                               std::move(rope), std::move(groups));
  std::unique_ptr<DecoderModel> model(raw);
  model->decoder_ = Assemble(model->spec_, model->shard_, model->weights_, model->rope_, mla_path);
  RETURN_IF_ERROR(raw->JoinExperts());
  return model;
}

Status DecoderModel::JoinExperts() {
  const parallel::ModelShape shape = ShapeOf(spec_);
  for (const int layer : shape.moe_layers) {
    if (layer >= shard_.layers.first && layer < shard_.layers.end()) moe_layers_.push_back(layer);
  }
  std::vector<int>& layers = exchanged_layers_;
  layers = moe_layers_;
  for (size_t i = 0; i < decoder_.mtp.size() && spec_.is_moe.back(); ++i) {
    layers.push_back(spec_.layers + static_cast<int>(i));
  }
  expert_load_.assign(layers.size() * static_cast<size_t>(spec_.moe.experts), 0);
  if (groups_ == nullptr || !groups_->layout().exchanges_tokens()) return OkStatus();
  std::vector<std::vector<std::vector<int>>> by_layer;
  for (const int layer : layers) by_layer.push_back(ExpertsByRank(groups_->layout(), shape, layer));
  RETURN_IF_ERROR(groups_->JoinExperts({.hidden = spec_.hidden,
                                        .experts = spec_.moe.experts,
                                        .top_k = spec_.moe.top_k,
                                        .sums_by_choice = groups_->layout().experts_move(),
                                        .split = groups_->layout().batch_split(),
                                        .pass_layers = static_cast<int>(moe_layers_.size()),
                                        .speeds = groups_->layout().speeds()},
                                       by_layer));
  if (groups_->layout().experts_move()) LetExpertsMove();
  return OkStatus();
}

// Experts of MTP modules stay.
void DecoderModel::LetExpertsMove() {
  std::vector<MovableExperts::Layer> layers;
  for (const int layer : moe_layers_) {
    auto& moe = std::get<layers::MoeLayer>(decoder_.layers[layer - shard_.layers.first].ffn);
    layers.push_back({.number = layer, .moe = &moe, .release = [this, layer] {
                        weights_.Release(LayerPrefix(layer) + "mlp.experts");
                      }});
  }
  movable_ = std::make_unique<MovableExperts>(std::move(layers), *groups_->experts());
}

Status DecoderModel::BeginExpertMove(const ExpertMoveOrder& order) {
  if (movable_ != nullptr) return movable_->Begin(order);
  return absl::FailedPreconditionError("the layout does not let experts move");
}

Status DecoderModel::ApplyExpertMove(uint64_t number) {
  if (movable_ == nullptr) return absl::FailedPreconditionError("the layout does not let experts move");
  RETURN_IF_ERROR(movable_->Apply(number));
  return groups_->layout().tolerates_failures() ? LeaveOutLostExperts() : OkStatus();
}

// Null: the layer is dense, or of another rank.
layers::MoeLayer* DecoderModel::MoeOf(int layer) {
  layers::DecoderLayer* found = nullptr;
  if (layer >= spec_.layers && layer - spec_.layers < std::ssize(decoder_.mtp)) {
    found = &decoder_.mtp[layer - spec_.layers].layer;
  } else if (layer >= shard_.layers.first && layer < shard_.layers.end()) {
    found = &decoder_.layers[layer - shard_.layers.first];
  }
  return found == nullptr ? nullptr : std::get_if<layers::MoeLayer>(&found->ffn);
}

Status DecoderModel::LeaveOutExperts(const LeftOutExperts& left_out) {
  layers::MoeLayer* const moe = MoeOf(left_out.layer);
  if (moe == nullptr) return InvalidArgument("layer {} has no routed experts here", left_out.layer);
  for (const int expert : left_out.experts) {
    if (expert < 0 || expert >= spec_.moe.experts) {
      return InvalidArgument("experts of layer {} are [0, {}), found {}", left_out.layer, spec_.moe.experts,
                             expert);
    }
  }
  moe->router.LeaveOut(left_out.experts);
  std::erase_if(left_out_, [&](const LeftOutExperts& old) { return old.layer == left_out.layer; });
  if (left_out.experts.empty()) return OkStatus();
  left_out_.insert(std::ranges::upper_bound(left_out_, left_out.layer, {}, &LeftOutExperts::layer), left_out);
  return OkStatus();
}

Status DecoderModel::ExcludeRanks(std::span<const int> ranks) {
  if (groups_ == nullptr || !groups_->layout().tolerates_failures()) {
    return absl::FailedPreconditionError("the layout does not tolerate failures of ranks");
  }
  RETURN_IF_ERROR(groups_->Exclude(ranks));
  return LeaveOutLostExperts();
}

Status DecoderModel::LeaveOutLostExperts() {
  for (size_t i = 0; i < exchanged_layers_.size(); ++i) {
    RETURN_IF_ERROR(LeaveOutExperts(
        {.layer = exchanged_layers_[i], .experts = groups_->experts()->LostExperts(static_cast<int>(i))}));
  }
  return OkStatus();
}

// Between layers: messages to other stages, and moves of experts.
void DecoderModel::Progress() const {
  groups_->Progress();
  if (movable_ != nullptr) movable_->Advance(/*in_step=*/true);
}

ExpertLoad DecoderModel::expert_load() const {
  const size_t count = moe_layers_.size() * static_cast<size_t>(spec_.moe.experts);
  return {.layers = moe_layers_,
          .experts = spec_.moe.experts,
          .tokens = {expert_load_.begin(), expert_load_.begin() + static_cast<ptrdiff_t>(count)}};
}

Status DecoderModel::Check(const ForwardBatch& batch, std::span<const KvLayer> kv,
                           const ForwardOutput& out) const {
  const auto rows = static_cast<int64_t>(batch.tokens.size());
  for (const int32_t token : batch.tokens) {
    if (token < 0 || token >= spec_.vocab) {
      return InvalidArgument("tokens must be in [0, {}), found {}", spec_.vocab, token);
    }
  }
  int64_t next = 0;
  for (const SequenceSlice& sequence : batch.sequences) {
    if (sequence.row != next || sequence.count < 1) {
      return InvalidArgument("sequences must cover the rows in order: row {} expected, found {} rows from {}",
                             next, sequence.count, sequence.row);
    }
    if (sequence.start < 0 || sequence.start > spec_.context - sequence.count) {
      return InvalidArgument("positions must be in [0, {}), found {} from {}", spec_.context, sequence.count,
                             sequence.start);
    }
    next += sequence.count;
  }
  if (next != rows) return InvalidArgument("sequences must cover {} rows, found {}", rows, next);
  for (const int32_t row : batch.logit_rows) {
    if (row < 0 || row >= rows) return InvalidArgument("logit rows must be in [0, {}), found {}", rows, row);
  }
  if (static_cast<int>(kv.size()) != info_.kv.layers) {
    return InvalidArgument("the cache must have {} layers, found {}", info_.kv.layers, kv.size());
  }
  const auto logits = static_cast<int64_t>(batch.logit_rows.size()) * info_.own_vocab.count;
  if (static_cast<int64_t>(out.logits.size()) != logits) {
    return InvalidArgument("logits must have space for {} values, found {}", logits, out.logits.size());
  }
  if (!out.hidden.empty() && static_cast<int64_t>(out.hidden.size()) != rows * spec_.hidden) {
    return InvalidArgument("hidden must have space for {} values, found {}", rows * spec_.hidden,
                           out.hidden.size());
  }
  return OkStatus();
}

// Returns the positions of all rows and fills the rotary tables up to them.
std::span<const int32_t> DecoderModel::Positions(ScratchScope& scratch, const ExecContext& ctx,
                                                 const ForwardBatch& batch) {
  auto* positions = scratch.Take<int32_t>(static_cast<int64_t>(batch.tokens.size()));
  int end = 0;
  for (const SequenceSlice& sequence : batch.sequences) {
    for (int i = 0; i < sequence.count; ++i) positions[sequence.row + i] = sequence.start + i;
    end = std::max(end, sequence.start + sequence.count);
  }
  rope_.Reserve(*ctx.pool, end);
  return {positions, batch.tokens.size()};
}

// Norms the residual stream x [rows, hidden] and multiplies the selected rows by the head.
void DecoderModel::Finish(const ExecContext& ctx, const ForwardBatch& batch, const float* norm,
                          const layers::Linear& head, float* x, const ForwardOutput& out) const {
  ScratchScope scratch(ctx);
  const int hidden = spec_.hidden;
  const auto wanted = static_cast<int>(batch.logit_rows.size());
  kernels::RmsNormParams params{.x = x,
                                .x_stride = hidden,
                                .weight = norm,
                                .y = x,
                                .y_stride = hidden,
                                .rows = static_cast<int>(batch.tokens.size()),
                                .n = hidden,
                                .eps = spec_.norm_eps};
  if (!out.hidden.empty()) {
    params.y = out.hidden.data();
    kernels::RmsNorm(ctx, params);
  }
  if (wanted == 0) return;
  auto* last = scratch.Take<float>(static_cast<int64_t>(wanted) * hidden);
  const float* from = out.hidden.empty() ? x : out.hidden.data();
  for (int i = 0; i < wanted; ++i) {
    std::copy_n(from + static_cast<int64_t>(batch.logit_rows[i]) * hidden, hidden,
                last + int64_t{i} * hidden);
  }
  if (out.hidden.empty()) {
    params.x = params.y = last;
    params.rows = wanted;
    kernels::RmsNorm(ctx, params);
  }
  layers::Apply(ctx, head, last, hidden, wanted, out.logits.data(), head.n());
}

void DecoderModel::Embed(const Step& step, const tensor::PackedMatrix& table, std::span<const int32_t> tokens,
                         float* x) const {
  layers::Embed(step.ctx, table, tokens, x, shard_.vocab.first);
  step.Sum(x, static_cast<int64_t>(tokens.size()) * spec_.hidden);
}

// Takes part in the exchanges of the rank's layers, without rows.
void DecoderModel::RunIdle(const ExecContext& ctx) const {
  const Step step{.ctx = ctx, .sequences = {}, .positions = {}, .groups = groups_.get()};
  for (const layers::DecoderLayer& layer : decoder_.layers) {
    const auto* moe = std::get_if<layers::MoeLayer>(&layer.ffn);
    if (moe != nullptr) moe->Forward(step, nullptr, nullptr);
    if (groups_->failed()) return;
    Progress();
  }
}

// Runs the rank's layers; `kv` begins with the first of them.
void DecoderModel::RunLayers(const Step& step, std::span<const KvLayer> kv, float* x) const {
  size_t numbered = 0;
  for (int i = 0; i < shard_.layers.count; ++i) {
    decoder_.layers[i].Forward(step, kv[i], x);
    if (groups_ != nullptr) {
      if (groups_->failed()) return;  // the results are void
      Progress();
    }
    if (step.routes == nullptr || step.routes->layers.size() == numbered) continue;
    step.routes->layers.back().layer = shard_.layers.first + i;
    ++numbered;
  }
}

// Runs the rank's layers for the rows of `part`, whose residual stream is x [rows, hidden].
void DecoderModel::RunPart(const ExecContext& ctx, const ForwardBatch& batch, const PipelinePart& part,
                           std::span<const int32_t> positions, std::span<const KvLayer> kv,
                           std::span<float> x, const ForwardOutput& out) const {
  if (part.rows.count == 0) return RunIdle(ctx);
  RouteTap routes;
  const Step step{.ctx = ctx,
                  .sequences = part.sequences,
                  .positions = positions.subspan(part.rows.first, part.rows.count),
                  .experts_read = out.experts_read,
                  .routes = out.routes != nullptr ? &routes : nullptr,
                  .expert_load = expert_load_.data(),
                  .fetcher = batch.fetcher,
                  .groups = groups_.get()};
  const std::span<const int32_t> tokens = batch.tokens.subspan(part.rows.first, part.rows.count);
  shard_.has_embedding ? Embed(step, decoder_.embedding, tokens, x.data()) : groups_->AwaitHidden();
  RunLayers(step, kv, x.data());
  if (groups_ != nullptr && groups_->failed()) return;
  if (out.routes != nullptr) AppendRoutes(std::move(routes), out.routes);
  if (!shard_.has_head) return groups_->SendHidden(x);
  const auto columns = static_cast<size_t>(info_.own_vocab.count), width = static_cast<size_t>(spec_.hidden);
  ForwardOutput own = out;
  own.logits = out.logits.subspan(part.logits.first * columns, part.logits.count * columns);
  if (!out.hidden.empty()) own.hidden = out.hidden.subspan(part.rows.first * width, part.rows.count * width);
  Finish(ctx, {.tokens = tokens, .sequences = part.sequences, .logit_rows = part.logit_rows},
         decoder_.final_norm, decoder_.head, x.data(), own);
}

Status DecoderModel::CheckJoint(const JointStep& joint, size_t parts) const {
  if (joint.number == 0 || static_cast<size_t>(joint.parts) >= parts) return OkStatus();
  return InvalidArgument("replicas agreed on {} parts of step {}, but this one has {}", joint.parts,
                         joint.number, parts);
}

Status DecoderModel::Forward(const ExecContext& ctx, const ForwardBatch& batch, std::span<const KvLayer> kv,
                             const ForwardOutput& out) {
  RETURN_IF_ERROR(Check(batch, kv, out));
  if (batch.tokens.empty() && !exchanges()) return OkStatus();
  ScratchScope scratch(ctx);
  const std::span<const int32_t> positions = Positions(scratch, ctx, batch);
  if (out.routes != nullptr) out.routes->layers.clear();
  const auto width = static_cast<size_t>(spec_.hidden);
  const size_t count = batch.tokens.size() * width;
  const std::span<float> x(scratch.Take<float>(static_cast<int64_t>(count)), count);
  const auto rows_of = [&](const PipelinePart& part) {
    return x.subspan(part.rows.first * width, part.rows.count * width);
  };
  const int stages = groups_ == nullptr ? 1 : groups_->layout().degrees().pipeline;
  std::vector<PipelinePart> parts =
      SplitForPipeline(batch, stages, ReadRows(spec_.moe.experts, spec_.moe.top_k));
  if (exchanges()) {
    RETURN_IF_ERROR(CheckJoint(batch.joint, parts.size()));
    groups_->experts()->SetMostRows(batch.joint.most_rows);
    const PipelinePart idle = {.rows = {static_cast<int>(batch.tokens.size()), 0}, .logits = {}};
    parts.resize(std::max<size_t>(parts.size(), batch.joint.parts), idle);
  }
  for (const PipelinePart& part : parts) {
    if (!shard_.has_embedding && part.rows.count > 0) groups_->ExpectHidden(rows_of(part));
  }
  for (const PipelinePart& part : parts) {
    if (groups_ != nullptr && groups_->failed()) break;
    RunPart(ctx, batch, part, positions, kv, rows_of(part), out);
  }
  return groups_ == nullptr ? OkStatus() : groups_->TakeFailure();
}

Status DecoderModel::ForwardMtp(const ExecContext& ctx, int depth, const ForwardBatch& batch,
                                std::span<const float> hidden, std::span<const KvLayer> kv,
                                const ForwardOutput& out) {
  if (depth < 0 || depth >= static_cast<int>(decoder_.mtp.size())) {
    return InvalidArgument("MTP modules are [0, {}), found {}", decoder_.mtp.size(), depth);
  }
  RETURN_IF_ERROR(Check(batch, kv, out));
  if (exchanges()) groups_->experts()->SetMostRows(batch.joint.most_rows);
  const MtpModule& module = decoder_.mtp[depth];
  if (batch.tokens.empty()) {
    const auto* moe = std::get_if<layers::MoeLayer>(&module.layer.ffn);
    if (moe == nullptr || !exchanges()) return OkStatus();
    moe->Forward({.ctx = ctx, .sequences = {}, .positions = {}, .groups = groups_.get()}, nullptr, nullptr);
    return groups_->TakeFailure();
  }
  const int width = spec_.hidden;
  if (hidden.size() != batch.tokens.size() * width) {
    return InvalidArgument("hidden must have {} values, found {}", batch.tokens.size() * width,
                           hidden.size());
  }
  ScratchScope scratch(ctx);
  const Step step{.ctx = ctx,
                  .sequences = batch.sequences,
                  .positions = Positions(scratch, ctx, batch),
                  .groups = groups_.get()};
  const int rows = step.rows();
  auto* x = scratch.Take<float>(static_cast<int64_t>(rows) * width);
  auto* joined = scratch.Take<float>(static_cast<int64_t>(rows) * 2 * width);
  Embed(step, module.embedding, batch.tokens, x);
  kernels::RmsNormParams norm{.x = x,
                              .x_stride = width,
                              .weight = module.embedding_norm,
                              .y = joined,
                              .y_stride = 2 * width,
                              .rows = rows,
                              .n = width,
                              .eps = spec_.norm_eps};
  kernels::RmsNorm(ctx, norm);
  norm.x = hidden.data();
  norm.weight = module.hidden_norm;
  norm.y = joined + width;
  kernels::RmsNorm(ctx, norm);
  layers::Apply(ctx, module.project, joined, 2 * width, rows, x, width);
  module.layer.Forward(step, kv[shard_.layers.count + depth], x);
  Finish(ctx, batch, module.final_norm, module.head, x, out);
  return groups_ == nullptr ? OkStatus() : groups_->TakeFailure();
}

}  // namespace moesaic::models
