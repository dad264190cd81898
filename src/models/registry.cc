#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>

#include "models/architectures.h"

namespace moesaic::models {
namespace {

struct Architecture {
  const char* name;  // config.json "architectures"[0]
  StatusOr<DecoderSpec> (*spec)(const nlohmann::json& config, const std::string& file);
};

constexpr Architecture kArchitectures[] = {
    {"DeepseekV2ForCausalLM", DeepseekV2Spec}, {"DeepseekV3ForCausalLM", DeepseekV3Spec},
    {"Glm4MoeForCausalLM", Glm4MoeSpec},       {"LlamaForCausalLM", LlamaSpec},
    {"MistralForCausalLM", MistralSpec},       {"PanguUltraMoEForCausalLM", PanguUltraMoeSpec},
    {"Qwen3ForCausalLM", Qwen3Spec},           {"Qwen3MoeForCausalLM", Qwen3MoeSpec},
};

}  // namespace

std::vector<std::string> SupportedArchitectures() {
  std::vector<std::string> names;
  for (const Architecture& architecture : kArchitectures) names.emplace_back(architecture.name);
  return names;
}

StatusOr<DecoderSpec> SpecFromConfig(const nlohmann::json& config, const std::string& file) {
  const auto names = config.find("architectures");
  if (names == config.end() || !names->is_array() || names->size() != 1 || !names->at(0).is_string()) {
    return InvalidArgument("{}: \"architectures\" must be a list of one name, found {}", file,
                           names == config.end() ? "nothing" : names->dump());
  }
  const std::string name = names->at(0).get<std::string>();
  const auto* found =
      std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                   [&](const Architecture& architecture) { return architecture.name == name; });
  if (found == std::end(kArchitectures)) {
    return Unimplemented("{}: architecture \"{}\" is not supported; this build runs {}", file, name,
                         fmt::join(SupportedArchitectures(), ", "));
  }
  return found->spec(config, file);
}

Status OverrideTopK(DecoderSpec& spec, int top_k) {
  if (top_k == 0) return OkStatus();
  MoeSpec& moe = spec.moe;
  if (moe.experts == 0)
    return InvalidArgument("experts per token can't be chosen: {} has no experts", spec.architecture);
  const int reachable = moe.experts / moe.groups * moe.top_groups;
  if (top_k < 1 || top_k > reachable) {
    return InvalidArgument("experts per token must be in [1, {}], found {}", reachable, top_k);
  }
  moe.top_k = top_k;
  return OkStatus();
}

}  // namespace moesaic::models
