// Sampling parameters: a flag overrides generation_config.json, which overrides the default.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "app/flags.h"
#include "base/status.h"
#include "engine/request.h"

namespace moesaic::app {

/// Temperature of `chat` and `generate` for a model that has none: varied answers that stay on the subject.
/// The server uses OpenAI's default instead, see kServerTemperature.
inline constexpr float kDefaultTemperature = 0.7f;
inline constexpr float kServerTemperature = 1;

/// Flags of the command line. An absent flag leaves the model's own value.
struct SamplingFlags {
  std::optional<float> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  int max_tokens = 0;
  bool ignore_eos = false;
};

/// Declares the flags on `verb`. `max_tokens` is the default of --max-tokens.
void AddSamplingFlags(Verb& verb, SamplingFlags& flags, int max_tokens);

/// `generation` is generation_config.json or an empty object. The error names a field of the wrong type.
/// `temperature` is the default where neither sets one.
StatusOr<engine::SamplingParams> ResolveSampling(const SamplingFlags& flags, const nlohmann::json& generation,
                                                 float temperature = kDefaultTemperature);

/// "max_new_tokens" of generation_config.json, or nothing. The error names a value that is no positive
/// integer.
StatusOr<std::optional<int>> MaxNewTokens(const nlohmann::json& generation);

/// Sets one parameter by its name, for `/set`. Names are those of the flags with underscores.
Status SetSampling(const std::string& name, const std::string& value, engine::SamplingParams* sampling);

/// Lists all parameters of SetSampling: "temperature 0.7, top_p 0.9, ...".
std::string DescribeSampling(const engine::SamplingParams& sampling);

}  // namespace moesaic::app
