#include "parallel/placement/numpy_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxHeader = 64 << 10;
constexpr size_t kMaxDimensions = 8;
constexpr int64_t kExactInteger = int64_t{1} << 53;

static_assert(std::endian::native == std::endian::little);

template <typename T>
T Number(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

// The Python dictionary of a header, of which files have exactly three members in any order.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  Status Read() {
    RETURN_IF_ERROR(Expect('{'));
    bool seen[3] = {};
    for (;;) {
      Skip();
      if (Take('}')) break;
      ASSIGN_OR_RETURN(const std::string key, Text());
      RETURN_IF_ERROR(Expect(':'));
      int index = 0;
      if (key == "descr") {
        ASSIGN_OR_RETURN(descr, Text());
      } else if (key == "fortran_order") {
        index = 1;
        ASSIGN_OR_RETURN(fortran, Boolean());
      } else if (key == "shape") {
        index = 2;
        RETURN_IF_ERROR(Shape());
      } else {
        return Fault("unknown member \"" + key.substr(0, 40) + "\"");
      }
      if (std::exchange(seen[index], true)) return Fault("\"" + key + "\" occurs twice");
      Skip();
      if (!Take(',')) {
        RETURN_IF_ERROR(Expect('}'));
        break;
      }
    }
    Skip();
    if (at_ != text_.size()) return Fault("text after the dictionary");
    if (!seen[0] || !seen[1] || !seen[2]) return Fault("needs descr, fortran_order and shape");
    return OkStatus();
  }

  std::string descr;
  bool fortran = false;
  std::vector<int64_t> shape;

 private:
  Status Fault(const std::string& reason) const {
    return InvalidArgument("{}: header of the .npy file, byte {}: {}", source_, at_, reason);
  }
  void Skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool Take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  Status Expect(char c) {
    Skip();
    return Take(c) ? OkStatus() : Fault(std::string("expected '") + c + "'");
  }
  StatusOr<std::string> Text() {
    Skip();
    if (at_ >= text_.size() || (text_[at_] != '\'' && text_[at_] != '"')) return Fault("expected a string");
    const size_t end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return Fault("string without end");
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }
  StatusOr<bool> Boolean() {
    Skip();
    for (const auto& [word, value] : {std::pair{std::string_view("True"), true}, {"False", false}}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return value;
    }
    return Fault("expected True or False");
  }
  Status Shape() {
    RETURN_IF_ERROR(Expect('('));
    for (;;) {
      Skip();
      if (Take(')')) return OkStatus();
      int64_t value = 0;
      const size_t start = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
        value = value * 10 + (text_[at_++] - '0');
        if (value > kMaxLoadValues) return Fault("dimension is too large");
      }
      if (at_ == start) return Fault("expected a dimension");
      if (shape.size() == kMaxDimensions) return Fault("too many dimensions");
      shape.push_back(value);
      Skip();
      if (!Take(',')) return Expect(')');
    }
  }

  std::string_view text_;
  const std::string& source_;
  size_t at_ = 0;
};

double HalfValue(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  double value = 0;
  if (exponent == 31) {
    value = mantissa ? NAN : INFINITY;
  } else {
    value = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  }
  return bits >> 15 ? -value : value;
}

template <typename T>
StatusOr<double> WholeValue(std::string_view bytes, const std::string& source) {
  const T value = Number<T>(bytes, 0);
  if (value > static_cast<T>(std::min<uint64_t>(kExactInteger, std::numeric_limits<T>::max())) ||
      (std::is_signed_v<T> && static_cast<int64_t>(value) < -kExactInteger))
    return InvalidArgument("{}: integers must be within 2^53, found {}", source, value);
  return static_cast<double>(value);
}

StatusOr<double> Value(char kind, std::string_view bytes, const std::string& source) {
  switch (kind * 16 + static_cast<int>(bytes.size())) {
    case 'b' * 16 + 1:
    case 'u' * 16 + 1:
      return static_cast<uint8_t>(bytes[0]);
    case 'i' * 16 + 1:
      return static_cast<int8_t>(bytes[0]);
    case 'u' * 16 + 2:
      return Number<uint16_t>(bytes, 0);
    case 'i' * 16 + 2:
      return Number<int16_t>(bytes, 0);
    case 'u' * 16 + 4:
      return Number<uint32_t>(bytes, 0);
    case 'i' * 16 + 4:
      return Number<int32_t>(bytes, 0);
    case 'u' * 16 + 8:
      return WholeValue<uint64_t>(bytes, source);
    case 'i' * 16 + 8:
      return WholeValue<int64_t>(bytes, source);
    case 'f' * 16 + 2:
      return HalfValue(Number<uint16_t>(bytes, 0));
    case 'f' * 16 + 4:
      return Number<float>(bytes, 0);
    case 'f' * 16 + 8:
      return Number<double>(bytes, 0);
    default:
      return InvalidArgument("{}: unsupported type", source);
  }
}

