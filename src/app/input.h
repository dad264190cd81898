// Reads the input of verbs from files and standard input.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/flags.h"
#include "base/status.h"

namespace moesaic::app {

inline constexpr const char* kStandardInput = "-";

/// Returns a readable name of "-" for messages, and any other path unchanged.
std::string InputName(const std::string& path);

/// Rejects command-line values that are neither a file nor "-".
std::string CheckExistingInput(std::string& path);

/// Declares --ids: token ids of one prompt, "5,6" or "5, 6". Other values are rejected by name.
Flag AddIdsFlag(Verb& verb, std::vector<int32_t>& ids);

/// Returns all bytes of a file, or of standard input for "-". Returns Cancelled if a signal arrived
/// meanwhile.
StatusOr<std::string> ReadInput(const std::string& path);

}  // namespace moesaic::app
