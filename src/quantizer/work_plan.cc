#include "quantizer/work_plan.h"

#include <algorithm>

#include "base/round.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {
namespace {

using runtime::kDirectBlock;

// Half a second of a disk of 512 MB/s: larger units would not make reads more sequential, only lose more work
// when a run is killed.
constexpr int64_t kLargestUnit = int64_t{256} << 20;
// 4 MiB as f32: several tasks for every core, and little beside the units.
constexpr int64_t kSlabValues = int64_t{1} << 20;
// Direct reads take whole blocks of the file around each of up to four tensors.
constexpr int64_t kAlignmentSlack = 4 * 2 * kDirectBlock;

class Cutter {
 public:
  Cutter(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms, const OutputPlan& output,
         bool by_layer, int64_t unit_bytes)
      : items_(items), forms_(forms), output_(output), by_layer_(by_layer), unit_bytes_(unit_bytes) {}

  // Items [first, end) go into one unit if one holds them.
  void AddTogether(size_t first, size_t end) {
    Unit sum;
    for (size_t i = first; i < end; ++i) Count({i, 0, RowsOf(items_[i])}, &sum);
    if (Bytes(sum) <= unit_bytes_) Open(first, sum);
    for (size_t i = first; i < end; ++i) AddInSteps(i);
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
      const auto pieces = std::span(plan_.pieces).subspan(unit.first, unit.end - unit.first);
      plan_.output_bytes = std::max(plan_.output_bytes, PlacesOf(output_, pieces).bytes);
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
    const SourceForm& form = forms_[piece.item];
    const int64_t by_row = form.bytes - form.whole_bytes;
    unit->source_bytes += (by_row * piece.rows + rows - 1) / rows + form.whole_bytes + kAlignmentSlack;
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
      if (last.first == last.end) return;  // opened for what comes now
      const size_t before = plan_.pieces.back().item;
      const bool same = output_.items[before].shard == output_.items[item].shard &&
                        (!by_layer_ || items_[before].layer == items_[item].layer);
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
  bool by_layer_;
  int64_t unit_bytes_;
  WorkPlan plan_;
};

}  // namespace

int64_t SlabRows(const ModelItem& item) { return SlabRows(item, kSlabValues); }
int64_t SlabRows(const ModelItem& item, int64_t values) {
  const int64_t columns = std::max<int64_t>(item.elements() / std::max<int64_t>(RowsOf(item), 1), 1);
  return std::max(values / columns / kRowStep * kRowStep, kRowStep);
}
int64_t EvenRows(int64_t rows, int64_t most) {
  return base::RoundUp(base::CeilDiv(rows, base::CeilDiv(rows, most)), kRowStep);
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

OutputPlaces PlacesOf(const OutputPlan& output, std::span<const Piece> pieces) {
  struct Part {
    PieceTensor place;
    size_t piece, tensor;
  };
  std::vector<Part> parts;
  OutputPlaces places;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const std::vector<OutputTensor>& tensors = output.items[pieces[p].item].tensors;
    places.tensors.emplace_back(tensors.size(), -1);
    for (size_t t = 0; t < tensors.size(); ++t) {
      const PieceTensor place = PlaceOf(tensors[t], pieces[p]);
      if (place.bytes > 0) parts.push_back({place, p, t});
    }
  }
  std::ranges::sort(parts, {}, [](const Part& part) { return part.place.offset; });
  for (const Part& part : parts) {
    const auto [offset, bytes] = part.place;
    if (places.runs.empty() || places.runs.back().offset + places.runs.back().bytes != offset) {
      const int64_t position =
          places.bytes + (offset - places.bytes % kDirectBlock + kDirectBlock) % kDirectBlock;
      places.runs.push_back({offset, 0, position});
      places.bytes = position;
    }
    places.tensors[part.piece][part.tensor] = places.bytes;
    places.runs.back().bytes += bytes;
    places.bytes += bytes;
  }
  return places;
}

WorkPlan CutWork(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                 const OutputPlan& output, const CutOptions& options, int64_t unit_bytes) {
  Cutter cutter(items, forms, output, options.by_layer, unit_bytes > 0 ? unit_bytes : kLargestUnit);
  for (size_t i = 0; i < items.size();) {
    if (items[i].elements() == 0) {
      ++i;
      continue;
    }
    // NVFP4's global scale is of all values of linears that run as one: together they are read once.
    size_t end = i + 1;
    const OutputItem& item = output.items[i];
    if (item.form == Form::kRounded && item.precision.is(Scheme::kNvfp4)) {
      while (end < items.size() && items[i].fused >= 0 && items[end].fused == items[i].fused) ++end;
      cutter.AddTogether(i, end);
    } else {
      cutter.AddInSteps(i);
    }
    i = end;
  }
  return cutter.Take();
}

StatusOr<int64_t> FitUnits(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                           const OutputPlan& output, const CutOptions& options, int64_t memory) {
  const auto fits = [&](int64_t unit_bytes) {
    return CutWork(items, forms, output, options, unit_bytes).bytes() <= memory;
  };
  int64_t high = kLargestUnit;
  if (fits(high)) return high;
  int64_t low = 1;  // every unit as small as can be
  if (const int64_t least = CutWork(items, forms, output, options, low).bytes(); least > memory) {
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
