// The memory that a model's weights are written to once: one image of a plan, or one on each NUMA node.
#pragma once

#include <functional>
#include <memory>

#include "models/numa_nodes.h"
#include "models/weight_plan.h"
#include "runtime/memory.h"

namespace moesaic::models {

/// Called with bytes done and in all; returns false to stop.
using PackProgress = std::function<bool(int64_t done, int64_t total)>;

/// Images are `stride` bytes apart, each laid out as `layout`: the plan itself, or, sliced, one whose
/// matrices have an equal share of the panels, rounded up. Slice i of a matrix is panels [i * share, (i + 1)
/// * share), the last ones of fewer or no panels. Vectors of a sliced plan are whole in the first image, and
/// only there.
class WeightImage {
 public:
  WeightImage() = default;
  /// Zeroed huge-page memory, placed as `placement` says. Where the system does not let pages be bound, those
  /// of a node are first touched by its threads, and the log says so. `plan` must outlive it. Reports that
  /// nothing is done yet now and then, and is Cancelled when told to stop.
  static StatusOr<WeightImage> Allocate(const WeightPlan& plan, const NumaPlacement& placement,
                                        const PackProgress& progress, runtime::ThreadPool& pool);

  const WeightPlan& layout() const { return sliced_ != nullptr ? *sliced_ : *plan_; }
  bool sliced() const { return sliced_ != nullptr; }
  int images() const { return images_; }
  int64_t stride() const { return stride_; }
  std::byte* data() const { return buffer_.data(); }  // of the first image
  /// What progress counts to: the plan's bytes, for each mirror.
  int64_t total() const { return sliced() ? plan_->bytes : plan_->bytes * images_; }

  /// Copies the first image to the others, on threads of their nodes, if they are mirrors of it. Cancelled
  /// when told to stop.
  Status Mirror(const PackProgress& progress, runtime::ThreadPool& pool) const;

 private:
  const WeightPlan* plan_ = nullptr;
  std::unique_ptr<WeightPlan> sliced_;
  runtime::Buffer buffer_;
  int images_ = 1;
  int64_t stride_ = 0;
};

/// `plan` with ceil(panels / slices) panels of every matrix.
WeightPlan SlicePlan(const WeightPlan& plan, int slices);

}  // namespace moesaic::models
