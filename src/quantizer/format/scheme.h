// The schemes that `moesaic quantize` writes: what becomes of a linear layer's weight, and how config.json
// describes it. compressed-tensors (github.com/vllm-project/compressed-tensors) defines names and fields.
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

/// Whether weights are int8, whose rounding costs less than that of activations does as our kernels run them.
inline bool IsInt8(Scheme scheme) { return scheme == Scheme::kW8A8 || scheme == Scheme::kW8A16; }

/// Whether groups of inputs may have several sizes.
inline bool HasGroupSize(Scheme scheme) { return scheme == Scheme::kW4A16 || scheme == Scheme::kW8A16; }

/// "32", "64", "128", or "channel": 0, all inputs of an output.
StatusOr<int> ParseGroupSize(const std::string& text);

/// The grid of `scheme`; `group_size` counts for those that HasGroupSize only.
Grid GridOf(Scheme scheme, int group_size);

/// What becomes of a linear: a scheme's codes, or its values in a type that keeps them.
struct Precision {
  std::optional<Scheme> scheme = std::nullopt;  // nothing: kept
  int group_size = 32;                          // of what HasGroupSize; 0: all inputs
  tensor::DType dtype = tensor::DType::kBF16;   // of what is kept: kBF16, kF16 or kF32

  bool kept() const { return !scheme.has_value(); }
  bool is(Scheme other) const { return scheme == other; }
  Grid grid() const { return GridOf(*scheme, group_size); }  // of what is not kept
  std::string Name() const;                                  // "w8a8", "w4a16-g32", "w8a16-channel", "bf16"
  bool operator==(const Precision& other) const { return Name() == other.Name(); }
};

/// "w8a8", "w4a16-g128", "w8a16-channel", "bf16", "fp16", "fp32"; "w4a16" and "w8a16" alone have groups of
/// `group_size`.
StatusOr<Precision> ParsePrecision(const std::string& name, int group_size);

/// One tensor of those that stand for a linear's weight.
struct StoredTensor {
  std::string suffix;  // of the name, behind the module's: ".weight_scale"
  tensor::DType dtype;
  std::vector<int64_t> shape;
  int64_t outputs_per_row =
      1;  // outputs of the linear that one row of the tensor is for; 0: for all, stored once

  int64_t bytes() const;
  int64_t row_bytes() const;  // of one row, or of the tensor when it is stored once
};

/// The tensors of an [n, k] weight on `grid`.
std::vector<StoredTensor> TensorsOf(const Grid& grid, int64_t n, int64_t k);

/// Writes the bytes of `tensors[i]`, one of TensorsOf(matrix.grid, ...), that are for all rows of `matrix` to
/// out[i]: a run of rows of the weight whose shape TensorsOf was told. Those that are stored once too.
void EncodeRows(runtime::ThreadPool& pool, const QuantizedMatrix& matrix,
                std::span<const StoredTensor> tensors, std::span<std::byte* const> out);

/// "quantization_config" of a checkpoint whose linears are all on the grid of `scheme` but those that
/// `ignore` names, by name or as "re:PATTERN". kW8A8: activations are static if `static_activations`, but for
/// the linears that `dynamic` names.
nlohmann::ordered_json QuantizationConfig(Scheme scheme, int group_size,
                                          const std::vector<std::string>& ignore,
                                          bool static_activations = false,
                                          const std::vector<std::string>& dynamic = {});

/// Modules, by name or as "re:PATTERN", that have one precision, which is not a kept one.
struct PrecisionTargets {
  Precision precision;
  std::vector<std::string> modules;
};

/// "quantization_config" of a checkpoint of several schemes (format mixed-precision, a format by group).
nlohmann::ordered_json MixedQuantizationConfig(const std::vector<PrecisionTargets>& targets,
                                               const std::vector<std::string>& ignore);

}  // namespace moesaic::quantizer
