#include "proxy/protocol/json_members.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstdint>
#include <cstring>

#include "base/percent.h"

namespace moesaic::proxy {
namespace {

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

using Bytes = unsigned char __attribute__((vector_size(16)));
using Halves = uint64_t __attribute__((vector_size(16)));

// Marks bytes of a string that are no plain text: quotes, backslashes and control characters.
Halves NotPlain(const char* text) {
  Bytes bytes;
  std::memcpy(&bytes, text, sizeof bytes);
  return reinterpret_cast<Halves>((bytes < 0x20) | (bytes == '"') | (bytes == '\\'));
}

// Returns whether all of the 64 bytes are plain text.
bool ArePlain(const char* text) {
  const Halves ends = (NotPlain(text) | NotPlain(text + 16)) | (NotPlain(text + 32) | NotPlain(text + 48));
  return (ends[0] | ends[1]) == 0;
}

// Returns the number of the first bytes of 16 that are plain text.
size_t PlainBytes(const char* text) {
  const Halves ends = NotPlain(text);
  if ((ends[0] | ends[1]) == 0) return sizeof ends;
  const auto first = [](uint64_t half) {
    const int bit =
        std::endian::native == std::endian::little ? std::countr_zero(half) : std::countl_zero(half);
    return static_cast<size_t>(bit) / 8;
  };
  return ends[0] != 0 ? first(ends[0]) : 8 + first(ends[1]);
}

// Is true for bytes that may follow a backslash, except 'u'.
constexpr std::array<bool, 256> kShortEscapes = [] {
  std::array<bool, 256> table{};
  for (const unsigned char c : {'"', '\\', '/', 'b', 'f', 'n', 'r', 't'}) table[c] = true;
  return table;
}();

// Checks JSON text from a position on. A failed step leaves the fault and its place.
class Scanner {
 public:
  Scanner(std::string_view text, const JsonLimits& limits) : text_(text), limits_(limits) {}

  size_t at() const { return at_; }
  size_t values() const { return values_; }    // that Value() met
  size_t objects() const { return objects_; }  // of them
  char Peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool done() const { return at_ == text_.size(); }

  void Space() {
    while (at_ < text_.size() && IsSpace(text_[at_])) ++at_;
  }

  bool Fail(const char* fault) {
    if (fault_ == nullptr) fault_ = fault;
    return false;
  }

  Status error() const { return InvalidArgument("invalid JSON at byte {}: {}", at_, fault_); }

  bool Take(char c, const char* fault) {
    if (Peek() != c || done()) return Fail(fault);
    ++at_;
    return true;
  }

  bool String() {
    ++at_;  // the quote
    if (limits_.checked) return CheckedString();
    while (at_ < text_.size()) {
      if (at_ + 64 <= text_.size()) {
        if (ArePlain(text_.data() + at_)) {
          at_ += 64;
          continue;
        }
        size_t plain;
        while ((plain = PlainBytes(text_.data() + at_)) == 16) at_ += 16;  // one of the 64 is not
        at_ += plain;
      }
      const char c = text_[at_];
      if (c == '"') {
        ++at_;
        return true;
      }
      if (static_cast<unsigned char>(c) < 0x20)
        return Fail("a control character in a string must be escaped");
      if (c == '\\' && !Escape()) return false;
      if (c != '\\') ++at_;
    }
    return Fail("a string has no end");
  }

  // Checks one value. Containers are walked with a stack of their kinds.
  bool Value(JsonType* type) {
    std::vector<char> open;
    for (bool first = true;; first = false) {
      Space();
      JsonType scalar;
      ++values_;
      if (Peek() == '{' || Peek() == '[') {
        const char bracket = text_[at_];
        if (bracket == '{') ++objects_;
        if (first) *type = bracket == '{' ? JsonType::kObject : JsonType::kArray;
        if (static_cast<int>(open.size()) + 1 >= limits_.max_depth)
          return Fail("values are nested too deeply");
        ++at_;
        Space();
        if (Peek() != (bracket == '{' ? '}' : ']') || done()) {
          open.push_back(bracket);
          if (bracket == '{' && !Key()) return false;
          continue;
        }
        ++at_;  // an empty container is a value
      } else if (Scalar(&scalar)) {
        if (first) *type = scalar;
      } else {
        return false;
      }
      if (!AfterValue(&open)) return false;
      if (open.empty()) return true;
    }
  }

  bool Key() {
    Space();
    if (Peek() != '"') return Fail("a member needs a key in double quotes");
    if (!String()) return false;
    Space();
    return Take(':', "a key must be followed by ':'");
  }

