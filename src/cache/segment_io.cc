#include "cache/segment_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

// Maximum bytes written between two checks for reads: a load waits some ten milliseconds at most.
constexpr int64_t kWriteBatchBytes = 16 << 20;
// Bytes of a piece of a load, which is read while the piece before is verified: large enough for a disk's
// full rate, small enough that a cancelled load ends soon.
constexpr int64_t kReadPieceBytes = 16 << 20;
constexpr int64_t kInvalidBytes = 512;  // of the start of a record; no valid record begins with zeros

// Announces contiguous ranges for read-ahead: the transfers run in parallel, in an order from which the
// kernel could not detect sequential access.
void Announce(std::span<const runtime::Transfer> transfers) {
  for (size_t first = 0, last = 0; first < transfers.size(); first = last) {
    int64_t end = transfers[first].offset;
    while (last < transfers.size() && transfers[last].fd == transfers[first].fd &&
           transfers[last].offset - end < SegmentFormat::kAlignment && transfers[last].offset >= end) {
      end = transfers[last].offset + transfers[last].needed;
      ++last;
    }
    const int64_t start = transfers[first].offset;
    posix_fadvise(transfers[first].fd, start, end - start, POSIX_FADV_WILLNEED);
  }
}

std::span<std::byte> Writable(const std::byte* bytes, int64_t count) {
  return {const_cast<std::byte*>(bytes), static_cast<size_t>(count)};  // never written
}

}  // namespace

StatusOr<std::unique_ptr<SegmentIo>> SegmentIo::Create(const std::string& folder, const SegmentFormat& format,
                                                       std::map<uint64_t, SegmentFile> files,
                                                       int slots_of_new) {
  ASSIGN_OR_RETURN(std::unique_ptr<runtime::AsyncFiles> async,
                   runtime::AsyncFiles::Create(runtime::AsyncFiles::Backend::kBest));
  return std::unique_ptr<SegmentIo>(
      new SegmentIo(folder, format, std::move(files), slots_of_new, std::move(async)));
}

SegmentIo::SegmentIo(std::string folder, const SegmentFormat& format, std::map<uint64_t, SegmentFile> files,
                     int slots_of_new, std::unique_ptr<runtime::AsyncFiles> async)
    : folder_(std::move(folder)),
      format_(format),
      slots_of_new_(slots_of_new),
      segments_(std::move(files)),
      files_(std::move(async)),
      zeros_(kInvalidBytes),
      thread_([this] { Loop(); }) {}

SegmentIo::~SegmentIo() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    reads_.clear();
    if (reading_ != nullptr) reading_->abandoned = true;
  }
  wake_.notify_one();
  thread_.join();
  for (const auto& [number, file] : segments_) close(file.descriptor);
}

void SegmentIo::Write(SlotPlace place, SlotRecord record, const std::byte* block) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({.kind = Kind::kWrite, .place = place, .record = std::move(record), .block = block});
  wake_.notify_one();
}

void SegmentIo::Invalidate(SlotPlace place) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({.kind = Kind::kInvalidate, .place = place});
  wake_.notify_one();
}

void SegmentIo::InvalidateAll() {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({.kind = Kind::kInvalidateAll});
  wake_.notify_one();
}

void SegmentIo::RemoveFile(std::string path) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({.kind = Kind::kRemoveFile, .path = std::move(path)});
  wake_.notify_one();
}

void SegmentIo::Read(uint64_t load, std::vector<BlockRead> blocks) {
  auto job = std::make_shared<ReadJob>();
  job->load = load;
  job->blocks = std::move(blocks);
  const std::lock_guard lock(mutex_);
  reads_.push_back(std::move(job));
  wake_.notify_one();
}

ReadEnd SegmentIo::ReadNow(uint64_t load, std::vector<BlockRead> blocks) {
  auto job = std::make_shared<ReadJob>();
  job->load = load;
  job->blocks = std::move(blocks);
  job->urgent = true;
  std::unique_lock lock(mutex_);
  reads_.push_front(std::move(job));
  wake_.notify_one();
  std::vector<ReadEnd>::iterator end;
  ended_.wait(lock, [&] {
    end = std::ranges::find(ends_.reads, load, &ReadEnd::load);
    return end != ends_.reads.end();
  });
  ReadEnd found = std::move(*end);
  ends_.reads.erase(end);
  return found;
}

void SegmentIo::Abandon(uint64_t load) {
  std::unique_lock lock(mutex_);
  std::erase_if(reads_, [load](const auto& job) { return job->load == load; });
  if (reading_ != nullptr && reading_->load == load) {
    reading_->abandoned = true;
    ended_.wait(lock, [&] { return reading_ == nullptr || reading_->load != load; });
  }
  std::erase_if(ends_.reads, [load](const ReadEnd& end) { return end.load == load; });
}

