// Turns the rows of a unit into the bytes of its output tensors.
#pragma once

#include <vector>

#include "kernels/ops.h"
#include "quantizer/unit_reader.h"

namespace moesaic::quantizer {

/// Bytes of one output file that a unit writes.
struct OutputExtent {
  int64_t offset = 0;  // in the file
  std::span<std::byte> bytes;
};

class UnitRounder {
 public:
  /// The arguments must outlive the rounder.
  UnitRounder(const checkpoint::Checkpoint& source, const std::vector<ModelItem>& items,
              const OutputPlan& output, const OutputSettings& settings, const kernels::ExecContext& ctx)
      : source_(source), items_(items), output_(output), settings_(settings), ctx_(ctx) {}

  /// Fills `buffer` with the output of the pieces, whose rows are in `loaded`, and returns where in the file
  /// its runs of bytes belong, in rising order. A value that is not finite is an error that says where it
  /// stands.
  StatusOr<std::vector<OutputExtent>> Run(std::span<const Piece> pieces, const LoadedUnit& loaded,
                                          std::span<std::byte> buffer);

 private:
  /// Rows [first, first + count) of a piece as f32, in slab_.
  Status ReadSlab(const Piece& piece, const SourceRows& rows, int64_t first, int64_t count);
  Status RoundPiece(const Piece& piece, const SourceRows& rows, float global_scale,
                    std::span<std::byte* const> out);
  Status ConvertPiece(const Piece& piece, const SourceRows& rows, std::byte* out);
  Status CopyPiece(const Piece& piece, const SourceRows& rows, std::byte* out) const;
  /// NVFP4: the global scale of pieces that run as one.
  StatusOr<float> SharedScale(std::span<const Piece> pieces, std::span<const SourceRows> rows);

  const checkpoint::Checkpoint& source_;
  const std::vector<ModelItem>& items_;
  const OutputPlan& output_;
  const OutputSettings& settings_;
  const kernels::ExecContext& ctx_;
  std::vector<float> slab_;
};

/// Where the output of `pieces` lies in the file, as runs of bytes in rising order, with the tensors in each:
/// for every (piece, tensor), its place in a buffer that holds the runs one after another; -1: none.
struct OutputPlaces {
  std::vector<std::vector<int64_t>> places;  // [pieces][tensors]
  std::vector<PieceTensor> runs;
};
OutputPlaces PlacesOf(const OutputPlan& output, std::span<const Piece> pieces);

}  // namespace moesaic::quantizer
