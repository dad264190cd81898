// Feeds arbitrary bytes to everything of this room that reads a file or a request. The first byte says which.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace moesaic::text {
namespace {

/// A byte-level vocabulary whose text must come back from any valid input.
const Tokenizer& Bytewise() {
  static const Tokenizer tokenizer = [] {
    GgufVocab vocab;
    vocab.model = "llama";
    vocab.tokens = {"<unk>", "<s>", "▁", "a", "b", "ab", "▁a"};
    vocab.token_types = {2, 3, 1, 1, 1, 1, 1};
    for (int byte = 0; byte < 256; ++byte) {
      vocab.tokens.push_back(fmt::format("<0x{:02X}>", byte));
      vocab.token_types.push_back(6);
    }
    for (size_t i = 0; i < vocab.tokens.size(); ++i) vocab.scores.push_back(-static_cast<float>(i));
    vocab.unk_id = 0;
    return *Tokenizer::FromGguf(vocab);
  }();
  return tokenizer;
}

void EncodeAndDecode(const Tokenizer& tokenizer, std::string_view text) {
  StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(text, true);
  if (!ids.ok()) return;
  StreamingDecoder decoder(tokenizer, false);
  std::string streamed;
  for (const int32_t id : *ids) streamed += *decoder.Push(id);
  streamed += *decoder.Finish();
  MOESAIC_CHECK(streamed == *tokenizer.Decode(*ids, false));
}

void LoadTokenizer(std::string_view json) {
  const size_t cut = json.find('\0');
  const std::string_view config = cut == json.npos ? std::string_view() : json.substr(cut + 1);
  StatusOr<Tokenizer> tokenizer = Tokenizer::FromJson(json.substr(0, cut), config);
  if (tokenizer.ok()) EncodeAndDecode(*tokenizer, "Hello, wörld! 123\n  ab");
}

void LoadTiktoken(std::string_view ranks) {
  StatusOr<Tokenizer> tokenizer = Tokenizer::FromTiktoken(ranks, "", TiktokenStyle::kKimi);
  if (tokenizer.ok()) EncodeAndDecode(*tokenizer, "Hello, wörld! 123\n  ab");
}

void RenderTemplate(std::string_view source) {
  StatusOr<ChatTemplate> made = ChatTemplate::FromSource(source);
  if (!made.ok()) return;
  const ChatInput input{
      R"([{"role":"system","content":"s"},{"role":"user","content":"u"},{"role":"assistant",)"
      R"("content":null,"tool_calls":[{"function":{"name":"f","arguments":{"a":[1,2.5,true]}}}]}])",
      R"([{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}])", "",
      R"({"bos_token":"<s>","n":-3,"t":"a b\nc","enable_thinking":false})", true};
  (void)made->Render(input, {Mutation::kAllowed, 0}).ok();
  (void)made->Render(input, {Mutation::kForbidden, 0}).ok();
}

void LoadConfig(std::string_view json) {
  StatusOr<ChatTemplate> made = ChatTemplate::FromConfig(json);
  if (made.ok()) (void)made->Render({R"([{"role":"user","content":"u"}])", "", "", "", true}).ok();
}

}  // namespace
}  // namespace moesaic::text

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moesaic::text;
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 5) {
    case 0:
      RenderTemplate(rest);
      break;
    case 1:
      EncodeAndDecode(Bytewise(), rest);
      break;
    case 2:
      LoadTokenizer(rest);
      break;
    case 3:
      LoadTiktoken(rest);
      break;
    default:
      LoadConfig(rest);
  }
  return 0;
}
