// Brings the weights of a checkpoint into the layouts that kernels read, tile by tile on all cores.
#pragma once

#include <functional>
#include <span>

#include "checkpoint/checkpoint.h"
#include "models/weight_image.h"
#include "models/weight_plan.h"
#include "runtime/thread_pool.h"

namespace moesaic::models {

/// Packs every region of `plan` to its place in `image`, allocated for it.
Status PackImage(const checkpoint::Checkpoint& checkpoint, const WeightPlan& plan,
                 const PackProgress& progress, runtime::ThreadPool& pool, const WeightImage& image);

/// Packs every region of `plan` in order and gives the bytes to `sink` piece by piece, in memory bounded by
/// some dozen megabytes however large a matrix is.
Status PackStream(const checkpoint::Checkpoint& checkpoint, const WeightPlan& plan,
                  const PackProgress& progress, runtime::ThreadPool& pool,
                  const std::function<Status(size_t region, std::span<const std::byte>)>& sink);

}  // namespace moesaic::models
