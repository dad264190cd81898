// Translates flags of vLLM, SGLang and llama.cpp to those of Moesaic, so that known command lines work
// unchanged.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::app {

/// Kind of a name on a verb's command line. A positional argument is looked up by its bare name.
enum class FlagKind { kUnknown, kSwitch, kValue };
using FlagLookup = std::function<FlagKind(std::string_view name)>;

struct FamiliarArguments {
  std::vector<std::string> words;  // the command line after the verb, with the verb's own flags
  std::vector<std::string> notes;  // one sentence for each flag that has no effect
};

/// Replaces every flag of `words` that the verb does not have by the verb's own flag of the same meaning.
/// Drops flags without a meaning here and adds a note for each. Other words are kept, so that the parser
/// reports them. Returns InvalidArgument if the verb has the setting but does not support this value; the
/// message names both.
StatusOr<FamiliarArguments> TranslateFlags(const std::vector<std::string>& words, const FlagLookup& lookup);

/// Returns the flags that TranslateFlags accepts for this verb, sorted.
std::vector<std::string> FamiliarNames(const FlagLookup& lookup);

}  // namespace moesaic::app
