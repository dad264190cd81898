#include "app/usage.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

#include "app/nearest_name.h"

namespace moesaic::app {
namespace {

// Splits "NAME<separator>REST". NAME is empty if the separator is missing.
std::pair<std::string, std::string> Split(const std::string& text, std::string_view separator) {
  const size_t at = text.find(separator);
  if (at == std::string::npos) return {"", text};
  return {text.substr(0, at), text.substr(at + separator.size())};
}

// Returns "--cuont (did you mean --count?)", or `shown` alone if no name is near `word`.
std::string WithNearest(const std::string& word, const std::string& shown,
                        const std::vector<std::string>& names) {
  const std::string nearest = NearestName(word, names);
  return nearest.empty() ? shown : fmt::format("{} (did you mean {}?)", shown, nearest);
}

std::string UnknownFlag(const CLI::App& verb, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::Option* option : verb.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  for (const std::string& name : FamiliarNames(FlagsOf(verb))) {
    if (name.starts_with("--")) names.push_back(name);
  }
  const std::string name = word.substr(0, word.find('='));
  return "there is no flag " + WithNearest(name, name, names);
}

// All names of the flag: two of them may have been given.
std::string NamesOf(const CLI::App& verb, const std::string& name) {
  const CLI::Option* const option = verb.get_option_no_throw(name);
  if (option == nullptr) return name;
  std::string all;
  for (const std::string& other : option->get_lnames())
    all += fmt::format("{}--{}", all.empty() ? "" : " or ", other);
  return all.empty() ? name : all;
}

std::string What(const CLI::App& root, const CLI::App& verb, const CLI::ParseError& error) {
  std::string text = error.what();
  const std::vector<std::string> extras = root.remaining(/*recurse=*/true);
  // CLI11 reports an unknown flag as an extra argument, after missing arguments.
  const auto flag = std::find_if(extras.begin(), extras.end(),
                                 [](const std::string& word) { return word.size() > 1 && word[0] == '-'; });
  if (flag != extras.end()) return UnknownFlag(verb, *flag);
  // Without a verb, CLI11 first reports the missing verb.
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
      (root.get_subcommands().empty() && !extras.empty())) {
    return extras.empty() ? "too many arguments" : fmt::format("unexpected argument \"{}\"", extras.front());
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    if (const auto [name, rest] = Split(text, ": 1 required "); !name.empty()) return name + " needs a value";
    if (const auto [name, rest] = Split(text, ": At Most 1 required "); !name.empty()) {
      return fmt::format("{} may be given once", NamesOf(verb, name));
    }
  }
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) {
    const auto [name, value] = Split(Split(text, "Could not convert: ").second, " = ");
    if (!name.empty()) return fmt::format("{} must be a number, found \"{}\"", name, value);
  }
  for (const char* begin : {": Path ", ": File ", ": Value "}) {  // lower case after a colon
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
  return UsageLine(verb, What(root, verb, error));
}

std::string UsageLine(const CLI::App& verb, const std::string& message) {
  const CLI::App* root = verb.get_parent();
  const std::string command = root == nullptr ? verb.get_name() : root->get_name() + " " + verb.get_name();
  std::string line = message;
  std::replace(line.begin(), line.end(), '\n', ' ');
  return fmt::format("{}: {}; see {} --help\n", command, line, command);
}

const CLI::App* FindVerb(const CLI::App& root, const std::string& name) {
  const auto found = root.get_subcommands([&](const CLI::App* verb) { return verb->check_name(name); });
  return found.empty() ? nullptr : found.front();
}

std::string UnknownVerb(const CLI::App& root, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* verb : root.get_subcommands({})) names.push_back(verb->get_name());
  return "there is no verb " + WithNearest(word, fmt::format("\"{}\"", word), names);
}

std::string UnknownVerbLine(const CLI::App& root, const std::string& word) {
  return fmt::format("moesaic: {}; moesaic --help lists them\n", UnknownVerb(root, word));
}

FlagLookup FlagsOf(const CLI::App& verb) {
  return [&verb](std::string_view name) {
    const CLI::Option* option = verb.get_option_no_throw(std::string(name));
    if (option == nullptr) return FlagKind::kUnknown;
    return option->get_items_expected_max() == 0 ? FlagKind::kSwitch : FlagKind::kValue;
  };
}

}  // namespace moesaic::app
