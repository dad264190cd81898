// The stored form of a source checkpoint's tensors, and reading rows of them.
#pragma once

#include <array>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "quantizer/format/model_items.h"

namespace moesaic::quantizer {

/// Linears are cut into pieces at multiples of this many rows. The row blocks of every format divide it (FP8:
/// 128, zero points: 8).
inline constexpr int64_t kRowStep = 128;

struct SourceForm {
  bool plain = false;  // true: a scalar type (`dtype`) whose bytes can be copied
  tensor::DType dtype = tensor::DType::kBF16;
  int64_t bytes = 0;        // of all its tensors
  int64_t whole_bytes = 0;  // of the tensors that any run of rows needs completely
};

/// Returns the stored form of each item. For a config without weights, "torch_dtype" and
/// "quantization_config" decide.
StatusOr<std::vector<SourceForm>> FormsOf(const checkpoint::Checkpoint& source,
                                          const std::vector<ModelItem>& items);

/// Rows [first, first + rows) of an item, located but not read. The bytes of `parts` are exactly those that
/// these rows need. They point into the checkpoint's maps until the caller points them to a copy.
class SourceRows {
 public:
  static StatusOr<SourceRows> Find(const checkpoint::Checkpoint& source, const ModelItem& item, int64_t first,
                                   int64_t rows);
  SourceRows(SourceRows&&) = default;
  SourceRows& operator=(SourceRows&&) = default;

  /// True for rows of a GGUF file with permuted rows. They cannot be cut out and are read through the map.
  bool through_map() const { return parts_.empty(); }
  std::vector<checkpoint::TensorEntry>& parts() { return parts_; }
  /// Returns the bytes of the first part: the rows themselves if the form is plain.
  std::span<const std::byte> bytes() const { return parts_.front().bytes; }

  /// Converts rows [first, first + count), counted from the start of the item, to f32. Thread-safe.
  Status Read(const checkpoint::Checkpoint& source, int64_t first, int64_t count, std::span<float> out) const;

 private:
  SourceRows() = default;
  checkpoint::LinearSource linear_;  // its tensors are pointed to parts_ before a read
  std::array<int, 4> part_of_{};     // index in parts_ of weight, scale, zero point and group index, or -1
  std::vector<checkpoint::TensorEntry> parts_;
  const checkpoint::TensorEntry* entry_ = nullptr;  // tensor that is read through the map
  bool is_linear_ = false;
  int64_t first_ = 0;
};

/// Returns the number of rows that an item can be cut into: those of a matrix, 1 for other tensors.
int64_t RowsOf(const ModelItem& item);

}  // namespace moesaic::quantizer
