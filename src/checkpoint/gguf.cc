#include "checkpoint/gguf.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/round.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr uint64_t kDefaultAlignment = 32;
constexpr size_t kMaxName = 65535;

enum ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64
};

// Reads sequentially through the file and checks every read against its end.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, std::string file) : bytes_(bytes), where_(std::move(file)) {}

  template <typename T>
  StatusOr<T> Read() {
    T value{};
    if (bytes_.size() - at_ < sizeof(T)) {
      return DataLoss("{}: the file ends at byte {} in its header; is it complete?", where_, bytes_.size());
    }
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }

  StatusOr<std::string> ReadString(size_t longest) {
    ASSIGN_OR_RETURN(const uint64_t length, Read<uint64_t>());
    if (length > left() || length > longest) {
      return DataLoss("{}: a string of {} bytes at byte {} does not fit", where_, length, at_);
    }
    std::string text(reinterpret_cast<const char*>(bytes_.data()) + at_, length);
    at_ += length;
    return text;
  }

  size_t at() const { return at_; }
  size_t left() const { return bytes_.size() - at_; }
  const std::string& where() const { return where_; }
  /// Sets the prefix of later messages.
  void set_where(std::string where) { where_ = std::move(where); }

 private:
  std::span<const std::byte> bytes_;
  std::string where_;
  size_t at_ = 0;
};

StatusOr<int64_t> ReadInt(Cursor& in, uint32_t type) {
  switch (type) {
    case kU8:
      return in.Read<uint8_t>();
    case kI8:
      return in.Read<int8_t>();
    case kU16:
      return in.Read<uint16_t>();
    case kI16:
      return in.Read<int16_t>();
    case kU32:
      return in.Read<uint32_t>();
    case kI32:
      return in.Read<int32_t>();
    case kBool:
      return in.Read<uint8_t>();
    default: {
      ASSIGN_OR_RETURN(const int64_t value, in.Read<int64_t>());
      if (type == kU64 && value < 0)
        return DataLoss("{}: a number at byte {} is larger than 2^63", in.where(), in.at());
      return value;
    }
  }
}

StatusOr<double> ReadNumber(Cursor& in, uint32_t type) {
  if (type == kF64) return in.Read<double>();
  ASSIGN_OR_RETURN(const float value, in.Read<float>());
  return static_cast<double>(value);
}

bool IsFloatType(uint32_t type) { return type == kF32 || type == kF64; }

// Returns the minimum size of one element in bytes. A count is compared with the remaining bytes before
// allocation.
size_t MinBytes(uint32_t type) {
  switch (type) {
    case kU8:
    case kI8:
    case kBool:
      return 1;
    case kU16:
    case kI16:
      return 2;
    case kU32:
    case kI32:
    case kF32:
      return 4;
    default:
      return 8;
  }
}

StatusOr<GgufMetadata::Value> ReadArray(Cursor& in) {
  ASSIGN_OR_RETURN(const uint32_t type, in.Read<uint32_t>());
  ASSIGN_OR_RETURN(const uint64_t count, in.Read<uint64_t>());
  if (type > kF64 || type == kArray)
    return DataLoss("{}: an array holds the unsupported type {}", in.where(), type);
  if (count > in.left() / MinBytes(type)) {
    return DataLoss("{}: an array of {} elements does not fit the {} bytes left", in.where(), count,
                    in.left());
  }
  constexpr uint64_t kMaxElements = uint64_t{1}
                                    << 24;  // tokenizers have fewer; an element takes up to 32 bytes
  if (count > kMaxElements) {
    return DataLoss("{}: an array of {} elements exceeds {}", in.where(), count, kMaxElements);
  }
  if (type == kString) {
    std::vector<std::string> values(count);
    for (std::string& value : values) {
      ASSIGN_OR_RETURN(value, in.ReadString(in.left()));
    }
    return values;
  }
  if (IsFloatType(type)) {
    std::vector<double> values(count);
    for (double& value : values) {
      ASSIGN_OR_RETURN(value, ReadNumber(in, type));
    }
    return values;
  }
  std::vector<int64_t> values(count);
  for (int64_t& value : values) {
    ASSIGN_OR_RETURN(value, ReadInt(in, type));
  }
  return values;
}

StatusOr<GgufMetadata::Value> ReadValue(Cursor& in) {
  ASSIGN_OR_RETURN(const uint32_t type, in.Read<uint32_t>());
  if (type > kF64) return DataLoss("{}: value type must be in [0, 12], found {}", in.where(), type);
  if (type == kArray) return ReadArray(in);
  if (type == kString) return in.ReadString(in.left());
  if (IsFloatType(type)) return ReadNumber(in, type);
  ASSIGN_OR_RETURN(const int64_t value, ReadInt(in, type));
  if (type == kBool) return value != 0;
  return value;
}

