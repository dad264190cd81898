// Packs the weights of a checkpoint into the layouts that kernels read, tile by tile on all cores.
#pragma once

#include <functional>
#include <span>

#include "checkpoint/checkpoint.h"
#include "models/weight_image.h"
#include "models/weight_plan.h"
#include "runtime/thread_pool.h"

namespace moesaic::models {

/// Packs every region of `plan` to its position in `image`, which must be allocated for the plan.
Status PackImage(const checkpoint::Checkpoint& checkpoint, const WeightPlan& plan,
                 const PackProgress& progress, runtime::ThreadPool& pool, const WeightImage& image);

/// Packs every region of `plan` in order and passes the bytes to `sink` piece by piece. Memory use is bounded
/// by a few dozen megabytes regardless of matrix sizes.
Status PackStream(const checkpoint::Checkpoint& checkpoint, const WeightPlan& plan,
                  const PackProgress& progress, runtime::ThreadPool& pool,
                  const std::function<Status(size_t region, std::span<const std::byte>)>& sink);

}  // namespace moesaic::models
