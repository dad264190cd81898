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
#include "kernels/exec_context.h"
#include "quantizer/stopwatch.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;

// Duration of each measurement. It is long enough that the first requests and momentary load do not dominate.
// The disk is measured with transfers larger than its own cache.
constexpr double kSampleSeconds = 0.5;
constexpr size_t kSampleBytes = size_t{256} << 20;

// CPU seconds of the process's threads, including those that the kernel creates for its transfers.
double ProcessorSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Returns the nearest existing ancestor; for an empty name the working folder.
fs::path ExistingFolder(const std::string& folder) {
  fs::path path = folder.empty() ? fs::current_path() : fs::absolute(folder);
  std::error_code error;
  while (!fs::is_directory(path, error) && path.has_parent_path() && path != path.parent_path()) {
    path = path.parent_path();
  }
  return path;
}

// An open file without a name, which is removed when it is closed.
class ScratchFile {
 public:
  static StatusOr<ScratchFile> Create(const fs::path& folder) {
    std::string path = (folder / "moesaic-rate-XXXXXX").string();
    const int fd = mkostemp(path.data(), O_CLOEXEC);
    if (fd < 0) return IoError("{}: cannot create a file: {}", folder.string(), std::strerror(errno));
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
  // Makes later transfers bypass the page cache if the file system supports it.
  void Direct() const { fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_DIRECT); }

 private:
  ScratchFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

// A repeated transfer: sequential in a file of `file_bytes`, else always at the same offset.
struct Repeated {
  runtime::Transfer transfer;
  int64_t file_bytes = 0;
};

// Deallocates the range of a write, because first writes cost a file system more than overwriting.
void Renew(const runtime::Transfer& write) {
  const auto bytes = static_cast<off_t>(write.bytes.size());
  if (fallocate(write.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, write.offset, bytes) == 0) {
    fallocate(write.fd, 0, write.offset, bytes);
  }
}

// Returns the bytes per second of simultaneous transfers.
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

// Measures direct reads: alone, and during writes, for half of the sample each.
Status MeasureReading(runtime::AsyncFiles& io, Repeated read, Repeated write, MachineRates* rates) {
  const Clock::time_point start = Clock::now();
  const double before = ProcessorSeconds();
  ASSIGN_OR_RETURN(rates->read, Timed(io, {read}));
  // At least a hundredth of the time, because CPU time is counted in ticks.
  rates->direct = rates->read * Since(start) / std::max(ProcessorSeconds() - before, Since(start) / 100);
  if (!rates->same_disk) return OkStatus();
  const size_t half = read.transfer.bytes.size() / 2 / runtime::kDirectBlock * runtime::kDirectBlock;
  read.transfer.bytes = read.transfer.bytes.first(half);
  read.transfer.needed = static_cast<int64_t>(half);
  if (read.file_bytes == 0) read.transfer.offset = static_cast<int64_t>(half);  // after the written range
  write.transfer.bytes = write.transfer.bytes.last(half);
  ASSIGN_OR_RETURN(const double both, Timed(io, {read, write}));
  rates->together = 2 / both / (1 / rates->read + 1 / rates->write);
  return OkStatus();
}

// Opens the source's largest file for direct reads. Returns -1 if it is too short to be better than the
// scratch file, or if its file system does not support them.
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
    return IoError("{}: no space for a file of {} bytes for measurements", folder.string(), kSampleBytes);
  }
  if (direct) file.Direct();
  const Repeated write = {file.Whole(bytes, true)};
  ASSIGN_OR_RETURN(rates->write, Timed(*io, {write}));
  Repeated read = {file.Whole(bytes, false)};
  if (direct) {
    const Clock::time_point copied = Clock::now();
    std::memcpy(bytes.data(), bytes.data() + kSampleBytes / 2, kSampleBytes / 2);
    rates->copy = static_cast<double>(kSampleBytes) / 2 / Since(copied);
  } else {  // written data is still in the page cache
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

// Rounds units of bf16 values as the pipeline does: read completely, rounded slab by slab, checksummed. The
// memory of a unit has left the caches before it is used again, like bytes from a disk.
class RoundingSample {
 public:
  static StatusOr<RoundingSample> Create(const Precision& precision, bool search) {
    RoundingSample sample(precision, search);
    for (const StoredTensor& tensor : sample.tensors_) sample.slab_output_ += tensor.bytes();
    ASSIGN_OR_RETURN(sample.source_, runtime::Buffer::Allocate(kSlabs * kValues * sizeof(uint16_t), false));
    ASSIGN_OR_RETURN(sample.output_,
                     runtime::Buffer::Allocate(kSlabs * static_cast<size_t>(sample.slab_output_), false));
    std::memset(sample.output_.data(), 0, sample.output_.size());  // maps the pages before the measurement
    auto* stored = sample.source_.as<uint16_t>();
    uint32_t state = 1;
    for (size_t v = 0; v < kValues; ++v) {  // distributed like weights: sums of four uniform values
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

  /// Returns values per second.
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
  for (const Precision& precision : settings.Roundings()) {  // takes the slowest
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
