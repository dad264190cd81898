#include "quantizer/format/scheme.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/round.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;
using tensor::DType;

struct Named {
  Scheme scheme;
  const char* name;
  const char* format;
};
constexpr Named kSchemes[] = {
    {Scheme::kW8A8, "w8a8", "int-quantized"},    {Scheme::kW8A16, "w8a16", "pack-quantized"},
    {Scheme::kW4A16, "w4a16", "pack-quantized"}, {Scheme::kNvfp4, "nvfp4", "nvfp4-pack-quantized"},
    {Scheme::kFp8, "fp8", "float-quantized"},
};

const Named& Find(Scheme scheme) {
  return *std::ranges::find_if(kSchemes, [&](const Named& named) { return named.scheme == scheme; });
}

// Packs `count` 4-bit codes, two per byte, the first in the low half. `flip` converts two's complement to an
// offset of 8.
void PackNibbles(const uint8_t* codes, int64_t count, uint8_t flip, std::byte* out) {
  constexpr uint64_t kBytes = 0x0101010101010101U;
  int64_t i = 0;
  if constexpr (std::endian::native == std::endian::little) {
    for (; i + 8 <= count; i += 8) {  // merges neighbours: bytes to pairs, pairs to 32-bit words
      uint64_t x = 0;
      std::memcpy(&x, codes + i, 8);
      x = (x ^ flip * kBytes) & 15 * kBytes;
      x = (x | x >> 4U) & 0x00ff00ff00ff00ffU;
      x = (x | x >> 8U) & 0x0000ffff0000ffffU;
      const auto packed = static_cast<uint32_t>(x | x >> 16U);
      std::memcpy(out + i / 2, &packed, 4);
    }
  }
  for (; i + 1 < count; i += 2) {
    const int low = (codes[i] ^ flip) & 15, high = (codes[i + 1] ^ flip) & 15;
    out[i / 2] = static_cast<std::byte>(low | high << 4);
  }
  if (count % 2 != 0) out[count / 2] = static_cast<std::byte>((codes[count - 1] ^ flip) & 15);
}

void EncodeScale(float scale, DType dtype, std::byte* out) {
  if (dtype == DType::kF8E4M3) {
    *out = static_cast<std::byte>(tensor::FloatToF8E4M3(scale));
  } else if (dtype == DType::kBF16) {
    const uint16_t bits = tensor::ToBF16(scale).bits;
    std::memcpy(out, &bits, sizeof(bits));
  } else {
    std::memcpy(out, &scale, sizeof(scale));
  }
}

void EncodeOnce(const QuantizedMatrix& matrix, const StoredTensor& stored, int64_t n, std::byte* out) {
  if (stored.dtype == DType::kI64) {
    const int64_t shape[] = {n, matrix.k};
    std::memcpy(out, shape, sizeof(shape));
  } else {
    std::memcpy(out, &matrix.global_scale, sizeof(float));
  }
}

// Encodes a row of codes as the weight tensor stores it.
void EncodeCodes(const QuantizedMatrix& matrix, const StoredTensor& stored, const uint8_t* codes,
                 std::byte* out) {
  switch (matrix.grid.kind) {
    case GridKind::kInt4Group:
      // The codes missing in the last word are zeros, as compressed-tensors pads.
      std::memset(out, 0, static_cast<size_t>(stored.row_bytes()));
      PackNibbles(codes, matrix.k, 8, out);
      return;
    case GridKind::kInt8Group:
      std::transform(codes, codes + matrix.k, out, [](uint8_t code) { return std::byte(code ^ 0x80); });
      std::memset(out + matrix.k, 0, static_cast<size_t>(stored.row_bytes() - matrix.k));
      return;
    case GridKind::kNvfp4:
      PackNibbles(codes, matrix.k, 0, out);
      return;
    default:
      std::memcpy(out, codes, static_cast<size_t>(matrix.k));
  }
}

ordered_json Arguments(int bits, const char* type, const char* strategy) {
  return {
      {"num_bits", bits}, {"type", type}, {"symmetric", true}, {"strategy", strategy}, {"dynamic", false}};
}

