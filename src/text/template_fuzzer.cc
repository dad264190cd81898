// Fuzzes chat templates: renders a conversation with tools, a tool call and unusual values, in a sandbox that
// allows mutation and in one that forbids it. An input that is a JSON object is also parsed as a
// tokenizer_config.json.
#include <cstdint>
#include <string_view>

#include "text/chat_template.h"

namespace moesaic::text {
namespace {

void Render(const StatusOr<ChatTemplate>& made) {
  if (!made.ok()) return;
  const ChatInput input{
      R"([{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"u"}]},)"
      R"({"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":)"
      R"({"name":"f","arguments":{"a":[1,2.5,true]}}}]},{"role":"tool","name":"f","content":"<é> 1"},)"
      R"({"role":"assistant","reasoning":"r","content":"<think>t</think> c"},{"role":"user","content":"u"}])",
      R"([{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object",)"
      R"("properties":{"a":{"type":"array","items":{"type":"number"}}},"required":["a"]}}}])",
      "", R"({"bos_token":"<s>","eos_token":"</s>","n":-3,"t":"a b\nc","x":1e300,"enable_thinking":false})",
      true};
  (void)made->Render(input, {Mutation::kAllowed, 0}).ok();
  (void)made->Render(input, {Mutation::kForbidden, 0}).ok();
}

}  // namespace
}  // namespace moesaic::text

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::text;  // NOLINT: a fuzzer is one function
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  Render(ChatTemplate::FromSource(input));
  if (input.starts_with("{\"")) Render(ChatTemplate::FromConfig(input));
  return 0;
}