Status SegmentIo::Sync(const std::function<bool()>& stop) {
  constexpr std::chrono::milliseconds kPoll{100};
  std::unique_lock lock(mutex_);
  stop_sync_ = stop && stop();
  jobs_.push_back({.kind = Kind::kSync});
  ++syncs_;
  wake_.notify_one();
  while (!ended_.wait_for(lock, kPoll, [this] { return syncs_ == 0; })) {
    if (stop && stop()) stop_sync_ = true;
  }
  return synced_;
}

SegmentIo::Ends SegmentIo::TakeEnds() {
  const std::lock_guard lock(mutex_);
  return std::exchange(ends_, {});
}

void SegmentIo::WaitForEnds(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  ended_.wait_for(lock, most, [this] {
    return !ends_.writes.empty() || !ends_.reads.empty() || (!working_ && jobs_.empty() && reads_.empty());
  });
}

void SegmentIo::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty() || !reads_.empty(); });
    if (jobs_.empty() && reads_.empty()) return;  // stop_
    working_ = true;
    if (!reads_.empty()) {
      reading_ = reads_.front();
      reads_.pop_front();
      lock.unlock();
      ReadEnd end = DoRead(*reading_);
      lock.lock();
      if (!reading_->abandoned) ends_.reads.push_back(std::move(end));
      reading_ = nullptr;
    } else if (jobs_.front().kind == Kind::kWrite) {
      std::vector<Job> batch;
      while (!jobs_.empty() && jobs_.front().kind == Kind::kWrite &&
             static_cast<int64_t>(batch.size()) * format_.block_bytes() < kWriteBatchBytes) {
        batch.push_back(std::move(jobs_.front()));
        jobs_.pop_front();
      }
      lock.unlock();
      std::vector<WriteEnd> ends = DoWrites(batch);
      lock.lock();
      std::ranges::move(ends, std::back_inserter(ends_.writes));
    } else {
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      const std::optional<Job> rest = DoOther(job);
      lock.lock();
      if (rest) jobs_.push_front(*rest);  // reads come between
      if (job.kind == Kind::kSync) --syncs_;
    }
    working_ = false;
    ended_.notify_all();
  }
}

StatusOr<SegmentFile*> SegmentIo::FileFor(uint64_t number) {
  const auto it = segments_.find(number);
  if (it != segments_.end()) return &it->second;
  SegmentFile file = {.slots = slots_of_new_, .path = folder_ + "/" + SegmentName(number)};
  file.descriptor = open(file.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file.descriptor < 0) return IoError("{}: can't be made: {}", file.path, std::strerror(errno));
  const std::vector<std::byte> header = format_.EncodeHeader(number, file.slots);
  const runtime::Transfer transfer = {.fd = file.descriptor,
                                      .write = true,
                                      .bytes = Writable(header.data(), SegmentFormat::kHeaderBytes),
                                      .path = &file.path};
  if (Status status = files_->Wait(files_->Submit({&transfer, 1})); !status.ok()) {
    close(file.descriptor);
    unlink(file.path.c_str());
    return status;
  }
  return &segments_.emplace(number, std::move(file)).first->second;
}

// The order keeps files valid if the process is killed: a slot's old record is cleared before its block is
// overwritten, and the new record is written after the block.
std::vector<WriteEnd> SegmentIo::DoWrites(std::vector<Job>& jobs) {
  std::vector<WriteEnd> ends(jobs.size());
  std::vector<const SegmentFile*> files(jobs.size());
  std::vector<runtime::AsyncFiles::Ticket> tickets(jobs.size());
  const auto write_all = [&](auto bytes_of, auto offset_of) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (!ends[i].status.ok()) continue;
      const runtime::Transfer transfer = {.fd = files[i]->descriptor,
                                          .write = true,
                                          .offset = offset_of(i),
                                          .bytes = bytes_of(i),
                                          .path = &files[i]->path};
      tickets[i] = files_->Submit({&transfer, 1});
    }
  };
  const auto wait_all = [&] {
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (ends[i].status.ok()) ends[i].status = files_->Wait(tickets[i]);
    }
  };
  const auto record_offset = [&](size_t i) { return format_.RecordOffset(jobs[i].place.slot); };
  for (size_t i = 0; i < jobs.size(); ++i) {
    ends[i].id = jobs[i].record.id;
    const StatusOr<SegmentFile*> file = FileFor(jobs[i].place.segment);
    ends[i].status = file.status();
    if (file.ok()) files[i] = *file;
  }
  write_all([&](size_t) { return Writable(zeros_.data(), kInvalidBytes); }, record_offset);
  wait_all();
  write_all([&](size_t i) { return Writable(jobs[i].block, format_.block_bytes()); },
            [&](size_t i) { return format_.BlockOffset(files[i]->slots, jobs[i].place.slot); });
  std::vector<std::vector<std::byte>> records(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].record.layer_sums = ends[i].layer_sums = format_.LayerSums(jobs[i].block, format_.layers());
    records[i] = format_.EncodeRecord(jobs[i].record, jobs[i].place.segment, jobs[i].place.slot);
    ends[i].summaries = std::move(jobs[i].record.summaries);
  }
  wait_all();
  write_all([&](size_t i) { return Writable(records[i].data(), format_.record_bytes()); }, record_offset);
  wait_all();
  return ends;
}

