#include "models/weight_image.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>

#include "base/round.h"

namespace moesaic::models {
namespace {

// No page, including huge ones, is shared by two nodes.
constexpr int64_t kImageAlignment = int64_t{runtime::kHugePage};
constexpr int64_t kMinPage = 4096;
// Bytes copied by one task.
constexpr int64_t kTaskBytes = int64_t{runtime::kHugePage};
// Bytes between two progress reports: a few threads copy them in a quarter of a second.
constexpr int64_t kReportedBytes = int64_t{1} << 30;

Status Report(const PackProgress& progress, int64_t done, int64_t total) {
  return progress && !progress(done, total) ? Cancelled("loading was stopped") : OkStatus();
}

void BindImages(runtime::Buffer& buffer, int64_t stride, const std::vector<int>& nodes) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Status bound = buffer.Prefer(i * stride, static_cast<size_t>(stride), nodes[i]);
    if (bound.ok()) continue;
    spdlog::warn("weights are placed on the NUMA nodes of the threads that touch them first: {}",
                 Message(bound));
    return;
  }
}

// Touches every page of bytes [first, last) of each image, `stride` apart, on threads of its node, which
// places it there. Worker 0 may run anywhere, so it leaves the work to other workers of its node if there are
// any.
void TouchImages(const runtime::Buffer& buffer, int64_t first, int64_t last, int64_t stride,
                 runtime::ThreadPool& pool) {
  pool.RunOnEach([&](int64_t, int worker) {
    const int node = pool.NodeOf(worker);
    int sharers = 0, place = 0;
    for (int other = 1; other < pool.size(); ++other) {
      if (pool.NodeOf(other) != node) continue;
      if (other < worker) ++place;
      ++sharers;
    }
    if (worker == 0 && sharers > 0) return;
    sharers = std::max(sharers, 1);
    const int64_t begin = first + base::RoundUp((last - first) * place / sharers, kMinPage);
    const int64_t end = first + base::RoundUp((last - first) * (place + 1) / sharers, kMinPage);
    volatile std::byte* at = buffer.data() + node * stride;
    for (int64_t i = begin; i < end; i += kMinPage) at[i] = std::byte{0};
  });
}

}  // namespace

WeightPlan SlicePlan(const WeightPlan& plan, int slices) {
  WeightPlan sliced;
  for (RegionPlan region : plan.regions) {
    if (!region.decl.is_vector()) {
      region.stride = 0;
      for (size_t part = 0; part < region.layouts.size(); ++part) {
        tensor::PackedLayout& layout = region.layouts[part];
        const int panels = base::CeilDiv(layout.panels(), slices);
        layout = tensor::PackedLayout::Of(layout.format, panels * tensor::kPanelRows, layout.k);
        region.offsets[part] = region.stride;
        region.stride += layout.total_bytes;
      }
      region.bytes = region.stride * region.decl.count;
    }
    sliced.Add(std::move(region));
  }
  return sliced;
}

StatusOr<WeightImage> WeightImage::Allocate(const WeightPlan& plan, const NumaPlacement& placement,
                                            const PackProgress& progress, runtime::ThreadPool& pool) {
  WeightImage image;
  image.plan_ = &plan;
  image.images_ = placement.images();
  if (image.images_ == 1) {
    ASSIGN_OR_RETURN(image.buffer_, runtime::Buffer::Allocate(plan.bytes, /*huge=*/true));
    RETURN_IF_ERROR(image.buffer_.Interleave(placement.nodes));
    return image;
  }
  if (placement.policy == NumaPolicy::kSlice) {
    image.sliced_ = std::make_unique<WeightPlan>(SlicePlan(plan, image.images_));
  }
  image.stride_ = base::RoundUp(image.layout().bytes, kImageAlignment);
  ASSIGN_OR_RETURN(image.buffer_, runtime::Buffer::Allocate(image.stride_ * image.images_, /*huge=*/true));
  BindImages(image.buffer_, image.stride_, placement.nodes);
  const int64_t part = base::RoundUp(kReportedBytes / image.images_, kImageAlignment);
  for (int64_t first = 0; first < image.stride_; first += part) {
    RETURN_IF_ERROR(Report(progress, 0, image.total()));
    TouchImages(image.buffer_, first, std::min(first + part, image.stride_), image.stride_, pool);
  }
  return image;
}

Status WeightImage::Mirror(const PackProgress& progress, runtime::ThreadPool& pool) const {
  if (images_ == 1 || sliced()) return OkStatus();
  const int64_t bytes = layout().bytes, mirrors = images_ - 1;
  const int64_t part = base::RoundUp(kReportedBytes / mirrors, kTaskBytes);
  for (int64_t begin = 0; begin < bytes; begin += part) {
    const int64_t end = std::min(begin + part, bytes), chunks = base::CeilDiv(end - begin, kTaskBytes);
    std::vector<int64_t> ends;
    for (int64_t image = 0; image < images_; ++image) ends.push_back(image * chunks);
    pool.RunByNode(ends, [&](int64_t task, int) {
      const int64_t first = begin + task % chunks * kTaskBytes;
      const int64_t to = (task / chunks + 1) * stride_ + first;
      std::memcpy(data() + to, data() + first, static_cast<size_t>(std::min(kTaskBytes, end - first)));
    });
    RETURN_IF_ERROR(Report(progress, bytes + mirrors * end, total()));
  }
  return OkStatus();
}

}  // namespace moesaic::models
