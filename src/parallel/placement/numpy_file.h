// NumPy's array files. https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace moesaic::parallel {

/// Array of numbers in C order.
struct NumpyArray {
  std::vector<int64_t> shape = {};
  std::vector<double> values = {};
  bool whole = false;  ///< integers or booleans
};

bool IsNumpyFile(std::string_view bytes);
bool IsZipFile(std::string_view bytes);

/// Parses a .npy file of version 1 to 3: booleans, integers and floats of any width and byte order, in C or
/// Fortran order, of at most kMaxLoadValues values. InvalidArgument for other dtypes, integers beyond 2^53,
/// and damaged files.
StatusOr<NumpyArray> ParseNumpy(std::string_view bytes, const std::string& source);

/// Parses one array of a .npz file whose members are stored, as numpy.savez writes them. NotFound if there is
/// none of this name.
StatusOr<NumpyArray> ParseNumpyZip(std::string_view bytes, const std::string& name,
                                   const std::string& source);

/// A .npy file of version 1.
std::string NumpyBytes(std::span<const int64_t> values, std::span<const int64_t> shape);
std::string NumpyBytes(std::span<const int32_t> values, std::span<const int64_t> shape);
std::string NumpyBytes(std::span<const double> values, std::span<const int64_t> shape);

/// A .npz file with stored members: (name without ".npy", file).
std::string NumpyZipBytes(std::span<const std::pair<std::string, std::string>> files);

}  // namespace moesaic::parallel
