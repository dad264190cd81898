#include "quantizer/unit_rounder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/check.h"

namespace moesaic::quantizer {
namespace {

using tensor::DType;

// Values of one task: 256 KiB as f32, which stay in a core's L2 cache.
constexpr int64_t kTaskValues = int64_t{1} << 16;
// Beyond, sums of products have no room left (grid.h).
constexpr float kTooLarge = 0x1p96F;

int64_t Columns(const ModelItem& item) { return item.elements() / RowsOf(item); }

// Whether a value that is stored in 2 or 4 bytes is a number: its exponent is not all ones.
template <typename T>
bool AllFinite(std::span<const std::byte> bytes, T exponent) {
  bool finite = true;
  for (size_t i = 0; i + sizeof(T) <= bytes.size(); i += sizeof(T)) {
    T value;
    std::memcpy(&value, bytes.data() + i, sizeof(T));
    finite &= (value & exponent) != exponent;
  }
  return finite;
}

bool IsFinite(DType dtype, std::span<const std::byte> bytes) {
  switch (dtype) {
    case DType::kF32:
      return AllFinite<uint32_t>(bytes, 0x7f800000U);
    case DType::kBF16:
      return AllFinite<uint16_t>(bytes, 0x7f80U);
    case DType::kF16:
      return AllFinite<uint16_t>(bytes, 0x7c00U);
    default:
      return true;
  }
}

}  // namespace

OutputPlaces PlacesOf(const OutputPlan& output, std::span<const Piece> pieces) {
  struct Part {
    PieceTensor place;
    size_t piece, tensor;
  };
  std::vector<Part> parts;
  OutputPlaces result;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const std::vector<OutputTensor>& tensors = output.items[pieces[p].item].tensors;
    result.places.emplace_back(tensors.size(), -1);
    for (size_t t = 0; t < tensors.size(); ++t) {
      const PieceTensor place = PlaceOf(tensors[t], pieces[p]);
      if (place.bytes > 0) parts.push_back({place, p, t});
    }
  }
  std::ranges::sort(parts, {}, [](const Part& part) { return part.place.offset; });
  int64_t used = 0;
  for (const Part& part : parts) {
    result.places[part.piece][part.tensor] = used;
    used += part.place.bytes;
    if (!result.runs.empty() && result.runs.back().offset + result.runs.back().bytes == part.place.offset) {
      result.runs.back().bytes += part.place.bytes;
    } else {
      result.runs.push_back(part.place);
    }
  }
  return result;
}

StatusOr<std::vector<OutputExtent>> UnitRounder::Run(std::span<const Piece> pieces, const LoadedUnit& loaded,
                                                     std::span<std::byte> buffer) {
  const OutputPlaces places = PlacesOf(output_, pieces);
  const std::span<const SourceRows> rows = loaded.rows;
  for (size_t p = 0; p < pieces.size();) {
    const ModelItem& item = items_[pieces[p].item];
    const Form form = output_.items[pieces[p].item].form;
    size_t end = p + 1;
    float global_scale = 0;
    if (form == Form::kRounded && settings_.scheme == Scheme::kNvfp4) {
      while (end < pieces.size() && item.fused >= 0 && items_[pieces[end].item].fused == item.fused) ++end;
      ASSIGN_OR_RETURN(global_scale, SharedScale(pieces.subspan(p, end - p), rows.subspan(p, end - p)));
    }
    for (; p < end; ++p) {
      std::byte* out[3] = {};
      MOESAIC_CHECK_LE(places.places[p].size(), std::size(out));
      for (size_t t = 0; t < places.places[p].size(); ++t) {
        if (places.places[p][t] >= 0) out[t] = buffer.data() + places.places[p][t];
      }
      switch (form) {
        case Form::kRounded:
          RETURN_IF_ERROR(RoundPiece(pieces[p], rows[p], global_scale, out));
          break;
        case Form::kConverted:
          RETURN_IF_ERROR(ConvertPiece(pieces[p], rows[p], out[0]));
          break;
        case Form::kCopied:
          RETURN_IF_ERROR(CopyPiece(pieces[p], rows[p], out[0]));
          break;
      }
    }
  }
  std::vector<OutputExtent> extents;
  size_t used = 0;
  for (const PieceTensor& run : places.runs) {
    extents.push_back({run.offset, buffer.subspan(used, static_cast<size_t>(run.bytes))});
    used += static_cast<size_t>(run.bytes);
  }
  return extents;
}

