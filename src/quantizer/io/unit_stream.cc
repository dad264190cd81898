#include "quantizer/io/unit_stream.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/round.h"
#include "quantizer/stopwatch.h"

namespace moesaic::quantizer {
namespace {

uint64_t ChecksumOf(std::span<const OutputExtent> extents) {
  base::Xxh3 sum;
  for (const OutputExtent& extent : extents) sum.Add(extent.bytes.data(), extent.bytes.size());
  return sum.value();
}

std::vector<OutputExtent> ExtentsOf(const OutputPlaces& places, std::span<std::byte> buffer) {
  std::vector<OutputExtent> extents;
  for (const OutputRun& run : places.runs) extents.push_back({run.offset, run.In(buffer)});
  return extents;
}

}  // namespace

UnitStream::UnitStream(const QuantizePlan& plan, const QuantizeOptions& options, const std::string& folder,
                       Journal& journal, runtime::AsyncFiles& io, UnitReader& reader)
    : plan_(plan),
      options_(options),
      journal_(journal),
      io_(io),
      reader_(reader),
      writer_(folder, plan.output, options.direct, io),
      done_(plan.work.units.size(), false),
      left_(plan.output.shards.size(), 0),
      finished_(plan.output.shards.size(), false) {
  for (size_t unit = 0; unit < done_.size(); ++unit) ++left_[ShardOf(unit)];
}

UnitStream::~UnitStream() {
  // No I/O may be in flight on the memory. Errors were reported by the calls that failed.
  (void)SettleAll();
}

std::span<const Piece> UnitStream::PiecesOf(size_t unit) const {
  const IoUnit& u = plan_.work.units[unit];
  return std::span(plan_.work.pieces).subspan(u.first, u.end - u.first);
}

UnitStream::Room UnitStream::RoomOf(size_t unit, size_t slot) const {
  const std::span<std::byte> all(memory_.data(), memory_.size());
  const auto blocks = [](int64_t bytes) {
    return static_cast<size_t>(base::RoundUp(bytes, runtime::kDirectBlock));
  };
  if (IsAlone(unit)) {
    const size_t source = blocks(plan_.work.units[unit].source_bytes);
    return {all.first(source), all.subspan(source)};
  }
  const size_t source = blocks(plan_.work.source_bytes), output = blocks(plan_.work.output_bytes);
  const std::span<std::byte> half = all.subspan(slot * (source + output), source + output);
  return {half.first(source), half.subspan(source)};
}

Status UnitStream::CheckFinished() {
  ASSIGN_OR_RETURN(memory_, runtime::Buffer::Allocate(static_cast<size_t>(plan_.work.buffer_bytes()), false));
  std::vector<bool> wrong(done_.size(), false);
  for (const Journal::Entry& entry : journal_.entries()) {
    if (entry.unit >= done_.size())
      return DataLoss("the journal has unit {}, but the plan only {} units", entry.unit, done_.size());
    if (done_[entry.unit]) continue;
    const std::vector<OutputExtent> extents =
        ExtentsOf(PlacesOf(plan_.output, PiecesOf(entry.unit)), RoomOf(entry.unit, 0).output);
    const StatusOr<runtime::AsyncFiles::Ticket> ticket = writer_.StartCheck(ShardOf(entry.unit), extents);
    bool right = ticket.ok();
    if (right) {
      RETURN_IF_ERROR(io_.Wait(*ticket));
      right = ChecksumOf(extents) == entry.checksum;
    } else if (ticket.status().code() != StatusCode::kNotFound) {
      return ticket.status();
    }
    if (!right) {
      wrong[entry.unit] = true;
      continue;
    }
    ++counts_.resumed_units;
    MarkDone(entry.unit);
    RETURN_IF_ERROR(Report(true, ""));
  }
  for (size_t unit = 0; unit < done_.size(); ++unit) {
    if (wrong[unit] && !done_[unit]) ++counts_.redone_units;
  }
  return OkStatus();
}

bool UnitStream::IsDoneBefore(int layer) const {
  for (size_t unit = 0; unit < done_.size() && LayerOf(unit) != layer; ++unit) {
    if (!done_[unit]) return false;
  }
  return true;
}

Status UnitStream::Begin(int layer) {
  bool again = false;
  for (size_t unit = 0; unit < done_.size(); ++unit) {
    again |= LayerOf(unit) == layer;
    if (done_[unit] && again) {
      done_[unit] = false;
      done_bytes_ -= plan_.work.units[unit].output_bytes;
      ++left_[ShardOf(unit)];
      --counts_.resumed_units;
    }
    if (!done_[unit]) todo_.push_back(unit);
  }
  return StartReads();
}

size_t UnitStream::NextItem() const {
  if (at_ == todo_.size()) return plan_.items.size();
  const std::span<const Piece> pieces = PiecesOf(todo_[at_]);
  if (piece_ < pieces.size()) return pieces[piece_].item;
  return at_ + 1 < todo_.size() ? PiecesOf(todo_[at_ + 1]).front().item : plan_.items.size();
}

StatusOr<UnitStream::PieceIo> UnitStream::Next() {
  if (at_ < todo_.size() && piece_ == PiecesOf(todo_[at_]).size()) RETURN_IF_ERROR(CloseUnit());
  MOESAIC_CHECK_LT(at_, todo_.size());
  if (piece_ == 0) RETURN_IF_ERROR(OpenUnit());
  Slot& slot = Current();
  const std::vector<int64_t>& tensors = places_.tensors[piece_];
  out_.assign(tensors.size(), nullptr);
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t] >= 0) out_[t] = slot.room.output.data() + tensors[t];
  }
  const PieceIo place{PiecesOf(todo_[at_]).subspan(piece_), std::span(slot.loaded.rows).subspan(piece_),
                      out_};
  ++piece_;
  return place;
}

