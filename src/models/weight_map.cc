#include "models/weight_map.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "models/packed_slices.h"

namespace moesaic::models {

using tensor::PackedMatrix;
using tensor::StaticScale;

namespace {

// Bytes of one task, so that no two threads fault the same page.
constexpr int64_t kCopyBytes = int64_t{runtime::kHugePage};
// Pieces copied between two progress reports: a quarter of a second at a modest disk's 1 GB/s.
constexpr size_t kReportedPieces = 128;

struct Piece {
  const std::byte* from;
  std::byte* to;
  int64_t bytes;
};

// Splits bytes to be copied into tasks.
void AddPieces(const std::byte* from, std::byte* to, int64_t bytes, std::vector<Piece>& pieces) {
  for (int64_t first = 0; first < bytes; first += kCopyBytes) {
    pieces.push_back({from + first, to + first, std::min(kCopyBytes, bytes - first)});
  }
}

// Copies each slice of a packed matrix to its image, `stride` bytes after the previous one; `layout` is a
// slice's.
void AddSlices(const tensor::PackedLayout& whole, const std::byte* from, const tensor::PackedLayout& layout,
               std::byte* to, int64_t stride, std::vector<Piece>& pieces) {
  for (int first = 0; first < whole.panels(); first += layout.panels(), to += stride) {
    const int panels = std::min(layout.panels(), whole.panels() - first);
    AddPieces(from + first * whole.panel_bytes, to, panels * whole.panel_bytes, pieces);
    // Scales and sums have 4 bytes per output.
    constexpr int64_t kBytes = int64_t{4} * tensor::kPanelRows;
    if (whole.scales_offset > 0) {
      AddPieces(from + whole.scales_offset + first * kBytes, to + layout.scales_offset, panels * kBytes,
                pieces);
    }
    if (whole.sums_offset > 0) {
      AddPieces(from + whole.sums_offset + first * kBytes, to + layout.sums_offset, panels * kBytes, pieces);
    }
  }
}

// Returns the copies of a whole region from `from` (a packed file) to the first image of `image`, where it
// has the layout `place`.
std::vector<Piece> PiecesOf(const RegionPlan& region, const std::byte* from, const RegionPlan& place,
                            const WeightImage& image) {
  std::vector<Piece> pieces;
  std::byte* to = image.data() + place.start;
  if (!image.sliced() || region.decl.is_vector()) {
    AddPieces(from, to, region.bytes, pieces);
    return pieces;
  }
  for (int record = 0; record < region.decl.count; ++record) {
    for (size_t part = 0; part < region.layouts.size(); ++part) {
      AddSlices(region.layouts[part], from + record * region.stride + region.offsets[part],
                place.layouts[part], to + record * place.stride + place.offsets[part], image.stride(),
                pieces);
    }
  }
  return pieces;
}

}  // namespace

StatusOr<WeightMap> WeightMap::Pack(const checkpoint::Checkpoint& checkpoint, WeightPlan plan,
                                    const PackProgress& progress, const NumaPlacement& placement,
                                    runtime::ThreadPool& pool) {
  WeightMap map;
  map.plan_ = std::make_unique<WeightPlan>(std::move(plan));
  ASSIGN_OR_RETURN(map.image_, WeightImage::Allocate(*map.plan_, placement, progress, pool));
  RETURN_IF_ERROR(PackImage(checkpoint, *map.plan_, progress, pool, map.image_));
  map.EnterImage();
  return map;
}

StatusOr<WeightMap> WeightMap::Copy(const checkpoint::PackedFile& file, WeightPlan plan,
                                    const PackProgress& progress, const NumaPlacement& placement,
                                    runtime::ThreadPool& pool) {
  WeightMap map;
  map.plan_ = std::make_unique<WeightPlan>(std::move(plan));
  ASSIGN_OR_RETURN(map.image_, WeightImage::Allocate(*map.plan_, placement, progress, pool));
  int64_t done = 0;
  for (size_t i = 0; i < map.plan_->regions.size(); ++i) {
    const RegionPlan& region = map.plan_->regions[i];
    ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, file.Region(region.decl.name));
    MOESAIC_CHECK_EQ(std::ssize(bytes), region.bytes);
    const std::vector<Piece> pieces =
        PiecesOf(region, bytes.data(), map.image_.layout().regions[i], map.image_);
    for (size_t first = 0; first < pieces.size(); first += kReportedPieces) {
      const auto part = std::span(pieces).subspan(first, std::min(kReportedPieces, pieces.size() - first));
      pool.Run(std::ssize(part), [&](int64_t task, int) {
        std::memcpy(part[task].to, part[task].from, static_cast<size_t>(part[task].bytes));
      });
      for (const Piece& piece : part) done += piece.bytes;
      // Padding between the parts of a matrix and after a region is not copied but counts as progress.
      if (first + part.size() == pieces.size()) done = region.start + region.placed_bytes();
      if (progress && !progress(done, map.image_.total())) return Cancelled("loading was stopped");
    }
  }
  RETURN_IF_ERROR(map.image_.Mirror(progress, pool));
  map.EnterImage();
  return map;
}