ordered_json WeightArguments(Scheme scheme, int group_size) {
  ordered_json arguments;
  switch (scheme) {
    case Scheme::kW8A8:
      return Arguments(8, "int", "channel");
    case Scheme::kW8A16:
    case Scheme::kW4A16:
      arguments = Arguments(scheme == Scheme::kW8A16 ? 8 : 4, "int", group_size > 0 ? "group" : "channel");
      // VLLM requires it for channel scales as well.
      arguments["group_size"] = group_size > 0 ? group_size : -1;
      return arguments;
    case Scheme::kNvfp4:
      arguments = Arguments(4, "float", "tensor_group");
      arguments["group_size"] = 16;
      return arguments;
    case Scheme::kFp8:
      break;
  }
  arguments = Arguments(8, "float", "block");
  arguments["block_structure"] = {128, 128};
  return arguments;
}

// Describes the run-time rounding of activations; null: none.
ordered_json ActivationArguments(Scheme scheme, bool is_static) {
  ordered_json arguments;
  if (scheme == Scheme::kW8A8) {
    arguments = Arguments(8, "int", is_static ? "tensor" : "token");
  } else if (scheme == Scheme::kFp8) {
    arguments = Arguments(8, "float", "group");
    arguments["group_size"] = 128;
  } else {
    return nullptr;
  }
  arguments["dynamic"] = !is_static;
  arguments["observer"] = nullptr;
  return arguments;
}

ordered_json ConfigGroup(Scheme scheme, int group_size, const std::vector<std::string>& targets,
                         bool static_activations) {
  return {{"targets", targets},
          {"weights", WeightArguments(scheme, group_size)},
          {"input_activations", ActivationArguments(scheme, static_activations)},
          {"output_activations", nullptr}};
}

ordered_json WholeConfig(const char* format, const std::vector<std::string>& ignore,
                         const ordered_json& groups) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"quantization_status", "compressed"},
          {"global_compression_ratio", nullptr},
          {"kv_cache_scheme", nullptr},
          {"ignore", ignore},
          {"config_groups", groups}};
}

}  // namespace

std::vector<std::string> SchemeNames() {
  std::vector<std::string> names;
  for (const Named& named : kSchemes) names.emplace_back(named.name);
  return names;
}

std::string SchemeName(Scheme scheme) { return Find(scheme).name; }

StatusOr<Scheme> ParseScheme(const std::string& name) {
  for (const Named& named : kSchemes) {
    if (name == named.name) return named.scheme;
  }
  return InvalidArgument("the scheme must be one of {}, found \"{}\"", fmt::join(SchemeNames(), ", "), name);
}

std::string Precision::Name() const {
  if (scheme.has_value()) {
    const std::string name = SchemeName(*scheme);
    if (!HasGroupSize(*scheme)) return name;
    return group_size > 0 ? fmt::format("{}-g{}", name, group_size) : name + "-channel";
  }
  return dtype == DType::kF32 ? "fp32" : dtype == DType::kF16 ? "fp16" : "bf16";
}

StatusOr<Precision> ParsePrecision(const std::string& name) {
  for (const auto& [dtype, kept] :
       {std::pair(DType::kBF16, "bf16"), std::pair(DType::kF16, "fp16"), std::pair(DType::kF32, "fp32")}) {
    if (name == kept) return Precision{.dtype = dtype};
  }
  std::vector<Precision> roundings;
  for (const Named& named : kSchemes) {
    if (!HasGroupSize(named.scheme)) roundings.push_back({.scheme = named.scheme});
    for (const int size : {32, 64, 128}) {
      if (HasGroupSize(named.scheme)) roundings.push_back({.scheme = named.scheme, .group_size = size});
    }
    if (named.scheme == Scheme::kW8A16) roundings.push_back({.scheme = named.scheme, .group_size = 0});
  }
  std::vector<std::string> names;
  for (const Precision& rounding : roundings) {
    names.push_back(rounding.Name());
    if (name == names.back() || (name == SchemeName(*rounding.scheme) && rounding.group_size == 32)) {
      return rounding;
    }
  }
  return InvalidArgument("a precision must be one of {}, bf16, fp16, fp32; found \"{}\"",
                         fmt::join(names, ", "), name);
}

