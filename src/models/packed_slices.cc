#include "models/packed_slices.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "tensor/fp8_format.h"
#include "tensor/group_format.h"

namespace moesaic::models {
namespace {

using tensor::PackedFormat;
using tensor::PackedLayout;

constexpr int64_t kPieceBytes = int64_t{1} << 20;
constexpr int kGroupBytes = 4;  // of one output in one group of inputs

// Inputs that are stored together: 4 bytes of elements, or a unit with its scales.
int StoredUnit(PackedFormat format) {
  if (format == PackedFormat::kF8G128) return tensor::kFp8Inputs;
  if (tensor::IsGroupScaled(format)) return std::max(tensor::kUnitInputs, tensor::ScaledInputs(format));
  return format == PackedFormat::kF32 ? 1 : format == PackedFormat::kBF16 ? 2 : kGroupBytes;
}

// Bytes of the first `columns` inputs of a panel, a multiple of the unit.
int64_t BytesBefore(PackedFormat format, int columns) {
  if (columns == 0) return 0;
  const int unit = StoredUnit(format);
  if (unit <= kGroupBytes) return int64_t{columns} / unit * kGroupBytes * tensor::kPanelRows;
  return PackedLayout::Of(format, tensor::kPanelRows, columns).panel_bytes;
}

// Where a part of a shard lies in the whole part: row, column and number of the first record.
struct Origin {
  int row = 0, column = 0, record = 0;
};

Origin OriginOf(const PartDecl& whole, const PartDecl& part) {
  const auto rows = static_cast<int>(part.first_row - whole.first_row);
  if (part.record_rows > 0) return {.record = static_cast<int>(rows / part.record_rows)};
  return {.row = rows, .column = part.first_column};
}

int RecordOf(const PartDecl& part, const Origin& origin, int record) {
  return part.records.empty() ? origin.record + record : part.records[record];
}

Status CheckSlice(const PartDecl& whole, const PartDecl& part, PackedFormat format, const std::string& path) {
  const Origin origin = OriginOf(whole, part);
  const int unit = StoredUnit(format), end = origin.column + part.k;
  if (origin.row % tensor::kPanelRows == 0 && origin.column % unit == 0 &&
      (end % unit == 0 || end == whole.k)) {
    return OkStatus();
  }
  return Unimplemented(
      "{}: this layout needs outputs from {} and inputs [{}, {}) of {}, but packed {} is divided at "
      "multiples of {} outputs and {} inputs; load the checkpoint that the file was made from",
      path, origin.row, origin.column, end, part.module, tensor::PackedFormatName(format), tensor::kPanelRows,
      unit);
}

void AddRange(const std::byte* from, std::byte* to, int64_t bytes, std::vector<SlicePiece>& pieces) {
  for (int64_t first = 0; first < bytes; first += kPieceBytes) {
    pieces.push_back({from + first, to + first, std::min(kPieceBytes, bytes - first)});
  }
}

void AddMatrix(const PackedLayout& whole, const std::byte* from, const Origin& origin,
               const PackedLayout& slice, std::byte* to, std::vector<SlicePiece>& pieces) {
  const int first_panel = origin.row / tensor::kPanelRows;
  const std::byte* panels = from + first_panel * whole.panel_bytes;
  const bool all_columns = whole.k == slice.k;
  if (all_columns) {
    AddRange(panels, to, slice.panels() * slice.panel_bytes, pieces);
  } else {
    const int64_t skipped = BytesBefore(whole.format, origin.column);
    const int64_t bytes =
        std::min({slice.panel_bytes, whole.panel_bytes - skipped,
                  BytesBefore(whole.format, base::RoundUp(slice.k, StoredUnit(whole.format)))});
    for (int panel = 0; panel < slice.panels(); ++panel) {
      std::byte* sums = slice.sums_offset > 0
                            ? to + slice.sums_offset + int64_t{panel} * kGroupBytes * tensor::kPanelRows
                            : nullptr;
      pieces.push_back(
          {panels + panel * whole.panel_bytes + skipped, to + panel * slice.panel_bytes, bytes, sums});
    }
  }
  // Scales and sums have 4 bytes per output.
  const int64_t first = int64_t{4} * origin.row, count = int64_t{4} * slice.n_padded;
  if (slice.scales_offset > 0) {
    AddRange(from + whole.scales_offset + first, to + slice.scales_offset, count, pieces);
  }
  if (slice.sums_offset > 0 && all_columns) {
    AddRange(from + whole.sums_offset + first, to + slice.sums_offset, count, pieces);
  }
}

}  // namespace

void SlicePiece::Copy() const {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  if (sums == nullptr) return;
  std::array<int32_t, tensor::kPanelRows> totals = {};
  for (int64_t i = 0; i < bytes; ++i) {
    totals[i / kGroupBytes % tensor::kPanelRows] += static_cast<int8_t>(to[i]);
  }
  std::memcpy(sums, totals.data(), sizeof totals);
}

parallel::ModelShape DivisibleShape(const DecoderSpec& spec, const WeightPlan& whole) {
  parallel::ModelShape shape = ShapeOf(spec);
  for (const RegionPlan& region : whole.regions) {
    if (!region.layouts.empty()) WidenUnit(region.decl, region.layouts.back().format, &shape);
  }
  return shape;
}

StatusOr<WeightPlan> PlanShardOfPacked(const DecoderSpec& spec, const WeightPlan& whole,
                                       const parallel::Shard& shard, const std::string& path) {
  WeightPlan plan;
  const bool separate_head = spec.tied && whole.Find(kHead) != nullptr;
  for (RegionDecl& decl : DeclareWeights(spec, separate_head, shard)) {
    const RegionPlan* from = whole.Find(decl.name);
    if (from == nullptr && decl.optional) continue;
    MOESAIC_CHECK(from != nullptr);
    std::vector<PackedFormat> formats;
    std::vector<float> input_scales;
    for (size_t p = 0; p < decl.parts.size(); ++p) {
      formats.push_back(from->layouts[p].format);
      RETURN_IF_ERROR(CheckSlice(from->decl.parts[p], decl.parts[p], formats[p], path));
    }
    for (int record = 0; record < decl.count && !from->input_scales.empty(); ++record) {
      for (size_t p = 0; p < decl.parts.size(); ++p) {
        const Origin origin = OriginOf(from->decl.parts[p], decl.parts[p]);
        const size_t stored = RecordOf(decl.parts[p], origin, record);
        input_scales.push_back(from->input_scales[stored * decl.parts.size() + p]);
      }
    }
    ASSIGN_OR_RETURN(RegionPlan region, LayOut(std::move(decl), formats));
    region.input_scales = std::move(input_scales);
    plan.Add(std::move(region));
  }
  return plan;
}

std::vector<SlicePiece> SlicePieces(const RegionPlan& whole, const std::byte* from, const RegionPlan& region,
                                    std::byte* to) {
  std::vector<SlicePiece> pieces;
  if (region.decl.is_vector()) {
    AddRange(from + region.decl.first_value * static_cast<int64_t>(sizeof(float)), to, region.bytes, pieces);
    return pieces;
  }
  for (int record = 0; record < region.decl.count; ++record) {
    for (size_t p = 0; p < region.layouts.size(); ++p) {
      const Origin origin = OriginOf(whole.decl.parts[p], region.decl.parts[p]);
      const int64_t stored = RecordOf(region.decl.parts[p], origin, record);
      AddMatrix(whole.layouts[p], from + stored * whole.stride + whole.offsets[p], origin, region.layouts[p],
                to + record * region.stride + region.offsets[p], pieces);
    }
  }
  return pieces;
}

}  // namespace moesaic::models
