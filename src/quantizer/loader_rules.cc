#include "quantizer/loader_rules.h"

#include "checkpoint/linear_source.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::QuantGroup;

LoaderVerdict Judge(const QuantGroup& group) {
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
    verdict.dense = "yes (compute capability 7.5 and up, or CPU)";
    verdict.experts =
        dynamic && by_channel
            ? "yes (before 2026-08 activations silently stayed 16 bits, vllm #50833)"
            : "no: fused experts take int8 by channel with activations by token only (ValueError)";
  } else if (group.format == "pack-quantized" && (group.num_bits == 4 || group.num_bits == 8) &&
             group.type == "int") {
    const bool by_channel = group.strategy == "channel";
    verdict.scheme =
        fmt::format("int{} {}, 16-bit activations", group.num_bits,
                    by_channel ? "by channel" : fmt::format("in groups of {}", group.group_size));
    const bool size =
        by_channel || group.group_size == 32 || group.group_size == 64 || group.group_size == 128;
    verdict.dense = verdict.experts = size ? "yes (Marlin, compute capability 8.0 and up)"
                                           : "no: Marlin has groups of 32, 64 and 128, and channels";
    if (size && group.num_bits == 8 && !by_channel) {
      verdict.experts =
          "yes (Marlin, compute capability 8.0 and up; some versions of 2026 take int8 experts by channel "
          "only)";
    }
  } else if (group.format == "nvfp4-pack-quantized") {
    verdict.scheme = "NVFP4, 16-bit activations";
    verdict.dense = "yes (Marlin, compute capability 7.5 and up)";
    verdict.experts = "yes (Marlin, since vllm #30881)";
  } else if (group.format == "float-quantized" && group.strategy == "block") {
    verdict.scheme =
        fmt::format("FP8 in blocks of {} x {}, FP8 activations", group.block_rows, group.block_cols);
    const bool size = group.block_rows == 128 && group.block_cols == 128;
    verdict.dense = verdict.experts =
        size ? "yes (compute capability 8.9 and up)" : "no: blocks must be 128 x 128";
  } else {
    verdict.scheme =
        fmt::format("{}-bit {} by {}, format {}", group.num_bits, group.type, group.strategy, group.format);
    verdict.dense = verdict.experts = "not known: moesaic quantize does not write it";
  }
  return verdict;
}

}  // namespace

StatusOr<std::vector<LoaderVerdict>> JudgeVllm(const nlohmann::json& config, const std::string& file) {
  ASSIGN_OR_RETURN(const checkpoint::QuantConfig quant, checkpoint::ParseQuantConfig(config, file));
  if (quant.method != checkpoint::QuantConfig::Method::kCompressedTensors) {
    return InvalidArgument("{}: \"quantization_config\" is not of compressed-tensors", file);
  }
  std::vector<LoaderVerdict> verdicts;
  for (const auto& [name, group] : config["quantization_config"]["config_groups"].items()) {
    verdicts.push_back(Judge(quant.groups[verdicts.size()]));
    verdicts.back().group = name;
  }
  return verdicts;
}

}  // namespace moesaic::quantizer
