#include "checkpoint/linear_source.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/round.h"
#include "checkpoint/ggml_blocks.h"
#include "tensor/group_format.h"
#include "tensor/static_scale.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;

std::string ListShape(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

Status UnexpectedTensor(const TensorEntry& entry, const std::string& expected) {
  return InvalidArgument("{}: tensor {} must be {}, found {} {}", entry.file, entry.name, expected,
                         tensor::DTypeName(entry.dtype), ListShape(entry.shape));
}

bool IsFloat(DType dtype) { return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16; }

// Returns a tensor of a module that must have one of the given dtypes and one of two shapes (scalars may be
// stored as [1]).
StatusOr<const TensorEntry*> Part(const Checkpoint& checkpoint, const std::string& name,
                                  std::initializer_list<DType> dtypes, std::vector<int64_t> shape) {
  ASSIGN_OR_RETURN(const TensorEntry* entry, checkpoint.Expect(name, shape));
  for (const DType dtype : dtypes) {
    if (entry->dtype == dtype) return entry;
  }
  return UnexpectedTensor(*entry, fmt::format("of dtype {}", tensor::DTypeName(*dtypes.begin())));
}

// Reads a module's scalar tensor, stored as [] or [1].
StatusOr<float> ReadScalar(const Checkpoint& checkpoint, const std::string& name) {
  const TensorEntry* entry = checkpoint.Find(name);
  if (entry == nullptr) return NotFound("{}: tensor {} is missing", checkpoint.path(), name);
  if (entry->shape.size() > 1 || (entry->shape.size() == 1 && entry->shape[0] != 1) ||
      !IsFloat(entry->dtype)) {
    return UnexpectedTensor(*entry, "one floating-point number");
  }
  const float value = ScalarAt(*entry, 0);
  if (!std::isfinite(value) || value <= 0) {
    return DataLoss("{}: tensor {} must be positive and finite, found {}", entry->file, name, value);
  }
  return value;
}

// The scale tensor has shape [1] or [] for strategy "tensor", [out, 1] for "channel", and so on.
StatusOr<const TensorEntry*> Scale(const Checkpoint& checkpoint, const LinearSource& source,
                                   const std::string& name) {
  const TensorEntry* entry = checkpoint.Find(name);
  if (entry == nullptr) return NotFound("{}: tensor {} is missing", checkpoint.path(), name);
  const int64_t rows = base::CeilDiv(source.out, source.block_rows),
                cols = base::CeilDiv(source.in, source.block_cols);
  const std::vector<int64_t> expected = {rows, cols};
  const bool scalar =
      rows * cols == 1 && (entry->shape.empty() || (entry->shape.size() == 1 && entry->shape[0] == 1));
  const bool column = cols == 1 && entry->shape.size() == 1 && entry->shape[0] == rows;
  if (!scalar && !column && entry->shape != expected) return UnexpectedTensor(*entry, ListShape(expected));
  if (!IsFloat(entry->dtype)) return UnexpectedTensor(*entry, "F32, F16 or BF16");
  return entry;
}

Status SetBlocks(const QuantGroup& group, LinearSource* source) {
  if (group.strategy == "tensor") {
    source->block_rows = source->out;
    source->block_cols = source->in;
  } else if (group.strategy == "channel") {
    source->block_cols = source->in;
  } else if (group.strategy == "group" || group.strategy == "tensor_group") {
    if (group.group_size < 1)
      return Unimplemented("\"group_size\" must be positive, found {}", group.group_size);
    source->block_cols = group.group_size;
  } else if (group.strategy == "block") {
    source->block_rows = group.block_rows;
    source->block_cols = group.block_cols;
  } else {
    return Unimplemented("weight strategy \"{}\" is not supported", group.strategy);
  }
  return OkStatus();
}

Status FindInt8(const Checkpoint& checkpoint, const QuantGroup& group, LinearSource* source) {
  const std::string& module = source->module;
  if (group.num_bits != 8)
    return Unimplemented("int-quantized weights must have 8 bits, found {}", group.num_bits);
  if (group.strategy != "channel" && group.strategy != "tensor") {
    return Unimplemented("int8 weights must have strategy \"channel\" or \"tensor\", found \"{}\"",
                         group.strategy);
  }
  if (!group.symmetric) return Unimplemented("asymmetric int8 weights are not supported");
  source->scheme = WeightScheme::kInt8Channel;
  ASSIGN_OR_RETURN(source->weight,
                   Part(checkpoint, module + ".weight", {DType::kI8}, {source->out, source->in}));
  ASSIGN_OR_RETURN(source->scale, Scale(checkpoint, *source, module + ".weight_scale"));
  source->dynamic_activations = group.int8_activations && group.dynamic_activations;
  if (group.int8_activations && !group.dynamic_activations) {
    const std::string name = module + ".input_scale";
    ASSIGN_OR_RETURN(source->input_scale, ReadScalar(checkpoint, name));
    if (!tensor::StaticScale::HasInverse(source->input_scale)) {
      return DataLoss("{}: tensor {} must be at least 2^-126, found {}", checkpoint.Find(name)->file, name,
                      source->input_scale);
    }
  }
  return OkStatus();
}

// If columns are not in the order of their groups, a tensor names the group of each column.
Status FindGroupIndex(const Checkpoint& checkpoint, bool required, int64_t groups, LinearSource* source) {
  const std::string name = source->module + ".weight_g_idx";
  if (!required && !checkpoint.Has(name)) return OkStatus();
  ASSIGN_OR_RETURN(const TensorEntry* entry, Part(checkpoint, name, {DType::kI32}, {source->in}));
  std::vector<int32_t> index(static_cast<size_t>(source->in));
  std::memcpy(index.data(), entry->bytes.data(), index.size() * sizeof(int32_t));
  // compressed-tensors initializes it with -1, which means that columns are in the order of their groups.
  if (!required && std::all_of(index.begin(), index.end(), [](int32_t g) { return g == -1; }))
    return OkStatus();
  for (const int32_t g : index) {
    if (g < 0 || g >= groups) {
      return InvalidArgument("{}: tensor {} must hold groups in [0, {}), found {}", entry->file, name, groups,
                             g);
    }
  }
  source->group_index = entry;
  return OkStatus();
}

Status FindPacked(const Checkpoint& checkpoint, const QuantGroup& group, LinearSource* source) {
  const std::string& module = source->module;
  if (group.num_bits != 4 && group.num_bits != 8)
    return Unimplemented("pack-quantized weights must have 4 or 8 bits, found {}", group.num_bits);
  if (group.type != "int")
    return Unimplemented("pack-quantized weights must be \"int\", found \"{}\"", group.type);
  if (group.int8_activations) return Unimplemented("packed weights with int8 activations are not supported");
  if (group.strategy != "channel" && group.strategy != "group") {
    return Unimplemented("packed weights must have strategy \"channel\" or \"group\", found \"{}\"",
                         group.strategy);
  }
  source->scheme = WeightScheme::kIntPacked;
  source->bits = group.num_bits;
  const int64_t per_word = 32 / source->bits, words = base::CeilDiv(source->in, per_word);
  const int64_t groups = base::CeilDiv(source->in, source->block_cols);
  ASSIGN_OR_RETURN(source->weight,
                   Part(checkpoint, module + ".weight_packed", {DType::kI32}, {source->out, words}));
  ASSIGN_OR_RETURN(source->scale, Scale(checkpoint, *source, module + ".weight_scale"));
  // compressed-tensors writes I64; Kimi-K2-Thinking has I32.
  ASSIGN_OR_RETURN(const TensorEntry* shape,
                   Part(checkpoint, module + ".weight_shape", {DType::kI64, DType::kI32}, {2}));
  std::array<int64_t, 2> stored{};
  if (shape->dtype == DType::kI64) {
    std::memcpy(stored.data(), shape->bytes.data(), sizeof(stored));
  } else {
    std::array<int32_t, 2> narrow{};
    std::memcpy(narrow.data(), shape->bytes.data(), sizeof(narrow));
    stored = {narrow[0], narrow[1]};
  }
  if (stored[0] != source->out || stored[1] != source->in) {
    return InvalidArgument("{}: tensor {} must hold [{}, {}], found {}", shape->file, shape->name,
                           source->out, source->in, ListShape(stored));
  }
  if (!group.symmetric) {
    ASSIGN_OR_RETURN(source->zero_point, Part(checkpoint, module + ".weight_zero_point", {DType::kI32},
                                              {base::CeilDiv(source->out, per_word), groups}));
  }
  return FindGroupIndex(checkpoint, group.needs_group_index, groups, source);
}

Status FindNvfp4(const Checkpoint& checkpoint, const QuantGroup& group, LinearSource* source) {
  const std::string& module = source->module;
  if (group.group_size != 16) return Unimplemented("NVFP4 has groups of 16, found {}", group.group_size);
  if (source->in % 16 != 0)
    return Unimplemented("NVFP4 needs inputs in multiples of 16, found {}", source->in);
  source->scheme = WeightScheme::kNvfp4;
  ASSIGN_OR_RETURN(source->weight,
                   Part(checkpoint, module + ".weight_packed", {DType::kU8}, {source->out, source->in / 2}));
  ASSIGN_OR_RETURN(source->scale, Part(checkpoint, module + ".weight_scale", {DType::kF8E4M3},
                                       {source->out, source->in / 16}));
  ASSIGN_OR_RETURN(source->global_scale, ReadScalar(checkpoint, module + ".weight_global_scale"));
  return OkStatus();
}

Status FindFp8(const Checkpoint& checkpoint, const std::string& scale, LinearSource* source) {
  source->scheme = WeightScheme::kFp8Block;
  ASSIGN_OR_RETURN(source->weight,
                   Part(checkpoint, source->module + ".weight", {DType::kF8E4M3}, {source->out, source->in}));
  ASSIGN_OR_RETURN(source->scale, Scale(checkpoint, *source, scale));
  return OkStatus();
}

Status FindCompressed(const Checkpoint& checkpoint, const QuantGroup& group, LinearSource* source) {
  RETURN_IF_ERROR(SetBlocks(group, source));
  if (group.format == "int-quantized" || (group.format == "naive-quantized" && group.type == "int")) {
    return FindInt8(checkpoint, group, source);
  }
  if (group.format == "pack-quantized") return FindPacked(checkpoint, group, source);
  if (group.format == "nvfp4-pack-quantized") return FindNvfp4(checkpoint, group, source);
  if (group.format == "float-quantized" || group.format == "naive-quantized") {
    if (group.type != "float" || group.num_bits != 8) {
      return Unimplemented("{} weights must be 8-bit \"float\", found {}-bit \"{}\"", group.format,
                           group.num_bits, group.type);
    }
    return FindFp8(checkpoint, source->module + ".weight_scale", source);
  }
  return Unimplemented(
      "compressed-tensors format must be int-quantized, pack-quantized, nvfp4-pack-quantized or "
      "float-quantized, "
      "found \"{}\"",
      group.format);
}

Status FindPlain(const Checkpoint& checkpoint, LinearSource* source) {
  const std::vector<int64_t> shape = {source->out, source->in};
  ASSIGN_OR_RETURN(source->weight, checkpoint.Expect(source->module + ".weight", shape));
  const tensor::BlockSize block = tensor::BlockOf(source->weight->dtype);
  const bool readable =
      IsFloat(source->weight->dtype) || source->weight->dtype == DType::kF64 || block.elements > 1;
  if (!readable) {
    return UnexpectedTensor(*source->weight,
                            "a floating-point or ggml block type (or described by \"quantization_config\")");
  }
  return OkStatus();
}

// Symmetric schemes have no zero points. Some tools store them all the same, with the value 0: codes of 0, or
// the middle code where words hold several.
Status CheckZeroPoints(const Checkpoint& checkpoint, const LinearSource& source) {
  for (const char* field : {".weight_zero_point", ".input_zero_point"}) {
    const TensorEntry* entry = checkpoint.Find(source.module + field);
    if (entry == nullptr || entry == source.zero_point) continue;
    auto zero = std::byte{0};
    if (source.scheme == WeightScheme::kIntPacked && entry->dtype == DType::kI32) {
      zero = source.bits == 4 ? std::byte{0x88} : std::byte{0x80};
    }
    if (std::ranges::all_of(entry->bytes, [zero](std::byte b) { return b == zero; })) continue;
    return InvalidArgument("{}: tensor {} must be 0, since {} is read as symmetric", entry->file, entry->name,
                           source.module);
  }
  return OkStatus();
}

// Rows are read one at a time: each function fills `out` [in] with row `row`.

void ReadFp8Row(const LinearSource& source, int64_t row, float* out) {
  static const std::array<float, 256> kValues = [] {
    std::array<float, 256> values{};
    for (int i = 0; i < 256; ++i) values[i] = tensor::F8E4M3ToFloat(static_cast<uint8_t>(i));
    return values;
  }();
  const std::byte* in = source.weight->bytes.data() + row * source.in;
  const int64_t blocks = base::CeilDiv(source.in, source.block_cols);
  for (int64_t block = 0; block < blocks; ++block) {
    const float scale = ScalarAt(*source.scale, row / source.block_rows * blocks + block);
    const int64_t end = std::min(source.in, (block + 1) * source.block_cols);
    for (int64_t i = block * source.block_cols; i < end; ++i)
      out[i] = kValues[static_cast<uint8_t>(in[i])] * scale;
  }
}

void ReadInt8Row(const LinearSource& source, int64_t row, float* out) {
  const std::byte* in = source.weight->bytes.data() + row * source.in;
  const float scale = ScalarAt(*source.scale, row / source.block_rows);
  for (int64_t i = 0; i < source.in; ++i) out[i] = static_cast<float>(static_cast<int8_t>(in[i])) * scale;
}

// Returns code `index` of a tensor of i32 words; the first code is in the low bits.
int PackedCode(const std::byte* words, int64_t index, int bits) {
  const int64_t per_word = 32 / bits;
  uint32_t word = 0;
  std::memcpy(&word, words + index / per_word * 4, 4);
  return static_cast<int>(word >> (bits * (index % per_word)) & ((1U << bits) - 1));
}

void ReadPackedRow(const LinearSource& source, int64_t row, float* out) {
  const int64_t per_word = 32 / source.bits, words = base::CeilDiv(source.in, per_word);
  const int64_t groups = base::CeilDiv(source.in, source.block_cols);
  const std::byte* in = source.weight->bytes.data() + row * words * 4;
  std::vector<float> scale(static_cast<size_t>(groups));
  std::vector<int> zero(static_cast<size_t>(groups), 1 << (source.bits - 1));
  for (int64_t g = 0; g < groups; ++g) {
    scale[g] = ScalarAt(*source.scale, row * groups + g);
    if (source.zero_point != nullptr) {
      const std::byte* word = source.zero_point->bytes.data() + (row / per_word * groups + g) * 4;
      zero[g] = PackedCode(word, row % per_word, source.bits);
    }
  }
  for (int64_t i = 0; i < source.in; ++i) {
    int64_t g = i / source.block_cols;
    if (source.group_index != nullptr) {
      int32_t index = 0;
      std::memcpy(&index, source.group_index->bytes.data() + i * 4, 4);
      g = index;
    }
    out[i] = static_cast<float>(PackedCode(in, i, source.bits) - zero[g]) * scale[g];
  }
}

void ReadNvfp4Row(const LinearSource& source, int64_t row, float* out) {
  const std::byte* in = source.weight->bytes.data() + row * source.in / 2;
  for (int64_t g = 0; g < source.in / 16; ++g) {
    const float scale = ScalarAt(*source.scale, row * (source.in / 16) + g) / source.global_scale;
    for (int64_t i = 0; i < 8; ++i) {
      const auto pair = static_cast<uint8_t>(in[g * 8 + i]);
      out[g * 16 + 2 * i] = tensor::kE2M1[pair & 15U] * scale;
      out[g * 16 + 2 * i + 1] = tensor::kE2M1[pair >> 4U] * scale;
    }
  }
}

}  // namespace

