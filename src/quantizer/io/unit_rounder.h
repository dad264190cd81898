// Converts the rows of a unit to the bytes of its output tensors.
#pragma once

#include <vector>

#include "kernels/exec_context.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/gptq/gptq_stage.h"
#include "quantizer/io/unit_reader.h"

namespace moesaic::quantizer {

/// A byte range of an output file that a unit writes.
struct OutputExtent {
  int64_t offset = 0;  // in the file
  std::span<std::byte> bytes;
};

/// Parameters for rounding the rows of a linear, in addition to the settings.
struct Rounding {
  const HessianFactor* factor = nullptr;  // null: rounds to the nearest; else by GPTQ
  GptqStage* stage = nullptr;             // GPTQ: stage that made the factor
  GptqReport* report = nullptr;           // GPTQ: sums over calls
  int64_t slab_values = 0;                // GPTQ: maximum number of values rounded at once
  RuntimeMatrix* runtime = nullptr;       // receives the rounded or kept rows in run-time form
};

class UnitRounder {
 public:
  /// The arguments must outlive the rounder.
  UnitRounder(const checkpoint::Checkpoint& source, const std::vector<ModelItem>& items,
              const OutputPlan& output, const OutputSettings& settings, const kernels::ExecContext& ctx)
      : source_(source), items_(items), output_(output), settings_(settings), ctx_(ctx) {}

  /// Fills `buffer` with the output of the pieces, at their `places`. `loaded` holds their rows. A value that
  /// is not finite is an error that states its position.
  Status Run(std::span<const Piece> pieces, const LoadedUnit& loaded, const OutputPlaces& places,
             std::span<std::byte> buffer);

  /// The same for the first of `pieces`; the others follow in its unit. `out` has one pointer for each of its
  /// output tensors, or null.
  Status Round(std::span<const Piece> pieces, std::span<const SourceRows> rows,
               std::span<std::byte* const> out, const Rounding& rounding = {});

  /// Returns the number of source bytes that were read again, for the scales of linears that are too large
  /// for the memory.
  int64_t reread_bytes() const { return reread_bytes_; }

 private:
  /// Reads rows [first, first + count) of a piece as f32 into slab_.
  Status ReadSlab(const Piece& piece, const SourceRows& rows, int64_t first, int64_t count);
  Status BadValue(const Piece& piece, int64_t first, int64_t count) const;
  /// Fails if the slab has values that are not finite or too large for `dtype`.
  Status CheckValues(const Piece& piece, int64_t first, int64_t count, tensor::DType dtype) const;
  Status RoundPiece(const Piece& piece, const SourceRows& rows, std::span<std::byte* const> out,
                    const Rounding& rounding);
  StatusOr<QuantizedMatrix> RoundSlab(const Precision& precision, int count, int columns,
                                      const Rounding& rounding) const;
  /// Packs a linear that is not rounded.
  Status PackKept(const Piece& piece, const SourceRows& rows, RuntimeMatrix* runtime);
  Status ConvertPiece(const Piece& piece, const SourceRows& rows, std::byte* out);
  Status CopyPiece(const Piece& piece, const SourceRows& rows, std::byte* out) const;
  /// NVFP4: sets global_scale_ to that of the first piece's item and all items fused with it. Rows outside
  /// `pieces` are read through the source's maps.
  Status FindSharedScale(std::span<const Piece> pieces, std::span<const SourceRows> rows);
  StatusOr<float> LargestOf(const Piece& piece, const SourceRows& rows, bool mapped);

  const checkpoint::Checkpoint& source_;
  const std::vector<ModelItem>& items_;
  const OutputPlan& output_;
  const OutputSettings& settings_;
  const kernels::ExecContext& ctx_;
  std::vector<float> slab_;
  size_t scale_first_ = 0, scale_end_ = 0;  // items of global_scale_
  float global_scale_ = 0;
  int64_t reread_bytes_ = 0;
};

}  // namespace moesaic::quantizer
