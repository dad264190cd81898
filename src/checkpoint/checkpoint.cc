#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "checkpoint/ggml_blocks.h"
#include "checkpoint/linear_source.h"
#include "checkpoint/open_checkpoint.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

Status ReadScalars(const TensorEntry& entry, int64_t first, std::span<float> out) {
  const std::byte* in = entry.bytes.data() + tensor::BytesOf(entry.dtype, first);
  for (size_t i = 0; i < out.size(); ++i) {
    double wide = 0;
    switch (entry.dtype) {
      case DType::kF64:
        std::memcpy(&wide, in + i * 8, 8);
        out[i] = static_cast<float>(wide);
        break;
      case DType::kF8E4M3:
        out[i] = tensor::F8E4M3ToFloat(static_cast<uint8_t>(in[i]));
        break;
      case DType::kF8E5M2:
        out[i] = tensor::F8E5M2ToFloat(static_cast<uint8_t>(in[i]));
        break;
      default:
        return InvalidArgument("{}: tensor {} must hold floating-point numbers, found {}", entry.file,
                               entry.name, tensor::DTypeName(entry.dtype));
    }
  }
  return OkStatus();
}

}  // namespace

Checkpoint::Checkpoint() = default;
Checkpoint::~Checkpoint() = default;

StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<Checkpoint> checkpoint, OpenContainer(path));
  RETURN_IF_ERROR(checkpoint->ReadQuantConfig());
  return checkpoint;
}

StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::FromMemory(std::string_view config,
                                                             std::span<const std::byte> safetensors) {
  ASSIGN_OR_RETURN(std::unique_ptr<Checkpoint> checkpoint, ReadContainer(config, safetensors));
  RETURN_IF_ERROR(checkpoint->ReadQuantConfig());
  return checkpoint;
}

Status Checkpoint::ReadQuantConfig() {
  ASSIGN_OR_RETURN(QuantConfig quant, ParseQuantConfig(config(), "config.json"));
  // A packed file holds dequantized weights; its config still describes the source checkpoint.
  if (container() != "moesaic") quant_ = std::make_unique<QuantConfig>(std::move(quant));
  return OkStatus();
}

void Checkpoint::ForgetMaps() const {
  for (const auto& file : files()) file->Forget();
}

const TensorEntry* Checkpoint::Find(std::string_view name) const {
  const std::vector<TensorEntry>& all = tensors();
  const auto found =
      std::lower_bound(all.begin(), all.end(), name,
                       [](const TensorEntry& entry, std::string_view key) { return entry.name < key; });
  return found != all.end() && found->name == name ? &*found : nullptr;
}

StatusOr<const TensorEntry*> Checkpoint::Expect(std::string_view name, std::span<const int64_t> shape) const {
  const TensorEntry* entry = Find(name);
  if (entry == nullptr) {
    if (tensors().empty()) return WeightsAreMissing(path());
    return NotFound("{}: tensor {} {} is missing", path(), name, ShapeText(shape));
  }
  if (!std::equal(shape.begin(), shape.end(), entry->shape.begin(), entry->shape.end())) {
    return InvalidArgument("{}: tensor {} must be {}, found {}", entry->file, name, ShapeText(shape),
                           ShapeText(entry->shape));
  }
  return entry;
}

StatusOr<std::vector<float>> Checkpoint::ReadF32(std::string_view name,
                                                 std::span<const int64_t> shape) const {
  ASSIGN_OR_RETURN(const TensorEntry* entry, Expect(name, shape));
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  std::vector<float> values(static_cast<size_t>(elements));
  const int64_t columns = shape.empty() ? 1 : shape.back();
  if (elements > 0) RETURN_IF_ERROR(ReadRows(*entry, 0, elements / columns, values));
  return values;
}

Status Checkpoint::ReadRows(const TensorEntry& entry, int64_t first, int64_t count,
                            std::span<float> out) const {
  const int64_t columns = entry.shape.empty() ? 1 : entry.shape.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < entry.shape.size(); ++i) rows *= entry.shape[i];
  if (first < 0 || count < 0 || first + count > rows || std::ssize(out) < count * columns) {
    return InvalidArgument("{}: rows [{}, {}) of tensor {}, which has {}, can't be read", entry.file, first,
                           first + count, entry.name, rows);
  }
  if (entry.rows != nullptr) {
    entry.rows->Read(first, count, out.data());
    return OkStatus();
  }
  const int64_t elements = count * columns;
  switch (entry.dtype) {
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      for (const char* scale : {"_scale", "_scale_inv"}) {
        if (!Has(entry.name + scale)) continue;
        return InvalidArgument("{}: tensor {} must not be quantized, found {} with the scales {}{}",
                               entry.file, entry.name, tensor::DTypeName(entry.dtype), entry.name, scale);
      }
      [[fallthrough]];
    case DType::kF64:
    case DType::kI64:
    case DType::kI32:
    case DType::kI16:
    case DType::kI8:
    case DType::kU8:
    case DType::kBool:
      return ReadScalars(entry, first * columns, out.first(static_cast<size_t>(elements)));
    default:
      DequantizeBlocks(entry.dtype, entry.bytes.data() + tensor::BytesOf(entry.dtype, first * columns),
                       elements, out.data());
      return OkStatus();
  }
}

}  // namespace moesaic::checkpoint
