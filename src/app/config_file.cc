#include "app/config_file.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace moesaic::app {
namespace {

bool IsKeyCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_'; }
bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\r'; }

// Escaped characters after a backslash.
constexpr std::pair<char, char> kEscapes[] = {
    {'"', '"'}, {'\\', '\\'}, {'n', '\n'}, {'t', '\t'}, {'r', '\r'}};

class ConfigParser {
 public:
  explicit ConfigParser(std::string_view text) : text_(text) {}

  StatusOr<std::vector<ConfigEntry>> Parse() {
    std::vector<ConfigEntry> entries;
    for (SkipBlanks(/*lines=*/true); !AtEnd(); SkipBlanks(/*lines=*/true)) {
      ASSIGN_OR_RETURN(ConfigEntry entry, ParseEntry());
      for (const ConfigEntry& other : entries) {
        if (other.key != entry.key) continue;
        return InvalidArgument("line {}: \"{}\" was set in line {} already", entry.line, entry.key,
                               other.line);
      }
      entries.push_back(std::move(entry));
    }
    return entries;
  }

 private:
  bool AtEnd() const { return at_ == text_.size(); }
  bool AtLineEnd() const { return AtEnd() || text_[at_] == '\n'; }
  bool Sees(char c) const { return !AtEnd() && text_[at_] == c; }

  char Take() {
    line_ += text_[at_] == '\n' ? 1 : 0;
    return text_[at_++];
  }

  // Skips spaces and comments, and with `lines` also line ends.
  void SkipBlanks(bool lines) {
    while (!AtEnd() && (IsSpace(text_[at_]) || Sees('#') || (lines && Sees('\n')))) {
      if (Sees('#')) {
        while (!AtLineEnd()) Take();
      } else {
        Take();
      }
    }
  }

  StatusOr<ConfigEntry> ParseEntry() {
    ConfigEntry entry{.key = {}, .values = {}, .line = line_};
    const size_t start = at_;
    while (!AtEnd() && IsKeyCharacter(text_[at_])) entry.key += Take();
    SkipBlanks(/*lines=*/false);
    if (entry.key.empty() || !Sees('=')) {
      const std::string_view rest = text_.substr(start);
      return InvalidArgument("line {}: expected KEY = VALUE, found {}", entry.line,
                             rest.substr(0, rest.find('\n')));
    }
    Take();
    SkipBlanks(/*lines=*/false);
    RETURN_IF_ERROR(Sees('[') ? ParseArray(&entry.values) : ParseScalar(&entry.values));
    SkipBlanks(/*lines=*/false);
    if (!AtLineEnd()) {
      return InvalidArgument("line {}: a value with spaces, commas or brackets needs quotes: {}", line_,
                             entry.key);
    }
    return entry;
  }

  Status ParseArray(std::vector<std::string>* values) {
    const int start = line_;
    Take();
    for (SkipBlanks(/*lines=*/true); !Sees(']'); SkipBlanks(/*lines=*/true)) {
      if (Sees(',')) return InvalidArgument("line {}: a value is missing before a comma", line_);
      RETURN_IF_ERROR(ParseScalar(values));
      SkipBlanks(/*lines=*/true);
      if (Sees(',')) {
        Take();
      } else if (!Sees(']')) {
        return InvalidArgument("line {}: an array without \"]\", or a missing comma between its values",
                               start);
      }
    }
    Take();
    return OkStatus();
  }

  Status ParseScalar(std::vector<std::string>* values) {
    if (Sees('"') || Sees('\'')) return ParseQuoted(Take(), &values->emplace_back());
    std::string& word = values->emplace_back();
    constexpr std::string_view kEndsWord = "\n,[]\"'";
    while (!AtEnd() && !IsSpace(text_[at_]) && kEndsWord.find(text_[at_]) == std::string_view::npos) {
      word += Take();
    }
    return OkStatus();
  }

  Status ParseQuoted(char quote, std::string* value) {
    while (!AtLineEnd() && !Sees(quote)) {
      const char c = Take();
      if (c != '\\' || quote == '\'') {
        value->push_back(c);
        continue;
      }
      const char escaped = AtLineEnd() ? '\n' : Take();
      const auto* meant = std::find_if(std::begin(kEscapes), std::end(kEscapes),
                                       [escaped](const auto& escape) { return escape.first == escaped; });
      if (meant == std::end(kEscapes)) {
        return InvalidArgument(
            "line {}: unknown escape; \\\" \\\\ \\n \\t \\r are supported, and '...' has "
            "no escapes",
            line_);
      }
      value->push_back(meant->second);
    }
    if (AtLineEnd()) return InvalidArgument("line {}: a closing quote is missing", line_);
    Take();
    return OkStatus();
  }

  const std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
};

bool AreDigits(std::string_view text) {
  return !text.empty() && text.size() < 19 &&
         std::all_of(text.begin(), text.end(), [](char c) { return '0' <= c && c <= '9'; });
}

bool IsNumber(std::string_view value) {
  if (value.starts_with('-')) value.remove_prefix(1);
  const size_t point = value.find('.');
  return AreDigits(value.substr(0, point)) &&
         (point == std::string_view::npos || AreDigits(value.substr(point + 1)));
}

}  // namespace

StatusOr<std::vector<ConfigEntry>> ParseConfig(std::string_view text) { return ConfigParser(text).Parse(); }

std::string ConfigValue(std::string_view value) {
  if (IsNumber(value) || value == "true" || value == "false") return std::string(value);
  std::string quoted = "\"";
  for (const char c : value) {
    const auto* escape = std::find_if(std::begin(kEscapes), std::end(kEscapes),
                                      [c](const auto& known) { return known.second == c; });
    if (escape == std::end(kEscapes)) {
      quoted += c;
    } else {
      quoted += {'\\', escape->first};
    }
  }
  return quoted + '"';
}

}  // namespace moesaic::app
