#include "cache/disk_store.h"

#include <absl/container/flat_hash_set.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>

#include "base/check.h"

namespace moesaic::cache {
namespace {

// A smaller budget removes whole segments, so each is a small part of the budget.
constexpr int64_t kMinSegments = 16;

// Reads a file from `offset` on; fewer than bytes.size() at its end.
StatusOr<size_t> ReadAt(int descriptor, const std::string& path, int64_t offset, std::span<std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got =
        pread(descriptor, bytes.data() + done, bytes.size() - done, offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return IoError("{}: reading failed: {}", path, std::strerror(errno));
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

}  // namespace

StatusOr<std::unique_ptr<DiskStore>> DiskStore::Open(const DiskStoreOptions& options) {
  std::unique_ptr<DiskStore> tier(new DiskStore(options));
  const int64_t least = tier->format_.SegmentBytes(1);
  if (options.bytes < least) {
    return ResourceExhausted(
        "{}: the KV blocks on disk need at least {} bytes, one block of {} tokens; found {}", options.folder,
        least, kKvBlockTokens, options.bytes);
  }
  RETURN_IF_ERROR(tier->Lock());
  RETURN_IF_ERROR(tier->Scan());
  return tier;
}

DiskStore::DiskStore(const DiskStoreOptions& options)
    : options_(options), format_(options.layout, FingerprintOf(options.layout, options.fingerprint)) {
  const int64_t wanted = std::min(SegmentFormat::kMaxBytes, options.bytes / kMinSegments);
  while (format_.SegmentBytes(2 * slots_of_new_) <= wanted) slots_of_new_ *= 2;
  stats_.capacity_blocks = options.bytes / format_.SegmentBytes(slots_of_new_) * slots_of_new_;
}

DiskStore::~DiskStore() {
  io_.reset();  // before the lock is released
  if (lock_ >= 0) close(lock_);
}

Status DiskStore::Lock() {
  std::error_code error;
  std::filesystem::create_directories(options_.folder, error);
  if (error) return IoError("{}: can't be made: {}", options_.folder, error.message());
  const std::string path = options_.folder + "/lock";
  lock_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_ < 0) return IoError("{}: can't be opened: {}", path, std::strerror(errno));
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0) return OkStatus();
  if (errno != EWOULDBLOCK) return IoError("{}: can't be locked: {}", path, std::strerror(errno));
  return absl::FailedPreconditionError(
      fmt::format("{}: another process keeps KV blocks there; give each its own folder", options_.folder));
}

Status DiskStore::Scan() {
  ASSIGN_OR_RETURN(std::vector<FoundFile> files, FindFiles());
  Shrink(&files);
  std::map<uint64_t, SegmentFile> segments;
  std::vector<FoundRecord> records;
  Status failure;
  for (const FoundFile& file : files) {
    if (failure.ok()) failure = ReadRecords(file, &records);
    segments[file.number] = {.descriptor = file.descriptor, .slots = file.slots, .path = file.path};
  }
  if (failure.ok()) {
    const size_t block_bytes = format_.slot_bytes();
    const size_t staged = std::max<size_t>(1, options_.staging_bytes / block_bytes);
    StatusOr<runtime::Buffer> staging = runtime::Buffer::Allocate(staged * block_bytes, /*huge=*/true);
    failure = staging.status();
    for (size_t i = staged; i-- > 0 && failure.ok();) {
      free_staging_.push_back(staging->data() + i * block_bytes);
    }
    if (failure.ok()) staging_ = *std::move(staging);
  }
  if (!failure.ok()) {
    for (const auto& [number, file] : segments) close(file.descriptor);
    return failure;
  }
  // A machine that stopped may have lost the latest records, whose numbers must not be reused.
  std::random_device device;
  next_id_ += (uint64_t{device()} << 8 | device() % 256) + 1;
  const std::vector<SlotPlace> ambiguous = Rebuild(std::move(records));
  ASSIGN_OR_RETURN(io_, SegmentIo::Create(options_.folder, format_, std::move(segments), slots_of_new_));
  for (const SlotPlace place : ambiguous) io_->Invalidate(place);
  return OkStatus();
}

// Opens the segments of this fingerprint, the oldest first; others are added to foreign_.
StatusOr<std::vector<DiskStore::FoundFile>> DiskStore::FindFiles() {
  Status failure;
  std::error_code error;
  std::vector<FoundFile> files;
  const std::filesystem::directory_iterator end;
  for (auto it = std::filesystem::directory_iterator(options_.folder, error); !error && it != end;
       it.increment(error)) {
    const auto number = SegmentNumber(it->path().filename().string());
    if (!number) continue;
    next_segment_ = std::max(next_segment_, *number + 1);
    FoundFile file = {.number = *number, .path = it->path().string()};
    if (failure = OpenFile(&file); !failure.ok()) break;
    if (file.descriptor >= 0) {
      files.push_back(std::move(file));
    } else if (file.bytes >= SegmentFormat::kHeaderBytes) {
      ++stats_.refused_files;
      messages_.push_back(fmt::format("{}: refused: {}", file.path, Message(file.refused)));
      foreign_.push_back(std::move(file));
    } else {
      unlink(file.path.c_str());  // its writer was killed, or the disk was full
    }
  }
  if (error) failure = IoError("{}: can't be read: {}", options_.folder, error.message());
  if (!failure.ok()) {
    for (const FoundFile& file : files) close(file.descriptor);
    return failure;
  }
  std::ranges::sort(files, {}, &FoundFile::number);
  std::ranges::sort(foreign_, {}, &FoundFile::number);
  return files;
}

// Sets file->descriptor if it is of this fingerprint, else file->refused. Fails if that is unknown, because
// its records may have numbers that would be reused.
Status DiskStore::OpenFile(FoundFile* file) {
  const int descriptor = open(file->path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) {
    return IoError("{}: can't be opened: {}; let the server read and write it, or remove it", file->path,
                   std::strerror(errno));
  }
  struct stat status = {};
  std::vector<std::byte> header(SegmentFormat::kHeaderBytes);
  const StatusOr<size_t> got = fstat(descriptor, &status) == 0
                                   ? ReadAt(descriptor, file->path, 0, header)
                                   : StatusOr<size_t>(IoError("{}: {}", file->path, std::strerror(errno)));
  if (!got.ok()) {
    close(descriptor);
    return got.status();
  }
  file->bytes = status.st_size;
  const StatusOr<int> slots = format_.DecodeHeader(std::span(header).first(*got), file->number);
  if (!slots.ok()) {
    close(descriptor);
    file->refused = slots.status();
    return OkStatus();
  }
  file->bytes = std::max<int64_t>(status.st_size, format_.SegmentBytes(*slots));  // its full size
  file->slots = *slots;
  file->descriptor = descriptor;
  return OkStatus();
}

// Removes files until the others fit the budget: foreign ones first, then the oldest.
void DiskStore::Shrink(std::vector<FoundFile>* files) {
  for (const FoundFile& file : foreign_) file_bytes_ += file.bytes;
  for (const FoundFile& file : *files) file_bytes_ += file.bytes;
  while (file_bytes_ > options_.bytes && !foreign_.empty()) {
    unlink(foreign_.front().path.c_str());
    file_bytes_ -= foreign_.front().bytes;
    foreign_.pop_front();
  }
  while (file_bytes_ > options_.bytes && !files->empty()) {
    const FoundFile& oldest = files->front();
    unlink(oldest.path.c_str());
    close(oldest.descriptor);
    file_bytes_ -= oldest.bytes;
    files->erase(files->begin());
  }
}

// Appends valid records to `records`, whether their block exists or not; other slots are free.
Status DiskStore::ReadRecords(const FoundFile& file, std::vector<FoundRecord>* records) {
  struct stat status = {};
  if (fstat(file.descriptor, &status) != 0) return IoError("{}: {}", file.path, std::strerror(errno));
  const int64_t start = format_.RecordOffset(0);
  std::vector<std::byte> bytes(
      std::clamp<int64_t>(status.st_size - start, 0, file.slots * format_.record_bytes()));
  RETURN_IF_ERROR(ReadAt(file.descriptor, file.path, start, bytes).status());
  for (int slot = 0; slot < file.slots; ++slot) {
    const SlotPlace place = {file.number, slot};
    if ((slot + 1) * format_.record_bytes() > std::ssize(bytes)) {  // the file is truncated
      index_.AddFree(place);
      continue;
    }
    const auto record_bytes = std::span(bytes).subspan(slot * format_.record_bytes(), format_.record_bytes());
    std::optional<SlotRecord> record = format_.DecodeRecord(record_bytes, file.number, slot);
    if (record) {
      next_id_ = std::max(next_id_, record->id + 1);
      const bool there = format_.BlockOffset(file.slots, slot) + format_.block_bytes() <= status.st_size;
      if (!there) ++stats_.refused_blocks;
      records->push_back({place, *std::move(record), there});
      continue;
    }
    index_.AddFree(place);
    // Empty slots begin with zeros.
    const auto first = record_bytes.first(2 * sizeof(uint64_t));
    if (std::ranges::any_of(first, [](std::byte byte) { return byte != std::byte{0}; }))
      ++stats_.refused_blocks;
  }
  return OkStatus();
}

// Builds the index; parents have lower ids than their followers. In a folder that was edited by hand a number
// may occur twice, so that the predecessor of its followers is unknown. Returns the places of all of these,
// in an order in which they can be invalidated: while a follower exists, its number occurs twice.
std::vector<SlotPlace> DiskStore::Rebuild(std::vector<FoundRecord> records) {
  std::ranges::sort(records, {}, [](const FoundRecord& found) { return found.record.id; });
  struct Made {
    DiskBlock* block;
    std::string name;
  };
  absl::flat_hash_map<uint64_t, Made> made;  // by id
  absl::flat_hash_set<uint64_t> twice;
  for (size_t i = 1; i < records.size(); ++i) {
    if (records[i].record.id == records[i - 1].record.id) twice.insert(records[i].record.id);
  }
  std::vector<SlotPlace> ambiguous;
  for (FoundRecord& found : records) {
    SlotRecord& record = found.record;
    if (twice.contains(record.id) || twice.contains(record.parent)) ambiguous.push_back(found.place);
    const auto parent = made.find(record.parent);
    const bool fits = record.parent == 0 || (parent != made.end() && parent->second.name == record.name);
    if (twice.contains(record.id) || !found.there || !fits) {
      index_.AddFree(found.place);  // its predecessor is missing
      continue;
    }
    DiskBlock* const before = record.parent == 0 ? nullptr : parent->second.block;
    DiskBlock* block = index_.Next(before, record.name, record.tokens);
    if (block != nullptr) {
      index_.AddFree(found.place);  // an older copy of a block that was removed and stored again
    } else {
      block = &index_.Add(before, record.name, record.tokens, found.place, record.id);
      index_.SetStored(*block, std::move(record.layer_sums), std::move(record.summaries));
    }
    made[record.id] = {block, std::move(record.name)};
  }
  stats_.refused_blocks += std::ssize(ambiguous);
  std::ranges::reverse(ambiguous);
  return ambiguous;
}

int DiskStore::Find(std::string_view name, std::span<const int32_t> tokens) const {
  return index_.CountStored(name, tokens);
}

bool DiskStore::CanStore(std::string_view name) const {
  return stats_.storing && name.size() <= kMaxNameBytes;
}

// Frees a slot if none is free. False: none can be freed.
bool DiskStore::MakeRoom() {
  if (index_.has_free()) return true;
  const int64_t segment = format_.SegmentBytes(slots_of_new_);
  while (file_bytes_ + segment > options_.bytes && !foreign_.empty()) {
    io_->RemoveFile(foreign_.front().path);
    file_bytes_ -= foreign_.front().bytes;
    foreign_.pop_front();
  }
  if (file_bytes_ + segment <= options_.bytes) {
    file_bytes_ += segment;
    for (int slot = 0; slot < slots_of_new_; ++slot) index_.AddFree({next_segment_, slot});
    ++next_segment_;
    return true;
  }
  if (!index_.EvictOne()) return false;
  ++stats_.evicted_blocks;
  return true;
}

DiskStore::Reserved DiskStore::Reserve(std::string_view name, std::span<const int32_t> tokens,
                                       int64_t max_bytes) {
  if (!CanStore(name)) return {};
  const std::vector<DiskBlock*> chain = index_.Find(name, tokens);
  index_.Touch(chain);
  for (DiskBlock* block : chain) index_.Pin(*block);
  DiskBlock* last = chain.empty() ? nullptr : chain.back();
  Reserved reserved;
  size_t done = chain.size();
  const size_t wanted = tokens.size() / kKvBlockTokens;
  for (int64_t bytes = 0; done < wanted && bytes < max_bytes; ++done) {
    if (free_staging_.empty() || !MakeRoom()) break;
    std::byte* const staging = free_staging_.back();
    free_staging_.pop_back();
    bytes += options_.layout.total_bytes();
    SlotRecord record = {
        .id = next_id_++, .parent = last == nullptr ? 0 : last->id, .name = std::string(name)};
    const auto block_tokens = KvBlockAt(tokens, done);
    std::ranges::copy(block_tokens, record.tokens.begin());
    const SlotPlace place = index_.TakeFree(last == nullptr ? SlotPlace{} : last->place);
    last = &index_.Add(last, name, block_tokens, place, record.id);
    reserved.records.push_back(record.id);
    under_way_[record.id] = {.block = last, .staging = staging, .record = std::move(record)};
  }
  for (DiskBlock* block : chain) index_.Unpin(*block);
  reserved.blocks = static_cast<int>(done);
  return reserved;
}

void DiskStore::Write(uint64_t record, const KvBlockView& from) {
  UnderWay& write = under_way_.at(record);
  std::memcpy(write.staging, from.data, format_.block_bytes());
  write.record.summaries = format_.SummariesOf(from);
  io_->Write(write.block->place, std::move(write.record), write.staging);
}

DiskStore::OpenedLoad DiskStore::OpenLoad(std::string_view name, std::span<const int32_t> tokens, int first,
                                          int count) {
  OpenedLoad opened = {.load = next_load_++, .records = Pin(name, tokens, first, count)};
  loads_[opened.load] = opened.records;
  return opened;
}

void DiskStore::Read(LoadId load, std::span<const Target> to) {
  std::vector<SegmentIo::BlockRead> reads;
  for (const Target& target : to) {
    const DiskBlock& block = index_.At(target.record);
    reads.push_back({.place = block.place,
                     .to = target.to,
                     .layer_sums = block.layer_sums,
                     .summaries = block.summaries});
  }
  io_->Read(load, std::move(reads));
}

std::vector<uint64_t> DiskStore::Pin(std::string_view name, std::span<const int32_t> tokens, int first,
                                     int count) {
  const std::vector<DiskBlock*> chain = index_.Find(name, tokens);
  MOESAIC_CHECK_LE(first + count, static_cast<int>(chain.size()));
  index_.Touch(chain);
  std::vector<uint64_t> records;
  for (DiskBlock* block : std::span(chain).subspan(first, count)) {
    MOESAIC_CHECK(block->stored);
    index_.Pin(*block);
    records.push_back(block->id);
  }
  return records;
}

size_t DiskStore::ReadLayers(std::span<const LayerRead> reads) {
  std::vector<SegmentIo::BlockRead> blocks;
  blocks.reserve(reads.size());
  for (const LayerRead& read : reads) {
    const DiskBlock& block = index_.At(read.record);
    blocks.push_back({.place = block.place,
                      .to = {.data = read.to},
                      .layer_sums = {block.layer_sums[read.layer]},
                      .first_layer = read.layer});
  }
  const ReadEnd end = io_->ReadNow(next_load_++, std::move(blocks));
  stats_.read_layers += end.blocks;
  stats_.loaded_bytes += end.bytes;
  stats_.load_seconds += end.seconds;
  if (end.blocks < static_cast<int>(reads.size())) Refuse(index_.At(reads[end.blocks].record), end.status);
  return static_cast<size_t>(end.blocks);
}

void DiskStore::Cancel(LoadId load) {
  io_->Abandon(load);
  std::erase_if(loaded_, [load](const Loaded& loaded) { return loaded.load == load; });
  const auto it = loads_.find(load);
  if (it == loads_.end()) return;
  for (const uint64_t record : it->second) Unpin(record);
  loads_.erase(it);
  ++stats_.abandoned_loads;
}

std::vector<DiskStore::Loaded> DiskStore::Poll() {
  Take();
  return std::exchange(loaded_, {});
}

void DiskStore::Take() {
  SegmentIo::Ends ends = io_->TakeEnds();
  for (WriteEnd& end : ends.writes) TakeWrite(end);
  for (const ReadEnd& end : ends.reads) TakeRead(end);
}

void DiskStore::TakeWrite(WriteEnd& end) {
  const auto it = under_way_.find(end.id);
  MOESAIC_CHECK(it != under_way_.end());
  DiskBlock& block = *it->second.block;
  free_staging_.push_back(it->second.staging);
  under_way_.erase(it);
  if (end.status.ok()) {
    ++stats_.written_blocks;
    if (block.removed) return index_.WritingEnded(block);
    return index_.SetStored(block, std::move(end.layer_sums), std::move(end.summaries));
  }
  ++stats_.write_errors;
  if (std::exchange(stats_.storing, false)) {
    messages_.push_back(fmt::format("{}; no more KV blocks are stored, those that are there are still used",
                                    Message(end.status)));
  }
  if (!block.removed) index_.Remove(block, [this](SlotPlace place) { io_->Invalidate(place); });
  index_.WritingEnded(block);
}

void DiskStore::TakeRead(const ReadEnd& end) {
  const auto it = loads_.find(end.load);
  MOESAIC_CHECK(it != loads_.end());
  const std::vector<uint64_t> records = std::move(it->second);
  loads_.erase(it);
  ++stats_.loads;
  stats_.loaded_blocks += end.blocks;
  stats_.loaded_bytes += end.bytes;
  stats_.load_seconds += end.seconds;
  loaded_.push_back({end.load, end.blocks});
  if (end.blocks < static_cast<int>(records.size())) Refuse(index_.At(records[end.blocks]), end.status);
  for (const uint64_t record : records) Unpin(record);
}

void DiskStore::Refuse(DiskBlock& block, const Status& why) {
  if (block.removed) return;
  ++stats_.refused_blocks;
  messages_.push_back(fmt::format("{}; it is computed again, with the blocks that follow it", Message(why)));
  index_.Remove(block, [this](SlotPlace place) { io_->Invalidate(place); });
}

void DiskStore::WaitForWrites(const std::function<bool()>& stop) {
  while (writing() && !(stop && stop())) {
    io_->WaitForEnds(std::chrono::milliseconds(100));
    Take();
  }
}

Status DiskStore::Flush(const std::function<bool()>& stop) {
  WaitForWrites(stop);
  return io_->Sync(stop);
}

void DiskStore::Clear() {
  index_.Clear();
  io_->InvalidateAll();
}

DiskTierStats DiskStore::stats() const {
  DiskTierStats stats = stats_;
  stats.blocks = index_.blocks();
  stats.bytes = index_.blocks() * (format_.slot_bytes() + format_.record_bytes());
  return stats;
}

}  // namespace moesaic::cache
