// How the help of verbs is laid out: names, choices and defaults, without CLI11's notes on types and ranges.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace moesaic::app {

class HelpFormat : public CLI::Formatter {
 public:
  HelpFormat();
  /// The footer of `app` and the exit codes, which are those of every verb.
  std::string make_footer(const CLI::App* app) const override;
  std::string make_option_name(const CLI::Option* option, bool positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
};

}  // namespace moesaic::app
