// Turns the rows of a unit into the bytes of its output tensors.
#pragma once

#include <vector>

#include "kernels/ops.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/gptq/gptq_stage.h"
#include "quantizer/io/unit_reader.h"

namespace moesaic::quantizer {

/// Bytes of one output file that a unit writes.
struct OutputExtent {
  int64_t offset = 0;  // in the file
  std::span<std::byte> bytes;
};

/// How the rows of a linear are rounded, beside what the settings say.
struct Rounding {
  const HessianFactor* factor = nullptr;  // null: to the nearest; else by GPTQ
  GptqStage* stage = nullptr;             // of GPTQ: what made the factor
  GptqReport* report = nullptr;           // of GPTQ, summed up over calls
  int64_t slab_values = 0;                // of GPTQ, at most at once
  RuntimeMatrix* runtime = nullptr;       // gets what was rounded, or kept, as it runs
};

class UnitRounder {
 public:
  /// The arguments must outlive the rounder.
  UnitRounder(const checkpoint::Checkpoint& source, const std::vector<ModelItem>& items,
              const OutputPlan& output, const OutputSettings& settings, const kernels::ExecContext& ctx)
      : source_(source), items_(items), output_(output), settings_(settings), ctx_(ctx) {}

  /// Fills `buffer` with the output of the pieces, whose rows are in `loaded`, at their `places`. A value
  /// that is not finite is an error that says where it stands.
  Status Run(std::span<const Piece> pieces, const LoadedUnit& loaded, const OutputPlaces& places,
             std::span<std::byte> buffer);

  /// The same for the first of `pieces`, of which the others follow in its unit; out: one for each of its
  /// output tensors, or null.
  Status Round(std::span<const Piece> pieces, std::span<const SourceRows> rows,
               std::span<std::byte* const> out, const Rounding& rounding = {});

  /// Bytes of the source that were read once more than units say: for the scales of linears too large for
  /// the memory.
  int64_t reread_bytes() const { return reread_bytes_; }

 private:
  /// Rows [first, first + count) of a piece as f32, in slab_.
  Status ReadSlab(const Piece& piece, const SourceRows& rows, int64_t first, int64_t count);
  Status BadValue(const Piece& piece, int64_t first, int64_t count) const;
  /// Refuses rows of the slab that have values which are not finite, or too large for `dtype`.
  Status CheckValues(const Piece& piece, int64_t first, int64_t count, tensor::DType dtype) const;
  Status RoundPiece(const Piece& piece, const SourceRows& rows, std::span<std::byte* const> out,
                    const Rounding& rounding);
  StatusOr<QuantizedMatrix> RoundSlab(const Precision& precision, int count, int columns,
                                      const Rounding& rounding) const;
  /// Of a linear that is not rounded.
  Status PackKept(const Piece& piece, const SourceRows& rows, RuntimeMatrix* runtime);
  Status ConvertPiece(const Piece& piece, const SourceRows& rows, std::byte* out);
  Status CopyPiece(const Piece& piece, const SourceRows& rows, std::byte* out) const;
  /// NVFP4: sets global_scale_ to that of the first piece's item and all that run as one with it. Rows that
  /// are not in `pieces` are read through the source's maps.
  Status FindSharedScale(std::span<const Piece> pieces, std::span<const SourceRows> rows);
  StatusOr<float> LargestOf(const Piece& piece, const SourceRows& rows, bool mapped);

  const checkpoint::Checkpoint& source_;
  const std::vector<ModelItem>& items_;
  const OutputPlan& output_;
  const OutputSettings& settings_;
  const kernels::ExecContext& ctx_;
  std::vector<float> slab_;
  size_t scale_first_ = 0, scale_end_ = 0;  // items that global_scale_ is of
  float global_scale_ = 0;
  int64_t reread_bytes_ = 0;
};

}  // namespace moesaic::quantizer
