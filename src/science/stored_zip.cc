#include "science/stored_zip.h"

#include <algorithm>
#include <cstring>

namespace moesaic::science {
namespace {

constexpr size_t kEndBytes = 22, kEntryBytes = 46, kLocalBytes = 30, kMaxComment = 0xffff;
constexpr uint32_t kEndMark = 0x06054b50, kEntryMark = 0x02014b50, kLocalMark = 0x04034b50,
                   kEnd64Mark = 0x06064b50;

template <typename T>
T ReadAt(ByteSpan bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof(T));  // callers check the range
  return value;
}

struct ZipDirectory {
  uint64_t entries = 0, offset = 0;
};

StatusOr<ZipDirectory> FindDirectory(ByteSpan bytes, const std::string& name) {
  if (bytes.size() < kEndBytes) return DataLoss("{}: no zip archive: only {} bytes", name, bytes.size());
  const size_t lowest = bytes.size() - std::min(bytes.size(), kEndBytes + kMaxComment);
  for (size_t at = bytes.size() - kEndBytes + 1; at-- > lowest;) {
    if (ReadAt<uint32_t>(bytes, at) != kEndMark) continue;
    ZipDirectory directory{.entries = ReadAt<uint16_t>(bytes, at + 10),
                           .offset = ReadAt<uint32_t>(bytes, at + 16)};
    if (directory.entries != 0xffff && directory.offset != 0xffffffff) return directory;
    constexpr size_t kLocator = 20;
    if (at < kLocator) return DataLoss("{}: the zip64 locator is missing", name);
    const uint64_t end = ReadAt<uint64_t>(bytes, at - kLocator + 8);
    if (end > bytes.size() || bytes.size() - end < 56 || ReadAt<uint32_t>(bytes, end) != kEnd64Mark) {
      return DataLoss("{}: the zip64 directory is damaged", name);
    }
    return ZipDirectory{.entries = ReadAt<uint64_t>(bytes, end + 32),
                        .offset = ReadAt<uint64_t>(bytes, end + 48)};
  }
  return DataLoss("{}: no zip archive, or it is truncated: the end of its directory is missing", name);
}

// Replaces fields of 0xffffffff by those of the zip64 extra field.
void ReadZip64(ByteSpan extra, uint64_t* size, uint64_t* packed, uint64_t* offset) {
  for (size_t at = 0; at + 4 <= extra.size();) {
    const auto id = ReadAt<uint16_t>(extra, at);
    const size_t length = ReadAt<uint16_t>(extra, at + 2), begin = at + 4;
    if (length > extra.size() - begin) return;
    if (id == 1) {
      size_t field = begin;
      for (uint64_t* value : {size, packed, offset}) {
        if (*value != 0xffffffff) continue;
        if (field + 8 > begin + length) return;
        *value = ReadAt<uint64_t>(extra, field);
        field += 8;
      }
    }
    at = begin + length;
  }
}

}  // namespace

StatusOr<std::map<std::string, ByteSpan>> ParseStoredZip(ByteSpan bytes, const std::string& name) {
  ASSIGN_OR_RETURN(const ZipDirectory directory, FindDirectory(bytes, name));
  std::map<std::string, ByteSpan> entries;
  uint64_t at = directory.offset;
  for (uint64_t i = 0; i < directory.entries; ++i) {
    if (at > bytes.size() || bytes.size() - at < kEntryBytes || ReadAt<uint32_t>(bytes, at) != kEntryMark) {
      return DataLoss("{}: entry {} of the zip directory is damaged", name, i);
    }
    const size_t name_bytes = ReadAt<uint16_t>(bytes, at + 28),
                 extra_bytes = ReadAt<uint16_t>(bytes, at + 30),
                 comment_bytes = ReadAt<uint16_t>(bytes, at + 32);
    if (bytes.size() - at - kEntryBytes < name_bytes + extra_bytes + comment_bytes) {
      return DataLoss("{}: entry {} of the zip directory is truncated", name, i);
    }
    const std::string entry(reinterpret_cast<const char*>(bytes.data() + at + kEntryBytes), name_bytes);
    uint64_t packed = ReadAt<uint32_t>(bytes, at + 20), size = ReadAt<uint32_t>(bytes, at + 24),
             offset = ReadAt<uint32_t>(bytes, at + 42);
    ReadZip64(bytes.subspan(at + kEntryBytes + name_bytes, extra_bytes), &size, &packed, &offset);
    if (ReadAt<uint16_t>(bytes, at + 10) != 0)
      return Unimplemented("{}: \"{}\" is compressed; PyTorch stores entries", name, entry);
    if (offset > bytes.size() || bytes.size() - offset < kLocalBytes ||
        ReadAt<uint32_t>(bytes, offset) != kLocalMark) {
      return DataLoss("{}: the header of \"{}\" is damaged", name, entry);
    }
    const uint64_t data =
        offset + kLocalBytes + ReadAt<uint16_t>(bytes, offset + 26) + ReadAt<uint16_t>(bytes, offset + 28);
    if (data > bytes.size() || bytes.size() - data < size)
      return DataLoss("{}: \"{}\" is truncated", name, entry);
    entries[entry] = bytes.subspan(data, size);
    at += kEntryBytes + name_bytes + extra_bytes + comment_bytes;
  }
  return entries;
}

}  // namespace moesaic::science
