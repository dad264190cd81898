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

/// Temperature of `chat` and `generate` if generation_config.json has none. It varies answers and keeps them
/// on the subject.
inline constexpr float kDefaultTemperature = 0.7f;
/// Temperature of the server in the same case: the default of OpenAI's API.
inline constexpr float kServerTemperature = 1;

/// Flags of the command line. If a flag is absent, the model's own value applies.
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

/// Returns the parameters of a request. `generation` is generation_config.json or an empty object.
/// `temperature` is used if neither the flags nor `generation` have one. InvalidArgument names a field of
/// `generation` with a wrong type, or a value out of range. SamplingFlags::stop is not part of the result.
StatusOr<engine::SamplingParams> ResolveSampling(const SamplingFlags& flags, const nlohmann::json& generation,
                                                 float temperature = kDefaultTemperature);

/// Returns "max_new_tokens" of generation_config.json, if present. InvalidArgument if it is not a positive
/// integer.
StatusOr<std::optional<int>> MaxNewTokens(const nlohmann::json& generation);

/// Sets one parameter by its name, for `/set`. Names are those of the flags with underscores. After an error
/// (unknown name, bad value) `sampling` is unchanged.
Status SetSampling(const std::string& name, const std::string& value, engine::SamplingParams* sampling);

/// Returns all parameters of SetSampling with their values: "temperature 0.7, top_p 0.9, ...".
std::string DescribeSampling(const engine::SamplingParams& sampling);

}  // namespace moesaic::app
