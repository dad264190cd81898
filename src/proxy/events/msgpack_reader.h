// A reader of MessagePack over a buffer. It never reads past the end and never allocates by an announced
// size.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/status.h"

namespace moesaic::proxy {

enum class MsgpackType : uint8_t {
  kNil,
  kBool,
  kInteger,
  kFloat,
  kString,
  kBinary,
  kArray,
  kMap,
  kExtension
};

/// Reads one value after another. An array or map yields its number of elements; its elements follow.
class MsgpackReader {
 public:
  /// Containers nested deeper than this are refused.
  static constexpr int kMaxDepth = 32;

  explicit MsgpackReader(std::string_view bytes) : bytes_(bytes) {}

  bool at_end() const { return at_ == bytes_.size(); }
  size_t position() const { return at_; }
  /// Type of the next value; DataLoss at the end of the bytes or for the unused type byte.
  StatusOr<MsgpackType> Peek() const;

  /// Each returns DataLoss when the next value has another type or is cut off.
  Status ReadNil();
  StatusOr<bool> ReadBool();
  /// Signed and unsigned 64-bit integers in one: negative ones as two's complement.
  StatusOr<uint64_t> ReadInteger();
  /// Floats, and integers as floats.
  StatusOr<double> ReadNumber();
  /// A string or binary value.
  StatusOr<std::string_view> ReadBytes();
  /// Number of elements of an array; at most as many as bytes are left.
  StatusOr<uint32_t> ReadArray();
  StatusOr<uint32_t> ReadMap();
  /// Skips one value with everything in it.
  Status Skip();
  /// Skips one value and returns its encoding.
  StatusOr<std::string_view> ReadRaw();

 private:
  struct Head {
    MsgpackType type;
    uint64_t value;    // integer, bool, length, or the bits of a float
    uint32_t payload;  // bytes that follow
    bool is_float32 = false;
  };
  StatusOr<Head> ReadHead();
  StatusOr<Head> Expect(MsgpackType type, const char* name);
  Status Damaged(const char* problem) const;
  std::optional<uint64_t> BigEndian(size_t bytes);

  std::string_view bytes_;
  size_t at_ = 0;
};

}  // namespace moesaic::proxy
