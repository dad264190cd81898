#include "proxy/events/msgpack_reader.h"

#include <bit>

namespace moesaic::proxy {
namespace {

uint64_t SignExtended(uint64_t value, int bytes) {
  const int shift = 64 - 8 * bytes;
  return static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift);
}

StatusOr<MsgpackType> TypeOf(uint8_t byte) {
  using enum MsgpackType;
  if (byte <= 0x7f || byte >= 0xe0 || (byte >= 0xcc && byte <= 0xd3)) return kInteger;
  if (byte <= 0x8f || byte == 0xde || byte == 0xdf) return kMap;
  if (byte <= 0x9f || byte == 0xdc || byte == 0xdd) return kArray;
  if (byte <= 0xbf || (byte >= 0xd9 && byte <= 0xdb)) return kString;
  if (byte == 0xc0) return kNil;
  if (byte == 0xc2 || byte == 0xc3) return kBool;
  if (byte >= 0xc4 && byte <= 0xc6) return kBinary;
  if (byte == 0xca || byte == 0xcb) return kFloat;
  if (byte == 0xc1) return DataLoss("type byte 0xc1");
  return kExtension;  // c7 to c9, d4 to d8
}

}  // namespace

Status MsgpackReader::Damaged(const char* problem) const {
  return DataLoss("MessagePack at byte {}: {}", at_, problem);
}

std::optional<uint64_t> MsgpackReader::BigEndian(size_t bytes) {
  if (bytes_.size() - at_ < bytes) return std::nullopt;
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value = value << 8 | static_cast<uint8_t>(bytes_[at_ + i]);
  at_ += bytes;
  return value;
}

StatusOr<MsgpackType> MsgpackReader::Peek() const {
  if (at_end()) return Damaged("the message ends where a value should follow");
  const auto type = TypeOf(static_cast<uint8_t>(bytes_[at_]));
  if (!type.ok()) return Damaged("the byte 0xc1 begins no value");
  return type;
}

StatusOr<MsgpackReader::Head> MsgpackReader::ReadHead() {
  ASSIGN_OR_RETURN(const MsgpackType type, Peek());
  const auto byte = static_cast<uint8_t>(bytes_[at_]);
  const size_t start = at_;
  ++at_;
  Head head = {.type = type, .value = 0, .payload = 0};
  std::optional<uint64_t> number = 0;
  switch (type) {
    case MsgpackType::kNil:
      break;
    case MsgpackType::kBool:
      head.value = byte & 1;
      break;
    case MsgpackType::kInteger:
      if (byte <= 0x7f || byte >= 0xe0) {
        head.value = SignExtended(byte, 1);
      } else {
        const int width = 1 << ((byte - 0xcc) & 3);
        number = BigEndian(static_cast<size_t>(width));
        head.value = byte >= 0xd0 ? SignExtended(number.value_or(0), width) : number.value_or(0);
      }
      break;
    case MsgpackType::kFloat:
      head.is_float32 = byte == 0xca;
      number = BigEndian(byte == 0xca ? 4 : 8);
      head.value = number.value_or(0);
      break;
    case MsgpackType::kString:
      number = byte <= 0xbf ? byte & 0x1f : BigEndian(size_t{1} << (byte - 0xd9));
      break;
    case MsgpackType::kBinary:
      number = BigEndian(size_t{1} << (byte - 0xc4));
      break;
    case MsgpackType::kArray:
      number = byte <= 0x9f ? byte & 0xf : BigEndian(byte == 0xdc ? 2 : 4);
      break;
    case MsgpackType::kMap:
      number = byte <= 0x8f ? byte & 0xf : BigEndian(byte == 0xde ? 2 : 4);
      break;
    case MsgpackType::kExtension:
      number = byte >= 0xd4 ? uint64_t{1} << (byte - 0xd4) : BigEndian(size_t{1} << (byte - 0xc7));
      if (number) number = *number + 1;  // the extension's type
      break;
  }
  const size_t left = bytes_.size() - at_;
  const bool has_payload =
      type == MsgpackType::kString || type == MsgpackType::kBinary || type == MsgpackType::kExtension;
  const bool is_container = type == MsgpackType::kArray || type == MsgpackType::kMap;
  // Every element takes at least one byte, so that a count beyond the bytes left is false.
  if (!number || (has_payload && *number > left) ||
      (is_container && *number * (type == MsgpackType::kMap ? 2 : 1) > left)) {
    at_ = start;
    return Damaged("the value is cut off");
  }
  if (has_payload || is_container) head.value = *number;
  if (has_payload) head.payload = static_cast<uint32_t>(*number);
  return head;
}

