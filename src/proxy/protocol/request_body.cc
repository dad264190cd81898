#include "proxy/protocol/request_body.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

namespace moesaic::proxy {
namespace {

constexpr std::array<std::pair<std::string_view, Transfer>, 5> kTransfers = {{
    {"aggregated", Transfer::kAggregated},
    {"nixl", Transfer::kVllmNixl},
    {"mooncake", Transfer::kVllmMooncake},
    {"sglang", Transfer::kSglang},
    {"ascend", Transfer::kAscend},
}};
constexpr std::array<std::pair<std::string_view, Dialect>, 3> kDialects = {
    {{"vllm", Dialect::kVllm}, {"sglang", Dialect::kSglang}, {"moesaic", Dialect::kMoesaic}}};

// Fields by which a client could make an engine fetch blocks of its choice, choose a data-parallel rank, or
// replace the prompt that the proxy has read.
constexpr std::array<std::string_view, 10> kTransferFields = {
    "kv_transfer_params",   "bootstrap_host",     "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key",   "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank",
    "disaggregated_params", "input_ids"};

Status CheckType(const JsonMembers& members, std::string_view key, JsonType type, std::string_view name) {
  const JsonMember* member = members.Find(key);
  if (member == nullptr || member->type == JsonType::kNull || member->type == type) return OkStatus();
  return InvalidArgument("'{}' must be {}, found {}", key, name,
                         std::string(members.Text(*member).substr(0, 40)));
}

Status ReadCount(const JsonMembers& members, std::string_view key, int64_t* value) {
  RETURN_IF_ERROR(CheckType(members, key, JsonType::kNumber, "an integer"));
  if (!members.Given(key)) return OkStatus();
  std::optional<int64_t> count = members.Integer(key);
  if (!count) {  // 1e3 and 1000.0 are integers too
    const std::string_view text = members.Value(key);
    double real = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), real);
    constexpr double kExact = 9007199254740992;
    if (error != std::errc() || end != text.data() + text.size() || std::trunc(real) != real ||
        std::abs(real) > kExact) {
      return InvalidArgument("'{}' must be an integer, found {}", key, text.substr(0, 40));
    }
    count = static_cast<int64_t>(real);
  }
  if (*count < 0 && key != "priority")
    return InvalidArgument("'{}' must not be negative, found {}", key, *count);
  *value = *count;
  return OkStatus();
}

void OneToken(const RequestBody& body, JsonEdit* edit) {
  const bool completion_limit = body.members.Find("max_completion_tokens") != nullptr;
  if (completion_limit) edit->Set("max_completion_tokens", "1");
  if (!completion_limit || body.members.Find("max_tokens") != nullptr) edit->Set("max_tokens", "1");
  if (const auto least = body.members.Integer("min_tokens"); least && *least > 1)
    edit->Set("min_tokens", "1");
  edit->Set("stream", "false");
  edit->Remove("stream_options");
}

void SetBootstrap(const TransferPeers& peers, JsonEdit* edit) {
  edit->Set("bootstrap_host", JsonQuoted(peers.prefill_host));
  edit->Set("bootstrap_port", std::to_string(peers.bootstrap_port));
  edit->Set("bootstrap_room", std::to_string(peers.room));
}

// Puts ids where the engine looks for them. vLLM reads those of a chat from kv_transfer_params.
void Forward(const RequestBody& body, const ForwardedIds& ids, JsonEdit* edit) {
  if (ids.list.empty()) return;
  if (body.endpoint == Endpoint::kCompletions) return edit->Set("prompt", std::string(ids.list));
  if (ids.dialect == Dialect::kSglang) return edit->Set("input_ids", std::string(ids.list));
  const std::string_view params = edit->Current("kv_transfer_params");
  const StatusOr<JsonMembers> members = JsonMembers::Scan(params);
  if (!members.ok()) {  // there are none
    return edit->Set("kv_transfer_params", fmt::format(R"({{"prompt_token_ids":{}}})", ids.list));
  }
  JsonEdit inner(*members);
  inner.Set("prompt_token_ids", std::string(ids.list));
  edit->Set("kv_transfer_params", inner.Apply());
}

void RemoveTransferFields(const RequestBody& body, JsonEdit* edit) {
  if (!body.has_kv_transfer) return;
  for (const std::string_view field : kTransferFields) edit->Remove(field);
}

}  // namespace

StatusOr<Transfer> ParseTransfer(std::string_view name) {
  for (const auto& [known, transfer] : kTransfers) {
    if (known == name) return transfer;
  }
  if (name == "epd") return Unimplemented("a separate encode stage (EPD) is not supported; use a P/D mode");
  return InvalidArgument("P/D mode must be aggregated, nixl, mooncake, sglang or ascend, found '{}'", name);
}

