// In which form a checkpoint holds what is to be quantized.
#pragma once

#include <array>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "quantizer/format/model_items.h"

namespace moesaic::quantizer {

/// Linears are cut into pieces at multiples of so many rows. Every format's blocks of rows (FP8's 128, zero
/// points' 8) divide it.
inline constexpr int64_t kRowStep = 128;

struct SourceForm {
  bool plain = false;  // a scalar type whose bytes can be taken over as they are: `dtype`
  tensor::DType dtype = tensor::DType::kBF16;
  int64_t bytes = 0;        // of all its tensors
  int64_t whole_bytes = 0;  // of those among them that any run of rows needs in full
};

/// How `source` stores each item. Of a config without weights: as "torch_dtype" and "quantization_config"
/// say.
StatusOr<std::vector<SourceForm>> FormsOf(const checkpoint::Checkpoint& source,
                                          const std::vector<ModelItem>& items);

/// Rows [first, first + rows) of an item, found but not read. The bytes of `parts` are those that these rows
/// need; they lie in the checkpoint's maps until they are pointed to a copy.
class SourceRows {
 public:
  static StatusOr<SourceRows> Find(const checkpoint::Checkpoint& source, const ModelItem& item, int64_t first,
                                   int64_t rows);
  SourceRows(SourceRows&&) = default;
  SourceRows& operator=(SourceRows&&) = default;

  /// Rows that a GGUF file has in another order can't be cut out; they are read through the map.
  bool through_map() const { return parts_.empty(); }
  std::vector<checkpoint::TensorEntry>& parts() { return parts_; }
  /// The bytes of the first part: the rows as they are, if the form is plain.
  std::span<const std::byte> bytes() const { return parts_.front().bytes; }

  /// Rows [first, first + count), counted from the item's start, as f32. Any thread may call it.
  Status Read(const checkpoint::Checkpoint& source, int64_t first, int64_t count, std::span<float> out) const;

 private:
  SourceRows() = default;
  checkpoint::LinearSource linear_;  // its tensors are pointed to parts_ when it is read
  std::array<int, 4> part_of_{};     // weight, scale, zero point, group index: place in parts_, or -1
  std::vector<checkpoint::TensorEntry> parts_;
  const checkpoint::TensorEntry* entry_ = nullptr;  // of a tensor read through the map
  bool is_linear_ = false;
  int64_t first_ = 0;
};

/// Rows that an item can be cut into: of a matrix its own, of others one.
int64_t RowsOf(const ModelItem& item);

}  // namespace moesaic::quantizer
