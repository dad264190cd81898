// Plain-text tables and human-readable numbers for the verbs that print facts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::app {

/// Rows of cells; the first row is the header. Columns of numbers align right, others left. Ends with a
/// newline. `markdown` draws the pipes that Markdown wants.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows, bool markdown);

std::string FormatBytes(double bytes);  ///< "1.50 GiB"
std::string FormatCount(double count);  ///< "30.5B", "135M", "512"

}  // namespace moesaic::app
