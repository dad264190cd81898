// Finds and decodes the weight of a linear layer. The storage scheme follows from config.json's
// "quantization_config" and the tensors present. Formats: DeepSeek's FP8 blocks (README_WEIGHTS.md of
// DeepSeek-V3) and compressed-tensors (int-quantized, pack-quantized, nvfp4-pack-quantized, float-quantized).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

/// Modules selected by one entry of "config_groups", or by "ignore".
class ModulePatterns {
 public:
  /// A plain name matches a whole module name, "re:..." a pattern from the name's start, "Linear" any linear
  /// layer.
  static StatusOr<ModulePatterns> Parse(const nlohmann::json& list, const std::string& where);
  bool MatchName(const std::string& module) const;  ///< matches names and patterns
  bool any_linear() const { return linear_; }       ///< whether "Linear" is listed

 private:
  bool linear_ = false;
  std::vector<std::string> names_;
  std::vector<std::regex> patterns_;
};

/// The fields of one "config_groups" entry that reading weights requires.
struct QuantGroup {
  ModulePatterns targets;
  std::string format;
  int num_bits = 0;
  std::string type;      // "int" or "float"
  std::string strategy;  // "tensor", "channel", "group", "block", "tensor_group"
  bool symmetric = true;
  bool needs_group_index = false;  // actorder "group": the order of columns differs from the order of groups
  int group_size = 0;
  int block_rows = 0, block_cols = 0;
  bool int8_activations = false;
  bool dynamic_activations = false;
};

/// The whole "quantization_config"; empty if config.json has none.
struct QuantConfig {
  enum class Method { kNone, kFp8Blocks, kCompressedTensors };
  Method method = Method::kNone;
  int block_rows = 0, block_cols = 0;  // kFp8Blocks
  ModulePatterns ignore;
  std::vector<QuantGroup> groups;

  /// Returns the group of `module`, or null if it is ignored or in no group. Names and patterns take
  /// precedence over "Linear", regardless of the order of groups.
  const QuantGroup* GroupOf(const std::string& module) const;
};

/// Parses config.json's "quantization_config". The error for an unknown method or scheme names it.
StatusOr<QuantConfig> ParseQuantConfig(const nlohmann::json& config, const std::string& file);

/// Returns whether Checkpoint::FindLinear knows the tensor `field` of a module: "weight", "weight_scale", ...
/// It reads or checks all of them.
bool IsLinearField(std::string_view field);

/// Returns element `index` of a tensor of F32, F16, BF16 or F8_E4M3, otherwise NaN.
float ScalarAt(const TensorEntry& entry, int64_t index);

}  // namespace moesaic::checkpoint
