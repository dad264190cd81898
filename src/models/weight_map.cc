#include "models/weight_map.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::models {

using tensor::PackedMatrix;

namespace {

// Copied between two reports of progress: at the 1 GB/s of a modest disk, a quarter of a second.
constexpr int64_t kReportedBytes = int64_t{256} << 20;
// Of one task: a huge page, so that no two threads take its fault.
constexpr int64_t kTaskBytes = int64_t{2} << 20;

void CopyBytes(std::span<const std::byte> from, std::byte* to, runtime::ThreadPool& pool) {
  const int64_t bytes = std::ssize(from);
  pool.Run(base::CeilDiv(bytes, kTaskBytes), [&](int64_t task, int) {
    const int64_t first = task * kTaskBytes;
    std::memcpy(to + first, from.data() + first, static_cast<size_t>(std::min(kTaskBytes, bytes - first)));
  });
}

}  // namespace

StatusOr<WeightMap> WeightMap::Pack(const checkpoint::Checkpoint& checkpoint, WeightPlan plan,
                                    const PackProgress& progress, std::span<const int> nodes,
                                    runtime::ThreadPool& pool) {
  WeightMap map;
  map.plan_ = std::make_unique<WeightPlan>(std::move(plan));
  ASSIGN_OR_RETURN(map.image_, runtime::Buffer::Allocate(map.plan_->bytes, /*huge=*/true));
  RETURN_IF_ERROR(map.image_.Interleave(nodes));
  RETURN_IF_ERROR(PackImage(checkpoint, *map.plan_, progress, pool, {map.image_.data(), map.image_.size()}));
  for (const RegionPlan& region : map.plan_->regions) map.Enter(region, map.image_.data() + region.start);
  return map;
}

StatusOr<WeightMap> WeightMap::Copy(const checkpoint::PackedFile& file, WeightPlan plan,
                                    const PackProgress& progress, std::span<const int> nodes,
                                    runtime::ThreadPool& pool) {
  WeightMap map;
  map.plan_ = std::make_unique<WeightPlan>(std::move(plan));
  ASSIGN_OR_RETURN(map.image_, runtime::Buffer::Allocate(map.plan_->bytes, /*huge=*/true));
  RETURN_IF_ERROR(map.image_.Interleave(nodes));
  int64_t done = 0;
  for (const RegionPlan& region : map.plan_->regions) {
    ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, file.Region(region.decl.name));
    MOESAIC_CHECK_EQ(std::ssize(bytes), region.bytes);
    std::byte* to = map.image_.data() + region.start;
    map.Enter(region, to);
    for (int64_t first = 0; first < region.bytes; first += kReportedBytes) {
      const std::span<const std::byte> part =
          bytes.subspan(first, std::min(kReportedBytes, region.bytes - first));
      CopyBytes(part, to + first, pool);
      done += std::ssize(part);
      if (progress && !progress(done, map.plan_->bytes)) return Cancelled("loading was stopped");
    }
  }
  return map;
}

StatusOr<WeightMap> WeightMap::Map(std::shared_ptr<const checkpoint::PackedFile> file, WeightPlan plan) {
  WeightMap map;
  map.plan_ = std::make_unique<WeightPlan>(std::move(plan));
  for (const RegionPlan& region : map.plan_->regions) {
    ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, file->Region(region.decl.name));
    MOESAIC_CHECK_EQ(static_cast<int64_t>(bytes.size()), region.bytes);
    map.Enter(region, bytes.data());
  }
  map.file_ = std::move(file);
  return map;
}

void WeightMap::Enter(const RegionPlan& region, const std::byte* data) {
  Place place{.region = &region, .data = data, .moe_scales = {}};
  for (size_t i = 0; i + 2 < region.input_scales.size(); i += 3) {
    place.moe_scales.push_back(region.input_scales[i]);  // gate's and up's are equal, as the plan checked
    place.moe_scales.push_back(region.input_scales[i + 2]);
  }
  regions_.emplace(region.decl.name, std::move(place));
}

const WeightMap::Place& WeightMap::At(const std::string& name) const {
  const auto found = regions_.find(name);
  if (found == regions_.end()) base::CheckFailed(__FILE__, __LINE__, "region is planned", name);
  return found->second;
}

const float* WeightMap::Vector(const std::string& name) const {
  return reinterpret_cast<const float*>(At(name).data);
}

PackedMatrix WeightMap::Matrix(const std::string& name, int record, int part) const {
  const Place& place = At(name);
  const RegionPlan& region = *place.region;
  PackedMatrix matrix{.layout = region.layouts.at(part),
                      .data = place.data + record * region.stride + region.offsets[part]};
  if (!region.input_scales.empty()) {
    matrix.input_scale = region.input_scales[record * region.layouts.size() + part];
  }
  return matrix;
}

kernels::ExpertWeights WeightMap::Experts(const std::string& name) const {
  const Place& place = At(name);
  kernels::ExpertWeights experts{.gate = Matrix(name, 0, 0),
                                 .up = Matrix(name, 0, 1),
                                 .down = Matrix(name, 0, 2),
                                 .stride = place.region->stride,
                                 .count = place.region->decl.count};
  if (!place.moe_scales.empty()) experts.input_scales = place.moe_scales.data();
  return experts;
}

}  // namespace moesaic::models
