// Memory that a model's weights are written to once: one image of a plan, or one per NUMA node.
#pragma once

#include <functional>
#include <memory>

#include "models/numa_nodes.h"
#include "models/weight_plan.h"
#include "runtime/memory.h"
#include "runtime/release_pages.h"

namespace moesaic::models {

/// Called with the bytes completed and the total; returns false to cancel.
using PackProgress = std::function<bool(int64_t done, int64_t total)>;

/// Images are `stride` bytes apart and have the layout `layout()`. That is the plan itself or, if sliced, a
/// plan whose matrices have an equal share of the panels, rounded up. Slice i of a matrix holds panels [i *
/// share, (i + 1) * share); the last slices may have fewer panels or none. Vectors of a sliced plan are
/// stored whole, only in the first image.
class WeightImage {
 public:
  WeightImage() = default;
  /// Allocates zeroed huge-page memory with the given placement. If the system does not permit binding pages,
  /// threads of each node touch its pages first, and a log line reports it. `plan` must outlive the result.
  /// Calls `progress` periodically with 0 bytes completed; returns Cancelled if it requests that.
  static StatusOr<WeightImage> Allocate(const WeightPlan& plan, const NumaPlacement& placement,
                                        const PackProgress& progress, runtime::ThreadPool& pool);

  const WeightPlan& layout() const { return sliced_ != nullptr ? *sliced_ : *plan_; }
  bool sliced() const { return sliced_ != nullptr; }
  int images() const { return images_; }
  int64_t stride() const { return stride_; }
  std::byte* data() const { return buffer_.data(); }  // start of the first image
  /// Returns the total for progress: the plan's bytes, times the number of mirrors.
  int64_t total() const { return sliced() ? plan_->bytes : plan_->bytes * images_; }

  /// Returns whole pages of [from, from + bytes), a range of the image that is not read any more, to the
  /// system.
  void Release(const std::byte* from, int64_t bytes) {
    runtime::ReleasePages(buffer_, static_cast<size_t>(from - buffer_.data()), static_cast<size_t>(bytes));
  }

  /// Copies the first image to its mirrors, on threads of their nodes; does nothing for other placements.
  /// Returns Cancelled if `progress` requests it.
  Status Mirror(const PackProgress& progress, runtime::ThreadPool& pool) const;

 private:
  const WeightPlan* plan_ = nullptr;
  std::unique_ptr<WeightPlan> sliced_;
  runtime::Buffer buffer_;
  int images_ = 1;
  int64_t stride_ = 0;
};

/// Returns `plan` with ceil(panels / slices) panels per matrix.
WeightPlan SlicePlan(const WeightPlan& plan, int slices);

}  // namespace moesaic::models
