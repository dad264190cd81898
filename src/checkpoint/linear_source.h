// How the weight of a linear layer is stored, decided from config.json's "quantization_config" and the
// tensors that are there, and how it is read back. Formats: DeepSeek's FP8 blocks (README_WEIGHTS.md of
// DeepSeek-V3) and compressed-tensors (int-quantized, pack-quantized, nvfp4-pack-quantized, float-quantized).
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

/// The modules that one entry of "config_groups" names, or that "ignore" does.
class ModulePatterns {
 public:
  /// Plain names match whole module names, "re:..." a pattern from the name's start, "Linear" any linear
  /// layer.
  static StatusOr<ModulePatterns> Parse(const nlohmann::json& list, const std::string& where);
  bool MatchName(const std::string& module) const;  ///< by name or pattern
  bool any_linear() const { return linear_; }       ///< by "Linear"

 private:
  bool linear_ = false;
  std::vector<std::string> names_;
  std::vector<std::regex> patterns_;
};

/// One entry of "config_groups", as far as reading weights needs it.
struct QuantGroup {
  ModulePatterns targets;
  std::string format;
  int num_bits = 0;
  std::string type;      // "int" or "float"
  std::string strategy;  // "tensor", "channel", "group", "block", "tensor_group"
  bool symmetric = true;
  bool needs_group_index = false;  // actorder "group": columns are in another order than their groups
  int group_size = 0;
  int block_rows = 0, block_cols = 0;
  bool int8_activations = false;
  bool dynamic_activations = false;
};

/// "quantization_config" as a whole; empty when config.json has none.
struct QuantConfig {
  enum class Method { kNone, kFp8Blocks, kCompressedTensors };
  Method method = Method::kNone;
  int block_rows = 0, block_cols = 0;  // kFp8Blocks
  ModulePatterns ignore;
  std::vector<QuantGroup> groups;

  /// The group that `module` falls in; null when it is ignored or in none. Names and patterns go before
  /// "Linear", whatever the order of the groups.
  const QuantGroup* GroupOf(const std::string& module) const;
};

/// Reads config.json's "quantization_config"; an unknown method or scheme is refused by name.
StatusOr<QuantConfig> ParseQuantConfig(const nlohmann::json& config, const std::string& file);

/// Element `index` of a tensor of F32, F16, BF16 or F8_E4M3, else NaN.
float ScalarAt(const TensorEntry& entry, int64_t index);

}  // namespace moesaic::checkpoint