std::string_view TransferName(Transfer transfer) { return kTransfers[static_cast<size_t>(transfer)].first; }

Mode ModeOf(Transfer transfer) {
  if (transfer == Transfer::kAggregated) return Mode::kAggregated;
  return transfer == Transfer::kVllmNixl ? Mode::kSequential : Mode::kParallel;
}

StatusOr<Dialect> ParseDialect(std::string_view name) {
  for (const auto& [known, dialect] : kDialects) {
    if (known == name) return dialect;
  }
  return InvalidArgument("engine must be vllm, sglang or moesaic, found '{}'", name);
}

Endpoint EndpointOf(std::string_view path) {
  if (path.ends_with("/v1/chat/completions")) return Endpoint::kChat;
  if (path.ends_with("/v1/completions")) return Endpoint::kCompletions;
  return Endpoint::kOther;
}

StatusOr<RequestBody> ReadRequestBody(Endpoint endpoint, std::string_view text) {
  RequestBody body;
  body.endpoint = endpoint;
  ASSIGN_OR_RETURN(body.members, JsonMembers::Scan(text));
  const JsonMembers& members = body.members;
  if (members.is_array()) return InvalidArgument("the body must be a JSON object, found an array");
  if (members.Given("ec_transfer_params")) {
    return Unimplemented("'ec_transfer_params': a separate encode stage (EPD) is not supported");
  }
  const std::string_view prompt = endpoint == Endpoint::kChat ? "messages" : "prompt";
  const JsonMember* input = members.Find(prompt);
  if (endpoint != Endpoint::kOther && (input == nullptr || input->type == JsonType::kNull)) {
    return InvalidArgument("missing required parameter '{}'", prompt);
  }
  if (endpoint == Endpoint::kChat && input->type != JsonType::kArray) {
    return InvalidArgument("'messages' must be an array");
  }
  if (endpoint == Endpoint::kCompletions && input->type != JsonType::kArray &&
      input->type != JsonType::kString) {
    return InvalidArgument("'prompt' must be a string or an array");
  }
  RETURN_IF_ERROR(CheckType(members, "model", JsonType::kString, "a string"));
  RETURN_IF_ERROR(CheckType(members, "cache_salt", JsonType::kString, "a string"));
  RETURN_IF_ERROR(CheckType(members, "stream", JsonType::kBool, "a boolean"));
  RETURN_IF_ERROR(CheckType(members, "stream_options", JsonType::kObject, "an object"));
  body.model = members.String("model").value_or("");
  body.cache_salt = members.String("cache_salt").value_or("");
  body.stream = members.Bool("stream").value_or(false);
  RETURN_IF_ERROR(ReadCount(members, "max_tokens", &body.max_tokens));
  RETURN_IF_ERROR(ReadCount(members, "max_completion_tokens", &body.max_tokens));
  RETURN_IF_ERROR(ReadCount(members, "priority", &body.priority));
  RETURN_IF_ERROR(ReadCount(members, "n", &body.choices));
  if (members.Given("stream_options")) {
    ASSIGN_OR_RETURN(const JsonMembers options, JsonMembers::Scan(members.Value("stream_options")));
    body.include_usage = options.Bool("include_usage").value_or(false);
  }
  for (const std::string_view field : kTransferFields) {
    body.has_kv_transfer = body.has_kv_transfer || members.Find(field) != nullptr;
  }
  return body;
}

std::optional<std::vector<int32_t>> PromptIds(const RequestBody& body) {
  if (body.endpoint != Endpoint::kCompletions) return std::nullopt;
  const JsonMember* prompt = body.members.Find("prompt");
  if (prompt->type != JsonType::kArray) return std::nullopt;
  const std::string_view list = body.members.Text(*prompt);
  std::vector<int32_t> ids;
  const char* at = list.data() + 1;
  const char* const end = list.data() + list.size() - 1;
  const auto space = [&at, end] {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) ++at;
  };
  for (space(); at < end; space()) {
    int32_t id = 0;
    const auto [next, error] = std::from_chars(at, end, id);
    if (error != std::errc() || id < 0)
      return std::nullopt;  // texts, lists of ids, or numbers that are no ids
    ids.push_back(id);
    at = next;
    space();
    if (at == end) break;
    if (*at != ',') return std::nullopt;
    ++at;
  }
  if (ids.empty()) return std::nullopt;
  return ids;
}

