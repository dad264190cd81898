// Formats errors of the command line: one line that names the flag or verb and says how to get help.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "app/familiar_flags.h"

namespace moesaic::app {

/// Returns the line for an error of `root.parse`, with its end of line, such as
/// `moesaic chat: --top-k must be a number, found "many"; see moesaic chat --help`.
std::string UsageLine(const CLI::App& root, const CLI::ParseError& error);

/// The same for a message about the command line of `verb`.
std::string UsageLine(const CLI::App& verb, const std::string& message);

/// Returns the verb called `name`, or null.
const CLI::App* FindVerb(const CLI::App& root, const std::string& name);

/// Returns "there is no verb "chta" (did you mean chat?)".
std::string UnknownVerb(const CLI::App& root, const std::string& word);

/// Returns UnknownVerb as a line for standard error, with its end of line.
std::string UnknownVerbLine(const CLI::App& root, const std::string& word);

/// Looks up names among the options and arguments of `verb`, which must outlive the result.
FlagLookup FlagsOf(const CLI::App& verb);

}  // namespace moesaic::app
