// Plain-text tables and readable numbers for verbs that print facts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::app {

/// Formats rows of cells; the first row is the header. Columns of numbers are right-aligned. Ends with a
/// newline. `markdown` draws a Markdown table.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows, bool markdown);

std::string FormatBytes(double bytes);                        ///< "1.50 GiB"
std::string FormatCount(double count);                        ///< "30.5B", "135M", "512"
std::string Counted(int64_t count, const std::string& noun);  ///< "1 layer", "2 layers"

}  // namespace moesaic::app
