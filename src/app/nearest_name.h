// Finds the name that a misspelled word most likely stands for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moesaic::app {

/// The candidate with the smallest edit distance to `word`, where swapped neighbours count as one edit; the
/// first of equals. Empty when every distance exceeds a third of the word's length.
std::string NearestName(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace moesaic::app
