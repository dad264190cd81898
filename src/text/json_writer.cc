#include "text/json_writer.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace moesaic::text {
namespace {

/// Returns the code point of each byte: printable Latin-1 maps to itself, the rest to U+0100 and up.
int CodePointOfByte(int byte) {
  const auto printable = [](int b) {
    return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
  };
  if (printable(byte)) return byte;
  int next = 0x100;
  for (int b = 0; b < byte; ++b) next += printable(b) ? 0 : 1;
  return next;
}

std::vector<std::string> SpellingTable() {
  std::vector<std::string> table(256);
  for (int byte = 0; byte < 256; ++byte) {
    const int code = CodePointOfByte(byte);
    if (code < 0x80) {
      table[byte] = std::string(1, static_cast<char>(code));
    } else {
      table[byte] = {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
    }
  }
  return table;
}

}  // namespace

std::string SpellBytes(std::string_view bytes) {
  static const std::vector<std::string> table = SpellingTable();
  std::string spelt;
  for (const char byte : bytes) spelt += table[static_cast<unsigned char>(byte)];
  return spelt;
}

std::string Quoted(std::string_view text) {
  return nlohmann::json(std::string(text)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string AddedTokensJson(std::span<const AddedEntry> added) {
  std::string out = "[";
  for (const AddedEntry& token : added) {
    if (out.size() > 1) out += ',';
    out += fmt::format(
        R"({{"id":{},"content":{},"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":{}}})",
        token.id, Quoted(token.text), token.special);
  }
  return out + "]";
}

std::string ByteLevelJson(const ByteLevelModel& model, std::span<const AddedEntry> added) {
  std::string out = R"({"version":"1.0","added_tokens":)" + AddedTokensJson(added);
  out += R"(,"normalizer":)";
  out += model.nfc ? R"({"type":"NFC"})" : "null";
  out += R"(,"pre_tokenizer":{"type":"Sequence","pretokenizers":[)";
  for (const std::string& pattern : model.patterns) {
    out += fmt::format(R"({{"type":"Split","pattern":{{"Regex":{}}},"behavior":"Isolated","invert":false}},)",
                       Quoted(pattern));
  }
  constexpr std::string_view kByteLevel =
      R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,)"
      R"("use_regex":false})";
  out += model.prefix_space
             ? R"({"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":false})"
             : kByteLevel;
  out += R"(]},"post_processor":null,"decoder":)";
  out += kByteLevel;
  out += fmt::format(R"(,"model":{{"type":"BPE","ignore_merges":{},"vocab":{{)", model.whole_words);
  bool first = true;
  for (const auto& [spelling, id] : model.vocab) {
    out += first ? "" : ",";
    out += Quoted(spelling);
    out += fmt::format(":{}", id);
    first = false;
  }
  out += R"(},"merges":[)";
  first = true;
  for (const auto& [left, right] : model.merges) {
    out += first ? "[" : ",[";
    out += Quoted(left) + "," + Quoted(right) + "]";
    first = false;
  }
  return out + "]}}";
}

}  // namespace moesaic::text
