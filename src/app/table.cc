#include "app/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace moesaic::app {
namespace {

bool LooksNumeric(const std::string& cell) {
  return !cell.empty() && (cell[0] == '-' || cell[0] == '+' || (cell[0] >= '0' && cell[0] <= '9'));
}

// Terminal columns of UTF-8 text; continuation bytes have none.
size_t Width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string FormatTable(const std::vector<std::vector<std::string>>& rows, bool markdown) {
  if (rows.empty()) return "";
  const size_t columns = rows[0].size();
  std::vector<size_t> width(columns, markdown ? 3 : 0);
  std::vector<bool> right(columns, rows.size() > 1);
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t c = 0; c < columns; ++c) {
      width[c] = std::max(width[c], Width(rows[r][c]));
      if (r > 0 && !LooksNumeric(rows[r][c])) right[c] = false;
    }
  }
  std::string out;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string line = markdown ? "| " : "";
    for (size_t c = 0; c < columns; ++c) {
      const std::string pad(width[c] - Width(rows[r][c]), ' ');
      line += right[c] ? pad + rows[r][c] : rows[r][c] + pad;
      line += markdown ? " | " : "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
    if (r == 0 && markdown) {
      out += "|";
      for (size_t c = 0; c < columns; ++c) out += std::string(width[c] + 1, '-') + (right[c] ? ":|" : "-|");
      out += "\n";
    }
  }
  return out;
}

std::string FormatBytes(double bytes) {
  static constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, kUnits[unit]);
}

std::string FormatCount(double count) {
  static constexpr std::array<const char*, 5> kUnits = {"", "K", "M", "B", "T"};
  size_t unit = 0;
  while (count >= 1000 && unit + 1 < kUnits.size()) {
    count /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f}", count);
  return count >= 100 ? fmt::format("{:.0f}{}", count, kUnits[unit])
                      : (count >= 10 ? fmt::format("{:.1f}{}", count, kUnits[unit])
                                     : fmt::format("{:.2f}{}", count, kUnits[unit]));
}

std::string Counted(int64_t count, const std::string& noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

}  // namespace moesaic::app