float ScalarAt(const TensorEntry& entry, int64_t index) {
  const std::byte* at = entry.bytes.data() + tensor::BytesOf(entry.dtype, index);
  uint16_t half = 0;
  float full = 0;
  switch (entry.dtype) {
    case DType::kF32:
      std::memcpy(&full, at, 4);
      return full;
    case DType::kF16:
      std::memcpy(&half, at, 2);
      return tensor::HalfToFloat(half);
    case DType::kBF16:
      std::memcpy(&half, at, 2);
      return tensor::ToFloat(tensor::BF16{half});
    case DType::kF8E4M3:
      return tensor::F8E4M3ToFloat(static_cast<uint8_t>(*at));
    default:
      return std::nanf("");
  }
}

bool IsLinearField(std::string_view field) {
  constexpr std::string_view kFields[] = {
      "weight",       "weight_packed",      "weight_scale",      "weight_scale_inv",
      "weight_shape", "weight_g_idx",       "weight_zero_point", "weight_global_scale",
      "input_scale",  "input_global_scale", "input_zero_point"};
  return std::ranges::find(kFields, field) != std::end(kFields);
}

StatusOr<LinearSource> Checkpoint::FindLinear(const std::string& module, int64_t out, int64_t in) const {
  ASSIGN_OR_RETURN(LinearSource source, FindWeight(module, out, in));
  RETURN_IF_ERROR(CheckZeroPoints(*this, source));
  return source;
}

