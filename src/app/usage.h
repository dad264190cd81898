// What `moesaic` says about a command line that it can't run: one line that names the flag or verb and tells
// where help is.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace moesaic::app {

/// "moesaic chat: --top-k must be a number, found "many"; see moesaic chat --help" for an error that
/// `root.parse` threw.
std::string UsageLine(const CLI::App& root, const CLI::ParseError& error);

/// The same for a first word that is no verb.
std::string UnknownVerbLine(const std::string& word);

}  // namespace moesaic::app
