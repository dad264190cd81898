#include "quantizer/format/loader_rules.h"

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/linear_source.h"
#include "models/decoder_spec.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::QuantConfig;
using checkpoint::QuantGroup;
using models::AttentionSpec;
using models::DecoderSpec;

constexpr char kMarlin[] = "yes (Marlin, compute capability 7.5 and up, in fp16 below 8.0)";

/// Returns the number of layers that vLLM loads. Those of multi-token prediction follow the model's.
int AllLayers(const DecoderSpec& spec) { return spec.layers + spec.mtp_layers; }

bool IsMoe(const DecoderSpec& spec, int layer) { return spec.is_moe[std::min(layer, spec.layers - 1)]; }

/// A linear whose outputs vLLM concatenates with those of the next one.
struct JoinedLinear {
  std::string module;
  int outputs = 0;
};

std::vector<JoinedLinear> JoinedLinears(const DecoderSpec& spec, int layer) {
  const std::string name = fmt::format("model.layers.{}.", layer);
  const AttentionSpec& attention = spec.attention;
  std::vector<JoinedLinear> joined;
  if (attention.kind == AttentionSpec::Kind::kGqa) {
    joined.push_back({name + "self_attn.q_proj", attention.heads * attention.head_dim});
    joined.push_back({name + "self_attn.k_proj", attention.kv_heads * attention.head_dim});
  } else if (attention.q_lora_rank > 0) {
    joined.push_back({name + "self_attn.q_a_proj", attention.q_lora_rank});
  }
  if (!IsMoe(spec, layer)) {
    joined.push_back({name + "mlp.gate_proj", spec.intermediate});
  } else if (spec.moe.shared_intermediate > 0) {
    joined.push_back({name + "mlp.shared_experts.gate_proj", spec.moe.shared_intermediate});
  }
  return joined;
}

std::string ExpertModule(int layer, int expert, const char* projection) {
  return fmt::format("model.layers.{}.mlp.experts.{}.{}_proj", layer, expert, projection);
}

/// Groups that routed experts use. Their names are scanned once for all groups, because Kimi-K2 has 70,000 of
/// them.
struct RoutedExperts {
  std::set<const QuantGroup*> groups;                // groups of any routed expert
  std::map<const QuantGroup*, std::string> refusal;  // reasons against groups that share a kernel with others
};

/// vLLM runs a layer's experts with one kernel and takes the scheme of expert 0's gate. It checks expert 0's
/// other projections against it, but not those of other experts. Their tensors then get wrong names or the
/// wrong type.
RoutedExperts LookAtExperts(const DecoderSpec& spec, const QuantConfig& quant) {
  RoutedExperts found;
  for (int layer = 0; layer < AllLayers(spec); ++layer) {
    if (!IsMoe(spec, layer)) continue;
    const QuantGroup* first = quant.GroupOf(ExpertModule(layer, 0, "gate"));
    std::set<const QuantGroup*> groups;
    std::string refusal;
    for (int expert = 0; expert < spec.moe.experts; ++expert) {
      for (const char* projection : {"gate", "up", "down"}) {
        const QuantGroup* group = quant.GroupOf(ExpertModule(layer, expert, projection));
        groups.insert(group);
        if (group == first || !refusal.empty()) continue;
        refusal = expert == 0 ? fmt::format(
                                    "no: gate, up and down of model.layers.{}.mlp.experts.0 do not share one "
                                    "scheme (ValueError)",
                                    layer)
                              : fmt::format(
                                    "no: {} does not have the scheme of experts.0, which vLLM uses for all "
                                    "(KeyError, or wrong weights without an error)",
                                    ExpertModule(layer, expert, projection));
      }
    }
    for (const QuantGroup* group : groups) {
      found.groups.insert(group);
      if (!refusal.empty()) found.refusal.emplace(group, refusal);
    }
  }
  return found;
}

/// FP8 blocks of outputs must not span two joined linears.
void RefuseRaggedBlocks(const DecoderSpec& spec, const QuantConfig& quant, const QuantGroup& group,
                        LoaderVerdict& verdict) {
  const auto refusal = [&group](const std::string& module, int outputs) {
    return fmt::format("no: {} has {} outputs, not a multiple of {} (ValueError)", module, outputs,
                       group.block_rows);
  };
  for (int layer = AllLayers(spec) - 1; layer >= 0; --layer) {
    for (const JoinedLinear& linear : JoinedLinears(spec, layer)) {
      if (linear.outputs % group.block_rows != 0 && quant.GroupOf(linear.module) == &group) {
        verdict.dense = refusal(linear.module, linear.outputs);
      }
    }
    const std::string gate = ExpertModule(layer, 0, "gate");
    if (IsMoe(spec, layer) && spec.moe.intermediate % group.block_rows != 0 &&
        quant.GroupOf(gate) == &group) {
      verdict.experts = refusal(gate, spec.moe.intermediate);
    }
  }
}

/// Returns vLLM's kernel for int4 and int8 experts with 16-bit activations if Marlin does not take their
/// widths.
std::string WeightOnlyExperts(const DecoderSpec& spec, const QuantGroup& group) {
  const bool by_channel = group.strategy == "channel";
  for (const int inputs : {spec.hidden, spec.moe.intermediate}) {
    if (by_channel || inputs % group.group_size == 0) continue;
    return fmt::format("no: {} inputs are not a multiple of {} (ValueError)", inputs, group.group_size);
  }
  if (spec.hidden % 128 == 0) return kMarlin;
  if (by_channel) {
    return fmt::format(
        "no: only Marlin runs channel scales, and {} inputs are not a multiple of 128 (AssertionError)",
        spec.hidden);
  }
  return "yes (Triton, compute capability 7.5 and up, in fp16 below 8.0)";
}