// Returns the names of ggml types that are not supported, for messages.
std::string OtherType(uint32_t number) {
  static const std::map<uint32_t, const char*> kNames = {
      {9, "Q8_1"},   {15, "Q8_K"},   {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"},
      {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"},   {22, "IQ2_S"},  {23, "IQ4_XS"},
      {29, "IQ1_M"}, {34, "TQ1_0"},  {35, "TQ2_0"},   {40, "NVFP4"},  {41, "Q1_0"}};
  const auto found = kNames.find(number);
  return found == kNames.end() ? fmt::format("number {}", number) : found->second;
}

// ggml's type numbers (enum ggml_type of ggml.h).
StatusOr<DType> TypeOf(uint32_t number) {
  switch (number) {
    case 0:
      return DType::kF32;
    case 1:
      return DType::kF16;
    case 2:
      return DType::kQ4_0;
    case 3:
      return DType::kQ4_1;
    case 6:
      return DType::kQ5_0;
    case 7:
      return DType::kQ5_1;
    case 8:
      return DType::kQ8_0;
    case 10:
      return DType::kQ2K;
    case 11:
      return DType::kQ3K;
    case 12:
      return DType::kQ4K;
    case 13:
      return DType::kQ5K;
    case 14:
      return DType::kQ6K;
    case 24:
      return DType::kI8;
    case 25:
      return DType::kI16;
    case 26:
      return DType::kI32;
    case 27:
      return DType::kI64;
    case 28:
      return DType::kF64;
    case 30:
      return DType::kBF16;
    case 39:
      return DType::kMxfp4;
    default:
      return Unimplemented(
          "type must be F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K or MXFP4, found {}",
          OtherType(number));
  }
}

struct TensorInfo {
  TensorEntry entry;
  uint64_t offset = 0;
  uint64_t size = 0;
};

StatusOr<TensorInfo> ReadInfo(Cursor& in) {
  TensorInfo info;
  ASSIGN_OR_RETURN(info.entry.name, in.ReadString(kMaxName));
  ASSIGN_OR_RETURN(const uint32_t dims, in.Read<uint32_t>());
  const std::string where = fmt::format("{}: tensor {}", in.where(), info.entry.name);
  if (dims < 1 || dims > 4) return DataLoss("{} must have 1 to 4 dimensions, found {}", where, dims);
  unsigned __int128 elements = 1;
  for (uint32_t i = 0; i < dims; ++i) {
    ASSIGN_OR_RETURN(const uint64_t size, in.Read<uint64_t>());
    elements *= size;
    if (size < 1 || elements > (uint64_t{1} << 48)) {
      return DataLoss("{}: dimension {} must be in [1, 2^48] in all, found {}", where, i, size);
    }
    info.entry.shape.insert(info.entry.shape.begin(),
                            static_cast<int64_t>(size));  // ggml stores the fastest dimension first
  }
  ASSIGN_OR_RETURN(const uint32_t type, in.Read<uint32_t>());
  ASSIGN_OR_RETURN(info.offset, in.Read<uint64_t>());
  const StatusOr<DType> dtype = TypeOf(type);
  if (!dtype.ok()) return Annotate(dtype.status(), where);
  info.entry.dtype = *dtype;
  info.entry.file = in.where();
  const int block = tensor::BlockOf(*dtype).elements;
  if (info.entry.shape.back() % block != 0) {
    return DataLoss("{}: rows must be whole blocks of {} elements, found {}", where, block,
                    info.entry.shape.back());
  }
  info.size = static_cast<uint64_t>(tensor::BytesOf(*dtype, static_cast<int64_t>(elements)));
  return info;
}

StatusOr<uint64_t> Alignment(const GgufMetadata& metadata, const std::string& file) {
  if (!metadata.Has("general.alignment")) return kDefaultAlignment;
  const int64_t alignment = metadata.Int("general.alignment").value_or(0);
  if (alignment < 1 || alignment > (1 << 20) || (alignment & (alignment - 1)) != 0) {
    return DataLoss("{}: \"general.alignment\" must be a power of two, found {}", file, alignment);
  }
  return static_cast<uint64_t>(alignment);
}

Status CheckApart(const std::vector<TensorEntry>& tensors) {
  std::vector<const TensorEntry*> order;
  order.reserve(tensors.size());
  for (const TensorEntry& entry : tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(),
            [](const TensorEntry* a, const TensorEntry* b) { return a->bytes.data() < b->bytes.data(); });
  for (size_t i = 1; i < order.size(); ++i) {
    const std::span<const std::byte> before = order[i - 1]->bytes;
    if (before.data() + before.size() <= order[i]->bytes.data()) continue;
    return DataLoss("{}: tensors {} and {} overlap", order[i]->file, order[i - 1]->name, order[i]->name);
  }
  return OkStatus();
}

}  // namespace

template <typename T>
const T* GgufMetadata::Get(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : std::get_if<T>(&found->second);
}

const std::string* GgufMetadata::String(const std::string& key) const { return Get<std::string>(key); }

std::optional<int64_t> GgufMetadata::Int(const std::string& key) const {
  const auto* value = Get<int64_t>(key);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<double> GgufMetadata::Number(const std::string& key) const {
  if (const auto* value = Get<double>(key); value != nullptr) return *value;
  const auto* integer = Get<int64_t>(key);
  return integer == nullptr ? std::nullopt : std::optional(static_cast<double>(*integer));
}

std::optional<bool> GgufMetadata::Bool(const std::string& key) const {
  const auto* value = Get<bool>(key);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

const std::vector<std::string>* GgufMetadata::Strings(const std::string& key) const {
  return Get<std::vector<std::string>>(key);
}
const std::vector<int64_t>* GgufMetadata::Ints(const std::string& key) const {
  return Get<std::vector<int64_t>>(key);
}
const std::vector<double>* GgufMetadata::Numbers(const std::string& key) const {
  return Get<std::vector<double>>(key);
}

std::vector<std::string> GgufMetadata::Keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : values_) keys.push_back(key);
  return keys;
}

StatusOr<GgufFile> ParseGguf(std::span<const std::byte> bytes, const std::string& file) {
  Cursor in(bytes, file);
  ASSIGN_OR_RETURN(const uint32_t magic, in.Read<uint32_t>());
  if (magic != kMagic) return DataLoss("{}: a GGUF file begins with \"GGUF\"", file);
  ASSIGN_OR_RETURN(const uint32_t version, in.Read<uint32_t>());
  if (version == 0x02000000 || version == 0x03000000) {
    return Unimplemented("{}: must be little-endian, found a big-endian GGUF file", file);
  }
  if (version != 2 && version != 3)
    return Unimplemented("{}: GGUF version must be 2 or 3, found {}", file, version);
  ASSIGN_OR_RETURN(const uint64_t tensors, in.Read<uint64_t>());
  ASSIGN_OR_RETURN(const uint64_t pairs, in.Read<uint64_t>());
  // minimum sizes: one-byte values and empty names
  constexpr uint64_t kMinPairBytes = 13, kMinTensorBytes = 32;
  if (pairs > in.left() / kMinPairBytes || tensors > in.left() / kMinTensorBytes) {
    return DataLoss("{}: {} tensors and {} metadata entries do not fit {} bytes; is the file complete?", file,
                    tensors, pairs, in.left());
  }
  GgufFile result;
  for (uint64_t i = 0; i < pairs; ++i) {
    ASSIGN_OR_RETURN(const std::string key, in.ReadString(kMaxName));
    if (result.metadata.Has(key)) return DataLoss("{}: metadata key \"{}\" occurs twice", file, key);
    in.set_where(fmt::format("{}: metadata \"{}\"", file, key));
    ASSIGN_OR_RETURN(GgufMetadata::Value value, ReadValue(in));
    in.set_where(file);
    result.metadata.Set(key, std::move(value));
  }
  std::vector<TensorInfo> infos;
  std::set<std::string> names;
  for (uint64_t i = 0; i < tensors; ++i) {
    ASSIGN_OR_RETURN(TensorInfo info, ReadInfo(in));
    if (!names.insert(info.entry.name).second)
      return DataLoss("{}: tensor {} occurs twice", file, info.entry.name);
    infos.push_back(std::move(info));
  }
  ASSIGN_OR_RETURN(const uint64_t alignment, Alignment(result.metadata, file));
  const uint64_t start = base::RoundUp(in.at(), alignment);
  const uint64_t data = start <= bytes.size() ? bytes.size() - start : 0;
  for (TensorInfo& info : infos) {
    if (info.offset % alignment != 0 || info.offset > data || info.size > data - info.offset) {
      return DataLoss("{}: tensor {} needs {} bytes at {} of the {} bytes of data; is the file complete?",
                      file, info.entry.name, info.size, info.offset, data);
    }
    info.entry.bytes = bytes.subspan(start + info.offset, info.size);
    result.tensors.push_back(std::move(info.entry));
  }
  RETURN_IF_ERROR(CheckApart(result.tensors));
  return result;
}

}  // namespace moesaic::checkpoint
