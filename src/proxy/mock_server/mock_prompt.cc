#include "proxy/mock_server/mock_prompt.h"

#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "proxy/protocol/json_members.h"
#include "proxy/protocol/url_host.h"

namespace moesaic::proxy {
namespace {

constexpr int32_t kVocabulary = 50'000;
constexpr size_t kBytesPerToken = 4;
constexpr uint32_t kDefaultOutput = 16;

std::vector<int32_t> TextIds(std::string_view text) {
  std::vector<int32_t> ids;
  for (size_t at = 0; at < text.size(); at += kBytesPerToken) {
    const std::string_view piece = text.substr(at, kBytesPerToken);
    ids.push_back(static_cast<int32_t>(XXH3_64bits(piece.data(), piece.size()) % kVocabulary));
  }
  if (ids.empty()) ids.push_back(0);
  return ids;
}

StatusOr<std::vector<int32_t>> IdList(std::string_view json) {
  std::vector<int32_t> ids;
  const char* at = json.data();
  const char* const end = at + json.size();
  while (at < end) {
    int32_t id = 0;
    const auto [next, error] = std::from_chars(at, end, id);
    if (error == std::errc()) {
      ids.push_back(id);
      at = next;
    } else {
      ++at;
    }
  }
  if (ids.empty()) return InvalidArgument("the list of token ids is empty");
  return ids;
}

Status ReadTransfer(const JsonMembers& members, Transfer transfer, MockPrompt* prompt) {
  MockTransfer& read = prompt->transfer;
  if (transfer == Transfer::kSglang) {
    const auto room = members.Integer("bootstrap_room");
    const auto host = members.String("bootstrap_host");
    const auto port = members.Integer("bootstrap_port");
    if (!room || !host || !port)
      return InvalidArgument("bootstrap_host, bootstrap_port and bootstrap_room are required");
    read.key = std::to_string(*room);
    read.peer = fmt::format("{}:{}", *host, *port);
    read.side = MockTransfer::Side::kPrefill;  // the caller knows its own role
    return OkStatus();
  }
  const JsonMember* member = members.Find("kv_transfer_params");
  if (member == nullptr || member->type != JsonType::kObject) return OkStatus();
  ASSIGN_OR_RETURN(const JsonMembers params, JsonMembers::Scan(members.Text(*member)));
  if (const JsonMember* ids = params.Find("prompt_token_ids");
      ids != nullptr && ids->type == JsonType::kArray) {
    ASSIGN_OR_RETURN(prompt->ids, IdList(params.Text(*ids)));
    prompt->had_ids = true;
  }
  const bool decode = params.Bool("do_remote_prefill").value_or(false);
  const bool prefill = params.Bool("do_remote_decode").value_or(false);
  read.side = decode    ? MockTransfer::Side::kDecode
              : prefill ? MockTransfer::Side::kPrefill
                        : MockTransfer::Side::kNone;
  switch (transfer) {
    case Transfer::kVllmNixl:
      read.key = params.String("remote_request_id").value_or("");
      read.prefilled = true;
      if (decode)
        read.peer = fmt::format("{}:{}", UrlHost(params.String("remote_host").value_or("")),
                                params.Integer("remote_port").value_or(0));
      break;
    case Transfer::kVllmMooncake: {
      read.key = params.String("transfer_id").value_or("");
      std::string address = params.String("remote_bootstrap_addr").value_or("");
      if (address.starts_with("http://")) address.erase(0, 7);
      read.peer = std::move(address);
      break;
    }
    case Transfer::kAscend:
      read.key = params.String("remote_request_id").value_or("");
      read.metaserver = params.String("metaserver").value_or("");
      if (!decode)
        read.peer = fmt::format("{}:{}", UrlHost(params.String("remote_host").value_or("")),
                                params.Integer("remote_port").value_or(0));
      break;
    default:
      read.side = MockTransfer::Side::kNone;
  }
  return OkStatus();
}

}  // namespace

uint64_t MockBlockHash(uint64_t parent, std::span<const int32_t> tokens) {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), parent);
}

StatusOr<MockPrompt> ReadMockPrompt(Endpoint endpoint, std::string_view text, Transfer transfer,
                                    uint32_t block_size, uint64_t seed) {
  MockPrompt prompt;
  ASSIGN_OR_RETURN(prompt.body, ReadRequestBody(endpoint, text));
  const JsonMembers& members = prompt.body.members;
  RETURN_IF_ERROR(ReadTransfer(members, transfer, &prompt));
  if (const JsonMember* ids = members.Find("input_ids"); ids != nullptr && ids->type == JsonType::kArray) {
    ASSIGN_OR_RETURN(prompt.ids, IdList(members.Text(*ids)));
    prompt.had_ids = true;
  } else if (std::optional<std::vector<int32_t>> in = PromptIds(prompt.body)) {
    prompt.ids = *std::move(in);
    prompt.had_ids = true;
  } else if (!prompt.had_ids) {
    prompt.ids = TextIds(members.Value(endpoint == Endpoint::kChat ? "messages" : "prompt"));
  }
  prompt.output_tokens = prompt.body.max_tokens > 0
                             ? static_cast<uint32_t>(std::min<int64_t>(prompt.body.max_tokens, 1 << 20))
                             : kDefaultOutput;
  prompt.return_ids = members.Bool("return_token_ids").value_or(false);
  uint64_t parent = XXH3_64bits_withSeed(prompt.body.cache_salt.data(), prompt.body.cache_salt.size(), seed);
  for (size_t at = 0; at + block_size <= prompt.ids.size(); at += block_size) {
    parent = MockBlockHash(parent, std::span(prompt.ids).subspan(at, block_size));
    prompt.keys.push_back(parent);
  }
  return prompt;
}

}  // namespace moesaic::proxy
