// Divides the items into units that are read, rounded and written as one. Two units fit the memory at a time:
// one is rounded while the next is read and the previous one is written.
//
// Linears that share an NVFP4 scale must all be read before the first is rounded. If they are too large for
// one unit, they get a unit that uses both buffers, and are still read once. If even that is too small, only
// the rows that do not fit are read twice.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Rows [first, first + rows) of an item.
struct Piece {
  size_t item = 0;
  int64_t first = 0, rows = 0;
};

/// Pieces [first, end) of a plan, all in one shard: a wave of experts, some matrices, or a part of one. A
/// unit is the granularity of I/O and of the journal.
struct IoUnit {
  size_t first = 0, end = 0;
  int64_t source_bytes = 0;  // maximum
  int64_t output_bytes = 0;
  bool alone = false;  // uses all buffers; no other unit is read or written meanwhile
};

struct WorkPlan {
  std::vector<Piece> pieces;
  std::vector<IoUnit> units;
  int64_t source_bytes = 0;  // of the largest unit that shares the memory with another
  int64_t output_bytes = 0;  // of the largest OutputPlaces of these
  int64_t alone_bytes = 0;   // source and OutputPlaces of the largest exclusive unit
  int64_t slab_values = 0;   // largest number of values rounded at once

  int64_t buffer_bytes() const;
  /// Returns the bytes that rounding needs in addition: one slab as f32, its codes and scales.
  int64_t slab_bytes() const { return slab_values * 6; }
  int64_t bytes() const { return buffer_bytes() + slab_bytes(); }
};

/// Number of rows of an item that are rounded at once. Without `values`: to the nearest. With `values`: by
/// GPTQ, at most that many values but at least 128 rows, because each slab reads the whole factor.
int64_t SlabRows(const ModelItem& item);
int64_t SlabRows(const ModelItem& item, int64_t values);
/// Splits `rows` into parts of similar size with at most `most` rows, and returns their size.
int64_t EvenRows(int64_t rows, int64_t most);

/// Output bytes of a piece in `tensor`, which begin at `offset` in the file. {0, 0}: none.
struct PieceTensor {
  int64_t offset = 0, bytes = 0;
};
PieceTensor PlaceOf(const OutputTensor& tensor, const Piece& piece);

/// Contiguous bytes of the file and their position in a unit's buffer. Both have the same offset within a
/// block of 4096 bytes, so that they can be written without a copy.
struct OutputRun {
  int64_t offset = 0, bytes = 0;
  int64_t position = 0;

  std::span<std::byte> In(std::span<std::byte> buffer) const {
    return buffer.subspan(static_cast<size_t>(position), static_cast<size_t>(bytes));
  }
};

/// Locations of the output of `pieces`, all in one shard.
struct OutputPlaces {
  std::vector<OutputRun> runs;                // in ascending order
  std::vector<std::vector<int64_t>> tensors;  // [pieces][tensors] positions in the buffer; -1: none
  int64_t bytes = 0;                          // size of the buffer
};
OutputPlaces PlacesOf(const OutputPlan& output, std::span<const Piece> pieces);

struct CutOptions {
  bool by_layer = false;  // a unit has items of one layer only
};

/// Maximum size of a unit: half a second of a disk with 512 MB/s. Larger units would not make reads more
/// sequential, but a kill would lose more work.
inline constexpr int64_t kLargestUnit = int64_t{256} << 20;

/// Maximum sizes of units, source and output together.
struct UnitSizes {
  int64_t unit_bytes = 0;   // 0: kLargestUnit
  int64_t alone_bytes = 0;  // of exclusive units; up to unit_bytes: there are none
};

/// Divides the work into units of at most these sizes. A single piece that cannot be split further may be
/// larger.
WorkPlan CutWork(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                 const OutputPlan& output, const CutOptions& options, const UnitSizes& sizes);

/// Returns the largest sizes for which the plan of CutWork fits `memory` bytes. If there is too little
/// memory, the error states how much is needed.
StatusOr<UnitSizes> FitUnits(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                             const OutputPlan& output, const CutOptions& options, int64_t memory);

/// Returns the range [first, end) of items that share a scale with `item`, itself included.
std::pair<size_t, size_t> FusedWith(const std::vector<ModelItem>& items, size_t item);
/// Returns the rows of items [first, end) that are not in `pieces`. `pieces` must be of one unit and begin
/// with one of these items.
std::vector<Piece> RowsBeside(const std::vector<ModelItem>& items, size_t first, size_t end,
                              std::span<const Piece> pieces);

}  // namespace moesaic::quantizer