Grid GridOf(Scheme scheme, int group_size) {
  switch (scheme) {
    case Scheme::kW8A8:
      return {GridKind::kInt8Channel, 0};
    case Scheme::kW8A16:
      return {GridKind::kInt8Group, group_size};
    case Scheme::kW4A16:
      return {GridKind::kInt4Group, group_size};
    case Scheme::kNvfp4:
      return {GridKind::kNvfp4, 16};
    case Scheme::kFp8:
      break;
  }
  return {GridKind::kFp8Block, 128};
}

int64_t StoredTensor::bytes() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return tensor::BytesOf(dtype, elements);
}

int64_t StoredTensor::row_bytes() const {
  return outputs_per_row == 0 || shape.empty() ? bytes() : bytes() / std::max<int64_t>(shape[0], 1);
}

std::vector<StoredTensor> TensorsOf(const Grid& grid, int64_t n, int64_t k) {
  const std::vector<int64_t> scales = {grid.scale_rows(static_cast<int>(n)),
                                       grid.scale_columns(static_cast<int>(k))};
  switch (grid.kind) {
    case GridKind::kInt8Channel:
      return {{".weight", DType::kI8, {n, k}}, {".weight_scale", DType::kF32, scales}};
    case GridKind::kInt8Group:
    case GridKind::kInt4Group:
      return {
          {".weight_packed", DType::kI32, {n, base::CeilDiv(k, grid.kind == GridKind::kInt8Group ? 4 : 8)}},
          {".weight_scale", DType::kBF16, scales},
          {".weight_shape", DType::kI64, {2}, 0}};
    case GridKind::kNvfp4:
      return {{".weight_packed", DType::kU8, {n, k / 2}},
              {".weight_scale", DType::kF8E4M3, scales},
              {".weight_global_scale", DType::kF32, {1}, 0}};
    case GridKind::kFp8Block:
      break;
  }
  return {{".weight", DType::kF8E4M3, {n, k}}, {".weight_scale", DType::kF32, scales, grid.group_outputs()}};
}

void EncodeRows(runtime::ThreadPool& pool, const QuantizedMatrix& matrix,
                std::span<const StoredTensor> tensors, std::span<std::byte* const> out) {
  const StoredTensor &codes = tensors[0], &scales = tensors[1];
  const int64_t scale_bytes = tensor::BytesOf(scales.dtype, 1);
  const int64_t columns = scales.shape[1];
  pool.Run(matrix.n, [&](int64_t row, int) {
    EncodeCodes(matrix, codes, matrix.codes.data() + row * matrix.k, out[0] + row * codes.row_bytes());
    if (row % scales.outputs_per_row != 0) return;
    const int64_t first = row / scales.outputs_per_row * columns;
    for (int64_t i = first; i < first + columns; ++i) {
      EncodeScale(matrix.scales[i], scales.dtype, out[1] + i * scale_bytes);
    }
  });
  if (tensors.size() > 2 && out[2] != nullptr) EncodeOnce(matrix, tensors[2], codes.shape[0], out[2]);
}

ordered_json QuantizationConfig(Scheme scheme, int group_size, const std::vector<std::string>& ignore,
                                bool static_activations, const std::vector<std::string>& dynamic) {
  ordered_json groups = {{"group_0", ConfigGroup(scheme, group_size, {"Linear"}, static_activations)}};
  if (!dynamic.empty()) groups["group_1"] = ConfigGroup(scheme, group_size, dynamic, false);
  return WholeConfig(Find(scheme).format, ignore, groups);
}

ordered_json MixedQuantizationConfig(const std::vector<PrecisionTargets>& targets,
                                     const std::vector<std::string>& ignore) {
  ordered_json groups = ordered_json::object();
  for (const auto& [precision, modules] : targets) {
    ordered_json group = ConfigGroup(*precision.scheme, precision.group_size, modules, false);
    group["format"] = Find(*precision.scheme).format;
    groups[fmt::format("group_{}", groups.size())] = std::move(group);
  }
  return WholeConfig("mixed-precision", ignore, groups);
}

}  // namespace moesaic::quantizer
