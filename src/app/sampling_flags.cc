#include "app/sampling_flags.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <limits>
#include <type_traits>

#include "engine/sampling.h"

namespace moesaic::app {
namespace {

struct FloatField {
  const char* name;
  float engine::SamplingParams::*field;
};
constexpr std::array<FloatField, 6> kFloats = {
    {{"temperature", &engine::SamplingParams::temperature},
     {"top_p", &engine::SamplingParams::top_p},
     {"min_p", &engine::SamplingParams::min_p},
     {"repetition_penalty", &engine::SamplingParams::repetition_penalty},
     {"presence_penalty", &engine::SamplingParams::presence_penalty},
     {"frequency_penalty", &engine::SamplingParams::frequency_penalty}}};

template <typename T>
StatusOr<T> Parse(const std::string& name, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    if constexpr (std::is_unsigned_v<T>) {
      return InvalidArgument("{} must be a whole number from 0 to {}, found \"{}\"", name,
                             std::numeric_limits<T>::max(), text);
    }
    return InvalidArgument("{} must be a number, found \"{}\"", name, text);
  }
  return value;
}

template <typename T, typename U>
void Override(const std::optional<T>& flag, U* value) {
  if (flag) *value = *flag;
}

Status ReadGeneration(const nlohmann::json& generation, engine::SamplingParams* sampling) {
  const auto number = [&](const char* key, auto* value) {
    const auto found = generation.find(key);
    if (found == generation.end() || found->is_null()) return OkStatus();
    if (!found->is_number()) {
      return InvalidArgument("generation_config.json: \"{}\" must be a number, found {}", key, found->dump());
    }
    *value = found->get<std::remove_pointer_t<decltype(value)>>();
    return OkStatus();
  };
  RETURN_IF_ERROR(number("temperature", &sampling->temperature));
  RETURN_IF_ERROR(number("top_p", &sampling->top_p));
  RETURN_IF_ERROR(number("min_p", &sampling->min_p));
  RETURN_IF_ERROR(number("top_k", &sampling->top_k));
  RETURN_IF_ERROR(number("repetition_penalty", &sampling->repetition_penalty));
  const auto sample = generation.find("do_sample");
  if (sample != generation.end() && sample->is_boolean() && !sample->get<bool>()) sampling->temperature = 0;
  return OkStatus();
}

// Checks a flag's value as the engine would check it.
ValueCheck Allowed(const char* name) {
  return [name](std::string& value) {
    engine::SamplingParams sampling;
    return Message(SetSampling(name, value, &sampling));
  };
}

}  // namespace

void AddSamplingFlags(Verb& verb, SamplingFlags& flags, int max_tokens) {
  flags.max_tokens = max_tokens;
  const std::string group = "Sampling (defaults: the model's generation_config.json)";
  verb.AddOption("-n,--max-tokens", flags.max_tokens, "Maximum number of output tokens")
      .Range(0, std::numeric_limits<int>::max())
      .ShowDefault();
  verb.AddOption("--temperature", flags.temperature,
                 "Temperature of draws; 0: greedy; 0.7 if the model has none")
      .Check(Allowed("temperature"))
      .Group(group);
  verb.AddOption("--top-k", flags.top_k, "Draw from the K likeliest tokens; 0: all")
      .Check(Allowed("top_k"))
      .Group(group);
  verb.AddOption("--top-p", flags.top_p, "Draw from the likeliest tokens that together have probability P")
      .Check(Allowed("top_p"))
      .Group(group);
  verb.AddOption("--min-p", flags.min_p,
                 "Exclude tokens with less than P times the probability of the likeliest")
      .Check(Allowed("min_p"))
      .Group(group);
  verb.AddOption(
          "--repetition-penalty", flags.repetition_penalty,
          "Divide positive logits of tokens that have occurred by this, and multiply negative ones; 1: off")
      .Check(Allowed("repetition_penalty"))
      .Group(group);
  verb.AddOption("--presence-penalty", flags.presence_penalty,
                 "Subtract this from the logit of each token that the output contains")
      .Check(Allowed("presence_penalty"))
      .Group(group);
  verb.AddOption("--frequency-penalty", flags.frequency_penalty,
                 "Subtract this from a token's logit for each time that the output contains it")
      .Check(Allowed("frequency_penalty"))
      .Group(group);
  verb.AddOption("--seed", flags.seed, "Seed of draws: equal seeds give equal texts; default: random")
      .Check([](std::string& value) { return Message(Parse<uint64_t>("seed", value).status()); })
      .Group(group);
  verb.AddOption("--stop", flags.stop, "Text that ends the output; may be repeated").OneValue().Group(group);
  verb.AddFlag("--ignore-eos", flags.ignore_eos, "Do not end at the model's end-of-sequence tokens")
      .Group(group);
}

