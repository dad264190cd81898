#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>

#include "checkpoint/json_text.h"

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;
using tensor::DType;

StatusOr<DType> ParseDType(const std::string& name) {
  static const std::map<std::string, DType> kTypes = {
      {"F64", DType::kF64},        {"F32", DType::kF32},        {"F16", DType::kF16}, {"BF16", DType::kBF16},
      {"F8_E4M3", DType::kF8E4M3}, {"F8_E5M2", DType::kF8E5M2}, {"I64", DType::kI64}, {"I32", DType::kI32},
      {"I16", DType::kI16},        {"I8", DType::kI8},          {"U8", DType::kU8},   {"BOOL", DType::kBool}};
  const auto found = kTypes.find(name);
  if (found == kTypes.end()) return Unimplemented("dtype must be one of F64 ... BOOL, found \"{}\"", name);
  return found->second;
}

StatusOr<uint64_t> ReadCount(const json& value, const char* what) {
  if (!value.is_number_unsigned())
    return DataLoss("{} must be a non-negative integer, found {}", what, ShownJson(value));
  return value.get<uint64_t>();
}

StatusOr<TensorEntry> ReadEntry(const json& value, std::span<const std::byte> data) {
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets")) {
    return DataLoss("needs \"dtype\", \"shape\" and \"data_offsets\"");
  }
  TensorEntry entry;
  if (!value["dtype"].is_string())
    return DataLoss("\"dtype\" must be a string, found {}", ShownJson(value["dtype"]));
  ASSIGN_OR_RETURN(entry.dtype, ParseDType(value["dtype"].get<std::string>()));
  const json& shape = value["shape"];
  const json& offsets = value["data_offsets"];
  if (!shape.is_array() || shape.size() > 8) return DataLoss("\"shape\" must be a list of at most 8 sizes");
  if (!offsets.is_array() || offsets.size() != 2) return DataLoss("\"data_offsets\" must be [begin, end]");
  unsigned __int128 elements = 1;
  for (const json& size : shape) {
    ASSIGN_OR_RETURN(const uint64_t count, ReadCount(size, "a size in \"shape\""));
    if (count > (uint64_t{1} << 48)) return DataLoss("a size in \"shape\" is too large, found {}", count);
    entry.shape.push_back(static_cast<int64_t>(count));
    elements *= count;
    if (elements > (uint64_t{1} << 60)) return DataLoss("\"shape\" has too many elements");
  }
  ASSIGN_OR_RETURN(const uint64_t begin, ReadCount(offsets[0], "\"data_offsets\""));
  ASSIGN_OR_RETURN(const uint64_t end, ReadCount(offsets[1], "\"data_offsets\""));
  if (begin > end || end > data.size()) {
    return DataLoss("\"data_offsets\" [{}, {}] lie outside the {} bytes of data; is the file complete?",
                    begin, end, data.size());
  }
  const auto expected = static_cast<uint64_t>(tensor::BytesOf(entry.dtype, static_cast<int64_t>(elements)));
  if (end - begin != expected) {
    return DataLoss("\"data_offsets\" must span {} bytes, found {}", expected, end - begin);
  }
  entry.bytes = data.subspan(begin, end - begin);
  return entry;
}

Status CheckContiguous(const std::vector<TensorEntry>& tensors, std::span<const std::byte> data,
                       const std::string& file) {
  const std::byte* next = data.data();
  for (const TensorEntry& entry : tensors) {
    if (entry.bytes.data() != next) {
      return DataLoss("{}: tensor {} begins at byte {} of the data, expected {}", file, entry.name,
                      entry.bytes.data() - data.data(), next - data.data());
    }
    next = entry.bytes.data() + entry.bytes.size();
  }
  if (next != data.data() + data.size()) {
    return DataLoss("{}: {} bytes follow the last tensor, expected none", file,
                    data.data() + data.size() - next);
  }
  return OkStatus();
}

}  // namespace

StatusOr<Safetensors> ParseSafetensors(std::span<const std::byte> bytes, const std::string& file) {
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) {
    return DataLoss("{}: a safetensors file has at least 8 bytes, found {}", file, bytes.size());
  }
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > kMaxSafetensorsHeader) {
    return DataLoss("{}: the header may have {} bytes, found {}; this is no safetensors file", file,
                    kMaxSafetensorsHeader, header_bytes);
  }
  if (header_bytes > bytes.size() - sizeof(header_bytes)) {
    return DataLoss("{}: the header should have {} bytes but the file ends after {}; is it complete?", file,
                    header_bytes, bytes.size() - sizeof(header_bytes));
  }
  Safetensors result;
  result.data_start = sizeof(header_bytes) + header_bytes;
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + sizeof(header_bytes);
  ASSIGN_OR_RETURN(const json header, ParseJsonObjectOnce({text, header_bytes}, file + ": header", "tensor"));
  const std::span<const std::byte> data = bytes.subspan(result.data_start);
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return DataLoss("{}: __metadata__ must be an object", file);
      for (const auto& [key, text_value] : value.items()) {
        if (!text_value.is_string()) return DataLoss("{}: __metadata__ \"{}\" must be a string", file, key);
        result.metadata[key] = text_value.get<std::string>();
      }
      continue;
    }
    StatusOr<TensorEntry> entry = ReadEntry(value, data);
    if (!entry.ok()) return Annotate(entry.status(), fmt::format("{}: tensor {}", file, name));
    entry->name = name;
    entry->file = file;
    result.tensors.push_back(*std::move(entry));
  }
  // An empty tensor has the same offset as its neighbour: the shorter one comes first.
  std::sort(result.tensors.begin(), result.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
  });
  RETURN_IF_ERROR(CheckContiguous(result.tensors, data, file));
  return result;
}

}  // namespace moesaic::checkpoint