Status UnitRounder::ReadSlab(const Piece& piece, const SourceRows& rows, int64_t first, int64_t count) {
  const ModelItem& item = items_[piece.item];
  const int64_t columns = Columns(item);
  const auto values = static_cast<size_t>(count * columns);
  if (slab_.size() < values) slab_.resize(values);
  const int64_t step = std::max<int64_t>(kTaskValues / columns, 1);
  std::mutex mutex;
  int64_t failed_row = count;  // the first one counts, whichever thread meets it
  Status failure;
  ctx_.pool->Run((count + step - 1) / step, [&](int64_t task, int) {
    const int64_t begin = task * step, end = std::min(begin + step, count);
    const std::span<float> out(slab_.data() + begin * columns, static_cast<size_t>((end - begin) * columns));
    Status status = rows.Read(source_, first + begin, end - begin, out);
    int64_t row = begin;
    if (status.ok()) {
      float largest = 0;
      bool numbers = true;
      for (const float value : out) {
        largest = std::max(largest, std::fabs(value));
        numbers &= value == value;
      }
      if (numbers && largest < kTooLarge) return;
      const auto bad = std::ranges::find_if(out, [](float v) { return !(std::fabs(v) < kTooLarge); });
      const int64_t at = bad - out.begin();
      row = begin + at / columns;
      status = DataLoss("{}: the weight of output {}, input {} must be a finite number below 2^96, found {}",
                        item.name, first + row, at % columns, *bad);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (row < failed_row) {
      failed_row = row;
      failure = std::move(status);
    }
  });
  return Annotate(failure, source_.path());
}

StatusOr<float> UnitRounder::SharedScale(std::span<const Piece> pieces, std::span<const SourceRows> rows) {
  float largest = 0;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const ModelItem& item = items_[pieces[p].item];
    const int64_t step = SlabRows(item);
    for (int64_t done = 0; done < pieces[p].rows; done += step) {
      const int64_t count = std::min(step, pieces[p].rows - done);
      RETURN_IF_ERROR(ReadSlab(pieces[p], rows[p], pieces[p].first + done, count));
      ASSIGN_OR_RETURN(const float amax, LargestMagnitude(ctx_, slab_.data(), static_cast<int>(count),
                                                          static_cast<int>(Columns(item))));
      largest = std::max(largest, amax);
    }
  }
  return Nvfp4GlobalScale(largest, settings_.search);
}

Status UnitRounder::RoundPiece(const Piece& piece, const SourceRows& rows, float global_scale,
                               std::span<std::byte* const> out) {
  const ModelItem& item = items_[piece.item];
  const std::vector<OutputTensor>& tensors = output_.items[piece.item].tensors;
  std::vector<StoredTensor> stored;
  for (const OutputTensor& tensor : tensors) stored.push_back(tensor.stored);
  const int64_t step = SlabRows(item);
  for (int64_t done = 0; done < piece.rows; done += step) {
    const int64_t count = std::min(step, piece.rows - done);
    RETURN_IF_ERROR(ReadSlab(piece, rows, piece.first + done, count));
    const ScaleSearch search{.by_error = settings_.search, .importance = {}, .global_scale = global_scale};
    StatusOr<QuantizedMatrix> matrix =
        RoundToNearest(ctx_, settings_.grid(), slab_.data(), static_cast<int>(count),
                       static_cast<int>(Columns(item)), search);
    if (!matrix.ok()) return Annotate(matrix.status(), fmt::format("{}: {}", source_.path(), item.name));
    std::byte* to[3] = {};
    for (size_t t = 0; t < stored.size(); ++t) {
      if (out[t] == nullptr) continue;
      const int64_t per_row = stored[t].outputs_per_row;
      to[t] = out[t] + (per_row > 0 ? done / per_row * stored[t].row_bytes() : 0);
    }
    EncodeRows(*ctx_.pool, *matrix, stored, std::span(to).first(stored.size()));
  }
  return OkStatus();
}

Status UnitRounder::ConvertPiece(const Piece& piece, const SourceRows& rows, std::byte* out) {
  const ModelItem& item = items_[piece.item];
  const int64_t columns = Columns(item), step = SlabRows(item);
  const bool f32 = output_.items[piece.item].tensors[0].stored.dtype == DType::kF32;
  for (int64_t done = 0; done < piece.rows; done += step) {
    const int64_t count = std::min(step, piece.rows - done);
    RETURN_IF_ERROR(ReadSlab(piece, rows, piece.first + done, count));
    ctx_.pool->Run(count, [&](int64_t row, int) {
      const float* from = slab_.data() + row * columns;
      std::byte* to = out + (done + row) * columns * (f32 ? 4 : 2);
      if (f32) {
        std::memcpy(to, from, static_cast<size_t>(columns) * sizeof(float));
        return;
      }
      for (int64_t i = 0; i < columns; ++i) {
        const uint16_t bits = tensor::ToBF16(from[i]).bits;
        std::memcpy(to + i * 2, &bits, sizeof(bits));
      }
    });
  }
  return OkStatus();
}

Status UnitRounder::CopyPiece(const Piece& piece, const SourceRows& rows, std::byte* out) const {
  constexpr int64_t kBytes = int64_t{1} << 20;
  const std::span<const std::byte> bytes = rows.bytes();
  const auto total = static_cast<int64_t>(bytes.size());
  const DType dtype = output_.items[piece.item].tensors[0].stored.dtype;
  std::atomic<bool> finite = true;
  ctx_.pool->Run((total + kBytes - 1) / kBytes, [&](int64_t task, int) {
    const auto from = bytes.subspan(static_cast<size_t>(task * kBytes),
                                    static_cast<size_t>(std::min(kBytes, total - task * kBytes)));
    if (!IsFinite(dtype, from)) finite = false;
    std::memcpy(out + task * kBytes, from.data(), from.size());
  });
  if (finite) return OkStatus();
  return DataLoss("{}: tensor {} has a value that is not finite", source_.path(), items_[piece.item].name);
}

}  // namespace moesaic::quantizer