StatusOr<engine::SamplingParams> ResolveSampling(const SamplingFlags& flags, const nlohmann::json& generation,
                                                 float temperature) {
  engine::SamplingParams sampling;
  sampling.temperature = temperature;
  RETURN_IF_ERROR(ReadGeneration(generation, &sampling));
  Override(flags.temperature, &sampling.temperature);
  Override(flags.top_k, &sampling.top_k);
  Override(flags.top_p, &sampling.top_p);
  Override(flags.min_p, &sampling.min_p);
  Override(flags.repetition_penalty, &sampling.repetition_penalty);
  Override(flags.presence_penalty, &sampling.presence_penalty);
  Override(flags.frequency_penalty, &sampling.frequency_penalty);
  sampling.seed = flags.seed;
  sampling.max_tokens = flags.max_tokens;
  sampling.ignore_eos = flags.ignore_eos;
  RETURN_IF_ERROR(engine::CheckSampling(sampling, std::numeric_limits<int>::max()));
  return sampling;
}

StatusOr<std::optional<int>> MaxNewTokens(const nlohmann::json& generation) {
  const auto found = generation.find("max_new_tokens");
  if (found == generation.end() || found->is_null()) return std::optional<int>();
  const int64_t tokens = found->is_number_integer() ? found->get<int64_t>() : 0;
  if (tokens < 1 || tokens > std::numeric_limits<int>::max()) {
    return InvalidArgument("generation_config.json: \"max_new_tokens\" must be a positive integer, found {}",
                           found->dump());
  }
  return std::optional<int>(static_cast<int>(tokens));
}

Status SetSampling(const std::string& name, const std::string& value, engine::SamplingParams* sampling) {
  engine::SamplingParams changed = *sampling;
  bool known = false;
  for (const FloatField& field : kFloats) {
    if (name != field.name) continue;
    ASSIGN_OR_RETURN(changed.*field.field, Parse<float>(name, value));
    known = true;
  }
  if (name == "top_k" || name == "max_tokens") {
    ASSIGN_OR_RETURN((name == "top_k" ? changed.top_k : changed.max_tokens), Parse<int>(name, value));
  } else if (name == "seed") {
    if (value == "none") {
      changed.seed.reset();
    } else {
      ASSIGN_OR_RETURN(changed.seed, Parse<uint64_t>(name, value));
    }
  } else if (!known) {
    return InvalidArgument("there is no \"{}\"; known: {}", name, DescribeSampling(*sampling));
  }
  RETURN_IF_ERROR(engine::CheckSampling(changed, std::numeric_limits<int>::max()));
  *sampling = changed;
  return OkStatus();
}

std::string DescribeSampling(const engine::SamplingParams& sampling) {
  std::string text;
  for (const FloatField& field : kFloats) text += fmt::format("{} {}, ", field.name, sampling.*field.field);
  text += fmt::format("top_k {}, max_tokens {}, seed {}", sampling.top_k, sampling.max_tokens,
                      sampling.seed ? std::to_string(*sampling.seed) : "none");
  return text;
}

}  // namespace moesaic::app
