#include "quantizer/preflight.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "checkpoint/ggml_blocks.h"

namespace moesaic::quantizer {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Long enough that a disk's own cache and the first requests do not decide, and a second or less to do.
constexpr size_t kSampleBytes = size_t{256} << 20;
constexpr double kRoundSeconds = 0.5;

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

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

StatusOr<double> Timed(runtime::AsyncFiles& io, const runtime::Transfer& transfer, int sync_fd) {
  const Clock::time_point start = Clock::now();
  RETURN_IF_ERROR(io.Wait(io.Submit({&transfer, 1})));
  if (sync_fd >= 0 && fdatasync(sync_fd) != 0) return IoError("{}: {}", *transfer.path, std::strerror(errno));
  return static_cast<double>(transfer.bytes.size()) / Since(start);
}

Status MeasureDisks(const checkpoint::Checkpoint& source, const fs::path& folder, bool direct,
                    MachineRates* rates) {
  ASSIGN_OR_RETURN(const auto io, runtime::AsyncFiles::Create(runtime::AsyncFiles::Backend::kBest));
  ASSIGN_OR_RETURN(const runtime::Buffer buffer, runtime::Buffer::Allocate(kSampleBytes, false));
  const std::span<std::byte> bytes(buffer.data(), buffer.size());
  for (size_t i = 0; i < bytes.size(); i += 4) bytes[i] = static_cast<std::byte>(i * 2654435761U >> 16U);
  ASSIGN_OR_RETURN(const ScratchFile file, ScratchFile::Create(folder));
  if (posix_fallocate(file.fd(), 0, static_cast<off_t>(kSampleBytes)) == ENOSPC) {
    return IoError("{}: there is no room for {} bytes to measure with", folder.string(), kSampleBytes);
  }
  if (direct) file.Direct();
  ASSIGN_OR_RETURN(rates->write, Timed(*io, file.Whole(bytes, true), file.fd()));
  if (direct) {
    const Clock::time_point start = Clock::now();
    std::memcpy(bytes.data(), bytes.data() + kSampleBytes / 2, kSampleBytes / 2);
    rates->copy = static_cast<double>(kSampleBytes) / 2 / Since(start);
  } else {  // what was written is still in the page cache
    ASSIGN_OR_RETURN(rates->copy, Timed(*io, file.Whole(bytes, false), -1));
  }
  file.Direct();
  ASSIGN_OR_RETURN(rates->read, Timed(*io, file.Whole(bytes, false), -1));

  const auto& files = source.files();
  const auto largest = std::ranges::max_element(files, {}, [](const auto& f) { return f->bytes().size(); });
  if (largest == files.end()) return OkStatus();
  struct stat there = {}, here = {};
  rates->same_disk = stat((*largest)->path().c_str(), &there) != 0 || fstat(file.fd(), &here) != 0 ||
                     there.st_dev == here.st_dev;
  const size_t sample =
      std::min(kSampleBytes, (*largest)->bytes().size() / runtime::kDirectBlock * runtime::kDirectBlock);
  const int fd = open((*largest)->path().c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  // A short sample, or a file system without direct reads, tells less than the scratch file.
  if (fd < 0 || sample < kSampleBytes / 8) {
    if (fd >= 0) close(fd);
    return OkStatus();
  }
  const std::string path = (*largest)->path();
  const StatusOr<double> rate = Timed(*io,
                                      {.fd = fd,
                                       .offset = 0,
                                       .bytes = bytes.first(sample),
                                       .path = &path,
                                       .needed = static_cast<int64_t>(sample)},
                                      -1);
  close(fd);
  ASSIGN_OR_RETURN(rates->read, rate);
  return OkStatus();
}

// Rounds a slab of bf16 values again and again, as the pipeline does.
StatusOr<double> MeasureRounding(const OutputSettings& settings, const kernels::ExecContext& ctx) {
  constexpr int kRows = 256, kColumns = 4096, kBand = 16;
  constexpr size_t kValues = size_t{kRows} * kColumns;
  std::vector<uint16_t> stored(kValues);
  uint32_t state = 1;
  for (uint16_t& value : stored) {  // spread as weights are: a sum of four uniform values
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 1664525U + 1013904223U;
      sum += static_cast<float>(state >> 8) * 0x1p-24F - 0.5F;
    }
    value = tensor::ToBF16(sum * 0.05F).bits;
  }
  const Grid grid = settings.grid();
  const ScaleSearch search{.by_error = settings.search, .importance = {}};
  const std::vector<StoredTensor> tensors = TensorsOf(grid, kRows, kColumns);
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> out;
  for (const StoredTensor& tensor : tensors) {
    memory.emplace_back(static_cast<size_t>(tensor.bytes()));
    out.push_back(memory.back().data());
  }
  std::vector<float> values(kValues);
  const Clock::time_point start = Clock::now();
  int64_t rounds = 0;
  while (rounds == 0 || Since(start) < kRoundSeconds) {
    ctx.pool->Run(kRows / kBand, [&](int64_t band, int) {
      const int64_t at = band * kBand * kColumns;
      checkpoint::DequantizeBlocks(tensor::DType::kBF16,
                                   reinterpret_cast<const std::byte*>(stored.data() + at),
                                   int64_t{kBand} * kColumns, values.data() + at);
    });
    ASSIGN_OR_RETURN(const QuantizedMatrix matrix,
                     RoundToNearest(ctx, grid, values.data(), kRows, kColumns, search));
    EncodeRows(*ctx.pool, matrix, tensors, out);
    ++rounds;
  }
  return static_cast<double>(rounds) * static_cast<double>(kValues) / Since(start);
}

}  // namespace

StatusOr<MachineRates> MeasureRates(const checkpoint::Checkpoint& source, const OutputSettings& settings,
                                    const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                    const std::string& folder, bool direct) {
  MachineRates rates;
  RETURN_IF_ERROR(MeasureDisks(source, ExistingFolder(folder), direct, &rates));
  runtime::Arena scratch;
  const kernels::ExecContext ctx{.kernels = &kernels, .pool = &pool, .scratch = &scratch};
  ASSIGN_OR_RETURN(rates.round, MeasureRounding(settings, ctx));
  return rates;
}

Forecast ForecastOf(const QuantizePlan& plan, const MachineRates& rates, bool direct, int threads) {
  double rounded = 0, other = 0;  // values, bytes
  for (size_t i = 0; i < plan.items.size(); ++i) {
    if (plan.output.items[i].form == Form::kRounded) {
      rounded += static_cast<double>(plan.items[i].elements());
    } else {
      other += static_cast<double>(plan.output.items[i].bytes());
    }
  }
  const auto in = static_cast<double>(plan.source_bytes), out = static_cast<double>(plan.output.bytes);
  Forecast forecast;
  const double read = in / rates.read, write = out / rates.write;
  forecast.disk_seconds = rates.same_disk ? read + write : std::max(read, write);
  const double moved = other + (direct ? 0 : in + out);
  forecast.compute_seconds = rounded / rates.round + moved / (rates.copy * threads);
  forecast.seconds = std::max(forecast.disk_seconds, forecast.compute_seconds);
  forecast.disk_bound = forecast.disk_seconds >= forecast.compute_seconds;
  return forecast;
}

int64_t FreeBytes(const std::string& folder) {
  struct statvfs info = {};
  if (statvfs(ExistingFolder(folder).c_str(), &info) != 0) return -1;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

}  // namespace moesaic::quantizer
