#include "server/sampling_fields.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "server/api_error.h"

namespace moesaic::server {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr size_t kMaxStops = 16;
// Each choice has a copy, and each token of it is compared with all beginnings of the string.
constexpr size_t kMaxStopBytes = 1024;
constexpr int kMaxStopIds = 1024;

void ReadLogitBias(Fields& body, const ServedModel& model, engine::SamplingParams* sampling) {
  const Json* bias = body.Object("logit_bias");
  if (bias == nullptr) return;
  for (const auto& [key, value] : bias->items()) {
    int32_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    const std::string path = "logit_bias." + key;
    if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= model.vocab_size) {
      return body.Merge(
          FieldError(path, "invalid_value",
                     fmt::format("Invalid key in 'logit_bias': a token id below {}, found \"{}\"",
                                 model.vocab_size, key)));
    }
    if (!value.is_number()) return body.Merge(TypeError(path, "a number", value));
    const auto number = value.get<double>();
    if (!(number >= -100 && number <= 100)) {
      return body.Merge(FieldError(
          path, "invalid_value",
          fmt::format("Invalid '{}': must be between -100 and 100, found {}", path, value.dump())));
    }
    sampling->logit_bias.emplace_back(id, static_cast<float>(number));
  }
}

void ReadStopIds(Fields& body, const ServedModel& model, engine::SamplingParams* sampling) {
  const Json* ids = body.Array("stop_token_ids");
  if (ids == nullptr) return;
  if (ids->size() > kMaxStopIds) {
    return body.Fail(
        "stop_token_ids", "array_above_max_length",
        fmt::format("Invalid 'stop_token_ids': at most {} ids, found {}", kMaxStopIds, ids->size()));
  }
  for (const Json& id : *ids) {
    if (!id.is_number_integer()) return body.Merge(TypeError("stop_token_ids", "an array of integers", id));
    const auto number = id.get<int64_t>();
    if (number < 0 || number >= model.vocab_size) {
      return body.Fail(
          "stop_token_ids", "invalid_value",
          fmt::format("Invalid 'stop_token_ids': ids below {}, found {}", model.vocab_size, id.dump()));
    }
    sampling->stop_ids.push_back(static_cast<int32_t>(number));
  }
}

Status ReadSessionState(Fields& holder, const char* name, cache::Session* session) {
  std::string state;
  holder.String(name, &state);
  if (!holder.ok() || state.empty()) return holder.status();
  if (state != "continues" && state != "ends") {
    holder.Fail(name, "invalid_value",
                fmt::format("Invalid '{}': 'continues' or 'ends', found '{}'", holder.Path(name), state));
  }
  *session = state == "ends" ? cache::Session::kEnds : cache::Session::kContinues;
  return holder.status();
}

// Reads "session". OpenAI's "prompt_cache_key", and a retention of 24 hours, also announce later turns of the
// conversation.
void ReadSession(Fields& body, GenerationFields* fields) {
  std::string key, retention;
  body.String("prompt_cache_key", &key);
  body.String("prompt_cache_retention", &retention);
  engine::SessionNote& note = fields->session;
  if (!key.empty() || retention == "24h") note.state = cache::Session::kContinues;
  const Json* session = body.Any("session");
  if (session == nullptr || session->is_string()) {
    body.Merge(ReadSessionState(body, "session", &note.state));
    return;
  }
  if (!session->is_object()) return body.FailType("session", "a string or an object", *session);
  Fields members(*session, "session");
  note.state = cache::Session::kContinues;
  body.Merge(ReadSessionState(members, "state", &note.state));
  members.Int("tokens", 0, std::numeric_limits<int64_t>::max(), &note.tokens);
  float seconds = 0;
  members.Float("returns_in", 0, kMaxReturnSeconds, &seconds);
  note.returns_in = seconds;
  for (const char* name : {"tokens", "returns_in"}) {
    if (members.ok() && note.state == cache::Session::kEnds && members.Has(name)) {
      members.Fail(name, "invalid_value",
                   fmt::format("Invalid '{}': a session that ends has no later turn", members.Path(name)));
    }
  }
  body.Merge(members.status());
}

// Reads "kv_sparsity". Absent members have the server's default; an absent mode is "decode" where that is
// dense.
void ReadSparsity(Fields& body, const ServedModel& model, GenerationFields* fields) {
  const Json* object = body.Object("kv_sparsity");
  if (object == nullptr) return;
  engine::RequestSparsity sparsity = model.sparsity.defaults;
  if (sparsity.mode == engine::SparsityMode::kDense) sparsity.mode = engine::SparsityMode::kDecode;
  Fields members(*object, "kv_sparsity");
  std::string mode = ToString(sparsity.mode);
  members.String("mode", &mode);
  members.Int("budget", engine::kMinSparsityBudget, kMaxInt / 2, &sparsity.budget);
  members.Int("reuse", 1, tensor::kKvBlockTokens, &sparsity.reuse);
  if (members.ok()) {
    const auto parsed = engine::ParseSparsityMode(mode);
    if (!parsed.ok()) {
      members.Fail("mode", "invalid_value",
                   fmt::format("Invalid 'kv_sparsity.mode': 'dense', 'decode' or 'all', found '{}'", mode));
    } else if (*parsed != engine::SparsityMode::kDense && !model.sparsity.key_summaries) {
      members.Fail(
          "mode", "unsupported_value",
          fmt::format("Invalid 'kv_sparsity.mode': '{}' needs a server started with --kv-sparsity", mode));
    } else {
      sparsity.mode = *parsed;
    }
  }
  body.Merge(members.status());
  fields->sparsity = sparsity;
}

}  // namespace

