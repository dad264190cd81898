// Streams a run's units from the source files to the output files. While one unit is rounded, the next one is
// read and the previous one is written. Finished units are recorded in the journal.
#pragma once

#include <array>
#include <vector>

#include "quantizer/io/journal.h"
#include "quantizer/io/shard_writer.h"
#include "quantizer/io/unit_reader.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

struct StreamCounts {
  int64_t read_bytes = 0, written_bytes = 0;
  size_t resumed_units = 0, redone_units = 0;  // redone: journaled, but with wrong bytes
  double read_wait_seconds = 0, write_wait_seconds = 0;
};

class UnitStream {
 public:
  /// The arguments must outlive the stream.
  UnitStream(const QuantizePlan& plan, const QuantizeOptions& options, const std::string& folder,
             Journal& journal, runtime::AsyncFiles& io, UnitReader& reader);
  /// Waits for I/O in flight.
  ~UnitStream();

  /// Reads the journaled units back. Units with wrong checksums are not done.
  Status CheckFinished();
  /// True if all units of items before `layer` are done.
  bool IsDoneBefore(int layer) const;
  /// Starts with the first unit that is not done. With `layer` > -2, starts with the first unit of that layer
  /// and repeats all later units.
  Status Begin(int layer = -2);

  /// A piece with its source rows and output buffers. The spans extend to the end of the unit.
  struct PieceIo {
    std::span<const Piece> pieces;
    std::span<const SourceRows> rows;
    std::span<std::byte* const> out;  // one per output tensor of the item; null: already stored
  };
  /// Returns the item of the next piece, or the number of items at the end.
  size_t NextItem() const;
  /// Returns the next piece, which must exist, and finishes the previous one.
  StatusOr<PieceIo> Next();
  /// Writes all finished units to the files and the journal.
  Status Drain();
  /// Flushes all finished units to disk, and then their lines of the journal. Call it before a state that
  /// relies on these units is saved.
  Status Sync();
  /// Finishes the run: writes the headers of files.
  Status Finish();

  /// Reports progress.
  Status ReportProgress(const std::string& stage = {}) const;
  const StreamCounts& counts() const { return counts_; }

 private:
  // Buffers of a unit: one of two halves of memory_, or all of it for an exclusive unit.
  struct Room {
    std::span<std::byte> source, output;
  };
  // A unit in flight: read into the room's source, rounded into its output, written from there.
  struct Slot {
    Room room;
    LoadedUnit loaded;
    bool reading = false;
    size_t writing = 0;  // unit being written, if `extents` is not empty
    std::vector<OutputExtent> extents;
    runtime::AsyncFiles::Ticket ticket = 0;
    uint64_t checksum = 0;
  };

  std::span<const Piece> PiecesOf(size_t unit) const;
  int ShardOf(size_t unit) const { return plan_.output.items[PiecesOf(unit).front().item].shard; }
  int LayerOf(size_t unit) const { return plan_.items[PiecesOf(unit).front().item].layer; }
  Slot& Current() { return slots_[at_ % slots_.size()]; }
  Room RoomOf(size_t unit, size_t slot) const;
  bool IsAlone(size_t unit) const { return plan_.work.units[unit].alone; }
  Status StartReads();
  Status FinishRead(Slot& slot);
  Status OpenUnit();
  Status CloseUnit();
  Status SettleAll();
  Status Settle(Slot& slot);
  Status FinishShard(int shard);
  void MarkDone(size_t unit);
  Status Report(bool checking, const std::string& stage) const;

  const QuantizePlan& plan_;
  const QuantizeOptions& options_;
  Journal& journal_;
  runtime::AsyncFiles& io_;
  UnitReader& reader_;
  ShardWriter writer_;
  runtime::Buffer memory_;
  std::array<Slot, 2> slots_;
  std::vector<bool> done_;    // [units]
  std::vector<size_t> left_;  // [shards] units left
  std::vector<bool> finished_;
  int64_t done_bytes_ = 0;
  std::vector<size_t> todo_;  // units to do
  size_t at_ = 0;             // index in todo_
  size_t started_ = 0;        // number of units of todo_ whose reads have started
  size_t piece_ = 0;          // index in the current unit; 0: not opened
  OutputPlaces places_;       // places of the current unit
  std::vector<std::byte*> out_;
  StreamCounts counts_;
};

}  // namespace moesaic::quantizer