 private:
  // Moves to the byte after the closing quote, the first quote with an even number of backslashes before it.
  bool CheckedString() {
    const size_t begin = at_;
    for (;;) {
      const size_t quote = text_.find('"', at_);
      if (quote == std::string_view::npos) return Fail("a string has no end");
      at_ = quote + 1;
      size_t slashes = 0;
      while (quote - slashes > begin && text_[quote - slashes - 1] == '\\') ++slashes;
      if (slashes % 2 == 0) return true;
    }
  }

  bool Escape() {
    if (at_ + 1 >= text_.size()) return Fail("a string has no end");
    const char c = text_[at_ + 1];
    if (c == 'u') {
      if (at_ + 6 > text_.size()) return Fail("\\u needs four hexadecimal digits");
      for (size_t i = at_ + 2; i < at_ + 6; ++i) {
        if (base::HexValue(text_[i]) < 0) return Fail("\\u needs four hexadecimal digits");
      }
      at_ += 6;
      return true;
    }
    if (!kShortEscapes[static_cast<unsigned char>(c)]) return Fail("unknown escape in a string");
    at_ += 2;
    return true;
  }

  bool Digits() {
    if (!IsDigit(Peek())) return Fail("a number lacks a digit");
    while (IsDigit(Peek())) ++at_;
    return true;
  }

  bool Number() {
    if (Peek() == '-') ++at_;
    if (Peek() == '0') {
      ++at_;
    } else if (!Digits()) {
      return false;
    }
    if (Peek() == '.') {
      ++at_;
      if (!Digits()) return false;
    }
    if (Peek() == 'e' || Peek() == 'E') {
      ++at_;
      if (Peek() == '+' || Peek() == '-') ++at_;
      if (!Digits()) return false;
    }
    return true;
  }

  bool Word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return Fail("unknown word");
    at_ += word.size();
    return true;
  }

  bool Scalar(JsonType* type) {
    if (done()) return Fail("a value is missing");
    switch (Peek()) {
      case '"':
        *type = JsonType::kString;
        return String();
      case 't':
        *type = JsonType::kBool;
        return Word("true");
      case 'f':
        *type = JsonType::kBool;
        return Word("false");
      case 'n':
        *type = JsonType::kNull;
        return Word("null");
      default:
        *type = JsonType::kNumber;
        return Number();
    }
  }

  // Consumes closing brackets and one comma. True when the next value begins, or when `open` is empty.
  bool AfterValue(std::vector<char>* open) {
    while (!open->empty()) {
      Space();
      const bool object = open->back() == '{';
      if (Peek() == ',' && !done()) {
        ++at_;
        return !object || Key();
      }
      if (!Take(object ? '}' : ']', object ? "expected ',' or '}'" : "expected ',' or ']'")) return false;
      open->pop_back();
    }
    return true;
  }

  std::string_view text_;
  JsonLimits limits_;
  size_t at_ = 0, values_ = 0, objects_ = 0;
  const char* fault_ = nullptr;
};

void AppendUtf8(uint32_t point, std::string* text) {
  if (point < 0x80) {
    *text += static_cast<char>(point);
  } else if (point < 0x800) {
    *text += static_cast<char>(0xC0 | point >> 6);
    *text += static_cast<char>(0x80 | (point & 0x3F));
  } else if (point < 0x10000) {
    *text += static_cast<char>(0xE0 | point >> 12);
    *text += static_cast<char>(0x80 | (point >> 6 & 0x3F));
    *text += static_cast<char>(0x80 | (point & 0x3F));
  } else {
    *text += static_cast<char>(0xF0 | point >> 18);
    *text += static_cast<char>(0x80 | (point >> 12 & 0x3F));
    *text += static_cast<char>(0x80 | (point >> 6 & 0x3F));
    *text += static_cast<char>(0x80 | (point & 0x3F));
  }
}

uint32_t CodeUnit(std::string_view four) {
  uint32_t unit = 0;
  for (const char c : four) unit = unit << 4 | static_cast<uint32_t>(base::HexValue(c));
  return unit;
}

// Unescapes the inside of a string that Scanner accepted. `half`: whether it has half of a surrogate pair.
std::string Unescaped(std::string_view inside, bool* half = nullptr) {
  std::string text;
  text.reserve(inside.size());
  for (size_t i = 0; i < inside.size();) {
    const size_t run = std::min(inside.find('\\', i), inside.size());
    text.append(inside.substr(i, run - i));
    if ((i = run) == inside.size()) break;
    const char c = inside[i + 1];
    if (c != 'u') {
      constexpr std::string_view kNames = "bfnrt", kValues = "\b\f\n\r\t";
      const size_t name = kNames.find(c);
      text += name == std::string_view::npos ? c : kValues[name];
      i += 2;
      continue;
    }
    uint32_t point = CodeUnit(inside.substr(i + 2, 4));
    i += 6;
    const bool high = point >= 0xD800 && point < 0xDC00;
    if (high && i + 6 <= inside.size() && inside[i] == '\\' && inside[i + 1] == 'u') {
      const uint32_t low = CodeUnit(inside.substr(i + 2, 4));
      if (low >= 0xDC00 && low < 0xE000) {
        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
        i += 6;
      }
    }
    if (point >= 0xD800 && point < 0xE000) {  // no character
      point = 0xFFFD;
      if (half != nullptr) *half = true;
    }
    AppendUtf8(point, &text);
  }
  return text;
}

}  // namespace