// A step waits for urgent reads, so they come before the load that is being read.
void SegmentIo::DoUrgent() {
  std::unique_lock lock(mutex_);
  while (!reads_.empty() && reads_.front()->urgent) {
    const std::shared_ptr<ReadJob> job = std::move(reads_.front());
    reads_.pop_front();
    lock.unlock();
    ReadEnd end = DoRead(*job);
    lock.lock();
    ends_.reads.push_back(std::move(end));
    ended_.notify_all();
  }
}

ReadEnd SegmentIo::DoRead(ReadJob& job) {
  ReadEnd end = {.load = job.load};
  const auto start = std::chrono::steady_clock::now();
  const int total = static_cast<int>(job.blocks.size());
  const auto bytes_of = [&](const BlockRead& read) {
    return static_cast<int64_t>(read.layer_sums.size()) * format_.layer_bytes();
  };
  int submitted = 0;
  const auto submit = [&] {
    std::vector<runtime::Transfer> transfers;
    int64_t bytes = 0;
    for (; submitted < total && bytes < kReadPieceBytes; ++submitted) {
      const BlockRead& read = job.blocks[submitted];
      const SegmentFile& file = segments_.at(read.place.segment);
      transfers.push_back({.fd = file.descriptor,
                           .offset = format_.BlockOffset(file.slots, read.place.slot) +
                                     read.first_layer * format_.layer_bytes(),
                           .bytes = {read.to.data, static_cast<size_t>(bytes_of(read))},
                           .path = &file.path,
                           .needed = bytes_of(read)});
      bytes += bytes_of(read);
    }
    end.bytes += bytes;
    Announce(transfers);
    return files_->Submit(transfers);
  };
  std::optional<runtime::AsyncFiles::Ticket> under_way = submit();
  while (under_way && end.blocks < total) {
    const int next = submitted;  // the block after those under way
    const Status read = files_->Wait(*std::exchange(under_way, std::nullopt));
    if (!job.urgent) DoUrgent();
    if (next < total && read.ok() && !job.abandoned) under_way = submit();
    // After a failed read some blocks of the piece may be intact: their checksums decide.
    for (int i = end.blocks; i < next && !job.abandoned; ++i) {
      const BlockRead& block = job.blocks[i];
      const std::vector<uint64_t>& wanted = block.layer_sums;
      if (format_.LayerSums(block.to.data, static_cast<int>(wanted.size())) != wanted) break;
      if (!block.summaries.empty()) format_.PutSummaries(block.summaries, block.to);
      end.blocks = i + 1;
    }
    if (end.blocks == next) continue;
    const SlotPlace place = job.blocks[end.blocks].place;
    end.status = read.ok() ? DataLoss("{}: the block in slot {} is damaged", segments_.at(place.segment).path,
                                      place.slot)
                           : read;
    break;
  }
  if (under_way) files_->Wait(*under_way).IgnoreError();  // memory must not be written after this call
  end.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return end;
}

// Failures are ignored: records that stay on disk have checksums.
void SegmentIo::InvalidateSlots(const SegmentFile& file, int first, int count) {
  std::vector<runtime::Transfer> transfers;
  transfers.reserve(count);
  for (int slot = first; slot < first + count; ++slot) {
    transfers.push_back({.fd = file.descriptor,
                         .write = true,
                         .offset = format_.RecordOffset(slot),
                         .bytes = Writable(zeros_.data(), kInvalidBytes),
                         .path = &file.path});
  }
  files_->Wait(files_->Submit(transfers)).IgnoreError();
}

// The rest of the job, to be done next.
std::optional<SegmentIo::Job> SegmentIo::DoOther(const Job& job) {
  switch (job.kind) {
    case Kind::kInvalidate:
      if (const auto it = segments_.find(job.place.segment); it != segments_.end()) {
        InvalidateSlots(it->second, job.place.slot, 1);
      }
      break;
    case Kind::kInvalidateAll:
      if (const auto it = segments_.lower_bound(job.place.segment); it != segments_.end()) {
        InvalidateSlots(it->second, 0, it->second.slots);
        if (const auto next = std::next(it); next != segments_.end()) {
          return Job{.kind = Kind::kInvalidateAll, .place = {.segment = next->first}};
        }
      }
      break;
    case Kind::kRemoveFile:
      unlink(job.path.c_str());
      break;
    case Kind::kSync:
      synced_ = OkStatus();
      for (const auto& [number, file] : segments_) {
        if (stop_sync_) {
          synced_ = absl::CancelledError("shutdown: stopped before all KV blocks were on the medium");
          break;
        }
        if (fdatasync(file.descriptor) != 0) {
          synced_ = IoError("{}: writing failed: {}", file.path, std::strerror(errno));
        }
      }
      break;
    case Kind::kWrite:
      MOESAIC_CHECK(false);
  }
  return std::nullopt;
}

}  // namespace moesaic::cache
