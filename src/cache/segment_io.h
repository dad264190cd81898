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

/// A file of slots that is open.
struct SegmentFile {
  int descriptor = -1;
  int slots = 0;
  std::string path;
};

/// What came of a block's writing.
struct WriteEnd {
  uint64_t id = 0;  // of its record
  std::vector<uint64_t> layer_sums;
  std::vector<std::byte> summaries;
  Status status = {};
};

/// What came of a load. `blocks` leading ones are in memory, whole and as they were stored.
struct ReadEnd {
  uint64_t load = 0;
  int blocks = 0;
  int64_t bytes = 0;   // read from files
  double seconds = 0;  // since reading began
  Status status = {};  // why the others are not: DataLoss for what is damaged
};

/// Methods but the destructor may be called from one thread; what they ask for happens on another, reads
/// before writes, and writes, invalidations and removals in the order in which they were asked for.
class SegmentIo {
 public:
  /// Some layers of a block, or all.
  struct BlockRead {
    SlotPlace place;
    KvBlockView to;                    // data: [layers * layer_bytes]
    std::vector<uint64_t> layer_sums;  // [layers] what must come
    int first_layer = 0;
    std::span<const std::byte> summaries = {};  // are put beside, and stay meanwhile; none: as they are
  };

  /// Takes over the files. New segments get `slots_of_new` slots.
  static StatusOr<std::unique_ptr<SegmentIo>> Create(const std::string& folder, const SegmentFormat& format,
                                                     std::map<uint64_t, SegmentFile> files, int slots_of_new);
  /// Writes what was asked for, drops reads, and closes the files.
  ~SegmentIo();
  SegmentIo(const SegmentIo&) = delete;
  SegmentIo& operator=(const SegmentIo&) = delete;

  /// Puts a block and its record into a slot, whose segment is made where there is none. `block`
  /// [block_bytes] must stay until the end is told; `record` comes with its summaries and without sums.
  void Write(SlotPlace place, SlotRecord record, const std::byte* block);
  /// Says on disk that the slot holds nothing.
  void Invalidate(SlotPlace place);
  /// Says so of all slots of all segments.
  void InvalidateAll();
  void RemoveFile(std::string path);
  /// Reads blocks one behind the other; ends with the first that is not as it was.
  void Read(uint64_t load, std::vector<BlockRead> blocks);
  /// The same before all other reads, between the pieces of one that is under way, and waits for it.
  ReadEnd ReadNow(uint64_t load, std::vector<BlockRead> blocks);
  /// Returns when the load's memory is written no more; its end is not told.
  void Abandon(uint64_t load);
  /// Returns when all that was asked for so far is on the medium. Cancelled: `stop`, asked now and then, said
  /// true before; what was asked for is still written.
  Status Sync(const std::function<bool()>& stop);

  struct Ends {
    std::vector<WriteEnd> writes;
    std::vector<ReadEnd> reads;
  };
  Ends TakeEnds();
  /// Returns when there are ends to take, nothing is under way, or the time has passed.
  void WaitForEnds(std::chrono::milliseconds most);
  const std::string& backend() const { return files_->backend(); }

 private:
  enum class Kind { kWrite, kInvalidate, kInvalidateAll, kRemoveFile, kSync };
  struct Job {
    Kind kind;
    SlotPlace place = {};  // of kInvalidateAll the first segment that is left
    SlotRecord record = {};
    const std::byte* block = nullptr;
    std::string path = {};
  };
  struct ReadJob {
    uint64_t load;
    std::vector<BlockRead> blocks;
    bool urgent = false;  // somebody waits in ReadNow
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
  std::map<uint64_t, SegmentFile> segments_;    // the thread's own once it runs
  std::unique_ptr<runtime::AsyncFiles> files_;  // likewise
  const std::vector<std::byte> zeros_;          // what stands where no record is

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, ended_;
  std::deque<Job> jobs_;
  std::deque<std::shared_ptr<ReadJob>> reads_;
  std::shared_ptr<ReadJob> reading_;  // or null
  Ends ends_;
  Status synced_;
  int syncs_ = 0;  // still to do
  std::atomic<bool> stop_sync_{false};
  bool working_ = false, stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace moesaic::cache
