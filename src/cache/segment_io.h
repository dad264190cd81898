// Writes and reads slots of segments on a thread of its own, through runtime::AsyncFiles.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "cache/disk_index.h"
#include "cache/kv_segment.h"
#include "runtime/async_file.h"

namespace moesaic::cache {

/// An open segment.
struct SegmentFile {
  int descriptor = -1;
  int slots = 0;
  std::string path;
};

/// Outcome of writing a block.
struct WriteEnd {
  uint64_t id = 0;  // of its record
  std::vector<uint64_t> layer_sums;
  std::vector<std::byte> summaries;
  Status status = {};
};

/// Outcome of a load: `blocks` leading blocks are in memory and intact.
struct ReadEnd {
  uint64_t load = 0;
  int blocks = 0;
  int64_t bytes = 0;   // read from files
  double seconds = 0;  // since reading began
  Status status = {};  // why the others are not; DataLoss: damaged
};

/// Runs requests on a thread of its own: reads before writes, and writes, invalidations and removals in the
/// order of the calls. All methods belong to one calling thread.
class SegmentIo {
 public:
  /// A read of some or all layers of a block.
  struct BlockRead {
    SlotPlace place;
    KvBlockView to;                    // data: [layers * layer_bytes]
    std::vector<uint64_t> layer_sums;  // [layers] expected checksums
    int first_layer = 0;
    std::span<const std::byte> summaries = {};  // copied to `to`, valid until the end; none: no copy
  };

  /// Takes over the files. New segments get `slots_of_new` slots.
  static StatusOr<std::unique_ptr<SegmentIo>> Create(const std::string& folder, const SegmentFormat& format,
                                                     std::map<uint64_t, SegmentFile> files, int slots_of_new);
  /// Completes all writes, drops reads, and closes the files.
  ~SegmentIo();
  SegmentIo(const SegmentIo&) = delete;
  SegmentIo& operator=(const SegmentIo&) = delete;

  /// Writes a block and its record to a slot, whose segment is created if needed. `block` [block_bytes] must
  /// stay valid until the end is reported; `record` has its key summaries and no checksums.
  void Write(SlotPlace place, SlotRecord record, const std::byte* block);
  /// Marks a slot on disk as empty.
  void Invalidate(SlotPlace place);
  /// Marks all slots of all segments as empty.
  void InvalidateAll();
  void RemoveFile(std::string path);
  /// Reads blocks in order; ends with the first that is damaged.
  void Read(uint64_t load, std::vector<BlockRead> blocks);
  /// Reads before all other reads, or between the pieces of one that is under way, and waits for the end.
  ReadEnd ReadNow(uint64_t load, std::vector<BlockRead> blocks);
  /// Ends a load. Its memory is not written after the call, and its end is not reported.
  void Abandon(uint64_t load);
  /// Waits until all earlier requests are on the medium. Cancelled: `stop`, which is polled, became true
  /// before; the requests are still completed.
  Status Sync(const std::function<bool()>& stop);

  struct Ends {
    std::vector<WriteEnd> writes;
    std::vector<ReadEnd> reads;
  };
  Ends TakeEnds();
  /// Waits until there are ends to take, nothing is under way, or `most` has passed.
  void WaitForEnds(std::chrono::milliseconds most);

 private:
  enum class Kind { kWrite, kInvalidate, kInvalidateAll, kRemoveFile, kSync };
  struct Job {
    Kind kind;
    SlotPlace place = {};  // kInvalidateAll: the first remaining segment
    SlotRecord record = {};
    const std::byte* block = nullptr;
    std::string path = {};
  };
  struct ReadJob {
    uint64_t load;
    std::vector<BlockRead> blocks;
    bool urgent = false;  // ReadNow waits for it
    std::atomic<bool> abandoned{false};
  };

  SegmentIo(std::string folder, const SegmentFormat& format, std::map<uint64_t, SegmentFile> files,
            int slots_of_new, std::unique_ptr<runtime::AsyncFiles> async);
  void Loop();
  StatusOr<SegmentFile*> FileFor(uint64_t number);
  std::vector<WriteEnd> DoWrites(std::vector<Job>& jobs);
  ReadEnd DoRead(ReadJob& job);
  void DoUrgent();
  std::optional<Job> DoOther(const Job& job);
  void InvalidateSlots(const SegmentFile& file, int first, int count);

  const std::string folder_;
  const SegmentFormat format_;
  const int slots_of_new_;
  std::map<uint64_t, SegmentFile> segments_;    // owned by the thread once it runs
  std::unique_ptr<runtime::AsyncFiles> files_;  // likewise
  const std::vector<std::byte> zeros_;          // the bytes of an empty record

  std::mutex mutex_;  // guards the members below
  std::condition_variable wake_, ended_;
  std::deque<Job> jobs_;
  std::deque<std::shared_ptr<ReadJob>> reads_;
  std::shared_ptr<ReadJob> reading_;  // or null
  Ends ends_;
  Status synced_;
  int syncs_ = 0;  // pending
  std::atomic<bool> stop_sync_{false};
  bool working_ = false, stop_ = false;
  std::thread thread_;  // last member: it uses all others
};

}  // namespace moesaic::cache
