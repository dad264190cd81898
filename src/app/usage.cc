#include "app/usage.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

namespace moesaic::app {
namespace {

// "NAME<separator>REST" as its two halves; an empty NAME where the separator is missing.
std::pair<std::string, std::string> Split(const std::string& text, std::string_view separator) {
  const size_t at = text.find(separator);
  if (at == std::string::npos) return {"", text};
  return {text.substr(0, at), text.substr(at + separator.size())};
}

std::string What(const CLI::App& root, const CLI::ParseError& error) {
  std::string text = error.what();
  const std::vector<std::string> extras = root.remaining(/*recurse=*/true);
  // CLI11 tells of a flag that is not there as of an argument too many, and of what is missing before that.
  const auto flag = std::find_if(extras.begin(), extras.end(),
                                 [](const std::string& word) { return word.size() > 1 && word[0] == '-'; });
  if (flag != extras.end()) return fmt::format("there is no flag {}", *flag);
  // Without a verb CLI11 asks for one first.
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
      (root.get_subcommands().empty() && !extras.empty())) {
    return extras.empty() ? "too many arguments" : fmt::format("unexpected argument \"{}\"", extras.front());
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    if (const auto [name, rest] = Split(text, ": 1 required "); !name.empty()) return name + " needs a value";
  }
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) {
    const auto [name, value] = Split(Split(text, "Could not convert: ").second, " = ");
    if (!name.empty()) return fmt::format("{} must be a number, found \"{}\"", name, value);
  }
  for (const char* begin : {": Path ", ": File ", ": Value "}) {  // sentences begin small behind a colon
    if (const size_t at = text.find(begin); at != std::string::npos) {
      text[at + 2] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[at + 2])));
    }
  }
  return text;
}

}  // namespace

std::string UsageLine(const CLI::App& root, const CLI::ParseError& error) {
  const std::vector<CLI::App*> verbs = root.get_subcommands();
  const CLI::App& verb = verbs.empty() ? root : *verbs.front();
  const std::string command = verbs.empty() ? "moesaic" : "moesaic " + verb.get_name();
  std::string what = What(root, error);
  std::replace(what.begin(), what.end(), '\n', ' ');
  return fmt::format("{}: {}; see {} --help\n", command, what, command);
}

std::string UnknownVerbLine(const std::string& word) {
  return fmt::format("moesaic: there is no verb \"{}\"; moesaic --help lists them\n", word);
}

}  // namespace moesaic::app
