// Where verbs read what they are asked: files and standard input.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/flags.h"
#include "base/status.h"

namespace moesaic::app {

inline constexpr const char* kStandardInput = "-";

/// "-" as people call it in messages, any other path as it is.
std::string InputName(const std::string& path);

/// Refuses on the command line what is neither a file nor "-".
std::string CheckExistingInput(std::string& path);

/// Declares --ids: token ids of one prompt, "5,6" or "5, 6". What isn't one is refused by name.
Flag AddIdsFlag(Verb& verb, std::vector<int32_t>& ids);

/// All bytes of a file, or of standard input for "-". Cancelled when a signal came meanwhile.
StatusOr<std::string> ReadInput(const std::string& path);

}  // namespace moesaic::app
