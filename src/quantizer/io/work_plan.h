// The order of the work and the memory it takes: items cut into units that are read, rounded and written as
// one, sized so that two of them fit the memory at a time: one is computed while the next is read and the
// last is written. Linears that share an NVFP4 scale, which must all be seen before the first is rounded, and
// are too large for that, make a unit that has the memory for itself: so they are read once, or, where even
// that is too little, no more of them is read twice than the memory does not hold.
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

/// Pieces [first, end) of a plan, all of one shard. The expensive steps of a run go by units: a wave of
/// experts, or a few matrices, or a part of one.
struct Unit {
  size_t first = 0, end = 0;
  int64_t source_bytes = 0;  // at most
  int64_t output_bytes = 0;
  bool alone = false;  // has all buffers: no other is read or written meanwhile
};

struct WorkPlan {
  std::vector<Piece> pieces;
  std::vector<Unit> units;
  int64_t source_bytes = 0;  // of the largest unit of which there are two at a time
  int64_t output_bytes = 0;  // of the largest OutputPlaces of these
  int64_t alone_bytes = 0;   // source and OutputPlaces of the largest unit that is alone
  int64_t slab_values = 0;   // of the largest run of rows that is rounded at once

  int64_t buffer_bytes() const;
  /// What a run holds besides: one slab as f32, its codes and scales.
  int64_t slab_bytes() const { return slab_values * 6; }
  int64_t bytes() const { return buffer_bytes() + slab_bytes(); }
};

/// Rows of an item that are rounded at once: to the nearest, and, of at most so many values (128 rows at
/// least), by GPTQ, which reads the whole factor for them.
int64_t SlabRows(const ModelItem& item);
int64_t SlabRows(const ModelItem& item, int64_t values);
/// The rows of parts, at most `most` each, that a piece is cut into: of about one size.
int64_t EvenRows(int64_t rows, int64_t most);

/// Output bytes of a piece's part of `tensor`, which begin at `offset` in the file. {0, 0}: none.
struct PieceTensor {
  int64_t offset = 0, bytes = 0;
};
PieceTensor PlaceOf(const OutputTensor& tensor, const Piece& piece);

/// Bytes that follow each other in the file, and where they lie in a unit's buffer: at the same distance from
/// a block of 4096 bytes, so that they can be written without a copy.
struct OutputRun {
  int64_t offset = 0, bytes = 0;
  int64_t position = 0;

  std::span<std::byte> In(std::span<std::byte> buffer) const {
    return buffer.subspan(static_cast<size_t>(position), static_cast<size_t>(bytes));
  }
};

/// Where the output of `pieces`, all of one shard, lies.
struct OutputPlaces {
  std::vector<OutputRun> runs;                // in rising order
  std::vector<std::vector<int64_t>> tensors;  // [pieces][tensors] places in the buffer; -1: none
  int64_t bytes = 0;                          // of the buffer
};
OutputPlaces PlacesOf(const OutputPlan& output, std::span<const Piece> pieces);

struct CutOptions {
  bool by_layer = false;  // no unit has items of two layers
};

/// Half a second of a disk of 512 MB/s: larger units would not make reads more sequential, only lose more
/// work when a run is killed.
inline constexpr int64_t kLargestUnit = int64_t{256} << 20;

/// How large units may be, source and output together.
struct UnitSizes {
  int64_t unit_bytes = 0;   // 0: kLargestUnit
  int64_t alone_bytes = 0;  // of one that is alone; up to unit_bytes: there are none
};

/// Cuts the work into units of at most these sizes; a single piece that can't be cut further may be larger.
WorkPlan CutWork(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                 const OutputPlan& output, const CutOptions& options, const UnitSizes& sizes);

/// The largest sizes with which CutWork's plan takes at most `memory` bytes. Too little memory is an error
/// that says how much is needed.
StatusOr<UnitSizes> FitUnits(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                             const OutputPlan& output, const CutOptions& options, int64_t memory);

/// Of the items that share a scale with `item`, which may be that one only, the first and the end.
std::pair<size_t, size_t> FusedWith(const std::vector<ModelItem>& items, size_t item);
/// Rows [first, first + rows) of items [first, end) that none of `pieces` has; `pieces`, of one unit, begin
/// with one of these items and follow each other.
std::vector<Piece> RowsBeside(const std::vector<ModelItem>& items, size_t first, size_t end,
                              std::span<const Piece> pieces);

}  // namespace moesaic::quantizer
