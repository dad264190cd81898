#include "app/help_format.h"

namespace moesaic::app {

HelpFormat::HelpFormat() {
  column_width(34);
  label("SUBCOMMAND", "VERB");
  label("Positionals", "Arguments");
}

std::string HelpFormat::make_footer(const CLI::App* app) const {
  return CLI::Formatter::make_footer(app) +
         "\nExit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).\n";
}

// CLI11 names a flag that switches off "--no-special{false}".
std::string HelpFormat::make_option_name(const CLI::Option* option, bool positional) const {
  std::string name = CLI::Formatter::make_option_name(option, positional);
  for (size_t begin; (begin = name.find('{')) != std::string::npos;) {
    name.erase(begin, name.find('}', begin) + 1 - begin);
  }
  return name;
}

std::string HelpFormat::make_option_opts(const CLI::Option* option) const {
  if (option->get_items_expected_max() == 0) return "";  // takes no value
  // "TEXT:{a,b}" or "INT:INT in [0 - 9]": choices are shown; a range is reported when a value violates it.
  const std::string type = option->get_type_name();
  const size_t colon = type.find(':');
  const bool choices = colon != std::string::npos && type[colon + 1] == '{';
  std::string text;
  if (choices) {
    text = " " + type.substr(colon + 1);
  } else if (!option->get_positional()) {
    text = " " + type.substr(0, colon);
  }
  std::string value = option->get_default_str();
  if (value.starts_with('[') && value.ends_with(']')) value = value.substr(1, value.size() - 2);  // a list
  if (!value.empty()) text += "=" + value;
  if (option->get_expected_max() == CLI::detail::expected_max_vector_size) text += " ...";
  if (option->get_required() && !option->get_positional()) text += " REQUIRED";
  return text;
}

}  // namespace moesaic::app
