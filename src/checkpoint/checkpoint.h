// A published checkpoint on disk: a Hugging Face folder, a GGUF file or a packed file.
//
// Higher rooms see only Hugging Face's conventions: a config with the keys of config.json, and tensors with
// their Hub names and shapes. GGUF files are translated when they are opened (metadata -> config, ggml names
// -> Hub names, llama's rotary row permutation undone), so that each model is written only once.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"

namespace moesaic::checkpoint {

/// Reads rows of a tensor that its file stores in a different order from the Hub, or in two parts.
class RowReader {
 public:
  virtual ~RowReader() = default;
  /// Reads rows [first, first + count), which must exist, as f32. Thread-safe.
  virtual void Read(int64_t first, int64_t count, float* out) const = 0;
  /// Returns the file's row that equals row `row`, or -1 if the row is composed of several.
  virtual int64_t FileRow(int64_t /*row*/) const { return -1; }
};

/// One stored tensor; its bytes are mapped, not copied.
struct TensorEntry {
  std::string name;  // Hub name, e.g. "model.layers.0.self_attn.q_a_proj.weight"
  tensor::DType dtype;
  std::vector<int64_t> shape;                       // in Hub order: [out, in]
  std::span<const std::byte> bytes;                 // mapped bytes, not yet read
  std::string file;                                 // for error messages
  std::shared_ptr<const RowReader> rows = nullptr;  // null: `bytes` holds the rows consecutively
};

/// Storage scheme of a linear layer's weight. The Read* functions below decode all of them.
enum class WeightScheme {
  kPlain,        // X.weight in f32, f16, bf16, or a ggml block type
  kFp8Block,     // X.weight f8_e4m3 [out, in] and X.weight_scale_inv f32 per 128x128 block (multiplies)
  kInt8Channel,  // compressed-tensors int-quantized: X.weight i8, X.weight_scale [out, 1], maybe
                 // X.input_scale
  kIntPacked,    // compressed-tensors pack-quantized: X.weight_packed i32, X.weight_scale, X.weight_shape
  kNvfp4,        // compressed-tensors nvfp4-pack-quantized: X.weight_packed u8, X.weight_scale,
                 // X.weight_global_scale
};

/// A linear layer's weight after lookup and validation; the data is not read yet.
struct LinearSource {
  std::string module;  // "model.layers.0.mlp.gate_proj"
  WeightScheme scheme;
  int64_t out = 0, in = 0;
  float input_scale = 0;             // static activation scale (kInt8Channel); 0 if dynamic or absent
  bool dynamic_activations = false;  // kIntPacked: bits per code, 4 or 8
  int bits = 4;                      // kIntPacked: of a code, 4 or 8

  // Tensors of the weight, owned by the checkpoint. One scale covers block_rows x block_cols weights.
  const TensorEntry* weight = nullptr;
  const TensorEntry* scale = nullptr;
  const TensorEntry* zero_point = nullptr;   // kIntPacked, asymmetric
  const TensorEntry* group_index = nullptr;  // kIntPacked with actorder: the group of each input
  int64_t block_rows = 1, block_cols = 1;
  float global_scale = 1;  // kNvfp4: divisor of the scales
};

struct QuantConfig;

class GgufMetadata;

class Checkpoint {
 public:
  /// Opens a folder, a .gguf or a .safetensors file. Maps the files and validates every header: names,
  /// shapes, counts and offsets. Does not read weights.
  static StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);
  /// Opens a checkpoint from the text of a config.json and the bytes of a safetensors file, which must
  /// outlive the result.
  static StatusOr<std::unique_ptr<Checkpoint>> FromMemory(std::string_view config,
                                                          std::span<const std::byte> safetensors);
  Checkpoint();
  virtual ~Checkpoint();

  /// Returns config.json, or its equivalent built from GGUF metadata.
  virtual const nlohmann::json& config() const = 0;
  virtual const std::string& path() const = 0;
  virtual std::string container() const = 0;  ///< "safetensors", "gguf" or "moesaic"

  virtual const std::vector<TensorEntry>& tensors() const = 0;  ///< sorted by name
  /// Returns the mapped files that hold the tensors' bytes; empty if the caller supplied the bytes.
  virtual std::span<const std::shared_ptr<const runtime::MappedFile>> files() const = 0;
  /// Drops pages of files() that were read from this process's resident memory. Thread-safe.
  void ForgetMaps() const;
  const TensorEntry* Find(std::string_view name) const;
  bool Has(std::string_view name) const { return Find(name) != nullptr; }

  /// Returns tensor `name`, which must have exactly `shape`. The error names the file, the tensor, the
  /// expected and the found shape.
  StatusOr<const TensorEntry*> Expect(std::string_view name, std::span<const int64_t> shape) const;

  /// Reads a whole tensor of `shape` as f32 (norms, biases). Like ReadRows, it refuses FP8 with scales:
  /// weights of linears are read by FindLinear and ReadLinearRows.
  StatusOr<std::vector<float>> ReadF32(std::string_view name, std::span<const int64_t> shape) const;

  /// Reads rows [first, first + count) of a 2-d tensor (or of a [n, out, in] stack flattened to rows) as f32
  /// into `out`.
  Status ReadRows(const TensorEntry& entry, int64_t first, int64_t count, std::span<float> out) const;

  /// Finds the weight of linear `module` with shape [out, in] in any storage scheme.
  StatusOr<LinearSource> FindLinear(const std::string& module, int64_t out, int64_t in) const;

  /// Dequantizes rows [first, first + count) of a linear's weight to f32 [count, in].
  Status ReadLinearRows(const LinearSource& source, int64_t first, int64_t count, std::span<float> out) const;

  /// kInt8Channel only: reads the stored int8 rows and their scales without rounding again.
  Status ReadLinearRowsI8(const LinearSource& source, int64_t first, int64_t count, std::span<int8_t> out,
                          std::span<float> scales) const;

  // Returns the contents of a text file of the checkpoint, or its equivalent from GGUF metadata; nullopt if
  // absent.
  virtual std::optional<std::string> ReadText(const std::string& file) const = 0;  ///< "tokenizer.json", ...
  /// GGUF only: metadata with the keys "tokenizer.ggml.*" and "tokenizer.chat_template"; null otherwise.
  virtual const GgufMetadata* gguf() const { return nullptr; }

 private:
  Status ReadQuantConfig();
  StatusOr<LinearSource> FindWeight(const std::string& module, int64_t out, int64_t in) const;

  std::unique_ptr<const QuantConfig> quant_;  // parsed from config() by Open
};

}  // namespace moesaic::checkpoint
