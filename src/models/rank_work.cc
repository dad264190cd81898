#include "models/rank_work.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/model_info.h"
#include "models/packed_slices.h"

namespace moesaic::models {
namespace {

double FlopsPerRow(const RegionPlan& region) {
  double flops = 0;
  for (const PartDecl& part : region.decl.parts) {
    if (!part.transposed) flops += 2.0 * part.n * part.k;
  }
  return flops;
}

void Count(const RegionPlan& region, bool is_head, parallel::RankWork* work) {
  work->weight_bytes += static_cast<double>(region.bytes);
  if (region.decl.mtp || region.decl.touch == Touch::kRow) return;
  if (region.decl.touch == Touch::kTopK) {
    ++work->expert_layers;
    work->expert_bytes = std::max(work->expert_bytes, static_cast<double>(region.stride));
    work->expert_flops_per_row = std::max(work->expert_flops_per_row, FlopsPerRow(region));
  } else if (is_head) {
    work->head_bytes += static_cast<double>(region.bytes);
    work->head_flops_per_row += FlopsPerRow(region);
  } else {
    work->read_bytes += static_cast<double>(region.decode_bytes());
    work->flops_per_row += FlopsPerRow(region) * region.decl.count;
  }
}

// Whether the ranks' parts can be cut out of a packed file, or are those that it has.
Status CheckPackedFile(const checkpoint::Checkpoint& checkpoint, DecoderSpec& spec,
                       const parallel::Layout& layout) {
  ASSIGN_OR_RETURN(const auto file, checkpoint::PackedFile::Open(checkpoint.path()));
  if (!file->layout().empty()) return PartOfFile(file, layout, /*rank=*/0).status();
  DropAbsentMtp(*file, spec);
  ASSIGN_OR_RETURN(const WeightPlan plan, PlanFromPacked(spec, *file));
  const parallel::ModelShape shape = DivisibleShape(spec, plan);
  if (layout.ranks() == 1) return OkStatus();
  // Replicas have equal parts, unless they divide the experts.
  const int different = layout.exchanges_tokens() ? layout.ranks() : layout.ranks() / layout.degrees().data;
  for (int rank = 0; rank < different; ++rank) {
    ASSIGN_OR_RETURN(const parallel::Shard shard, parallel::MakeShard(layout, rank, shape));
    RETURN_IF_ERROR(PlanShardOfPacked(spec, plan, shard, checkpoint.path()).status());
  }
  return OkStatus();
}

}  // namespace

Status CheckDivisible(const checkpoint::Checkpoint& checkpoint, const std::string& dtype,
                      const parallel::Layout& layout) {
  ASSIGN_OR_RETURN(DecoderSpec spec, SpecFromConfig(checkpoint.config(), ConfigFile(checkpoint)));
  ASSIGN_OR_RETURN(const WeightDtype wanted, ParseWeightDtype(dtype));
  parallel::ModelShape shape = ShapeOf(spec);
  if (checkpoint.container() == "moesaic") return CheckPackedFile(checkpoint, spec, layout);
  if (!checkpoint.tensors().empty()) {
    ASSIGN_OR_RETURN(shape, DivisibleShape(spec, checkpoint, wanted));
  }
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    RETURN_IF_ERROR(parallel::MakeShard(layout, rank, shape).status());
  }
  return OkStatus();
}

StatusOr<WorkOfRanks> WorkOfRanks::Create(const checkpoint::Checkpoint& checkpoint, const std::string& dtype,
                                          double kv_element_bytes, bool load_mtp) {
  WorkOfRanks work;
  work.kv_element_bytes_ = kv_element_bytes;
  ASSIGN_OR_RETURN(work.spec_, SpecFromConfig(checkpoint.config(), ConfigFile(checkpoint)));
  ASSIGN_OR_RETURN(work.dtype_, ParseWeightDtype(dtype));
  if (!load_mtp) work.spec_.mtp_layers = 0;
  work.shape_ = ShapeOf(work.spec_);
  if (checkpoint.tensors().empty()) return work;
  ASSIGN_OR_RETURN(const WeightPlan plan, PlanOf(checkpoint, work.dtype_, work.spec_));
  work.shape_ = DivisibleShape(work.spec_, plan);
  for (const RegionPlan& region : plan.regions) {
    std::vector<tensor::PackedFormat>& formats = work.formats_[region.decl.name];
    for (const tensor::PackedLayout& layout : region.layouts) formats.push_back(layout.format);
  }
  return work;
}

StatusOr<parallel::RankWork> WorkOfRanks::Of(const parallel::Layout& layout, int rank) const {
  ASSIGN_OR_RETURN(const parallel::Shard shard, parallel::MakeShard(layout, rank, shape_));
  const bool separate_head = formats_.empty() ? SeparatesHead(dtype_) : formats_.contains(kHead);
  parallel::RankWork work = {.layers = shard.layers.count,
                             .has_embedding = shard.has_embedding,
                             .has_head = shard.has_head,
                             .all_experts = spec_.moe.experts,
                             .top_k = spec_.moe.top_k};
  double embedding_bytes = 0;
  for (const RegionDecl& decl : DeclareWeights(spec_, separate_head, shard)) {
    std::vector<tensor::PackedFormat> formats(decl.parts.size(), FormatFor(decl.precision, dtype_));
    if (!formats_.empty()) {
      const auto known = formats_.find(decl.name);
      if (known == formats_.end()) continue;  // optional, and absent
      if (known->second.size() == formats.size()) formats = known->second;
    } else if (decl.optional) {
      continue;
    }
    ASSIGN_OR_RETURN(const RegionPlan region, LayOut(decl, formats));
    if (decl.name == kEmbedding) embedding_bytes = static_cast<double>(region.bytes);
    Count(region, decl.name == kHead, &work);
  }
  if (spec_.tied && shard.has_head && work.head_bytes == 0) {  // the embedding is the head
    work.head_bytes = embedding_bytes;
    work.head_flops_per_row = 2.0 * shard.vocab.count * spec_.hidden;
  }
  const KvSpec kv = KvOf(spec_, shard);
  work.kv_bytes_per_token =
      kv_element_bytes_ * kv.layers * kv.heads * (kv.key_dim + (kv.shared ? 0 : kv.value_dim));
  return work;
}

}  // namespace moesaic::models
