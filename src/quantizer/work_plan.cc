#include "quantizer/work_plan.h"

#include <algorithm>

namespace moesaic::quantizer {
namespace {

// Every format's blocks of rows (FP8's 128, zero points' 8) divide this.
constexpr int64_t kRowStep = 128;
// Half a second of a disk of 512 MB/s: larger units would not make reads more sequential, only lose more work
// when a run is killed.
constexpr int64_t kLargestUnit = int64_t{256} << 20;
// 4 MiB as f32: several tasks for every core, and little beside the units.
constexpr int64_t kSlabValues = int64_t{1} << 20;
// Direct reads take whole blocks of the file around each of up to four tensors.
constexpr int64_t kAlignmentSlack = int64_t{4} * 2 * 4096;

class Cutter {
 public:
  Cutter(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms, const OutputPlan& output,
         int64_t unit_bytes)
      : items_(items), forms_(forms), output_(output), unit_bytes_(unit_bytes) {}

  // Items [first, end) must be in one unit.
  void AddWhole(size_t first, size_t end) {
    Unit sum;
    for (size_t i = first; i < end; ++i) Count({i, 0, RowsOf(items_[i])}, &sum);
    Open(first, sum);
    for (size_t i = first; i < end; ++i) Put({i, 0, RowsOf(items_[i])});
  }

  void AddInSteps(size_t item) {
    const int64_t rows = RowsOf(items_[item]);
    for (int64_t first = 0; first < rows;) {
      Piece piece{item, first, rows - first};
      const Unit filled = plan_.units.empty() ? Unit{} : plan_.units.back();
      if (!Fits(filled, piece)) {
        // As many steps as still fit an empty unit.
        Unit step;
        Count({item, first, std::min(kRowStep, rows - first)}, &step);
        const int64_t steps = std::max<int64_t>(unit_bytes_ / std::max<int64_t>(Bytes(step), 1), 1);
        piece.rows = std::min(rows - first, steps * kRowStep);
        while (piece.rows > kRowStep && !Fits({}, piece)) piece.rows = (piece.rows - 1) / kRowStep * kRowStep;
      }
      Unit bytes;
      Count(piece, &bytes);
      Open(item, bytes);
      Put(piece);
      first += piece.rows;
    }
  }

  WorkPlan Take() {
    for (const Unit& unit : plan_.units) {
      plan_.source_bytes = std::max(plan_.source_bytes, unit.source_bytes);
      plan_.output_bytes = std::max(plan_.output_bytes, unit.output_bytes);
    }
    for (size_t i = 0; i < items_.size(); ++i) {
      const int64_t rows = std::min(SlabRows(items_[i]), RowsOf(items_[i]));
      if (output_.items[i].form == Form::kCopied) continue;
      plan_.slab_values = std::max(plan_.slab_values, items_[i].elements() / RowsOf(items_[i]) * rows);
    }
    return std::move(plan_);
  }

 private:
  static int64_t Bytes(const Unit& unit) { return unit.source_bytes + unit.output_bytes; }

  void Count(const Piece& piece, Unit* unit) const {
    const int64_t rows = RowsOf(items_[piece.item]);
    unit->source_bytes += (forms_[piece.item].bytes * piece.rows + rows - 1) / rows + kAlignmentSlack;
    for (const OutputTensor& tensor : output_.items[piece.item].tensors) {
      unit->output_bytes += PlaceOf(tensor, piece).bytes;
    }
  }

  bool Fits(Unit unit, const Piece& piece) const {
    Count(piece, &unit);
    return Bytes(unit) <= unit_bytes_;
  }

  // Begins a unit where the last one has no room for `more`, or belongs to another shard than `item`.
  void Open(size_t item, const Unit& more) {
    if (!plan_.units.empty()) {
      const Unit& last = plan_.units.back();
      const bool same = output_.items[plan_.pieces.back().item].shard == output_.items[item].shard;
      if (same && Bytes(last) + Bytes(more) <= unit_bytes_) return;
    }
    plan_.units.push_back({plan_.pieces.size(), plan_.pieces.size()});
  }

  void Put(const Piece& piece) {
    plan_.pieces.push_back(piece);
    Count(piece, &plan_.units.back());
    plan_.units.back().end = plan_.pieces.size();
  }

  const std::vector<ModelItem>& items_;
  const std::vector<SourceForm>& forms_;
  const OutputPlan& output_;
  int64_t unit_bytes_;
  WorkPlan plan_;
};

}  // namespace

int64_t SlabRows(const ModelItem& item) {
  const int64_t columns = std::max<int64_t>(item.elements() / std::max<int64_t>(RowsOf(item), 1), 1);
  return std::max(kSlabValues / columns / kRowStep * kRowStep, kRowStep);
}

PieceTensor PlaceOf(const OutputTensor& tensor, const Piece& piece) {
  const StoredTensor& stored = tensor.stored;
  if (stored.outputs_per_row == 0) {
    return piece.first == 0 ? PieceTensor{tensor.offset, stored.bytes()} : PieceTensor{};
  }
  const int64_t per_row = stored.outputs_per_row;
  const int64_t begin = piece.first / per_row, end = (piece.first + piece.rows + per_row - 1) / per_row;
  return {tensor.offset + begin * stored.row_bytes(), (end - begin) * stored.row_bytes()};
}

WorkPlan CutWork(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                 const OutputPlan& output, const Grid& grid, int64_t unit_bytes) {
  Cutter cutter(items, forms, output, unit_bytes > 0 ? unit_bytes : kLargestUnit);
  for (size_t i = 0; i < items.size();) {
    if (items[i].elements() == 0) {
      ++i;
      continue;
    }
    // NVFP4's global scale is of all values of linears that run as one.
    size_t end = i + 1;
    if (grid.kind == GridKind::kNvfp4 && output.items[i].form == Form::kRounded) {
      while (end < items.size() && items[i].fused >= 0 && items[end].fused == items[i].fused) ++end;
      cutter.AddWhole(i, end);
    } else {
      cutter.AddInSteps(i);
    }
    i = end;
  }
  return cutter.Take();
}

StatusOr<int64_t> FitUnits(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                           const OutputPlan& output, const Grid& grid, int64_t memory) {
  const auto fits = [&](int64_t unit_bytes) {
    return CutWork(items, forms, output, grid, unit_bytes).bytes() <= memory;
  };
  int64_t high = kLargestUnit;
  if (fits(high)) return high;
  int64_t low = 1;  // every unit as small as can be
  if (const int64_t least = CutWork(items, forms, output, grid, low).bytes(); least > memory) {
    return ResourceExhausted("{} bytes of memory are left for buffers, {} are needed",
                             std::max<int64_t>(memory, 0), least);
  }
  while (high - low > std::max<int64_t>(low / 16, 4096)) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

}  // namespace moesaic::quantizer
