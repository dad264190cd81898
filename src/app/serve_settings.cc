// Reads settings of `moesaic serve` from the environment and --config, and prints them for --print-config.
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cctype>
#include <cstdlib>
#include <map>
#include <set>

#include "app/config_file.h"
#include "app/serve_flags.h"
#include "text/file.h"

namespace moesaic::app {
namespace {

std::string EnvironmentName(std::string name) {
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return "MOESAIC_" + name;
}

}  // namespace

void NameEnvironment(Verb& verb) {
  for (CLI::Option* option : verb.app()->get_options()) {
    if (option->get_lnames().empty() || option->check_lname("help")) continue;
    option->envname(EnvironmentName(option->get_lnames().front()));
  }
}

Status ReadConfigFile(const Verb& handle, const ServeFlags& flags) {
  CLI::App& verb = *handle.app();
  // CLI11 ignores environment variables that are set but empty.
  for (const char* name : {"--api-key", "--admin-key"}) {
    const CLI::Option* keys = verb.get_option(name);
    const char* given = std::getenv(keys->get_envname().c_str());
    if (keys->count() == 0 && given != nullptr && *given == '\0') {
      return InvalidArgument("{}: {}", keys->get_envname(), kEmptyKey);
    }
  }
  if (flags.config.empty()) return OkStatus();
  const std::string& file = flags.config;
  ASSIGN_OR_RETURN(const std::string text, text::ReadFile(file));
  auto entries = ParseConfig(text);
  if (!entries.ok()) return Annotate(entries.status(), file);
  std::set<const CLI::Option*> given;  // by a flag or the environment
  for (const CLI::Option* option : verb.get_options()) {
    if (option->count() > 0) given.insert(option);
  }
  // --tensor-parallel-size overrides the file's layout.
  const auto is_overridden = [&given](const CLI::Option* option) {
    if (given.contains(option)) return true;
    for (const CLI::Option* other : option->get_excludes()) {
      if (given.contains(other)) return true;
    }
    return false;
  };
  std::map<const CLI::Option*, const ConfigEntry*> said;  // options may have two names
  for (const ConfigEntry& entry : *entries) {
    CLI::Option* option = verb.get_option_no_throw("--" + entry.key);
    if (option == nullptr || option->get_lnames().empty() || entry.key == "config" ||
        entry.key == "print-config") {
      return InvalidArgument("{}: unknown setting \"{}\"", file, entry.key);
    }
    if (const auto [it, first] = said.emplace(option, &entry); !first) {
      return InvalidArgument("{}: line {}: \"{}\" was set as \"{}\" in line {} already", file, entry.line,
                             entry.key, it->second->key, it->second->line);
    }
    if (is_overridden(option)) continue;
    std::vector<std::string> inputs = entry.values;
    // PrintConfig writes unset values this way.
    if (option->get_configurable() && inputs == std::vector<std::string>{""}) continue;
    try {
      if (option->get_items_expected_max() == 0 && inputs.size() == 1) {
        inputs = {option->get_flag_value(entry.key, inputs.front())};
      }
      option->add_result(inputs);
      option->run_callback();
    } catch (const CLI::Error& error) {
      return InvalidArgument("{}: {}", file, error.what());
    }
  }
  return OkStatus();
}

std::string PrintConfig(const Verb& handle) {
  const CLI::App& verb = *handle.app();
  std::string text = fmt::format("# {}\n", verb.get_description());
  for (const std::string& group : verb.get_groups()) {
    for (const CLI::Option* option : verb.get_options()) {
      if (!option->get_configurable() || option->get_group() != group) continue;
      std::vector<std::string> values = option->reduced_results();
      if (values.empty()) {
        const bool unset_flag = option->get_default_str().empty() && option->get_expected_min() == 0;
        values = {unset_flag ? "false" : option->get_default_str()};
      }
      for (std::string& value : values) value = ConfigValue(value);
      text += fmt::format("\n# {}\n{} = {}\n", option->get_description(), option->get_single_name(),
                          values.size() == 1 ? values.front() : fmt::format("[{}]", fmt::join(values, ", ")));
    }
  }
  return text;
}

}  // namespace moesaic::app
