// Feeds bodies to every endpoint's reader, which must accept each or refuse it with an error that names the
// field.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "server/anthropic_prompt.h"
#include "server/api_error.h"
#include "server/chat_prompt.h"
#include "server/prompts.h"
#include "server/responses_request.h"
#include "server/sampling_fields.h"
#include "server/structured.h"
#include "server/test_model.h"
#include "server/tracing.h"

namespace moesaic::server {
namespace {

// A tokenizer of few tokens is sufficient, since the readers only count tokens and look them up.
constexpr const char* kTokenizer = R"({"version": "1.0", "added_tokens": [
  {"id": 3, "content": "<end>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
  "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})";

const ServedModel& Model() {
  static const ServedModel model = [] {
    auto tokenizer = text::Tokenizer::FromJson(kTokenizer, "").value();
    ServedModel made = ModelOf(std::move(tokenizer), /*end=*/3, text::ToolFormat::kHermes);
    made.chat.emplace(
        text::ChatTemplate::FromSource("{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}")
            .value());
    made.max_context = 1 << 20;
    made.vocab_size = 4;
    made.sparsity.key_summaries = true;
    return made;
  }();
  return model;
}

// Checks that a refusal has a status below 500 and is valid JSON in both forms.
void Check(const Status& status) {
  if (status.ok()) return;
  const ApiError error = ErrorOf(status);
  if (error.http_status >= 500) std::abort();
  if (!Json::accept(ErrorJson(error, ApiStyle::kOpenAi)) ||
      !Json::accept(ErrorJson(error, ApiStyle::kAnthropic)))
    std::abort();
}

void ReadBody(uint8_t kind, const Json& json) {
  Fields body(json, "");
  Conversation conversation;
  switch (kind % 4) {
    case 0:
      ReadGeneration(body, Model());
      conversation = ReadConversation(body);
      ReadStructured(body);
      break;
    case 1:
      conversation = ReadMessages(body);
      break;
    case 2:
      conversation = ReadResponses(body, Model(), Json()).conversation;
      break;
    default:
      ReadGeneration(body, Model());
      if (const Json* prompt = body.Any("prompt"))
        Check(ReadPrompts(Model(), *prompt, "prompt", true).status());
  }
  Check(body.status());
  if (!body.ok() || conversation.messages.empty()) return;
  Check(RenderPrompt(Model(), conversation).status());
  Check(ForcedCalls(Model(), conversation).status());
}

}  // namespace
}  // namespace moesaic::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  moesaic::server::ReadTraceparent(text);
  const auto json = moesaic::server::ParseJson(text);
  moesaic::server::Check(json.status());
  if (json.ok()) moesaic::server::ReadBody(data[0], *json);
  return 0;
}
