// The order of the work and the memory it takes: items cut into units that are read, rounded and written as
// one, sized so that two of them fit the memory at a time: one is computed while the next is read and the
// last is written.
#pragma once

#include <span>
#include <vector>

#include "quantizer/output_plan.h"

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
};

struct WorkPlan {
  std::vector<Piece> pieces;
  std::vector<Unit> units;
  int64_t source_bytes = 0;  // of the largest unit
  int64_t output_bytes = 0;  // of the largest unit's OutputPlaces
  int64_t slab_values = 0;   // of the largest run of rows that is rounded at once

  int64_t buffer_bytes() const { return 2 * (source_bytes + output_bytes); }
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

/// Cuts the work into units of at most `unit_bytes`, source and output together; a single piece that can't be
/// cut further may be larger. 0: as large as is of use.
WorkPlan CutWork(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                 const OutputPlan& output, const CutOptions& options, int64_t unit_bytes);

/// The largest unit_bytes with which CutWork's plan takes at most `memory` bytes. Too little memory is an
/// error that says how much is needed.
StatusOr<int64_t> FitUnits(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                           const OutputPlan& output, const CutOptions& options, int64_t memory);

}  // namespace moesaic::quantizer
