// What `moesaic` says about a command line that it can't run: one line that names the flag or verb and tells
// where help is.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "app/familiar_flags.h"

namespace moesaic::app {

/// "moesaic chat: --top-k must be a number, found "many"; see moesaic chat --help" for an error that
/// `root.parse` threw.
std::string UsageLine(const CLI::App& root, const CLI::ParseError& error);

/// The same for a message about the command line of `verb`.
std::string UsageLine(const CLI::App& verb, const std::string& message);

/// The verb called `name`, or null.
const CLI::App* FindVerb(const CLI::App& root, const std::string& name);

/// "there is no verb "chta" (did you mean chat?)"
std::string UnknownVerb(const CLI::App& root, const std::string& word);

/// UnknownVerb as a line for standard error.
std::string UnknownVerbLine(const CLI::App& root, const std::string& word);

/// Looks names up among the options and arguments of `verb`, which must outlive the result.
FlagLookup FlagsOf(const CLI::App& verb);

}  // namespace moesaic::app