bool IsKnownType(char kind, size_t width) {
  switch (kind) {
    case 'b':
      return width == 1;
    case 'i':
    case 'u':
      return width == 1 || width == 2 || width == 4 || width == 8;
    case 'f':
      return width == 2 || width == 4 || width == 8;
    default:
      return false;
  }
}

template <typename T>
std::string FileOf(std::string_view descr, std::span<const T> values, std::span<const int64_t> shape) {
  std::string dims;
  for (const int64_t size : shape) dims += std::to_string(size) + ", ";
  if (shape.size() > 1) dims.resize(dims.size() - 2);
  if (shape.size() == 1) dims.pop_back();
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr, dims);
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::string file(kMagic);
  file += std::string_view("\x01\x00", 2);
  file += static_cast<char>(header.size() & 255);
  file += static_cast<char>(header.size() >> 8);
  file += header;
  file.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
  return file;
}

uint32_t Crc32(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> values{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320 : 0);
      values[i] = value;
    }
    return values;
  }();
  uint32_t crc = 0xFFFFFFFF;
  for (const char c : bytes) crc = table[(crc ^ static_cast<uint8_t>(c)) & 255] ^ (crc >> 8);
  return ~crc;
}

void Append(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}

// Fields that local and central headers of a zip file share, from the version on.
std::string ZipFields(const std::string& name, std::string_view file, uint32_t crc) {
  std::string fields;
  Append(fields, 20, 2);          // version 2.0
  Append(fields, 0, 4);           // flags, stored
  Append(fields, 0x00210000, 4);  // 1980-01-01
  Append(fields, crc, 4);
  Append(fields, file.size(), 4);
  Append(fields, file.size(), 4);
  Append(fields, name.size(), 2);
  Append(fields, 0, 2);  // no extra field
  return fields;
}

}  // namespace

bool IsNumpyFile(std::string_view bytes) { return bytes.substr(0, kMagic.size()) == kMagic; }
bool IsZipFile(std::string_view bytes) { return bytes.substr(0, 4) == "PK\x03\x04"; }

StatusOr<NumpyArray> ParseNumpy(std::string_view bytes, const std::string& source) {
  if (!IsNumpyFile(bytes) || bytes.size() < 10) return InvalidArgument("{}: not a .npy file", source);
  const int version = bytes[6];
  if (version < 1 || version > 3)
    return InvalidArgument("{}: versions of .npy are 1 to 3, found {}", source, version);
  const size_t start = version == 1 ? 10 : 12;
  if (bytes.size() < start) return InvalidArgument("{}: cut short in the header", source);
  const size_t header_bytes = version == 1 ? Number<uint16_t>(bytes, 8) : Number<uint32_t>(bytes, 8);
  if (header_bytes > kMaxHeader)
    return InvalidArgument("{}: header must be at most {} bytes, found {}", source, kMaxHeader, header_bytes);
  if (bytes.size() - start < header_bytes) return InvalidArgument("{}: cut short in the header", source);
  HeaderReader header(bytes.substr(start, header_bytes), source);
  RETURN_IF_ERROR(header.Read());
  const std::string& descr = header.descr;
  size_t width = 0;
  if (descr.size() == 3 && std::string_view("<>|=").find(descr[0]) != std::string_view::npos)
    width = static_cast<size_t>(descr[2] - '0');
  if (width > 8 || !IsKnownType(descr.size() > 1 ? descr[1] : ' ', width)) {
    return InvalidArgument(
        "{}: values must be booleans, integers or floats of 2, 4 or 8 bytes, found dtype \"{}\"", source,
        descr.substr(0, 40));
  }
  NumpyArray array{.shape = header.shape};
  array.whole = descr[1] != 'f';
  int64_t count = 1;
  for (const int64_t size : array.shape) {
    if (size > 0 && count > kMaxLoadValues / size)
      return InvalidArgument("{}: must have at most {} values", source, kMaxLoadValues);
    count *= size;
  }
  const std::string_view data = bytes.substr(start + header_bytes);
  if (data.size() != static_cast<size_t>(count) * width) {
    return InvalidArgument("{}: {} values of {} bytes need {} bytes after the header, found {}", source,
                           count, width, static_cast<size_t>(count) * width, data.size());
  }
  array.values.resize(count);
  char value_bytes[8];
  // Index of C order of the value that comes i-th in the file.
  std::vector<int64_t> index(array.shape.size(), 0);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(value_bytes, data.data() + static_cast<size_t>(i) * width, width);
    if (descr[0] == '>') std::reverse(value_bytes, value_bytes + width);
    int64_t to = i;
    if (header.fortran) {
      to = 0;
      for (size_t d = 0; d < index.size(); ++d) to = to * array.shape[d] + index[d];
      for (size_t d = 0; d < index.size() && ++index[d] == array.shape[d]; ++d) index[d] = 0;
    }
    ASSIGN_OR_RETURN(array.values[to], Value(descr[1], {value_bytes, width}, source));
  }
  return array;
}

