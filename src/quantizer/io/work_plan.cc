#include "quantizer/io/work_plan.h"

#include <algorithm>

#include "base/round.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {
namespace {

using runtime::kDirectBlock;

// 4 MiB as f32: several tasks per core, and small compared with the units.
constexpr int64_t kSlabValues = int64_t{1} << 20;
// Direct reads need whole file blocks around each of up to four tensors.
constexpr int64_t kAlignmentSlack = 4 * 2 * kDirectBlock;
// Output tensors of one linear: codes, scales, global scale, activation scale.
constexpr int64_t kMaxTensors = 4;

class Cutter {
 public:
  Cutter(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms, const OutputPlan& output,
         bool by_layer, const UnitSizes& sizes)
      : items_(items),
        forms_(forms),
        output_(output),
        by_layer_(by_layer),
        unit_bytes_(sizes.unit_bytes > 0 ? sizes.unit_bytes : kLargestUnit),
        alone_bytes_(sizes.alone_bytes) {}

  // Puts items [first, end) into one unit if they fit.
  void AddTogether(size_t first, size_t end) {
    IoUnit sum;
    for (size_t i = first; i < end; ++i) Count({i, 0, RowsOf(items_[i])}, &sum);
    Piece next{first, 0, 0};  // next rows to add
    if (Bytes(sum) <= unit_bytes_) {
      Open(first, sum);
    } else if (alone_bytes_ > unit_bytes_) {
      next = AddAlone(first, end);
    }
    for (; next.item < end; next = {next.item + 1, 0, 0}) AddInSteps(next.item, next.first);
  }

  void AddInSteps(size_t item, int64_t from) {
    const int64_t rows = RowsOf(items_[item]);
    for (int64_t first = from; first < rows;) {
      Piece piece{item, first, rows - first};
      const IoUnit filled = plan_.units.empty() || plan_.units.back().alone ? IoUnit{} : plan_.units.back();
      if (!Fits(filled, piece)) {
        // Adds as many steps as fit an empty unit.
        IoUnit step;
        Count({item, first, std::min(kRowStep, rows - first)}, &step);
        const int64_t steps = std::max<int64_t>(unit_bytes_ / std::max<int64_t>(Bytes(step), 1), 1);
        piece.rows = std::min(rows - first, steps * kRowStep);
        while (piece.rows > kRowStep && !Fits({}, piece)) piece.rows = (piece.rows - 1) / kRowStep * kRowStep;
      }
      IoUnit bytes;
      Count(piece, &bytes);
      Open(item, bytes);
      Put(piece);
      first += piece.rows;
    }
  }

  WorkPlan Take() {
    for (const IoUnit& unit : plan_.units) {
      const auto pieces = std::span(plan_.pieces).subspan(unit.first, unit.end - unit.first);
      const int64_t output_bytes = PlacesOf(output_, pieces).bytes;
      if (unit.alone) {
        const int64_t bytes = base::RoundUp(unit.source_bytes, kDirectBlock) + output_bytes;
        plan_.alone_bytes = std::max(plan_.alone_bytes, bytes);
        continue;
      }
      plan_.source_bytes = std::max(plan_.source_bytes, unit.source_bytes);
      plan_.output_bytes = std::max(plan_.output_bytes, output_bytes);
    }
    for (size_t i = 0; i < items_.size(); ++i) {
      const int64_t rows = std::min(SlabRows(items_[i]), RowsOf(items_[i]));
      if (output_.items[i].form == Form::kCopied) continue;
      plan_.slab_values = std::max(plan_.slab_values, items_[i].elements() / RowsOf(items_[i]) * rows);
    }
    return std::move(plan_);
  }

 private:
  static int64_t Bytes(const IoUnit& unit) { return unit.source_bytes + unit.output_bytes; }

  void Count(const Piece& piece, IoUnit* unit) const {
    const int64_t rows = RowsOf(items_[piece.item]);
    const SourceForm& form = forms_[piece.item];
    const int64_t by_row = form.bytes - form.whole_bytes;
    unit->source_bytes += (by_row * piece.rows + rows - 1) / rows + form.whole_bytes + kAlignmentSlack;
    for (const OutputTensor& tensor : output_.items[piece.item].tensors) {
      unit->output_bytes += PlaceOf(tensor, piece).bytes;
    }
  }

  bool Fits(IoUnit unit, const Piece& piece) const {
    Count(piece, &unit);
    return Bytes(unit) <= unit_bytes_;
  }

  // Adds an exclusive unit with as many rows of items [first, end) as fit. Returns the first item and row
  // that were not added.
  Piece AddAlone(size_t first, size_t end) {
    plan_.units.push_back({.first = plan_.pieces.size(), .end = plan_.pieces.size(), .alone = true});
    for (size_t item = first; item < end; ++item) {
      if (output_.items[item].shard != output_.items[first].shard) return {item, 0, 0};
      const int64_t rows = RowsOf(items_[item]);
      Piece piece{item, 0, rows};
      while (piece.rows > 0 && !FitsAlone(piece)) piece.rows = (piece.rows - 1) / kRowStep * kRowStep;
      if (piece.rows > 0) Put(piece);
      if (piece.rows < rows) {
        if (plan_.units.back().first == plan_.units.back().end) plan_.units.pop_back();
        return {item, piece.rows, 0};
      }
    }
    return {end, 0, 0};
  }

