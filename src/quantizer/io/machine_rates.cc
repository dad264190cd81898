#include "quantizer/io/machine_rates.h"

#define XXH_INLINE_ALL
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "checkpoint/ggml_blocks.h"
#include "quantizer/stopwatch.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;

// Each rate is measured for so long: the first requests and a moment's other load do not decide, and all take
// some seconds. The disk by transfers that are too large for its own cache.
constexpr double kSampleSeconds = 0.5;
constexpr size_t kSampleBytes = size_t{256} << 20;

// Seconds that the process's threads ran, those that the kernel made for its transfers among them.
double ProcessorSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The nearest folder upwards that is there; of an empty name, the working one.
fs::path ExistingFolder(const std::string& folder) {
  fs::path path = folder.empty() ? fs::current_path() : fs::absolute(folder);
  std::error_code error;
  while (!fs::is_directory(path, error) && path.has_parent_path() && path != path.parent_path()) {
    path = path.parent_path();
  }
  return path;
}

// An open file that nobody finds and that goes when it is closed.
class ScratchFile {
 public:
  static StatusOr<ScratchFile> Create(const fs::path& folder) {
    std::string path = (folder / "moesaic-rate-XXXXXX").string();
    const int fd = mkostemp(path.data(), O_CLOEXEC);
    if (fd < 0) return IoError("{}: no file can be made there: {}", folder.string(), std::strerror(errno));
    unlink(path.c_str());
    return ScratchFile(fd, folder.string());
  }
  ~ScratchFile() {
    if (fd_ >= 0) close(fd_);
  }
  ScratchFile(ScratchFile&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}
  ScratchFile& operator=(ScratchFile&&) = delete;

  int fd() const { return fd_; }
  runtime::Transfer Whole(std::span<std::byte> bytes, bool write) const {
    return {.fd = fd_,
            .write = write,
            .offset = 0,
            .bytes = bytes,
            .path = &path_,
            .needed = static_cast<int64_t>(bytes.size())};
  }
  // Later transfers go past the page cache, where the file system can.
  void Direct() const { fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_DIRECT); }

 private:
  ScratchFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

// A transfer that is done again and again, behind each other in a file of `file_bytes`, else in its place.
struct Repeated {
  runtime::Transfer transfer;
  int64_t file_bytes = 0;
};

// Reserves the place of a write anew: the first bytes there cost a file system more than later ones.
void Renew(const runtime::Transfer& write) {
  const auto bytes = static_cast<off_t>(write.bytes.size());
  if (fallocate(write.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, write.offset, bytes) == 0) {
    fallocate(write.fd, 0, write.offset, bytes);
  }
}

// Bytes a second of transfers that are under way together.
StatusOr<double> Timed(runtime::AsyncFiles& io, std::vector<Repeated> all) {
  const Clock::time_point start = Clock::now();
  double done = 0;
  do {
    std::vector<runtime::Transfer> batch;
    for (const Repeated& one : all) {
      if (one.transfer.write) Renew(one.transfer);
      batch.push_back(one.transfer);
    }
    RETURN_IF_ERROR(io.Wait(io.Submit(batch)));
    for (auto& [transfer, file_bytes] : all) {
      if (transfer.write && fdatasync(transfer.fd) != 0) {
        return IoError("{}: {}", *transfer.path, std::strerror(errno));
      }
      const auto bytes = static_cast<int64_t>(transfer.bytes.size());
      done += static_cast<double>(bytes);
      if (file_bytes > 0) transfer.offset += bytes;
      if (file_bytes > 0 && transfer.offset + bytes > file_bytes) transfer.offset = 0;
    }
  } while (Since(start) < kSampleSeconds);
  return done / Since(start);
}

// Past the page cache: reading alone, and beside writing, a half of the sample each.
Status MeasureReading(runtime::AsyncFiles& io, Repeated read, Repeated write, MachineRates* rates) {
  const Clock::time_point start = Clock::now();
  const double before = ProcessorSeconds();
  ASSIGN_OR_RETURN(rates->read, Timed(io, {read}));
  // At least a hundredth of the time: a tick of the clock.
  rates->direct = rates->read * Since(start) / std::max(ProcessorSeconds() - before, Since(start) / 100);
  if (!rates->same_disk) return OkStatus();
  const size_t half = read.transfer.bytes.size() / 2 / runtime::kDirectBlock * runtime::kDirectBlock;
  read.transfer.bytes = read.transfer.bytes.first(half);
  read.transfer.needed = static_cast<int64_t>(half);
  if (read.file_bytes == 0) read.transfer.offset = static_cast<int64_t>(half);  // behind what is written
  write.transfer.bytes = write.transfer.bytes.last(half);
  ASSIGN_OR_RETURN(const double both, Timed(io, {read, write}));
  rates->together = 2 / both / (1 / rates->read + 1 / rates->write);
  return OkStatus();
}

