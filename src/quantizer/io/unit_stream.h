// A run's units on their way from the source's files to the output's: the next one is read and the last one
// written while one is worked on, and what is written is journaled.
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
  size_t resumed_units = 0, redone_units = 0;  // redone: journaled, but their bytes were not right
  double read_wait_seconds = 0, write_wait_seconds = 0;
};

class UnitStream {
 public:
  /// The arguments must outlive the stream.
  UnitStream(const QuantizePlan& plan, const QuantizeOptions& options, const std::string& folder,
             Journal& journal, runtime::AsyncFiles& io, UnitReader& reader);
  /// Waits for what is under way.
  ~UnitStream();

  /// Reads the units of the journal back; those whose bytes are not what it says are not done.
  Status CheckFinished();
  /// Whether all units of items before `layer` are done.
  bool IsDoneBefore(int layer) const;
  /// Begins with the units that are not done, or with `layer` > -2 with its first unit, and all behind are
  /// done again.
  Status Begin(int layer = -2);

  /// A piece with what is read of it, and where its output goes. The spans go on to the end of the unit.
  struct Place {
    std::span<const Piece> pieces;
    std::span<const SourceRows> rows;
    std::span<std::byte* const> out;  // one for each of the item's output tensors; null: stored before
  };
  /// The item of the next piece; the number of items at the end.
  size_t NextItem() const;
  /// The next piece, which there is; the one before is finished.
  StatusOr<Place> Next();
  /// Brings all that was finished to the files and the journal.
  Status Drain();
  /// The end of the work: writes headers of files.
  Status Finish();

  /// Reports progress.
  Status Tell(const std::string& stage = {}) const;
  const StreamCounts& counts() const { return counts_; }

 private:
  // Of memory_, one of two halves, or all of it for a unit that is alone.
  struct Room {
    std::span<std::byte> source, output;
  };
  // A unit on its way: read to the room's source, worked into its output, written from there.
  struct Slot {
    Room room;
    LoadedUnit loaded;
    bool reading = false;
    size_t writing = 0;  // the unit being written, when `extents` is not empty
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
  Status Say(bool checking, const std::string& stage) const;

  const QuantizePlan& plan_;
  const QuantizeOptions& options_;
  Journal& journal_;
  runtime::AsyncFiles& io_;
  UnitReader& reader_;
  ShardWriter writer_;
  runtime::Buffer memory_;
  std::array<Slot, 2> slots_;
  std::vector<bool> done_;    // [units]
  std::vector<size_t> left_;  // [shards] units
  std::vector<bool> finished_;
  int64_t done_bytes_ = 0;
  std::vector<size_t> todo_;  // units
  size_t at_ = 0;             // in todo_
  size_t started_ = 0;        // units of todo_ whose reading was begun
  size_t piece_ = 0;          // in the current unit; 0: not open
  OutputPlaces places_;       // of the current unit
  std::vector<std::byte*> out_;
  StreamCounts counts_;
};

}  // namespace moesaic::quantizer