StatusOr<LinearSource> Checkpoint::FindWeight(const std::string& module, int64_t out, int64_t in) const {
  LinearSource source;
  source.module = module;
  source.out = out;
  source.in = in;
  source.scheme = WeightScheme::kPlain;
  const TensorEntry* weight = Find(module + ".weight");
  const bool plain = weight != nullptr && weight->dtype != DType::kF8E4M3 && weight->dtype != DType::kI8;
  if (plain || quant_ == nullptr || quant_->method == QuantConfig::Method::kNone) {
    for (const char* part : {".weight_packed", ".weight_scale", ".weight_scale_inv"}) {
      if (plain && Has(module + part)) {
        return InvalidArgument("{}: tensor {}.weight is {} and not quantized, but {}{} exists too",
                               weight->file, module, tensor::DTypeName(weight->dtype), module, part);
      }
    }
    RETURN_IF_ERROR(FindPlain(*this, &source));
    return source;
  }
  if (quant_->method == QuantConfig::Method::kFp8Blocks) {
    source.block_rows = quant_->block_rows;
    source.block_cols = quant_->block_cols;
    RETURN_IF_ERROR(FindFp8(*this, module + ".weight_scale_inv", &source));
    return source;
  }
  const QuantGroup* group = quant_->GroupOf(module);
  if (group == nullptr) {
    if (weight == nullptr && !Has(module + ".weight_packed")) {
      return NotFound("{}: tensor {}.weight is missing", path(), module);
    }
    return InvalidArgument("{}: {} is stored quantized, but \"quantization_config\" has no group for it",
                           path(), module);
  }
  if (Status status = FindCompressed(*this, *group, &source); !status.ok()) {
    return status.code() == StatusCode::kUnimplemented
               ? Annotate(status, fmt::format("{}: {}", path(), module))
               : status;
  }
  return source;
}

