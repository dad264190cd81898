#include "quantizer/loader_rules.h"

#include "checkpoint/linear_source.h"
#include "models/decoder_spec.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::QuantConfig;
using checkpoint::QuantGroup;
using models::AttentionSpec;
using models::DecoderSpec;

/// A linear whose outputs vLLM joins with those of the next one.
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
  if (!spec.is_moe[layer]) {
    joined.push_back({name + "mlp.gate_proj", spec.intermediate});
  } else if (spec.moe.shared_intermediate > 0) {
    joined.push_back({name + "mlp.shared_experts.gate_proj", spec.moe.shared_intermediate});
  }
  return joined;
}

/// The projections that vLLM takes a layer's routed experts to be like.
std::vector<std::string> FirstExpert(int layer) {
  std::vector<std::string> modules;
  for (const char* projection : {"gate", "up", "down"}) {
    modules.push_back(fmt::format("model.layers.{}.mlp.experts.0.{}_proj", layer, projection));
  }
  return modules;
}

/// FP8 blocks of outputs may not go over from one joined linear to the next.
void RefuseRaggedBlocks(const DecoderSpec& spec, const QuantConfig& quant, const QuantGroup& group,
                        LoaderVerdict& verdict) {
  const auto refusal = [&group](const std::string& module, int outputs) {
    return fmt::format("no: {} has {} outputs, not whole blocks of {} (ValueError)", module, outputs,
                       group.block_rows);
  };
  for (int layer = spec.layers - 1; layer >= 0; --layer) {
    for (const JoinedLinear& linear : JoinedLinears(spec, layer)) {
      if (linear.outputs % group.block_rows != 0 && quant.GroupOf(linear.module) == &group) {
        verdict.dense = refusal(linear.module, linear.outputs);
      }
    }
    const std::string gate = FirstExpert(layer).front();
    if (spec.is_moe[layer] && spec.moe.intermediate % group.block_rows != 0 &&
        quant.GroupOf(gate) == &group) {
      verdict.experts = refusal(gate, spec.moe.intermediate);
    }
  }
}

/// One kernel runs a layer's experts: gate, up and down must be of one scheme.
void RefuseSplitExperts(const DecoderSpec& spec, const QuantConfig& quant, const QuantGroup& group,
                        LoaderVerdict& verdict) {
  if (!verdict.experts.starts_with("yes")) return;
  for (int layer = 0; layer < spec.layers; ++layer) {
    if (!spec.is_moe[layer]) continue;
    int in_group = 0;
    const std::vector<std::string> modules = FirstExpert(layer);
    for (const std::string& module : modules) in_group += quant.GroupOf(module) == &group ? 1 : 0;
    if (in_group == 0 || in_group == static_cast<int>(modules.size())) continue;
    verdict.experts = fmt::format(
        "no: gate, up and down of model.layers.{}.mlp.experts.0 are not of one scheme (ValueError)", layer);
    return;
  }
}

LoaderVerdict Judge(const DecoderSpec& spec, const QuantConfig& quant, const QuantGroup& group) {
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
        "yes (compute capability 7.5 to 9.0, or CPU; from 10.0 on it loads and then fails, vllm #54311)";
    verdict.experts =
        dynamic && by_channel
            ? "yes (before 2026-08 activations silently stayed 16 bits, vllm #50833)"
            : "no: fused experts take int8 by channel with activations by token only (RuntimeError)";
  } else if (group.format == "pack-quantized" && (group.num_bits == 4 || group.num_bits == 8) &&
             group.type == "int") {
    const bool by_channel = group.strategy == "channel";
    verdict.scheme =
        fmt::format("int{} {}, 16-bit activations", group.num_bits,
                    by_channel ? "by channel" : fmt::format("in groups of {}", group.group_size));
    const bool size =
        by_channel || group.group_size == 32 || group.group_size == 64 || group.group_size == 128;
    verdict.dense = verdict.experts = size ? "yes (Marlin, compute capability 7.5 and up)"
                                           : "no: Marlin has groups of 32, 64 and 128, and channels";
  } else if (group.format == "nvfp4-pack-quantized") {
    verdict.scheme = "NVFP4, 16-bit activations";
    verdict.dense = "yes (Marlin, compute capability 7.5 and up)";
    verdict.experts = "yes (Marlin, since vllm #30881)";
  } else if (group.format == "float-quantized" && group.strategy == "block") {
    verdict.scheme =
        fmt::format("FP8 in blocks of {} x {}, FP8 activations", group.block_rows, group.block_cols);
    const bool size = group.block_rows == 128 && group.block_cols == 128;
    verdict.dense = verdict.experts =
        size ? "yes (compute capability 8.9 and up; 16-bit activations by Marlin from 7.5 on)"
             : "no: blocks must be 128 x 128";
    if (size) RefuseRaggedBlocks(spec, quant, group, verdict);
  } else {
    verdict.scheme =
        fmt::format("{}-bit {} by {}, format {}", group.num_bits, group.type, group.strategy, group.format);
    verdict.dense = verdict.experts = "not known: moesaic quantize does not write it";
  }
  RefuseSplitExperts(spec, quant, group, verdict);
  return verdict;
}

}  // namespace

StatusOr<std::vector<LoaderVerdict>> JudgeVllm(const nlohmann::json& config, const std::string& file) {
  ASSIGN_OR_RETURN(const QuantConfig quant, checkpoint::ParseQuantConfig(config, file));
  if (quant.method != QuantConfig::Method::kCompressedTensors) {
    return InvalidArgument("{}: \"quantization_config\" is not of compressed-tensors", file);
  }
  ASSIGN_OR_RETURN(const DecoderSpec spec, models::SpecFromConfig(config, file));
  std::vector<LoaderVerdict> verdicts;
  for (const auto& [name, group] : config["quantization_config"]["config_groups"].items()) {
    verdicts.push_back(Judge(spec, quant, quant.groups[verdicts.size()]));
    verdicts.back().group = name;
  }
  return verdicts;
}

}  // namespace moesaic::quantizer
