// Flags of sampling, which override generation_config.json, which overrides the defaults.
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

/// Flags of the command line; absent ones keep the model's own value.
struct SamplingFlags {
  std::optional<float> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  int max_tokens = 0;
  bool ignore_eos = false;
};

/// Declares them on `verb`; `max_tokens` is the default of --max-tokens.
void AddSamplingFlags(Verb& verb, SamplingFlags& flags, int max_tokens);

/// `generation` is generation_config.json or an empty object. A field of the wrong type is rejected by name.
StatusOr<engine::SamplingParams> ResolveSampling(const SamplingFlags& flags,
                                                 const nlohmann::json& generation);

/// Sets one parameter by name, for `/set`. Names are those of the flags with underscores.
Status SetSampling(const std::string& name, const std::string& value, engine::SamplingParams* sampling);

/// Returns "temperature 0.7, top_p 0.9, ..." of all parameters of /set.
std::string DescribeSampling(const engine::SamplingParams& sampling);

}  // namespace moesaic::app
