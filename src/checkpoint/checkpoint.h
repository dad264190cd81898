// A published checkpoint on disk, whatever its container: a Hugging Face folder or a GGUF file.
//
// Everything above this room sees Hugging Face's world: a config in config.json's terms and tensors by their
// Hub names and shapes. A GGUF file is translated at the door (metadata -> config, ggml names -> Hub names,
// llama's rotary row permutation undone), so that no model is written twice.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"

namespace moesaic::checkpoint {

/// Reads the rows of a tensor that its file has in another order than the Hub, or in two parts.
class RowReader {
 public:
  virtual ~RowReader() = default;
  /// Rows [first, first + count), which exist, as f32. Any thread may call it.
  virtual void Read(int64_t first, int64_t count, float* out) const = 0;
  /// The row of the file that row `row` is; -1 when it is none, but put together.
  virtual int64_t FileRow(int64_t /*row*/) const { return -1; }
};

/// One stored tensor, in place.
struct TensorEntry {
  std::string name;  // Hub name, e.g. "model.layers.0.self_attn.q_a_proj.weight"
  tensor::DType dtype;
  std::vector<int64_t> shape;                       // Hub order: [out, in]
  std::span<const std::byte> bytes;                 // mapped, not yet read
  std::string file;                                 // for messages
  std::shared_ptr<const RowReader> rows = nullptr;  // null: `bytes` are the rows, one after the other
};

/// How the weight of a linear layer is stored. Read* below undo all of them.
enum class WeightScheme {
  kPlain,        // X.weight in f32, f16, bf16, or a ggml block type
  kFp8Block,     // X.weight f8_e4m3 [out, in] and X.weight_scale_inv f32 per 128x128 block (multiplies)
  kInt8Channel,  // compressed-tensors int-quantized: X.weight i8, X.weight_scale [out, 1], maybe
                 // X.input_scale
  kIntPacked,    // compressed-tensors pack-quantized: X.weight_packed i32, X.weight_scale, X.weight_shape
  kNvfp4,        // compressed-tensors nvfp4-pack-quantized: X.weight_packed u8, X.weight_scale,
                 // X.weight_global_scale
};

/// A linear layer's weight, found and checked but not read.
struct LinearSource {
  std::string module;  // "model.layers.0.mlp.gate_proj"
  WeightScheme scheme;
  int64_t out = 0, in = 0;
  float input_scale = 0;             // static activation scale (kInt8Channel), 0 when dynamic or absent
  bool dynamic_activations = false;  // kInt8Channel with dynamic per-token int8 activations
  int bits = 4;                      // kIntPacked: of a code, 4 or 8

  // The tensors behind it, owned by the checkpoint. One scale covers block_rows x block_cols weights.
  const TensorEntry* weight = nullptr;
  const TensorEntry* scale = nullptr;
  const TensorEntry* zero_point = nullptr;   // kIntPacked, asymmetric
  const TensorEntry* group_index = nullptr;  // kIntPacked with actorder: the group of each input
  int64_t block_rows = 1, block_cols = 1;
  float global_scale = 1;  // kNvfp4: divides
};

struct QuantConfig;

class GgufMetadata;

class Checkpoint {
 public:
  /// Opens a folder, a .gguf or a .safetensors file. Maps the files and checks every header: names, shapes,
  /// counts and offsets. Reads no weight.
  static StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);
  /// The same from the text of a config.json and the bytes of a safetensors file, which must outlive the
  /// result.
  static StatusOr<std::unique_ptr<Checkpoint>> FromMemory(std::string_view config,
                                                          std::span<const std::byte> safetensors);
  Checkpoint();
  virtual ~Checkpoint();

  /// config.json, or its equivalent from GGUF metadata.
  virtual const nlohmann::json& config() const = 0;
  virtual const std::string& path() const = 0;
  virtual std::string container() const = 0;  ///< "safetensors", "gguf" or "moesaic"

  virtual const std::vector<TensorEntry>& tensors() const = 0;  ///< sorted by name
  /// The mapped files that tensors' bytes lie in; none when the caller brought the bytes.
  virtual std::span<const std::shared_ptr<const runtime::MappedFile>> files() const = 0;
  /// Takes the pages of files() that were read so far out of this process's resident memory. Thread-safe.
  void ForgetMaps() const;
  const TensorEntry* Find(std::string_view name) const;
  bool Has(std::string_view name) const { return Find(name) != nullptr; }

  /// Tensor `name`, which must have exactly `shape`; the error names file, tensor, expected and found.
  StatusOr<const TensorEntry*> Expect(std::string_view name, std::span<const int64_t> shape) const;

  /// Reads a whole tensor of `shape` as f32 (norms, biases, router, embeddings).
  StatusOr<std::vector<float>> ReadF32(std::string_view name, std::span<const int64_t> shape) const;

  /// Rows [first, first + count) of a 2-d tensor (or of a [n, out, in] stack flattened to rows) as f32 into
  /// `out`.
  Status ReadRows(const TensorEntry& entry, int64_t first, int64_t count, std::span<float> out) const;

  /// Finds the weight of linear `module`, which must be [out, in], under whatever scheme it is stored.
  StatusOr<LinearSource> FindLinear(const std::string& module, int64_t out, int64_t in) const;

  /// Dequantised rows [first, first + count) of a linear's weight, f32 [count, in].
  Status ReadLinearRows(const LinearSource& source, int64_t first, int64_t count, std::span<float> out) const;

  /// kInt8Channel only: the stored int8 rows and their scales, not rounded again.
  Status ReadLinearRowsI8(const LinearSource& source, int64_t first, int64_t count, std::span<int8_t> out,
                          std::span<float> scales) const;

  // Text side: the bytes of these files, or their equivalents from GGUF metadata; nullopt when absent.
  virtual std::optional<std::string> ReadText(const std::string& file) const = 0;  ///< "tokenizer.json", ...
  /// GGUF only: the metadata keys "tokenizer.ggml.*" and "tokenizer.chat_template".
  virtual const GgufMetadata* gguf() const { return nullptr; }

 private:
  Status ReadQuantConfig();

  std::unique_ptr<const QuantConfig> quant_;  // of config(), read by Open
};

}  // namespace moesaic::checkpoint