Status Checkpoint::ReadLinearRows(const LinearSource& source, int64_t first, int64_t count,
                                  std::span<float> out) const {
  if (first < 0 || count < 0 || first + count > source.out || std::ssize(out) < count * source.in) {
    return InvalidArgument("{}: rows [{}, {}) of {} rows can't be read", source.module, first, first + count,
                           source.out);
  }
  if (source.scheme == WeightScheme::kPlain) return ReadRows(*source.weight, first, count, out);
  for (int64_t row = 0; row < count; ++row) {
    float* to = out.data() + row * source.in;
    switch (source.scheme) {
      case WeightScheme::kFp8Block:
        ReadFp8Row(source, first + row, to);
        break;
      case WeightScheme::kInt8Channel:
        ReadInt8Row(source, first + row, to);
        break;
      case WeightScheme::kIntPacked:
        ReadPackedRow(source, first + row, to);
        break;
      case WeightScheme::kNvfp4:
        ReadNvfp4Row(source, first + row, to);
        break;
      case WeightScheme::kPlain:
        break;
    }
  }
  return OkStatus();
}

Status Checkpoint::ReadLinearRowsI8(const LinearSource& source, int64_t first, int64_t count,
                                    std::span<int8_t> out, std::span<float> scales) const {
  if (source.scheme != WeightScheme::kInt8Channel || first < 0 || first + count > source.out ||
      std::ssize(out) < count * source.in || std::ssize(scales) < count) {
    return InvalidArgument("{}: int8 rows [{}, {}) can't be read", source.module, first, first + count);
  }
  std::memcpy(out.data(), source.weight->bytes.data() + first * source.in,
              static_cast<size_t>(count * source.in));
  for (int64_t row = 0; row < count; ++row)
    scales[row] = ScalarAt(*source.scale, (first + row) / source.block_rows);
  return OkStatus();
}

}  // namespace moesaic::checkpoint
