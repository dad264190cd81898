// Lays out the help of verbs: names, choices and defaults, without CLI11's notes on types and ranges.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace moesaic::app {

class HelpFormat : public CLI::Formatter {
 public:
  HelpFormat();
  /// Returns the footer of `app`, followed by the exit codes, which are common to all verbs.
  std::string make_footer(const CLI::App* app) const override;
  std::string make_option_name(const CLI::Option* option, bool positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
};

}  // namespace moesaic::app
