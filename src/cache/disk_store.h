// Copies of KV blocks in files of a folder, which are found again after a restart: the index of the files and
// the requests to their I/O thread. docs/contracts/kv-tiers.md, K1 to K16, is normative.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cache/disk_index.h"
#include "cache/kv_segment.h"
#include "cache/segment_io.h"
#include "cache/tier_stats.h"
#include "runtime/memory.h"

namespace moesaic::cache {

struct DiskStoreOptions {
  std::string folder;  ///< Created if missing; no other process may have it open.
  int64_t bytes = 0;   ///< Maximum bytes of all files.
  KvLayout layout;
  std::string fingerprint;  ///< Identifies the computation of blocks; files of another one are refused.
  int64_t staging_bytes = 64 << 20;  ///< Memory for blocks that are being written; at least one block.
};

/// Reads and writes files on a thread of its own: only Open, Cancel, ReadLayers, Flush and the destructor
/// wait for the disk. Engine thread only.
class DiskStore {
 public:
  using LoadId = uint64_t;
  /// Blocks that Reserve found or added.
  struct Reserved {
    int blocks = 0;                      // leading ones that are stored or being written
    std::vector<uint64_t> records = {};  // of the last of these, which Reserve added
  };
  struct OpenedLoad {
    LoadId load = 0;
    std::vector<uint64_t> records;
  };
  /// Memory that a record is read into.
  struct Target {
    uint64_t record = 0;
    KvBlockView to;
  };
  struct LayerRead {
    uint64_t record = 0;  // pinned
    int layer = 0;
    std::byte* to = nullptr;  // [layer_bytes]
  };
  struct Loaded {
    LoadId load;
    int blocks;  ///< leading ones that are in memory; the next was damaged
  };

  /// Opens the folder and finds its blocks. Fails if it cannot be created, read or locked, if a segment
  /// cannot be read, or if the budget holds no block.
  static StatusOr<std::unique_ptr<DiskStore>> Open(const DiskStoreOptions& options);
  /// Ends all requests; memory of loads is not written afterwards.
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  /// Returns the number of leading blocks of `tokens` that can be loaded now.
  int Find(std::string_view name, std::span<const int32_t> tokens) const;

  /// Adds the blocks of `tokens` that are missing, from the first on, as far as staging memory, room on disk
  /// and `max_bytes` go. Write must follow for each record that it adds.
  Reserved Reserve(std::string_view name, std::span<const int32_t> tokens, int64_t max_bytes);
  /// Copies a block of a reserved record to staging memory and starts to write it.
  void Write(uint64_t record, const KvBlockView& from);
  /// False for names that are too long, and after a write error.
  bool CanStore(std::string_view name) const;
  /// Returns whether blocks are being written.
  bool writing() const { return !under_way_.empty(); }

  /// Opens a load of blocks [first, first + count) of `tokens`, which Find counted. Read or Cancel must
  /// follow.
  OpenedLoad OpenLoad(std::string_view name, std::span<const int32_t> tokens, int first, int count);
  /// Starts to read the records of a load, each with its key summaries. Poll reports the end.
  void Read(LoadId load, std::span<const Target> to);
  /// Ends a load at once: its memory is not written after this call, which takes as long as the disk needs
  /// for some megabytes. Poll does not report it.
  void Cancel(LoadId load);
  /// Pins blocks [first, first + count) of `tokens`, which Find counted: they stay on disk until Unpin. Their
  /// records.
  std::vector<uint64_t> Pin(std::string_view name, std::span<const int32_t> tokens, int first, int count);
  void Unpin(uint64_t record) { index_.Unpin(index_.At(record)); }
  void CountAttached(int blocks) { stats_.borrowed_blocks += blocks; }
  /// Copies the key summaries of a pinned record to those of `to`.
  void FillSummaries(uint64_t record, const KvBlockView& to) const {
    format_.PutSummaries(index_.At(record).summaries, to);
  }
  /// Reads layers of pinned records and waits for them. The number of leading ones that are intact; the next
  /// is refused, with the blocks after it.
  size_t ReadLayers(std::span<const LayerRead> reads);
  /// Returns the number of leading blocks of `tokens` that are stored or being written.
  int CountKnown(std::string_view name, std::span<const int32_t> tokens) const {
    return static_cast<int>(index_.Find(name, tokens).size());
  }
  /// Processes requests that have ended since the last call; the loads among them.
  std::vector<Loaded> Poll();
  /// Waits until a request ends, nothing is under way, or `most` has passed.
  void Wait(std::chrono::milliseconds most) { io_->WaitForEnds(most); }
  /// Waits until no block is being written, or `stop`, which is polled, becomes true.
  void WaitForWrites(const std::function<bool()>& stop);
  /// Waits until all stored blocks are on the medium. Cancelled: `stop` became true before.
  Status Flush(const std::function<bool()>& stop = {});
  /// Forgets all blocks except those that are being loaded.
  void Clear();

  DiskTierStats stats() const;
  /// Takes messages for the log: refused files, damaged blocks, a full disk.
  std::vector<std::string> TakeMessages() { return std::exchange(messages_, {}); }

 private:
  struct UnderWay {
    DiskBlock* block;
    std::byte* staging;
    SlotRecord record;  // until Write
  };
  struct FoundFile {
    uint64_t number;
    std::string path;
    int64_t bytes = 0;
    int descriptor = -1;  // -1: of another fingerprint, or damaged
    int slots = 0;
    Status refused = {};  // the reason
  };
  struct FoundRecord {
    SlotPlace place;
    SlotRecord record;
    bool there;  // its block is in the file
  };

  explicit DiskStore(const DiskStoreOptions& options);
  Status Lock();
  StatusOr<std::vector<FoundFile>> FindFiles();
  Status OpenFile(FoundFile* file);
  void Shrink(std::vector<FoundFile>* files);
  Status ReadRecords(const FoundFile& file, std::vector<FoundRecord>* records);
  std::vector<SlotPlace> Rebuild(std::vector<FoundRecord> records);
  Status Scan();
  bool MakeRoom();
  void Refuse(DiskBlock& block, const Status& why);
  void Take();
  void TakeWrite(WriteEnd& end);
  void TakeRead(const ReadEnd& end);

  const DiskStoreOptions options_;
  const SegmentFormat format_;
  int lock_ = -1;  // descriptor
  DiskIndex index_;
  int slots_of_new_ = 1;
  int64_t file_bytes_ = 0;  // of all segments at their full size, foreign ones included
  uint64_t next_segment_ = 1, next_id_ = 1, next_load_ = 1;
  std::deque<FoundFile> foreign_;  // of other fingerprints; removed when space is needed
  runtime::Buffer staging_;
  std::vector<std::byte*> free_staging_;
  absl::flat_hash_map<uint64_t, UnderWay> under_way_;         // by record id
  absl::flat_hash_map<LoadId, std::vector<uint64_t>> loads_;  // records, pinned
  std::vector<Loaded> loaded_;                                // to be returned by Poll
  DiskTierStats stats_;
  std::vector<std::string> messages_;
  std::unique_ptr<SegmentIo> io_;
};

}  // namespace moesaic::cache
