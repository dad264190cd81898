#include "app/npy.h"

#include <fmt/format.h>

namespace moesaic::app {

std::string NpyHeader(int64_t rows, int64_t columns) {
  constexpr size_t kPrefix = 10;     // magic, version and length
  constexpr size_t kAlignment = 64;  // alignment of the values that the format requires
  std::string text =
      fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, columns);
  const size_t total = (kPrefix + text.size() + 1 + kAlignment - 1) / kAlignment * kAlignment;
  text.append(total - kPrefix - text.size() - 1, ' ');
  text += '\n';
  std::string header("\x93NUMPY\x01\x00", 8);
  header += static_cast<char>(text.size() & 0xFF);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

}  // namespace moesaic::app
