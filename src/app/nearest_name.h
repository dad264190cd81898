// Finds the likely intended name of a misspelled word.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moesaic::app {

/// Returns the candidate with the smallest edit distance to `word`, the first of equals. Swapped neighbours
/// count as one edit; leading dashes are ignored, and "_" equals "-". Empty if every distance exceeds a third
/// of the word's length.
std::string NearestName(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace moesaic::app
