// Flags of vLLM, SGLang and llama.cpp in the words of Moesaic, so that a known command line works unchanged.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::app {

/// Kind of a name on the command line of one verb. A positional argument is looked up by its bare name.
enum class FlagKind { kUnknown, kSwitch, kValue };
using FlagLookup = std::function<FlagKind(std::string_view name)>;

struct FamiliarArguments {
  std::vector<std::string> words;  // the command line after the verb, in the verb's own flags
  std::vector<std::string> notes;  // one sentence for each flag that has no effect
};

/// Replaces every flag of `words` that the verb lacks by the verb's own flag of the same meaning. Drops a
/// flag without a meaning here and adds a note. Other words stay, so that the parser reports them.
/// InvalidArgument: the verb has the setting but not this value of it; the message names both.
StatusOr<FamiliarArguments> TranslateFlags(const std::vector<std::string>& words, const FlagLookup& lookup);

/// The flags that TranslateFlags takes for this verb, sorted.
std::vector<std::string> FamiliarNames(const FlagLookup& lookup);

}  // namespace moesaic::app
