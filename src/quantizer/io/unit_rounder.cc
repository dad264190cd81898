#include "quantizer/io/unit_rounder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/check.h"
#include "base/round.h"
#include "quantizer/mixed/mix.h"

namespace moesaic::quantizer {
namespace {

using tensor::DType;

// Values per task: 256 KiB as f32, which fit the L2 cache of a core.
constexpr int64_t kTaskValues = int64_t{1} << 16;

int64_t Columns(const ModelItem& item) { return item.elements() / RowsOf(item); }

// True if a value of 2 or 4 bytes is finite: its exponent is not all ones.
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

Status UnitRounder::Run(std::span<const Piece> pieces, const LoadedUnit& loaded, const OutputPlaces& places,
                        std::span<std::byte> buffer) {
  const std::span<const SourceRows> rows = loaded.rows;
  for (size_t p = 0; p < pieces.size(); ++p) {
    std::byte* out[3] = {};
    MOESAIC_CHECK_LE(places.tensors[p].size(), std::size(out));
    for (size_t t = 0; t < places.tensors[p].size(); ++t) {
      if (places.tensors[p][t] >= 0) out[t] = buffer.data() + places.tensors[p][t];
    }
    RETURN_IF_ERROR(
        Round(pieces.subspan(p), rows.subspan(p), std::span(out).first(places.tensors[p].size())));
  }
  return OkStatus();
}

Status UnitRounder::Round(std::span<const Piece> pieces, std::span<const SourceRows> rows,
                          std::span<std::byte* const> out, const Rounding& rounding) {
  const Form form = output_.items[pieces.front().item].form;
  if (form == Form::kRounded) {
    const Precision& precision = output_.items[pieces.front().item].precision;
    if (precision.is(Scheme::kNvfp4)) RETURN_IF_ERROR(FindSharedScale(pieces, rows));
    return RoundPiece(pieces.front(), rows.front(), out, rounding);
  }
  RETURN_IF_ERROR(form == Form::kConverted ? ConvertPiece(pieces.front(), rows.front(), out[0])
                                           : CopyPiece(pieces.front(), rows.front(), out[0]));
  return rounding.runtime == nullptr ? OkStatus() : PackKept(pieces.front(), rows.front(), rounding.runtime);
}

Status UnitRounder::ReadSlab(const Piece& piece, const SourceRows& rows, int64_t first, int64_t count) {
  const int64_t columns = Columns(items_[piece.item]);
  const auto values = static_cast<size_t>(count * columns);
  if (slab_.size() < values) slab_.resize(values);
  const int64_t step = std::max<int64_t>(kTaskValues / columns, 1);
  std::mutex mutex;
  Status failure;
  ctx_.pool->Run(base::CeilDiv(count, step), [&](int64_t task, int) {
    const int64_t begin = task * step, end = std::min(begin + step, count);
    const std::span<float> out(slab_.data() + begin * columns, static_cast<size_t>((end - begin) * columns));
    Status status = rows.Read(source_, first + begin, end - begin, out);
    if (status.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure.ok()) failure = std::move(status);
  });
  RETURN_IF_ERROR(Annotate(failure, source_.path()));
  if (settings_.folding() != nullptr) {
    settings_.folding()->Apply(ctx_, items_[piece.item].name, first, count, columns, slab_.data());
  }
  return OkStatus();
}

// Returns an error with the position of a bad value in the slab. Rows are counted from the start of the item.
Status UnitRounder::BadValue(const Piece& piece, int64_t first, int64_t count) const {
  const ModelItem& item = items_[piece.item];
  const int64_t columns = Columns(item);
  for (int64_t i = 0; i < count * columns; ++i) {
    if (std::fabs(slab_[i]) < kTooLarge) continue;
    return DataLoss("{}: {}: the weight of output {}, input {} must be a finite number below 2^96, found {}",
                    source_.path(), item.name, first + i / columns, i % columns, slab_[i]);
  }
  return OkStatus();
}

Status UnitRounder::CheckValues(const Piece& piece, int64_t first, int64_t count, DType dtype) const {
  const ModelItem& item = items_[piece.item];
  const int64_t columns = Columns(item);
  const auto values = static_cast<size_t>(count * columns);
  if (!IsFinite(DType::kF32, std::as_bytes(std::span(slab_.data(), values)))) {
    return BadValue(piece, first, count);
  }
  if (dtype != DType::kF16) return OkStatus();
  for (size_t i = 0; i < values; ++i) {
    if (std::fabs(slab_[i]) <= kLargestHalf) continue;
    const auto at = static_cast<int64_t>(i);
    return DataLoss("{}: {}: the weight of output {}, input {} must be at most {} to be fp16, found {}",
                    source_.path(), item.name, first + at / columns, at % columns, kLargestHalf, slab_[i]);
  }
  return OkStatus();
}

Status UnitRounder::FindSharedScale(std::span<const Piece> pieces, std::span<const SourceRows> rows) {
  const size_t item = pieces.front().item;
  if (item >= scale_first_ && item < scale_end_) return OkStatus();
  const auto [first, end] = FusedWith(items_, item);
  float largest = 0;
  for (size_t p = 0; p < pieces.size() && pieces[p].item < end; ++p) {
    ASSIGN_OR_RETURN(const float of_piece, LargestOf(pieces[p], rows[p], false));
    largest = std::max(largest, of_piece);
  }
  // Reads the rows that are not in the unit: parts of linears that are too large for the memory, or of a
  // resumed unit.
  for (const Piece& piece : RowsBeside(items_, first, end, pieces)) {
    ASSIGN_OR_RETURN(SourceRows mapped,
                     SourceRows::Find(source_, items_[piece.item], piece.first, piece.rows));
    ASSIGN_OR_RETURN(const float of_piece, LargestOf(piece, mapped, true));
    largest = std::max(largest, of_piece);
    for (const checkpoint::TensorEntry& part : mapped.parts()) {
      reread_bytes_ += static_cast<int64_t>(part.bytes.size());
    }
  }
  scale_first_ = first;
  scale_end_ = end;
  global_scale_ = Nvfp4GlobalScale(largest, settings_.search);
  return OkStatus();
}

StatusOr<float> UnitRounder::LargestOf(const Piece& piece, const SourceRows& rows, bool mapped) {
  const ModelItem& item = items_[piece.item];
  const auto columns = static_cast<int>(Columns(item));
  const int64_t step = SlabRows(item);
  float largest = 0;
  for (int64_t done = 0; done < piece.rows; done += step) {
    const int64_t count = std::min(step, piece.rows - done);
    RETURN_IF_ERROR(ReadSlab(piece, rows, piece.first + done, count));
    const StatusOr<float> amax = LargestMagnitude(ctx_, slab_.data(), static_cast<int>(count), columns);
    if (!amax.ok()) return BadValue(piece, piece.first + done, count);
    largest = std::max(largest, *amax);
    if (mapped) source_.ForgetMaps();
  }
  return largest;
}

StatusOr<QuantizedMatrix> UnitRounder::RoundSlab(const Precision& precision, int count, int columns,
                                                 const Rounding& rounding) const {
  const Grid grid = precision.grid();
  ScaleSearch search{.by_error = settings_.search,
                     .importance = {},
                     .global_scale = precision.is(Scheme::kNvfp4) ? global_scale_ : 0};
  if (rounding.factor == nullptr) return RoundToNearest(ctx_, grid, slab_.data(), count, columns, search);
  GptqReport report;
  ASSIGN_OR_RETURN(QuantizedMatrix matrix, rounding.stage->Round(ctx_, grid, slab_.data(), count, columns,
                                                                 *rounding.factor, search, &report));
  if (rounding.report != nullptr) {
    const double nearest = report.of_nearest > 0 ? report.loss / report.of_nearest : 0;
    GptqReport& sum = *rounding.report;
    const double before = sum.of_nearest > 0 ? sum.loss / sum.of_nearest : 0;
    sum.loss += report.loss;
    sum.of_nearest = before + nearest > 0 ? sum.loss / (before + nearest) : 1;
  }
  return matrix;
}

Status UnitRounder::RoundPiece(const Piece& piece, const SourceRows& rows, std::span<std::byte* const> out,
                               const Rounding& rounding) {
  const ModelItem& item = items_[piece.item];
  const std::vector<OutputTensor>& tensors = output_.items[piece.item].tensors;
  std::vector<StoredTensor> stored;
  for (const OutputTensor& tensor : tensors) stored.push_back(tensor.stored);
  // The static scale of activations may follow the grid's tensors.
  const float input_scale = settings_.InputScale(item.name);
  if (input_scale > 0) {
    if (out.back() != nullptr) std::memcpy(out.back(), &input_scale, sizeof(input_scale));
    stored.pop_back();
    if (rounding.runtime != nullptr) rounding.runtime->SetInputScale(input_scale);
  }
  const int64_t step = rounding.factor == nullptr
                           ? SlabRows(item)
                           : EvenRows(piece.rows, SlabRows(item, rounding.slab_values));
  for (int64_t done = 0; done < piece.rows; done += step) {
    const int64_t count = std::min(step, piece.rows - done);
    RETURN_IF_ERROR(ReadSlab(piece, rows, piece.first + done, count));
    const StatusOr<QuantizedMatrix> matrix =
        RoundSlab(output_.items[piece.item].precision, static_cast<int>(count),
                  static_cast<int>(Columns(item)), rounding);
    if (!matrix.ok()) {
      RETURN_IF_ERROR(BadValue(piece, piece.first + done, count));
      return Annotate(matrix.status(), fmt::format("{}: {}", source_.path(), item.name));
    }
    std::byte* to[3] = {};
    for (size_t t = 0; t < stored.size(); ++t) {
      if (out[t] == nullptr) continue;
      const int64_t per_row = stored[t].outputs_per_row;
      to[t] = out[t] + (per_row > 0 ? done / per_row * stored[t].row_bytes() : 0);
    }
    EncodeRows(*ctx_.pool, *matrix, stored, std::span(to).first(stored.size()));
    if (rounding.runtime == nullptr) continue;
    RETURN_IF_ERROR(rounding.runtime->Add(*ctx_.pool, static_cast<int>(piece.first + done), *matrix, stored,
                                          std::span<std::byte* const>(to).first(stored.size())));
  }
  return OkStatus();
}

Status UnitRounder::PackKept(const Piece& piece, const SourceRows& rows, RuntimeMatrix* runtime) {
  const int64_t step = SlabRows(items_[piece.item]);
  for (int64_t done = 0; done < piece.rows; done += step) {
    const int64_t count = std::min(step, piece.rows - done);
    RETURN_IF_ERROR(ReadSlab(piece, rows, piece.first + done, count));
    runtime->AddKept(*ctx_.pool, static_cast<int>(piece.first + done), static_cast<int>(count), slab_.data());
  }
  return OkStatus();
}

Status UnitRounder::ConvertPiece(const Piece& piece, const SourceRows& rows, std::byte* out) {
  const ModelItem& item = items_[piece.item];
  const int64_t columns = Columns(item), step = SlabRows(item);
  const DType dtype = output_.items[piece.item].tensors[0].stored.dtype;
  for (int64_t done = 0; done < piece.rows; done += step) {
    const int64_t count = std::min(step, piece.rows - done);
    RETURN_IF_ERROR(ReadSlab(piece, rows, piece.first + done, count));
    RETURN_IF_ERROR(CheckValues(piece, piece.first + done, count, dtype));
    const auto width = static_cast<int64_t>(tensor::BytesOf(dtype, 1));
    ctx_.pool->Run(count, [&](int64_t row, int) {
      const float* from = slab_.data() + row * columns;
      std::byte* to = out + (done + row) * columns * width;
      if (dtype == DType::kF32) {
        std::memcpy(to, from, static_cast<size_t>(columns) * sizeof(float));
        return;
      }
      for (int64_t i = 0; i < columns; ++i) {
        const uint16_t bits =
            dtype == DType::kF16 ? tensor::FloatToHalf(from[i]) : tensor::ToBF16(from[i]).bits;
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
  ctx_.pool->Run(base::CeilDiv(total, kBytes), [&](int64_t task, int) {
    const auto from = bytes.subspan(static_cast<size_t>(task * kBytes),
                                    static_cast<size_t>(std::min(kBytes, total - task * kBytes)));
    if (!IsFinite(dtype, from)) finite = false;
    std::memcpy(out + task * kBytes, from.data(), from.size());
  });
  if (finite) return OkStatus();
  return DataLoss("{}: tensor {} has a value that is not finite", source_.path(), items_[piece.item].name);
}

}  // namespace moesaic::quantizer