GenerationFields ReadGeneration(Fields& body, const ServedModel& model) {
  GenerationFields fields;
  engine::SamplingParams& sampling = fields.sampling;
  sampling = model.defaults;
  std::string name;
  body.String("model", &name);
  if (body.ok()) body.Merge(model.CheckName(name));
  body.Float("temperature", 0, 100, &sampling.temperature);
  body.ShareAbove0("top_p", &sampling.top_p);
  body.Int("top_k", -1, kMaxInt, &sampling.top_k);
  sampling.top_k = std::max(sampling.top_k, 0);  // -1 means "off" as well
  body.Float("min_p", 0, 1, &sampling.min_p);
  body.ShareAbove0("typical_p", &sampling.typical_p);
  body.Float("repetition_penalty", 1e-6, 100, &sampling.repetition_penalty);
  body.Float("presence_penalty", -2, 2, &sampling.presence_penalty);
  body.Float("frequency_penalty", -2, 2, &sampling.frequency_penalty);
  if (body.Has("seed")) {
    int64_t seed = 0;
    body.Int("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), &seed);
    sampling.seed = static_cast<uint64_t>(seed);
  }
  body.Int("min_tokens", 0, kMaxInt, &sampling.min_tokens);
  body.Bool("ignore_eos", &sampling.ignore_eos);
  ReadLogitBias(body, model, &sampling);
  ReadStopIds(body, model, &sampling);
  ReadStops(body, "stop", &fields.stop);
  body.Bool("include_stop_str_in_output", &fields.include_stop);
  body.Bool("skip_special_tokens", &fields.skip_special);
  body.Int("n", 1, kMaxChoices, &fields.n);
  fields.best_of = fields.n;
  body.Bool("return_token_ids", &fields.return_token_ids);
  body.Bool("stream", &fields.stream);
  body.String("cache_salt", &fields.cache_salt);
  body.Int("priority", -kMaxInt, kMaxInt, &fields.priority);
  std::string user;  // has no effect: the key or the address is the unit of fair scheduling
  body.String("user", &user);
  ReadSession(body, &fields);
  ReadSparsity(body, model, &fields);
  if (const Json* options = body.Object("stream_options")) {
    Fields stream(*options, "stream_options");
    stream.Bool("include_usage", &fields.stream_usage);
    stream.Bool("continuous_usage_stats", &fields.stream_usage_continuous);
    body.Merge(stream.status());
    if (body.ok() && !fields.stream) {
      body.Fail("stream_options", "invalid_value", "'stream_options' may only be given with 'stream': true");
    }
  }
  if (body.Has("max_tokens")) {
    int most = 0;
    body.Int("max_tokens", 0, kMaxInt, &most);
    fields.max_tokens = most;
  }
  return fields;
}

void ReadStops(Fields& body, const char* name, std::vector<std::string>* stops) {
  body.Strings(name, kMaxStops, stops);
  for (const std::string& stop : *stops) {
    if (stop.size() <= kMaxStopBytes) continue;
    body.Fail(name, "string_above_max_length",
              fmt::format("Invalid '{}': at most {} bytes each, found {}", body.Path(name), kMaxStopBytes,
                          stop.size()));
  }
}

// Clients recognize a prompt that is too long by OpenAI's words "maximum context length is".
StatusOr<int> OutputBudget(const ServedModel& model, size_t prompt, std::optional<int> asked, int otherwise,
                           const char* param) {
  const int64_t room = model.max_context - static_cast<int64_t>(prompt);
  if (room <= 0) {
    return FieldError(
        param, "context_length_exceeded",
        fmt::format("This model's maximum context length is {} tokens. However, the prompt has {} and leaves "
                    "no room for an answer. Please shorten it.",
                    model.max_context, prompt));
  }
  if (asked && *asked > room) {
    return FieldError(
        param, "context_length_exceeded",
        fmt::format(
            "This model's maximum context length is {} tokens. However, the prompt has {} and {} more "
            "were requested. Please shorten one of them.",
            model.max_context, prompt, *asked));
  }
  return static_cast<int>(std::min<int64_t>(asked.value_or(otherwise), room));
}

}  // namespace moesaic::server
