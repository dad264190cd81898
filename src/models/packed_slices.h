// One rank's part of a packed file: slices of rows and columns, and records, of the whole model's regions.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "models/weight_plan.h"

namespace moesaic::models {

/// The sizes of `spec` that ranks can divide, with the units of the formats of a packed file's plan.
parallel::ModelShape DivisibleShape(const DecoderSpec& spec, const WeightPlan& whole);

/// Plans the regions of `shard`, with the formats of `whole`, which PlanFromPacked returned for the file
/// `path`. Unimplemented: a slice begins inside a panel of 16 outputs or inside a unit of inputs of its
/// format.
StatusOr<WeightPlan> PlanShardOfPacked(const DecoderSpec& spec, const WeightPlan& whole,
                                       const parallel::Shard& shard, const std::string& path);

/// A range of bytes to copy from a packed file. Tasks for different pieces may run concurrently.
struct SlicePiece {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t bytes = 0;
  std::byte* sums = nullptr;  // int8 columns: sums of the panel's outputs [16] are computed here

  void Copy() const;
};

/// The copies that make `region` of a shard at `to`, zeroed memory, from `whole`, the region of the same
/// name, at `from`.
std::vector<SlicePiece> SlicePieces(const RegionPlan& whole, const std::byte* from, const RegionPlan& region,
                                    std::byte* to);

}  // namespace moesaic::models
