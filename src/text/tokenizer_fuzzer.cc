// Fuzzes all loaders of tokenizers, and encodes text with those that load. The first byte selects the input:
//   j  tokenizer.json, a zero byte, tokenizer_config.json
//   t  a tiktoken vocabulary, a zero byte, tokenizer_config.json
//   g  the vocabulary of a GGUF file: its model and pre-tokenizer on the first line; then one line per merge
//      (with a space) or token (after its type as one digit)
//   any other: a text for a vocabulary of single bytes
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "text/tokenizer.h"

namespace moesaic::text {
namespace {

constexpr std::string_view kText = "Hello, wörld! 123\n  ab <s> 日本\t\xf0\x9f\x99\x82 don't";

GgufVocab Bytes() {
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
  return vocab;
}

std::string Streamed(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool skip_special) {
  StreamingDecoder decoder(tokenizer, skip_special);
  std::string text;
  for (const int32_t id : ids) text += *decoder.Push(id);
  return text + *decoder.Finish();
}

void EncodeAndDecode(const StatusOr<Tokenizer>& tokenizer, std::string_view text) {
  if (!tokenizer.ok()) return;
  for (const bool special : {false, true}) {
    StatusOr<std::vector<int32_t>> ids = tokenizer->Encode(text, special);
    if (!ids.ok()) continue;
    const StatusOr<std::string> decoded = tokenizer->Decode(*ids, special);
    if (decoded.ok()) MOESAIC_CHECK(Streamed(*tokenizer, *ids, special) == *decoded);
    for (const int32_t id : *ids) (void)tokenizer->TokenBytes(id);
  }
}

std::pair<std::string_view, std::string_view> Cut(std::string_view text, char at) {
  const size_t cut = text.find(at);
  if (cut == text.npos) return {text, {}};
  return {text.substr(0, cut), text.substr(cut + 1)};
}

GgufVocab ReadVocab(std::string_view text) {
  GgufVocab vocab;
  const auto [names, lines] = Cut(text, '\n');
  std::tie(vocab.model, vocab.pre) = Cut(names, ' ');
  for (auto [line, rest] = Cut(lines, '\n'); !line.empty(); std::tie(line, rest) = Cut(rest, '\n')) {
    if (line.find(' ') != line.npos) {
      vocab.merges.emplace_back(line);
    } else {
      vocab.token_types.push_back(line[0] - '0');
      vocab.tokens.emplace_back(line.substr(1));
      vocab.scores.push_back(-static_cast<float>(vocab.tokens.size()));
    }
  }
  vocab.bos_id = 0;
  vocab.add_bos = true;
  return vocab;
}

void Load(char kind, std::string_view input) {
  const auto [file, config] = Cut(input, '\0');
  switch (kind) {
    case 'j':
      return EncodeAndDecode(Tokenizer::FromJson(file, config), kText);
    case 't':
      EncodeAndDecode(Tokenizer::FromTiktoken(file, config, TiktokenStyle::kKimi), kText);
      return EncodeAndDecode(Tokenizer::FromTiktoken(file, config, TiktokenStyle::kQwen), kText);
    case 'g': {
      const GgufVocab vocab = ReadVocab(input);
      (void)HubFilesFromGguf(vocab, "{{ x }}").ok();
      return EncodeAndDecode(Tokenizer::FromGguf(vocab), kText);
    }
    default: {
      static const StatusOr<Tokenizer> bytes = Tokenizer::FromGguf(Bytes());
      return EncodeAndDecode(bytes, input);
    }
  }
}

}  // namespace
}  // namespace moesaic::text

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (!input.empty()) moesaic::text::Load(input[0], input.substr(1));
  return 0;
}