// Starts reads of the current unit and the next one while there are free buffers.
Status UnitStream::StartReads() {
  for (; started_ < std::min(todo_.size(), at_ + slots_.size()); ++started_) {
    const size_t unit = todo_[started_];
    if (IsAlone(unit) || (started_ > 0 && IsAlone(todo_[started_ - 1]))) {
      if (started_ > at_) return OkStatus();  // retried when the current one is finished
      RETURN_IF_ERROR(SettleAll());           // the memory may still be being written
    }
    const size_t index = started_ % slots_.size();
    Slot& slot = slots_[index];
    slot.room = RoomOf(unit, index);
    ASSIGN_OR_RETURN(slot.loaded, reader_.Start(plan_.items, PiecesOf(unit), slot.room.source));
    slot.reading = true;
    counts_.read_bytes += slot.loaded.read_bytes;
  }
  return OkStatus();
}

Status UnitStream::FinishRead(Slot& slot) {
  return std::exchange(slot.reading, false) ? reader_.Wait(slot.loaded) : OkStatus();
}

Status UnitStream::OpenUnit() {
  Slot& slot = Current();
  const Clock::time_point start = Clock::now();
  RETURN_IF_ERROR(FinishRead(slot));
  counts_.read_wait_seconds += Since(start);
  RETURN_IF_ERROR(Settle(slot));
  places_ = PlacesOf(plan_.output, PiecesOf(todo_[at_]));
  return OkStatus();
}

// Starts to write the current unit and to read the one that reuses its buffer.
Status UnitStream::CloseUnit() {
  Slot& slot = Current();
  slot.extents = ExtentsOf(places_, slot.room.output);
  slot.writing = todo_[at_];
  slot.checksum = ChecksumOf(slot.extents);
  StatusOr<runtime::AsyncFiles::Ticket> ticket = writer_.Start(ShardOf(todo_[at_]), slot.extents);
  if (!ticket.ok()) {
    slot.extents.clear();
    return ticket.status();
  }
  slot.ticket = *ticket;
  reader_.Forget(slot.loaded);
  ++at_;
  piece_ = 0;
  RETURN_IF_ERROR(StartReads());
  return ReportProgress();
}

// Waits until the slot's output is written, then journals it.
Status UnitStream::Settle(Slot& slot) {
  if (slot.extents.empty()) return OkStatus();
  const std::vector<OutputExtent> extents = std::exchange(slot.extents, {});
  const Clock::time_point start = Clock::now();
  RETURN_IF_ERROR(io_.Wait(slot.ticket));
  counts_.write_wait_seconds += Since(start);
  const int shard = ShardOf(slot.writing);
  writer_.Flush(shard, extents);
  int64_t bytes = 0;
  for (const OutputExtent& extent : extents) bytes += static_cast<int64_t>(extent.bytes.size());
  counts_.written_bytes += bytes;
  const nlohmann::ordered_json place = {
      {"file", plan_.output.shards[shard].file}, {"offset", extents.front().offset}, {"bytes", bytes}};
  RETURN_IF_ERROR(journal_.Append({slot.writing, slot.checksum}, place));
  MarkDone(slot.writing);
  return left_[shard] == 0 ? FinishShard(shard) : OkStatus();
}

Status UnitStream::Drain() {
  if (at_ < todo_.size() && piece_ == PiecesOf(todo_[at_]).size()) RETURN_IF_ERROR(CloseUnit());
  return SettleAll();
}

Status UnitStream::Sync() {
  RETURN_IF_ERROR(Drain());
  RETURN_IF_ERROR(writer_.Sync());
  return journal_.Sync();
}

Status UnitStream::SettleAll() {
  Status status;
  // Units in flight are journaled even after an error.
  for (Slot& slot : slots_) {
    if (const Status read = FinishRead(slot); status.ok()) status = read;
  }
  // In the order of their start.
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (const Status written = Settle(slots_[(at_ + i) % slots_.size()]); status.ok()) status = written;
  }
  return status;
}

Status UnitStream::Finish() {
  RETURN_IF_ERROR(Drain());
  for (size_t shard = 0; shard < left_.size(); ++shard) {
    if (!finished_[shard]) RETURN_IF_ERROR(FinishShard(static_cast<int>(shard)));
  }
  return OkStatus();
}

Status UnitStream::FinishShard(int shard) {
  finished_[shard] = true;
  const std::string header = plan_.output.Header(plan_.output.shards[shard], plan_.items, options_.output);
  counts_.written_bytes += static_cast<int64_t>(header.size());
  return writer_.Finish(shard, header);
}

void UnitStream::MarkDone(size_t unit) {
  done_[unit] = true;
  done_bytes_ += plan_.work.units[unit].output_bytes;
  --left_[ShardOf(unit)];
}

Status UnitStream::ReportProgress(const std::string& stage) const { return Report(false, stage); }

Status UnitStream::Report(bool checking, const std::string& stage) const {
  if (!options_.progress || options_.progress({done_bytes_, plan_.output.bytes, checking, stage})) {
    return OkStatus();
  }
  return Cancelled("stopped; repeat the command to resume");
}

}  // namespace moesaic::quantizer