StatusOr<NumpyArray> ParseNumpyZip(std::string_view bytes, const std::string& name,
                                   const std::string& source) {
  const size_t end = bytes.rfind("PK\x05\x06");
  if (end == std::string_view::npos || bytes.size() - end < 22)
    return InvalidArgument("{}: not a .npz file: it has no directory at its end", source);
  const int entries = Number<uint16_t>(bytes, end + 10);
  size_t at = Number<uint32_t>(bytes, end + 16);
  for (int i = 0; i < entries; ++i) {
    if (at > end || end - at < 46) return InvalidArgument("{}: directory is cut short", source);
    const size_t name_bytes = Number<uint16_t>(bytes, at + 28), extra = Number<uint16_t>(bytes, at + 30);
    const size_t comment = Number<uint16_t>(bytes, at + 32);
    if (end - at - 46 < name_bytes + extra + comment)
      return InvalidArgument("{}: directory is cut short", source);
    const bool found = bytes.substr(at + 46, name_bytes) == name + ".npy";
    const size_t local = Number<uint32_t>(bytes, at + 42), size = Number<uint32_t>(bytes, at + 20);
    const auto crc = Number<uint32_t>(bytes, at + 16);
    const int method = Number<uint16_t>(bytes, at + 10);
    at += 46 + name_bytes + extra + comment;
    if (!found) continue;
    if (method != 0)
      return InvalidArgument("{}: \"{}\" must be stored as numpy.savez does, found compression {}", source,
                             name, method);
    if (local > bytes.size() || bytes.size() - local < 30)
      return InvalidArgument("{}: \"{}\" is cut short", source, name);
    const size_t data =
        local + 30 + Number<uint16_t>(bytes, local + 26) + Number<uint16_t>(bytes, local + 28);
    if (data > bytes.size() || bytes.size() - data < size)
      return InvalidArgument("{}: \"{}\" is cut short", source, name);
    const std::string_view file = bytes.substr(data, size);
    if (Crc32(file) != crc)
      return DataLoss("{}: \"{}\" is damaged: its CRC-32 is not that of the directory", source, name);
    return ParseNumpy(file, source + ": " + name);
  }
  return NotFound("{}: no array \"{}\"", source, name);
}

std::string NumpyBytes(std::span<const int64_t> values, std::span<const int64_t> shape) {
  return FileOf("<i8", values, shape);
}
std::string NumpyBytes(std::span<const int32_t> values, std::span<const int64_t> shape) {
  return FileOf("<i4", values, shape);
}
std::string NumpyBytes(std::span<const double> values, std::span<const int64_t> shape) {
  return FileOf("<f8", values, shape);
}

std::string NumpyZipBytes(std::span<const std::pair<std::string, std::string>> files) {
  std::string zip, directory;
  for (const auto& [stem, file] : files) {
    const std::string name = stem + ".npy";
    const std::string fields = ZipFields(name, file, Crc32(file));
    directory += "PK\x01\x02";
    Append(directory, 20, 2);
    directory += fields;
    Append(directory, 0, 6);  // comment, disk, attributes
    Append(directory, 0, 4);
    Append(directory, zip.size(), 4);
    directory += name;
    zip += "PK\x03\x04" + fields + name + file;
  }
  const size_t start = zip.size();
  zip += directory;
  zip += "PK\x05\x06";
  Append(zip, 0, 4);
  Append(zip, files.size(), 2);
  Append(zip, files.size(), 2);
  Append(zip, directory.size(), 4);
  Append(zip, start, 4);
  Append(zip, 0, 2);
  return zip;
}

}  // namespace moesaic::parallel