StatusOr<MsgpackReader::Head> MsgpackReader::Expect(MsgpackType type, const char* name) {
  const size_t start = at_;
  ASSIGN_OR_RETURN(const Head head, ReadHead());
  if (head.type != type) {
    at_ = start;
    return Damaged(name);
  }
  return head;
}

Status MsgpackReader::ReadNil() { return Expect(MsgpackType::kNil, "nil is expected").status(); }

StatusOr<bool> MsgpackReader::ReadBool() {
  ASSIGN_OR_RETURN(const Head head, Expect(MsgpackType::kBool, "true or false is expected"));
  return head.value != 0;
}

StatusOr<uint64_t> MsgpackReader::ReadInteger() {
  // Almost all values of a message are token ids.
  if (bytes_.size() - at_ >= 5) {
    const auto byte = [&](size_t i) { return uint64_t{static_cast<uint8_t>(bytes_[at_ + i])}; };
    const uint64_t first = byte(0);
    if (first <= 0x7f) {
      ++at_;
      return first;
    }
    if (first == 0xcd) {
      const uint64_t value = byte(1) << 8 | byte(2);
      at_ += 3;
      return value;
    }
    if (first == 0xce) {
      const uint64_t value = byte(1) << 24 | byte(2) << 16 | byte(3) << 8 | byte(4);
      at_ += 5;
      return value;
    }
  }
  ASSIGN_OR_RETURN(const Head head, Expect(MsgpackType::kInteger, "an integer is expected"));
  return head.value;
}

StatusOr<double> MsgpackReader::ReadNumber() {
  ASSIGN_OR_RETURN(const MsgpackType type, Peek());
  if (type == MsgpackType::kInteger) {
    ASSIGN_OR_RETURN(const uint64_t value, ReadInteger());
    return static_cast<double>(static_cast<int64_t>(value));
  }
  ASSIGN_OR_RETURN(const Head head, Expect(MsgpackType::kFloat, "a number is expected"));
  if (head.is_float32) return std::bit_cast<float>(static_cast<uint32_t>(head.value));
  return std::bit_cast<double>(head.value);
}

StatusOr<std::string_view> MsgpackReader::ReadBytes() {
  const size_t start = at_;
  ASSIGN_OR_RETURN(const Head head, ReadHead());
  if (head.type != MsgpackType::kString && head.type != MsgpackType::kBinary) {
    at_ = start;
    return Damaged("a string or binary value is expected");
  }
  const std::string_view value = bytes_.substr(at_, head.payload);
  at_ += head.payload;
  return value;
}

StatusOr<uint32_t> MsgpackReader::ReadArray() {
  ASSIGN_OR_RETURN(const Head head, Expect(MsgpackType::kArray, "an array is expected"));
  return static_cast<uint32_t>(head.value);
}

StatusOr<uint32_t> MsgpackReader::ReadMap() {
  ASSIGN_OR_RETURN(const Head head, Expect(MsgpackType::kMap, "a map is expected"));
  return static_cast<uint32_t>(head.value);
}

Status MsgpackReader::Skip() {
  // Counts of values that each open container still has, instead of recursion.
  uint64_t left[kMaxDepth];
  int depth = 0;
  left[0] = 1;
  for (;;) {
    while (left[depth] == 0) {
      if (depth == 0) return OkStatus();
      --depth;
    }
    --left[depth];
    ASSIGN_OR_RETURN(const Head head, ReadHead());
    at_ += head.payload;
    if (head.type == MsgpackType::kArray || head.type == MsgpackType::kMap) {
      if (depth + 1 == kMaxDepth) return Damaged("containers are nested too deep");
      left[++depth] = head.value * (head.type == MsgpackType::kMap ? 2 : 1);
    }
  }
}

StatusOr<std::string_view> MsgpackReader::ReadRaw() {
  const size_t start = at_;
  RETURN_IF_ERROR(Skip());
  return bytes_.substr(start, at_ - start);
}

}  // namespace moesaic::proxy