StatusOr<WeightMap> WeightMap::CopyShard(const checkpoint::PackedFile& file, const WeightPlan& whole,
                                         WeightPlan plan, const PackProgress& progress,
                                         const NumaPlacement& placement, runtime::ThreadPool& pool) {
  MOESAIC_CHECK(placement.policy != NumaPolicy::kSlice || placement.images() == 1);
  WeightMap map;
  map.plan_ = std::make_unique<WeightPlan>(std::move(plan));
  ASSIGN_OR_RETURN(map.image_, WeightImage::Allocate(*map.plan_, placement, progress, pool));
  for (const RegionPlan& region : map.plan_->regions) {
    ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, file.Region(region.decl.name));
    const std::vector<SlicePiece> pieces =
        SlicePieces(*whole.Find(region.decl.name), bytes.data(), region, map.image_.data() + region.start);
    pool.Run(std::ssize(pieces), [&](int64_t task, int) { pieces[task].Copy(); });
    if (progress && !progress(region.start + region.placed_bytes(), map.image_.total())) {
      return Cancelled("loading was stopped");
    }
  }
  RETURN_IF_ERROR(map.image_.Mirror(progress, pool));
  map.EnterImage();
  return map;
}

StatusOr<WeightMap> WeightMap::Map(std::shared_ptr<const checkpoint::PackedFile> file, WeightPlan plan) {
  WeightMap map;
  map.plan_ = std::make_unique<WeightPlan>(std::move(plan));
  for (const RegionPlan& region : map.plan_->regions) {
    ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, file->Region(region.decl.name));
    MOESAIC_CHECK_EQ(static_cast<int64_t>(bytes.size()), region.bytes);
    map.Enter(region, region, bytes.data());
  }
  map.file_ = std::move(file);
  return map;
}

void WeightMap::EnterImage() {
  for (size_t i = 0; i < plan_->regions.size(); ++i) {
    const RegionPlan& layout = image_.layout().regions[i];
    Enter(plan_->regions[i], layout, image_.data() + layout.start);
  }
}

void WeightMap::Enter(const RegionPlan& region, const RegionPlan& layout, const std::byte* data) {
  RegionView view{.region = &region, .layout = &layout, .data = data, .moe_scales = {}};
  for (size_t i = 0; i + 2 < region.input_scales.size(); i += 3) {
    // Gate and up have equal scales: the plan checked it for checkpoints and packed files.
    view.moe_scales.push_back(StaticScale::Of(region.input_scales[i]));
    view.moe_scales.push_back(StaticScale::Of(region.input_scales[i + 2]));
  }
  regions_.emplace(region.decl.name, std::move(view));
}

const WeightMap::RegionView& WeightMap::At(const std::string& name) const {
  const auto found = regions_.find(name);
  if (found == regions_.end()) base::CheckFailed(__FILE__, __LINE__, "region is planned", name);
  return found->second;
}

const float* WeightMap::Vector(const std::string& name) const {
  return reinterpret_cast<const float*>(At(name).data);
}

PackedMatrix WeightMap::Matrix(const std::string& name, int record, int part) const {
  const RegionView& view = At(name);
  const RegionPlan& region = *view.region;
  const RegionPlan& layout = *view.layout;
  PackedMatrix matrix{.layout = layout.layouts.at(part),
                      .data = view.data + record * layout.stride + layout.offsets[part],
                      .images = image_.images(),
                      .slice_panels = image_.sliced() ? layout.layouts[part].panels() : 0,
                      .image_stride = image_.stride()};
  matrix.layout.n = region.layouts[part].n;
  matrix.layout.n_padded = region.layouts[part].n_padded;
  if (!region.input_scales.empty()) {
    matrix.input_scale = StaticScale::Of(region.input_scales[record * region.layouts.size() + part]);
  }
  return matrix;
}

void WeightMap::Release(const std::string& name) {
  const RegionView& view = At(name);
  if (file_ == nullptr && image_.images() == 1) image_.Release(view.data, view.region->bytes);
}

kernels::ExpertWeights WeightMap::Experts(const std::string& name) const {
  const RegionView& view = At(name);
  kernels::ExpertWeights experts{.gate = Matrix(name, 0, 0),
                                 .up = Matrix(name, 0, 1),
                                 .down = Matrix(name, 0, 2),
                                 .stride = view.layout->stride,
                                 .count = view.region->decl.count};
  if (!view.moe_scales.empty()) experts.input_scales = view.moe_scales.data();
  return experts;
}

}  // namespace moesaic::models
