// The schemes that `moesaic quantize` writes: the stored form of a linear layer's weight, and its description
// in config.json. compressed-tensors (github.com/vllm-project/compressed-tensors) defines names and fields.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "quantizer/format/grid.h"
#include "runtime/thread_pool.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {

enum class Scheme : uint8_t {
  kW8A8,   // int8 per output, activations int8 per token at run time; format int-quantized
  kW8A16,  // int8 in groups of inputs or per output; format pack-quantized
  kW4A16,  // int4 in groups of inputs; format pack-quantized
  kNvfp4,  // e2m1 in groups of 16 with e4m3 scales; format nvfp4-pack-quantized
  kFp8,    // e4m3 in blocks of 128 x 128, activations e4m3 at run time; format float-quantized
};

std::vector<std::string> SchemeNames();  ///< "w8a8", "w8a16", "w4a16", "nvfp4", "fp8"
std::string SchemeName(Scheme scheme);
StatusOr<Scheme> ParseScheme(const std::string& name);

/// True if weights are int8. Their rounding costs less than that of the activations in our kernels.
inline bool IsInt8(Scheme scheme) { return scheme == Scheme::kW8A8 || scheme == Scheme::kW8A16; }

/// True if the scheme has groups of inputs of several sizes.
inline bool HasGroupSize(Scheme scheme) { return scheme == Scheme::kW4A16 || scheme == Scheme::kW8A16; }

/// Returns the grid of `scheme`. `group_size` is used only by schemes with HasGroupSize.
Grid GridOf(Scheme scheme, int group_size);

/// Stored form of a linear: the codes of a scheme, or unrounded values of a dtype.
struct Precision {
  std::optional<Scheme> scheme = std::nullopt;  // nothing: kept
  int group_size = 32;                          // group size of schemes with HasGroupSize; 0: all inputs
  tensor::DType dtype = tensor::DType::kBF16;   // dtype of a kept linear: kBF16, kF16 or kF32

  bool kept() const { return !scheme.has_value(); }
  bool is(Scheme other) const { return scheme == other; }
  Grid grid() const { return GridOf(*scheme, group_size); }  // must not be kept
  std::string Name() const;                                  // "w8a8", "w4a16-g32", "w8a16-channel", "bf16"
  bool operator==(const Precision& other) const { return Name() == other.Name(); }
};

/// Parses "w8a8", "w4a16-g128", "w8a16-channel", "bf16", "fp16", "fp32". "w4a16" and "w8a16" alone have
/// groups of 32.
StatusOr<Precision> ParsePrecision(const std::string& name);

/// One of the tensors that store a linear's weight.
struct StoredTensor {
  std::string suffix;  // follows the module in the name: ".weight_scale"
  tensor::DType dtype;
  std::vector<int64_t> shape;
  int64_t outputs_per_row = 1;  // outputs of the linear per row of the tensor; 0: stored once for all

  int64_t bytes() const;
  int64_t row_bytes() const;  // bytes of one row, or of a tensor that is stored once
};

/// Returns the tensors of an [n, k] weight on `grid`.
std::vector<StoredTensor> TensorsOf(const Grid& grid, int64_t n, int64_t k);

/// Encodes all rows of `matrix`, a run of rows of a weight. out[i] receives the bytes of `tensors[i]`, one of
/// TensorsOf(matrix.grid, ...). Tensors that are stored once are written as well.
void EncodeRows(runtime::ThreadPool& pool, const QuantizedMatrix& matrix,
                std::span<const StoredTensor> tensors, std::span<std::byte* const> out);

/// Returns "quantization_config" of a checkpoint with all linears on the grid of `scheme`, except those that
/// `ignore` names directly or as "re:PATTERN". kW8A8: if `static_activations`, activations are static except
/// for the linears in `dynamic`.
nlohmann::ordered_json QuantizationConfig(Scheme scheme, int group_size,
                                          const std::vector<std::string>& ignore,
                                          bool static_activations = false,
                                          const std::vector<std::string>& dynamic = {});

/// Modules of one rounded precision, by name or as "re:PATTERN".
struct PrecisionTargets {
  Precision precision;
  std::vector<std::string> modules;
};

/// Returns "quantization_config" of a checkpoint with several schemes (format mixed-precision).
nlohmann::ordered_json MixedQuantizationConfig(const std::vector<PrecisionTargets>& targets,
                                               const std::vector<std::string>& ignore);

}  // namespace moesaic::quantizer