std::string IdList(std::span<const int32_t> ids) {
  constexpr size_t kMaxDigits = 12;  // with a sign and a comma
  std::string list(ids.size() * kMaxDigits + 2, '[');
  char* at = list.data() + 1;
  for (const int32_t id : ids) {
    if (at != list.data() + 1) *at++ = ',';
    at = std::to_chars(at, list.data() + list.size(), id).ptr;
  }
  *at++ = ']';
  list.resize(static_cast<size_t>(at - list.data()));
  return list;
}

std::string AggregatedBody(const RequestBody& body, const ForwardedIds& ids) {
  JsonEdit edit(body.members);
  RemoveTransferFields(body, &edit);
  Forward(body, ids, &edit);
  return edit.empty() ? std::string(body.text()) : edit.Apply();
}

std::string PrefillBody(const RequestBody& body, const TransferPeers& peers, std::string_view params,
                        const ForwardedIds& ids) {
  JsonEdit edit(body.members);
  RemoveTransferFields(body, &edit);
  switch (peers.transfer) {
    case Transfer::kAggregated:
      return AggregatedBody(body, ids);
    case Transfer::kSglang:
      SetBootstrap(peers, &edit);
      Forward(body, ids, &edit);
      return edit.Apply();
    case Transfer::kVllmNixl:
      edit.Set("kv_transfer_params",
               R"({"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,)"
               R"("remote_block_ids":null,"remote_host":null,"remote_port":null})");
      break;
    case Transfer::kVllmMooncake:
      edit.Set("kv_transfer_params",
               fmt::format(R"({{"do_remote_prefill":false,"do_remote_decode":true,"transfer_id":{}}})",
                           JsonQuoted(peers.transfer_id)));
      break;
    case Transfer::kAscend:
      edit.Set("kv_transfer_params", std::string(params));
      break;
  }
  OneToken(body, &edit);
  Forward(body, ids, &edit);
  return edit.Apply();
}

std::string DecodeBody(const RequestBody& body, const TransferPeers& peers, std::string_view params,
                       const ForwardedIds& ids) {
  JsonEdit edit(body.members);
  RemoveTransferFields(body, &edit);
  switch (peers.transfer) {
    case Transfer::kAggregated:
      break;
    case Transfer::kSglang:
      SetBootstrap(peers, &edit);
      if (peers.prefill_rank) edit.Set("disagg_prefill_dp_rank", std::to_string(*peers.prefill_rank));
      break;
    case Transfer::kVllmNixl:
      if (!params.empty()) edit.Set("kv_transfer_params", std::string(params));
      break;
    case Transfer::kVllmMooncake:
      edit.Set("kv_transfer_params",
               fmt::format(R"({{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":{},)"
                           R"("remote_bootstrap_addr":{},"remote_engine_id":{}}})",
                           JsonQuoted(peers.transfer_id), JsonQuoted(peers.bootstrap_address),
                           JsonQuoted(peers.engine_id)));
      break;
    case Transfer::kAscend:
      edit.Set("kv_transfer_params",
               fmt::format(R"({{"do_remote_decode":false,"do_remote_prefill":true,"metaserver":{}}})",
                           JsonQuoted(peers.metaserver)));
      break;
  }
  Forward(body, ids, &edit);
  return edit.empty() ? std::string(body.text()) : edit.Apply();
}

std::string ReleaseBody(const RequestBody& body, std::string_view params) {
  JsonEdit edit(body.members);
  RemoveTransferFields(body, &edit);
  edit.Set("kv_transfer_params", std::string(params));
  OneToken(body, &edit);
  for (const std::string_view field : {"n", "best_of"}) {
    if (body.members.Find(field) != nullptr) edit.Set(field, "1");
  }
  for (const std::string_view field : {"logprobs", "top_logprobs", "prompt_logprobs", "echo"})
    edit.Remove(field);
  return edit.Apply();
}

bool CanForwardTokens(const RequestBody& body, Dialect dialect, bool decode) {
  const JsonMembers& members = body.members;
  if (body.endpoint == Endpoint::kCompletions) {
    const JsonMember* prompt = members.Find("prompt");
    // vLLM truncates ids and text at different ends of its own pipeline; such prompts keep their text.
    return prompt->type == JsonType::kString && !members.Bool("echo").value_or(false) &&
           !members.Given("truncate_prompt_tokens") && !members.Given("prompt_embeds") &&
           !members.Given("suffix");
  }
  if (body.endpoint != Endpoint::kChat) return false;
  if (dialect == Dialect::kVllm) return decode;
  if (dialect != Dialect::kSglang) return false;
  for (const std::string_view field : {"tools", "chat_template_kwargs", "chat_template", "documents",
                                       "continue_final_message", "reasoning_effort", "input_ids"}) {
    if (members.Given(field)) return false;
  }
  return true;
}

}  // namespace moesaic::proxy
