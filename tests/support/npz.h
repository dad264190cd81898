// Reads numpy's .npz files for tests: zip archives of .npy arrays, stored or deflated.
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <zlib.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace moesaic::test_support {

/// One array in C order. The readers throw an exception with a message for a broken archive.
struct NpyArray {
  std::string dtype;  // numpy's spelling: "<f4", "|u1", "<i8"
  std::vector<int64_t> shape;
  std::string bytes;

  template <typename T>
  std::vector<T> As() const {
    if (dtype.empty() || std::stoul(dtype.substr(2)) != sizeof(T))
      throw std::runtime_error("dtype is " + dtype);
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
};

inline NpyArray ParseNpy(const std::string& file) {
  if (file.size() < 12 || file.compare(0, 6, "\x93NUMPY") != 0) throw std::runtime_error("not a .npy array");
  const bool wide = file[6] > 1;  // versions from 2 have a 32-bit header length
  uint32_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data() + 8, wide ? 4 : 2);
  const size_t start = wide ? 12 : 10;
  const std::string header = file.substr(start, header_bytes);
  if (header.find("'fortran_order': False") == std::string::npos) throw std::runtime_error("not in C order");
  NpyArray array;
  const size_t descr = header.find("'descr': '") + 10;
  array.dtype = header.substr(descr, header.find('\'', descr) - descr);
  size_t at = header.find("'shape': (") + 10;
  for (const size_t end = header.find(')', at); at < end;) {
    size_t next = std::min(header.find(',', at), end);
    if (header.find_first_of("0123456789", at) < next)
      array.shape.push_back(std::stoll(header.substr(at, next - at)));
    at = next + 1;
  }
  array.bytes = file.substr(start + header_bytes);
  return array;
}

/// Returns all arrays of an archive by name, without ".npy".
inline std::map<std::string, NpyArray> ReadNpz(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string zip((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto number = [&](size_t at, size_t bytes) {
    uint64_t value = 0;
    if (at + bytes > zip.size()) throw std::runtime_error(path + ": cut short");
    std::memcpy(&value, zip.data() + at, bytes);
    return value;
  };
  // The directory is at the end of the file. Local headers may have no sizes.
  const size_t end = zip.rfind("PK\x05\x06");
  if (end == std::string::npos) throw std::runtime_error(path + ": not a zip archive");
  const uint64_t entries = number(end + 10, 2);
  size_t at = number(end + 16, 4);
  std::map<std::string, NpyArray> arrays;
  for (uint64_t i = 0; i < entries; ++i) {
    const uint64_t method = number(at + 10, 2), packed = number(at + 20, 4), size = number(at + 24, 4);
    const uint64_t name_bytes = number(at + 28, 2), extra = number(at + 30, 2), comment = number(at + 32, 2);
    const uint64_t local = number(at + 42, 4);
    const std::string name = zip.substr(at + 46, name_bytes);
    const size_t data = local + 30 + number(local + 26, 2) + number(local + 28, 2);
    std::string file = zip.substr(data, packed);
    if (method == 8) {
      std::string inflated(size, '\0');
      z_stream stream{};
      if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw std::runtime_error("zlib");
      stream.next_in = reinterpret_cast<Bytef*>(file.data());
      stream.avail_in = static_cast<uInt>(file.size());
      stream.next_out = reinterpret_cast<Bytef*>(inflated.data());
      stream.avail_out = static_cast<uInt>(inflated.size());
      const int result = inflate(&stream, Z_FINISH);
      inflateEnd(&stream);
      if (result != Z_STREAM_END) throw std::runtime_error(path + ": " + name + " does not inflate");
      file = std::move(inflated);
    }
    arrays[name.substr(0, name.rfind(".npy"))] = ParseNpy(file);
    at += 46 + name_bytes + extra + comment;
  }
  return arrays;
}

}  // namespace moesaic::test_support
