// Sums of outputs over the shards of a stage.
#pragma once

#include "kernels/column_parts.h"
#include "layers/step.h"

namespace moesaic::layers {

/// Sums one output [rows, columns] over the shards of the stage, in place. A large output is summed in parts:
/// the columns that are computed first travel while the others are computed.
class ShardSum {
 public:
  /// Borrows everything. `scratch` has memory for a copy of a large output.
  ShardSum(const Step& step, ScratchScope& scratch, float* out, int columns);
  ~ShardSum();
  ShardSum(const ShardSum&) = delete;
  ShardSum& operator=(const ShardSum&) = delete;

  /// The parts in which the output is to be computed.
  const kernels::ColumnParts& parts() const { return parts_; }
  /// Returns when the output is the sum. All its columns must be done.
  void Wait();

 private:
  void Start(int first, int count);
  void CopyPart(kernels::ColumnParts::Range part, bool to_output);

  const Step& step_;
  float* out_;
  int columns_;
  float* sums_ = nullptr;  // parts one after the other, each [rows, its columns]; null: one part, in place
  kernels::ColumnParts parts_;
};

}  // namespace moesaic::layers