// The source's largest file, for direct reads; -1 where it is too short to tell more than the scratch file
// does, or its file system has no direct reads.
int OpenLargest(const checkpoint::Checkpoint& source, std::string* path, int64_t* bytes) {
  const auto& files = source.files();
  const auto largest = std::ranges::max_element(files, {}, [](const auto& f) { return f->bytes().size(); });
  if (largest == files.end()) return -1;
  *path = (*largest)->path();
  *bytes = static_cast<int64_t>((*largest)->bytes().size());
  if (*bytes < static_cast<int64_t>(kSampleBytes / 4)) return -1;
  return open(path->c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
}

Status MeasureDisks(const checkpoint::Checkpoint& source, const fs::path& folder, bool direct,
                    MachineRates* rates) {
  ASSIGN_OR_RETURN(const auto io, runtime::AsyncFiles::Create(runtime::AsyncFiles::Backend::kBest));
  ASSIGN_OR_RETURN(const runtime::Buffer buffer, runtime::Buffer::Allocate(kSampleBytes, false));
  const std::span<std::byte> bytes(buffer.data(), buffer.size());
  const Clock::time_point start = Clock::now();
  for (size_t i = 0; i < bytes.size(); i += runtime::kDirectBlock) bytes[i] = std::byte{1};
  rates->touch = static_cast<double>(bytes.size()) / Since(start);
  for (size_t i = 0; i < bytes.size(); i += 4) bytes[i] = static_cast<std::byte>(i * 2654435761U >> 16U);
  ASSIGN_OR_RETURN(const ScratchFile file, ScratchFile::Create(folder));
  if (posix_fallocate(file.fd(), 0, static_cast<off_t>(kSampleBytes)) == ENOSPC) {
    return IoError("{}: there is no room for {} bytes to measure with", folder.string(), kSampleBytes);
  }
  if (direct) file.Direct();
  const Repeated write = {file.Whole(bytes, true)};
  ASSIGN_OR_RETURN(rates->write, Timed(*io, {write}));
  Repeated read = {file.Whole(bytes, false)};
  if (direct) {
    const Clock::time_point copied = Clock::now();
    std::memcpy(bytes.data(), bytes.data() + kSampleBytes / 2, kSampleBytes / 2);
    rates->copy = static_cast<double>(kSampleBytes) / 2 / Since(copied);
  } else {  // what was written is still in the page cache
    ASSIGN_OR_RETURN(rates->copy, Timed(*io, {read}));
    file.Direct();
  }

  std::string path;
  int64_t file_bytes = 0;
  const int fd = OpenLargest(source, &path, &file_bytes);
  struct stat there = {}, here = {};
  rates->same_disk = path.empty() || stat(path.c_str(), &there) != 0 || fstat(file.fd(), &here) != 0 ||
                     there.st_dev == here.st_dev;
  if (fd >= 0) {
    const int64_t sample =
        std::min<int64_t>(kSampleBytes, file_bytes / runtime::kDirectBlock * runtime::kDirectBlock);
    read = {{.fd = fd,
             .offset = 0,
             .bytes = bytes.first(static_cast<size_t>(sample)),
             .path = &path,
             .needed = sample},
            file_bytes};
  }
  const Status measured = MeasureReading(*io, read, write, rates);
  if (fd >= 0) close(fd);
  return measured;
}

// Rounds units of bf16 values as the pipeline does: read whole, rounded slab by slab, checksummed. Each
// unit's memory has left the caches when its turn comes again, as that of bytes that come from a disk.
class RoundingSample {
 public:
  static StatusOr<RoundingSample> Create(const Precision& precision, bool search) {
    RoundingSample sample(precision, search);
    for (const StoredTensor& tensor : sample.tensors_) sample.slab_output_ += tensor.bytes();
    ASSIGN_OR_RETURN(sample.source_, runtime::Buffer::Allocate(kSlabs * kValues * sizeof(uint16_t), false));
    ASSIGN_OR_RETURN(sample.output_,
                     runtime::Buffer::Allocate(kSlabs * static_cast<size_t>(sample.slab_output_), false));
    std::memset(sample.output_.data(), 0, sample.output_.size());  // pages are there before time counts
    auto* stored = sample.source_.as<uint16_t>();
    uint32_t state = 1;
    for (size_t v = 0; v < kValues; ++v) {  // spread as weights are: a sum of four uniform values
      float sum = 0;
      for (int i = 0; i < 4; ++i) {
        state = state * 1664525U + 1013904223U;
        sum += static_cast<float>(state >> 8) * 0x1p-24F - 0.5F;
      }
      stored[v] = tensor::ToBF16(sum * 0.05F).bits;
    }
    for (size_t s = 1; s < kSlabs; ++s) std::copy_n(stored, kValues, stored + s * kValues);
    return sample;
  }

  /// Values a second.
  StatusOr<double> Measure(const kernels::ExecContext& ctx) {
    const Clock::time_point start = Clock::now();
    size_t units = 0;
    while (units == 0 || Since(start) < kSampleSeconds) {
      RETURN_IF_ERROR(RoundUnit(ctx, units++ % (kSlabs / kUnitSlabs) * kUnitSlabs));
    }
    return static_cast<double>(units * kUnitSlabs * kValues) / Since(start);
  }

 private:
  static constexpr int kRows = 256, kColumns = 4096, kBand = 16;
  static constexpr size_t kValues = size_t{kRows} * kColumns;
  static constexpr size_t kUnitSlabs = 16, kSlabs = 4 * kUnitSlabs;  // 32 and 128 MiB of bf16

  RoundingSample(const Precision& precision, bool search)
      : precision_(precision),
        search_(search),
        tensors_(TensorsOf(precision.grid(), kRows, kColumns)),
        values_(kValues) {}

  void ReadSlab(const kernels::ExecContext& ctx, size_t slab) {
    const std::byte* stored = source_.data() + slab * kValues * sizeof(uint16_t);
    ctx.pool->Run(kRows / kBand, [&](int64_t band, int) {
      const int64_t at = band * kBand * kColumns;
      checkpoint::DequantizeBlocks(tensor::DType::kBF16, stored + at * int64_t{sizeof(uint16_t)},
                                   int64_t{kBand} * kColumns, values_.data() + at);
    });
  }

  Status RoundUnit(const kernels::ExecContext& ctx, size_t first) {
    float largest = 0;
    for (size_t s = 0; precision_.is(Scheme::kNvfp4) && s < kUnitSlabs; ++s) {
      ReadSlab(ctx, first + s);
      ASSIGN_OR_RETURN(const float of_slab, LargestMagnitude(ctx, values_.data(), kRows, kColumns));
      largest = std::max(largest, of_slab);
    }
    const ScaleSearch search{.by_error = search_,
                             .importance = {},
                             .global_scale = largest > 0 ? Nvfp4GlobalScale(largest, search_) : 0};
    for (size_t s = first; s < first + kUnitSlabs; ++s) {
      ReadSlab(ctx, s);
      ASSIGN_OR_RETURN(const QuantizedMatrix matrix,
                       RoundToNearest(ctx, precision_.grid(), values_.data(), kRows, kColumns, search));
      std::byte* at = output_.data() + s * static_cast<size_t>(slab_output_);
      std::vector<std::byte*> out;
      for (const StoredTensor& tensor : tensors_) {
        out.push_back(at);
        at += tensor.bytes();
      }
      EncodeRows(*ctx.pool, matrix, tensors_, out);
    }
    const auto bytes = static_cast<size_t>(slab_output_);
    checksum_ ^= XXH3_64bits(output_.data() + first * bytes, kUnitSlabs * bytes);
    return OkStatus();
  }

  Precision precision_;
  bool search_;
  std::vector<StoredTensor> tensors_;
  int64_t slab_output_ = 0;
  runtime::Buffer source_, output_;
  std::vector<float> values_;
  uint64_t checksum_ = 0;
};

}  // namespace

StatusOr<MachineRates> MeasureRates(const checkpoint::Checkpoint& source, const OutputSettings& settings,
                                    const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                    const std::string& folder, bool direct) {
  MachineRates rates;
  RETURN_IF_ERROR(MeasureDisks(source, ExistingFolder(folder), direct, &rates));
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  for (const Precision& precision : settings.Roundings()) {  // the slowest
    ASSIGN_OR_RETURN(RoundingSample sample, RoundingSample::Create(precision, settings.search));
    ASSIGN_OR_RETURN(const double rate, sample.Measure(ctx));
    rates.rounds[precision.Name()] = rate;
    rates.round = rates.round > 0 ? std::min(rates.round, rate) : rate;
    rates.whole_scales |= precision.is(Scheme::kNvfp4);
  }
  return rates;
}

int64_t FreeBytes(const std::string& folder) {
  struct statvfs info = {};
  if (statvfs(ExistingFolder(folder).c_str(), &info) != 0) return -1;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

}  // namespace moesaic::quantizer