/// Judges the scheme alone, for any layer.
LoaderVerdict JudgeScheme(const QuantGroup& group) {
  LoaderVerdict verdict;
  if (group.format == "int-quantized" && group.num_bits == 8) {
    const bool dynamic = group.int8_activations && group.dynamic_activations;
    const char* activations = !group.int8_activations ? "16-bit activations"
                              : dynamic               ? "int8 activations by token"
                                                      : "static int8 activations";
    verdict.scheme = fmt::format("int8 by {}, {}", group.strategy, activations);
    const bool by_channel = group.strategy == "channel";
    if (!group.int8_activations) {
      verdict.dense = verdict.experts = "no: int8 weights need int8 activations";
      return verdict;
    }
    verdict.dense =
        "yes (compute capability 7.5 to 9.0, in fp16 below 8.0, or CPU; from 10.0 on it loads and then "
        "fails, vllm #54311)";
    verdict.experts =
        dynamic && by_channel
            ? "yes (before 2026-08 activations silently stayed at 16 bits, vllm #50833)"
            : "no: fused experts take only int8 by channel with activations by token (RuntimeError)";
  } else if (group.format == "pack-quantized" && (group.num_bits == 4 || group.num_bits == 8) &&
             group.type == "int") {
    const bool by_channel = group.strategy == "channel";
    verdict.scheme =
        fmt::format("int{} {}, 16-bit activations", group.num_bits,
                    by_channel ? "by channel" : fmt::format("in groups of {}", group.group_size));
    const bool size =
        by_channel || group.group_size == 32 || group.group_size == 64 || group.group_size == 128;
    verdict.dense = verdict.experts =
        size ? kMarlin : "no: Marlin takes only groups of 32, 64 and 128, and channels";
  } else if (group.format == "nvfp4-pack-quantized") {
    verdict.scheme = "NVFP4, 16-bit activations";
    verdict.dense = kMarlin;
    verdict.experts = "yes (Marlin, since vllm #30881)";
  } else if (group.format == "float-quantized" && group.strategy == "block") {
    verdict.scheme =
        fmt::format("FP8 in blocks of {} x {}, FP8 activations", group.block_rows, group.block_cols);
    const bool size = group.block_rows == 128 && group.block_cols == 128;
    verdict.dense = verdict.experts = size ? "yes (compute capability 8.9 and up; 16-bit activations by "
                                             "Marlin from 7.5 on, in fp16 below 8.0)"
                                           : "no: blocks must be 128 x 128";
  } else {
    verdict.scheme =
        fmt::format("{}-bit {} by {}, format {}", group.num_bits, group.type, group.strategy, group.format);
    verdict.dense = verdict.experts = "not known: moesaic quantize does not write it";
  }
  return verdict;
}

/// Judges the linears that have this scheme.
void JudgeLinears(const DecoderSpec& spec, const QuantConfig& quant, const QuantGroup& group,
                  const RoutedExperts& experts, LoaderVerdict& verdict) {
  if (group.strategy == "block" && verdict.dense.starts_with("yes")) {
    RefuseRaggedBlocks(spec, quant, group, verdict);
  }
  if (!verdict.experts.starts_with("yes") || !experts.groups.contains(&group)) return;
  if (group.format == "pack-quantized") verdict.experts = WeightOnlyExperts(spec, group);
  const auto refusal = experts.refusal.find(&group);
  if (refusal != experts.refusal.end()) verdict.experts = refusal->second;
}

/// Marks linears as not judged if Moesaic does not know the architecture.
void LeaveOpen(const std::string& architecture, LoaderVerdict& verdict) {
  for (std::string* said : {&verdict.dense, &verdict.experts}) {
    if (said->starts_with("yes")) {
      *said = fmt::format("not judged: the scheme loads, but Moesaic does not know the linears of {}",
                          architecture);
    }
  }
}

}  // namespace

StatusOr<std::vector<LoaderVerdict>> JudgeVllm(const nlohmann::json& config, const std::string& file) {
  ASSIGN_OR_RETURN(const QuantConfig quant, checkpoint::ParseQuantConfig(config, file));
  if (quant.method != QuantConfig::Method::kCompressedTensors) {
    return InvalidArgument("{}: \"quantization_config\" is not a compressed-tensors one", file);
  }
  const StatusOr<DecoderSpec> spec = models::SpecFromConfig(config, file);
  if (!spec.ok() && spec.status().code() != StatusCode::kUnimplemented) return spec.status();
  const RoutedExperts experts = spec.ok() ? LookAtExperts(*spec, quant) : RoutedExperts();
  std::vector<LoaderVerdict> verdicts;
  for (const auto& [name, entry] : config["quantization_config"]["config_groups"].items()) {
    const QuantGroup& group = quant.groups[verdicts.size()];
    LoaderVerdict& verdict = verdicts.emplace_back(JudgeScheme(group));
    verdict.group = name;
    if (spec.ok()) {
      JudgeLinears(*spec, quant, group, experts, verdict);
    } else {
      LeaveOpen(config["architectures"][0].get<std::string>(), verdict);
    }
  }
  return verdicts;
}

}  // namespace moesaic::quantizer