StatusOr<JsonMembers> JsonMembers::Scan(std::string_view text, const JsonLimits& limits) {
  size_t end = 0;
  ASSIGN_OR_RETURN(JsonMembers found, ScanFirst(text, limits, &end));
  while (end < text.size() && IsSpace(text[end])) ++end;
  if (end < text.size()) return InvalidArgument("invalid JSON at byte {}: text follows the value", end);
  found.text_ = text;
  return found;
}

StatusOr<JsonMembers> JsonMembers::ScanFirst(std::string_view text, const JsonLimits& limits, size_t* end) {
  JsonMembers found;
  found.text_ = text;
  Scanner scan(text, limits);
  scan.Space();
  found.is_array_ = scan.Peek() == '[';
  const char close = found.is_array_ ? ']' : '}';
  if (!found.is_array_ && !scan.Take('{', "expected an object")) return scan.error();
  if (found.is_array_) scan.Take('[', "");
  scan.Space();
  bool ok = true;
  for (bool more = scan.Peek() != close || scan.done(); ok && more;) {
    JsonMember member;
    scan.Space();
    member.key_begin = scan.at();
    if (!found.is_array_) {
      if (!(ok = scan.Key())) break;
      const std::string_view key = text.substr(member.key_begin, scan.at() - member.key_begin);
      const size_t end = key.rfind('"');
      member.key = Unescaped(key.substr(1, end - 1));
      scan.Space();
    }
    member.value_begin = scan.at();
    if (!(ok = scan.Value(&member.type))) break;
    member.value_end = scan.at();
    found.members_.push_back(std::move(member));
    if (found.members_.size() > limits.max_members) {
      ok = scan.Fail("too many members");
      break;
    }
    scan.Space();
    more = scan.Peek() == ',' && !scan.done();
    if (more) ok = scan.Take(',', "");
  }
  if (!ok) return scan.error();
  found.close_ = scan.at();
  if (!scan.Take(close, found.is_array_ ? "expected ',' or ']'" : "expected ',' or '}'")) return scan.error();
  *end = scan.at();
  found.num_values_ = scan.values();
  found.num_objects_ = scan.objects();
  found.text_ = text.substr(0, *end);
  return found;
}

const JsonMember* JsonMembers::Find(std::string_view key) const {
  if (is_array_) return nullptr;
  const auto last =
      std::find_if(members_.rbegin(), members_.rend(), [key](const JsonMember& m) { return m.key == key; });
  return last == members_.rend() ? nullptr : &*last;
}

std::string_view JsonMembers::Value(std::string_view key) const {
  const JsonMember* member = Find(key);
  return member == nullptr ? std::string_view() : Text(*member);
}

bool JsonMembers::Given(std::string_view key) const {
  const JsonMember* member = Find(key);
  if (member == nullptr || member->type == JsonType::kNull) return false;
  const bool container = member->type == JsonType::kArray || member->type == JsonType::kObject;
  const std::string_view text = Text(*member);
  return !container || text.substr(1, text.size() - 2).find_first_not_of(" \t\r\n") != std::string_view::npos;
}

std::optional<std::string> JsonMembers::String(std::string_view key) const {
  const std::optional<std::string_view> inside = QuotedString(key);
  if (!inside) return std::nullopt;
  return Unescaped(*inside);
}

std::optional<std::string_view> JsonMembers::QuotedString(std::string_view key) const {
  const JsonMember* member = Find(key);
  if (member == nullptr || member->type != JsonType::kString) return std::nullopt;
  const std::string_view quoted = Text(*member);
  return quoted.substr(1, quoted.size() - 2);
}