  // True if the last unit, which is exclusive, has space for `piece` including worst-case alignment.
  bool FitsAlone(const Piece& piece) const {
    IoUnit unit = plan_.units.back();
    Count(piece, &unit);
    const auto pieces = static_cast<int64_t>(unit.end - unit.first) + 1;
    return Bytes(unit) + kDirectBlock * (1 + pieces * kMaxTensors) <= alone_bytes_;
  }

  // Starts a unit if the last one has no space for `more` or belongs to another shard than `item`.
  void Open(size_t item, const IoUnit& more) {
    if (!plan_.units.empty()) {
      const IoUnit& last = plan_.units.back();
      if (last.first == last.end) return;  // still empty
      const size_t before = plan_.pieces.back().item;
      const bool same = !last.alone && output_.items[before].shard == output_.items[item].shard &&
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
  int64_t unit_bytes_, alone_bytes_;
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
  struct PlacedTensor {
    PieceTensor place;
    size_t piece, tensor;
  };
  std::vector<PlacedTensor> parts;
  OutputPlaces places;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const std::vector<OutputTensor>& tensors = output.items[pieces[p].item].tensors;
    places.tensors.emplace_back(tensors.size(), -1);
    for (size_t t = 0; t < tensors.size(); ++t) {
      const PieceTensor place = PlaceOf(tensors[t], pieces[p]);
      if (place.bytes > 0) parts.push_back({place, p, t});
    }
  }
  std::ranges::sort(parts, {}, [](const PlacedTensor& part) { return part.place.offset; });
  for (const PlacedTensor& part : parts) {
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

int64_t WorkPlan::buffer_bytes() const {
  const int64_t two =
      2 * (base::RoundUp(source_bytes, kDirectBlock) + base::RoundUp(output_bytes, kDirectBlock));
  return std::max(two, alone_bytes);
}

std::pair<size_t, size_t> FusedWith(const std::vector<ModelItem>& items, size_t item) {
  const int fused = items[item].fused;
  size_t first = item, end = item + 1;
  while (fused >= 0 && first > 0 && items[first - 1].fused == fused) --first;
  while (fused >= 0 && end < items.size() && items[end].fused == fused) ++end;
  return {first, end};
}

std::vector<Piece> RowsBeside(const std::vector<ModelItem>& items, size_t first, size_t end,
                              std::span<const Piece> pieces) {
  std::vector<Piece> beside;
  const auto add = [&](size_t item, int64_t from, int64_t to) {
    if (from < to) beside.push_back({item, from, to - from});
  };
  for (size_t i = first; i < end; ++i) {
    int64_t from = RowsOf(items[i]), to = from;  // row range of the pieces
    for (const Piece& piece : pieces) {
      if (piece.item != i) continue;
      from = std::min(from, piece.first);
      to = piece.first + piece.rows;
    }
    add(i, 0, from);
    add(i, to, RowsOf(items[i]));
  }
  return beside;
}

WorkPlan CutWork(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                 const OutputPlan& output, const CutOptions& options, const UnitSizes& sizes) {
  Cutter cutter(items, forms, output, options.by_layer, sizes);
  for (size_t i = 0; i < items.size();) {
    if (items[i].elements() == 0) {
      ++i;
      continue;
    }
    // NVFP4's global scale covers all values of fused linears. In one unit they are read once.
    size_t end = i + 1;
    const OutputItem& item = output.items[i];
    if (item.form == Form::kRounded && item.precision.is(Scheme::kNvfp4)) {
      end = FusedWith(items, i).second;
      cutter.AddTogether(i, end);
    } else {
      cutter.AddInSteps(i, 0);
    }
    i = end;
  }
  return cutter.Take();
}

StatusOr<UnitSizes> FitUnits(const std::vector<ModelItem>& items, const std::vector<SourceForm>& forms,
                             const OutputPlan& output, const CutOptions& options, int64_t memory) {
  int64_t low = 1;  // every unit as small as possible
  const WorkPlan smallest = CutWork(items, forms, output, options, {.unit_bytes = low});
  if (smallest.bytes() > memory) {
    return ResourceExhausted("{} bytes of memory are left for buffers, but {} are needed",
                             std::max<int64_t>(memory, 0), smallest.bytes());
  }
  const int64_t alone_bytes = memory - smallest.slab_bytes();
  const auto fits = [&](int64_t unit_bytes) {
    return CutWork(items, forms, output, options, {unit_bytes, alone_bytes}).bytes() <= memory;
  };
  int64_t high = kLargestUnit;
  if (fits(high)) return UnitSizes{high, alone_bytes};
  while (high - low > std::max<int64_t>(low / 16, 4096)) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return UnitSizes{low, alone_bytes};
}

}  // namespace moesaic::quantizer
