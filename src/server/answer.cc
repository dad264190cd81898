#include "server/answer.h"

#include <chrono>
#include <iterator>
#include <utility>

namespace moesaic::server {
namespace {

Json LogprobJson(const text::Tokenizer& tokenizer, int32_t id, float logprob) {
  const std::string bytes = tokenizer.TokenBytes(id);
  Json codes = Json::array();
  for (const char c : bytes) codes.push_back(static_cast<unsigned char>(c));
  return {{"token", bytes}, {"logprob", logprob}, {"bytes", std::move(codes)}};
}

}  // namespace

void AnsweredChoice::Add(ChoiceDelta delta) {
  reasoning += delta.reasoning;
  content += delta.content;
  for (text::ToolCallDelta& call : delta.calls) {
    if (!call.name.empty()) calls.push_back({std::move(call.id), std::move(call.name), ""});
    if (!calls.empty()) calls.back().arguments += call.arguments;
  }
  std::move(delta.tokens.begin(), delta.tokens.end(), std::back_inserter(tokens));
  if (!delta.prompt_logprobs.empty()) prompt_logprobs = std::move(delta.prompt_logprobs);
  if (!delta.finish_reason.empty()) {
    finish_reason = std::move(delta.finish_reason);
    stop_cause = std::move(delta.stop_cause);
  }
}

Json UsageJson(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}},
          {"completion_tokens_details", {{"reasoning_tokens", usage.reasoning_tokens}}}};
}

Json StopReasonJson(const StopCause& cause) {
  if (const auto* text = std::get_if<std::string>(&cause)) return *text;
  if (const auto* id = std::get_if<int32_t>(&cause)) return *id;
  return nullptr;
}

Json TokenIds(const std::vector<GeneratedToken>& tokens) {
  Json ids = Json::array();
  for (const GeneratedToken& token : tokens) ids.push_back(token.id);
  return ids;
}

Json ChatLogprobs(const text::Tokenizer& tokenizer, const std::vector<GeneratedToken>& tokens, int top) {
  Json content = Json::array();
  for (const GeneratedToken& token : tokens) {
    Json entry = LogprobJson(tokenizer, token.id, token.logprobs.logprob);
    entry["top_logprobs"] = Json::array();
    for (size_t i = 0; i < token.logprobs.top.size() && i < static_cast<size_t>(top); ++i) {
      const engine::TokenLogprob& other = token.logprobs.top[i];
      entry["top_logprobs"].push_back(LogprobJson(tokenizer, other.token, other.logprob));
    }
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

std::string TokenText(const text::Tokenizer& tokenizer, int32_t id) { return tokenizer.TokenBytes(id); }

int64_t UnixNow() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Json CallsJson(const std::vector<AnsweredCall>& calls) {
  Json list = Json::array();
  for (const AnsweredCall& call : calls) {
    list.push_back({{"id", call.id},
                    {"type", "function"},
                    {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return list;
}

}  // namespace moesaic::server