std::optional<int64_t> JsonMembers::Integer(std::string_view key) const {
  const JsonMember* member = Find(key);
  if (member == nullptr || member->type != JsonType::kNumber) return std::nullopt;
  const std::string_view digits = Text(*member);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

std::optional<bool> JsonMembers::Bool(std::string_view key) const {
  const JsonMember* member = Find(key);
  if (member == nullptr || member->type != JsonType::kBool) return std::nullopt;
  return Text(*member) == "true";
}

void JsonEdit::Set(std::string_view key, std::string json) {
  for (Change& change : changes_) {
    if (change.key == key) {
      change.json = std::move(json);
      return;
    }
  }
  changes_.push_back({std::string(key), std::move(json)});
}

void JsonEdit::Remove(std::string_view key) {
  std::erase_if(changes_, [key](const Change& change) { return change.key == key; });
  changes_.push_back({std::string(key), std::nullopt});
}

std::string_view JsonEdit::Current(std::string_view key) const {
  for (const Change& change : changes_) {
    if (change.key == key) return change.json ? std::string_view(*change.json) : std::string_view();
  }
  return object_.Value(key);
}

std::string JsonEdit::Apply() const {
  const std::string_view text = object_.text_;
  const auto& members = object_.members_;
  std::string out;
  size_t more = 0;
  for (const Change& change : changes_)
    more += change.key.size() + (change.json ? change.json->size() : 0) + 8;
  out.reserve(text.size() + more);

  const auto change_of = [this](const JsonMember& member) -> const Change* {
    for (const Change& change : changes_) {
      if (change.key == member.key) return &change;
    }
    return nullptr;
  };
  size_t begin = 0;  // first byte that is not copied yet
  bool any = false;  // a member has been written
  for (size_t i = 0; i < members.size(); ++i) {
    const JsonMember& member = members[i];
    const Change* change = change_of(member);
    if (change != nullptr && (!change->json || object_.Find(member.key) !=
                                                   &member)) {  // drop it with the comma after or before it
      if (i + 1 < members.size()) {
        out.append(text.substr(begin, member.key_begin - begin));
        begin = members[i + 1].key_begin;
      } else {
        size_t end = member.key_begin;
        if (any) {  // the comma before the last member is dropped too
          out.append(text.substr(begin, end - begin));
          out.erase(out.rfind(','));
        } else {
          out.append(text.substr(begin, end - begin));
        }
        begin = member.value_end;
      }
      continue;
    }
    any = true;
    if (change == nullptr) continue;
    out.append(text.substr(begin, member.value_begin - begin));
    out.append(*change->json);
    begin = member.value_end;
  }
  size_t tail = object_.close_;
  while (tail > begin && IsSpace(text[tail - 1])) --tail;
  out.append(text.substr(begin, tail - begin));
  for (const Change& change : changes_) {
    if (!change.json || object_.Find(change.key) != nullptr) continue;
    if (any) out += ',';
    out += JsonQuoted(change.key);
    out += ':';
    out += *change.json;
    any = true;
  }
  out.append(text.substr(tail));
  return out;
}

void AppendJsonEscaped(std::string_view text, std::string* json) {
  constexpr std::string_view kHex = "0123456789abcdef", kNames = "bfnrt", kValues = "\b\f\n\r\t";
  size_t copied = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool control = static_cast<unsigned char>(c) < 0x20;
    if (!control && c != '"' && c != '\\') continue;
    json->append(text.substr(copied, i - copied));
    copied = i + 1;
    *json += '\\';
    const size_t name = kValues.find(c);
    if (!control) {
      *json += c;
    } else if (name != std::string_view::npos) {
      *json += kNames[name];
    } else {
      *json += "u00";
      *json += kHex[static_cast<size_t>(c) >> 4];
      *json += kHex[static_cast<size_t>(c) & 15];
    }
  }
  json->append(text.substr(copied));
}

std::string JsonQuoted(std::string_view text) {
  std::string json = "\"";
  json.reserve(text.size() + 2);
  AppendJsonEscaped(text, &json);
  return json += '"';
}

std::optional<std::string> JsonUnescaped(std::string_view inside) {
  bool half = false;
  std::string text = Unescaped(inside, &half);
  if (half) return std::nullopt;
  return text;
}

std::optional<std::string> JsonUnquoted(std::string_view json) {
  if (json.empty() || json.front() != '"') return std::nullopt;
  Scanner scan(json, {});
  if (!scan.String() || !scan.done()) return std::nullopt;
  return Unescaped(json.substr(1, json.size() - 2));
}

}  // namespace moesaic::proxy
