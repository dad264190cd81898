// The tier of KV blocks on disk: blocks of the radix tree that are kept in files, found again after they went
// from memory, and after a restart. docs/contracts/kv-tiers.md is the law.
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
#include "runtime/memory.h"

namespace moesaic::cache {

struct DiskTierOptions {
  std::string folder;  ///< made if it is not there; no other process may have it open
  int64_t bytes = 0;   ///< that files may take
  KvLayout layout;
  std::string maker;                 ///< what computes blocks: those of another are refused
  int64_t staging_bytes = 64 << 20;  ///< memory for blocks that are being written; at least one block's
};

/// Counters rise over the tier's life; the others are of this moment.
struct DiskTierStats {
  int blocks = 0;               ///< that can be found
  int64_t capacity_blocks = 0;  ///< that there is room for
  int64_t bytes = 0;            ///< of these blocks
  int64_t written_blocks = 0, loaded_blocks = 0, evicted_blocks = 0;
  int64_t loads = 0, loaded_bytes = 0;  ///< loads that ended; bytes read by them
  double load_seconds = 0;
  int64_t abandoned_loads = 0;
  int64_t borrowed_blocks = 0;  ///< of which only those layers are read that are asked for
  int64_t read_layers = 0;      ///< of those
  int64_t refused_blocks = 0;   ///< damaged ones, found at the start or by a load
  int64_t refused_files = 0;    ///< foreign or damaged
  int64_t write_errors = 0;
  bool storing = true;  ///< false behind a write error: what is there is still found
};

/// Engine thread only. Files are written and read by a thread of its own: no method waits for the disk but
/// Open, Abandon, Flush and the destructor.
class DiskTier {
 public:
  using LoadId = uint64_t;
  struct Stored {
    int blocks;  ///< leading ones that are stored or on their way
    int copied;  ///< those of them that this call put on their way
  };
  struct Loaded {
    LoadId load;
    int blocks;  ///< leading ones that are in memory; those behind were damaged
  };

  /// Finds what the folder has. Fails when it can't be made, read or locked, one of its segments can't be
  /// read, or the budget holds no block.
  static StatusOr<std::unique_ptr<DiskTier>> Open(const DiskTierOptions& options);
  /// Ends what is under way; loads' memory is written no more.
  ~DiskTier();
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  /// Whole blocks of `tokens`, from the first on, that can be loaded now.
  int Find(std::string_view name, std::span<const int32_t> tokens) const;

  /// Copies those of `blocks` that are not stored, from the first on, as far as memory for writing, room on
  /// disk and `most_bytes` go. tokens: [blocks.size() * kKvBlockTokens].
  Stored Store(std::string_view name, std::span<const int32_t> tokens, std::span<const KvBlockView> blocks,
               int64_t most_bytes);
  /// False for names that are too long, and for ever after a write error.
  bool CanStore(std::string_view name) const;
  /// Whether blocks are on their way to the disk.
  bool writing() const { return !under_way_.empty(); }

  /// Starts to read blocks [first, first + to.size()) of `tokens`, which Find counted, each to its memory,
  /// with its summaries.
  LoadId Load(std::string_view name, std::span<const int32_t> tokens, int first,
              std::span<const KvBlockView> to);
  /// Ends a load at once: its memory is written no more when this returns, which takes as long as the disk
  /// needs for some megabytes. It won't be told.
  void Abandon(LoadId load);
  /// Blocks [first, first + count) of `tokens`, which Find counted: they stay on disk until they are
  /// returned.
  std::vector<DiskBlock*> Borrow(std::string_view name, std::span<const int32_t> tokens, int first,
                                 int count);
  void Return(DiskBlock& block) { index_.Unpin(block); }
  /// Puts a borrowed block's summaries to where they stand beside `to`.
  void PutSummaries(const DiskBlock& block, const KvBlockView& to) const {
    format_.PutSummaries(block.summaries, to);
  }
  struct LayerRead {
    DiskBlock* block;  // borrowed
    int layer;
    std::byte* to;  // [layer_bytes]
  };
  /// Reads layers of borrowed blocks and waits for them; the leading ones that are as they were stored. The
  /// next is refused, with what follows its block.
  int ReadLayers(std::span<const LayerRead> reads);
  /// Blocks of `tokens`, from the first on, that are stored or on their way.
  int CountKnown(std::string_view name, std::span<const int32_t> tokens) const {
    return static_cast<int>(index_.Find(name, tokens).size());
  }
  /// Takes in what has ended since the last call; the loads among it.
  std::vector<Loaded> Poll();
  /// Waits until Poll would find something, nothing is under way, or so much time has passed.
  void Wait(std::chrono::milliseconds most) { io_->WaitForEnds(most); }
  /// Returns when nothing is on its way to the disk, or soon after `stop`, asked now and then, says true.
  void WaitForWrites(const std::function<bool()>& stop);
  /// Returns when all that was stored is on the medium. Cancelled: `stop` said true before.
  Status Flush(const std::function<bool()>& stop = {});
  /// Forgets all blocks, but for those that are being loaded.
  void Clear();

  DiskTierStats stats() const;
  /// What somebody should read of: refused files, damaged blocks, a full disk. Once each.
  std::vector<std::string> TakeMessages() { return std::exchange(messages_, {}); }
  const std::string& backend() const { return io_->backend(); }

 private:
  struct OpenLoad {
    std::vector<DiskBlock*> blocks;  // pinned
  };
  struct UnderWay {
    DiskBlock* block;
    std::byte* staging;
  };
  struct FoundFile {
    uint64_t number;
    std::string path;
    int64_t bytes = 0;
    int descriptor = -1;  // -1: foreign or damaged
    int slots = 0;
    Status refused = {};  // why
  };
  struct FoundRecord {
    SlotPlace place;
    SlotRecord record;
    bool there;  // its block is in the file
  };

  explicit DiskTier(const DiskTierOptions& options);
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

  const DiskTierOptions options_;
  const SegmentFormat format_;
  int lock_ = -1;  // descriptor
  DiskIndex index_;
  int slots_of_new_ = 1;
  int64_t file_bytes_ = 0;  // of all segments when they are full, foreign ones among them
  uint64_t next_segment_ = 1, next_id_ = 1, next_load_ = 1;
  std::deque<FoundFile> foreign_;  // go when room is needed
  runtime::Buffer staging_;
  std::vector<std::byte*> free_staging_;
  absl::flat_hash_map<uint64_t, UnderWay> under_way_;  // by record id
  absl::flat_hash_map<LoadId, OpenLoad> loads_;
  std::vector<Loaded> loaded_;  // to be told
  DiskTierStats stats_;
  std::vector<std::string> messages_;
  std::unique_ptr<SegmentIo> io_;
};

}  // namespace moesaic::cache
