#include "models/model_info.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <map>

namespace moesaic::models {
namespace {

// Returns the bytes of `region` that decoding one token reads.
int64_t ActiveBytes(const DecoderSpec& spec, const RegionPlan& region) {
  switch (region.decl.touch) {
    case Touch::kRow:
      return region.layouts[0].panel_bytes / tensor::kPanelRows;
    case Touch::kTopK:
      return region.stride * std::min(spec.moe.top_k, region.decl.count);
    case Touch::kAll:
      break;
  }
  return region.decode_bytes();
}

int64_t ActiveParameters(const DecoderSpec& spec, const RegionDecl& decl) {
  switch (decl.touch) {
    case Touch::kRow:
      return spec.hidden;
    case Touch::kTopK:
      return decl.parameters / decl.count * spec.moe.top_k;
    case Touch::kAll:
      break;
  }
  return decl.parameters;
}

// Returns the format of most parameters.
std::string MainFormat(const WeightPlan& plan) {
  std::map<std::string, int64_t> parameters;
  for (const RegionPlan& region : plan.regions) {
    if (region.decl.parameters == 0) continue;  // a copy
    for (const tensor::PackedLayout& layout : region.layouts) {
      parameters[tensor::PackedFormatName(layout.format)] += int64_t{layout.n} * layout.k * region.decl.count;
    }
  }
  std::string main;
  for (const auto& [format, count] : parameters) {
    if (main.empty() || count > parameters[main]) main = format;
  }
  return main;
}

}  // namespace

KvSpec KvOf(const DecoderSpec& spec) { return KvOf(spec, parallel::WholeModel(ShapeOf(spec))); }

KvSpec KvOf(const DecoderSpec& spec, const parallel::Shard& shard) {
  const AttentionSpec& a = spec.attention;
  const int layers = shard.layers.count + (shard.has_head ? spec.mtp_layers : 0);
  if (a.kind == AttentionSpec::Kind::kMla) {
    const int latent = (a.kv_lora_rank + 7) / 8 * 8;  // MlaAttention::padded_latent
    return {
        .layers = layers, .heads = 1, .key_dim = latent + a.rope_dim, .value_dim = latent, .shared = true};
  }
  return {.layers = layers, .heads = shard.kv_heads.count, .key_dim = a.head_dim, .value_dim = a.head_dim};
}

ModelInfo InfoFromPlan(const DecoderSpec& spec, const WeightPlan& plan) {
  return InfoFromPlan(spec, plan, parallel::WholeModel(ShapeOf(spec)));
}

ModelInfo InfoFromPlan(const DecoderSpec& spec, const WeightPlan& plan, const parallel::Shard& shard) {
  ModelInfo info{.architecture = spec.architecture,
                 .model_type = spec.model_type,
                 .vocab_size = spec.vocab,
                 .hidden_size = spec.hidden,
                 .layers = spec.layers,
                 .mtp_layers = spec.mtp_layers,
                 .context_length = spec.context,
                 .experts = spec.moe.experts,
                 .experts_per_token = spec.moe.top_k,
                 .expert_groups = spec.moe.groups,
                 .top_expert_groups = spec.moe.top_groups,
                 .weight_format = MainFormat(plan),
                 .weights_from = WeightSource::kPacked,
                 .own_layers = shard.layers,
                 .own_vocab = shard.has_head ? shard.vocab : parallel::Range{},
                 .own_mtp_layers = shard.has_head ? spec.mtp_layers : 0,
                 .kv = KvOf(spec, shard)};
  int64_t experts = 0, expert_bytes = 0;
  for (const RegionPlan& region : plan.regions) {
    if (region.decl.mtp) {
      info.mtp_weight_bytes += region.bytes;
      continue;
    }
    info.weight_bytes += region.bytes;
    info.active_weight_bytes += ActiveBytes(spec, region);
    if (region.decl.touch != Touch::kTopK) continue;
    ++info.moe_layers;
    experts += region.decl.count;
    expert_bytes += region.bytes;
  }
  if (experts > 0) info.expert_bytes = expert_bytes / experts;
  const auto count = [&](const RegionDecl& decl) {
    if (decl.mtp) {
      info.mtp_parameters += decl.parameters;
      return;
    }
    info.parameters += decl.parameters;
    info.active_parameters += ActiveParameters(spec, decl);
  };
  if (shard.is_whole) {
    for (const RegionPlan& region : plan.regions) count(region.decl);
  } else {
    for (const RegionDecl& decl : DeclareWeights(spec, false)) {
      if (!decl.optional) count(decl);
    }
  }
  if (spec.tied) {
    info.active_parameters += static_cast<int64_t>(spec.vocab) * spec.hidden;
    const bool reads_embedding = shard.has_head && plan.Find(kHead) == nullptr;
    if (reads_embedding) info.active_weight_bytes += plan.Find(kEmbedding)->bytes;
  }
  return info;
}

StatusOr<ModelInfo> InfoFromSpec(const DecoderSpec& spec, const std::string& dtype) {
  ASSIGN_OR_RETURN(const WeightDtype wanted, ParseWeightDtype(dtype));
  WeightPlan plan;
  for (const RegionDecl& decl : DeclareWeights(spec, SeparatesHead(wanted))) {
    if (decl.optional) continue;
    const std::vector<tensor::PackedFormat> formats(decl.parts.size(), FormatFor(decl.precision, wanted));
    ASSIGN_OR_RETURN(RegionPlan region, LayOut(decl, formats));
    plan.regions.push_back(std::move(region));
  }
  return InfoFromPlan(spec, plan);
}

std::string ConfigFile(const checkpoint::Checkpoint& checkpoint) {
  if (checkpoint.container() != "safetensors") return checkpoint.path();
  const std::filesystem::path path(checkpoint.path());
  return ((path.extension() == ".safetensors" ? path.parent_path() : path) / "config.json").string();
}

StatusOr<WeightPlan> PlanOf(const checkpoint::Checkpoint& checkpoint, WeightDtype dtype, DecoderSpec& spec) {
  if (checkpoint.container() == "moesaic") {
    ASSIGN_OR_RETURN(const auto file, checkpoint::PackedFile::Open(checkpoint.path()));
    DropAbsentMtp(*file, spec);
    return file->layout().empty() ? PlanFromPacked(spec, *file) : PlanOfParts(spec, *file);
  }
  DropAbsentMtp(checkpoint, spec);
  return PlanFromCheckpoint(spec, checkpoint, dtype);
}

StatusOr<ModelInfo> InfoOf(const checkpoint::Checkpoint& checkpoint, const std::string& dtype) {
  ASSIGN_OR_RETURN(DecoderSpec spec, SpecFromConfig(checkpoint.config(), ConfigFile(checkpoint)));
  ASSIGN_OR_RETURN(const WeightDtype wanted, ParseWeightDtype(dtype));
  if (checkpoint.container() != "moesaic" && checkpoint.tensors().empty()) return InfoFromSpec(spec, dtype);
  ASSIGN_OR_RETURN(const WeightPlan plan, PlanOf(checkpoint, wanted, spec));
  return InfoFromPlan(spec, plan);
}

}  // namespace moesaic::models
