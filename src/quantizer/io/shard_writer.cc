#include "quantizer/io/shard_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/round.h"

namespace moesaic::quantizer {
namespace {

using runtime::kDirectBlock;

runtime::Transfer TransferOf(const OutputExtent& extent, int fd, bool write, const std::string& path) {
  return {.fd = fd,
          .write = write,
          .offset = extent.offset,
          .bytes = extent.bytes,
          .path = &path,
          .needed = static_cast<int64_t>(extent.bytes.size())};
}

// Writes `bytes` to the start of the file.
Status WriteStart(int fd, std::string_view bytes, const std::string& path) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t written = pwrite(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return IoError("{}: writing the header failed at byte {}: {}", path, done,
                     written < 0 ? std::strerror(errno) : "no byte was written");
    }
    done += static_cast<size_t>(written);
  }
  return OkStatus();
}

OutputExtent Part(const OutputExtent& extent, int64_t begin, int64_t end) {
  const auto first = static_cast<size_t>(begin - extent.offset);
  return {begin, extent.bytes.subspan(first, static_cast<size_t>(end - begin))};
}

}  // namespace

ShardWriter::ShardWriter(std::string folder, const OutputPlan& output, bool direct, runtime::AsyncFiles& io)
    : folder_(std::move(folder)), output_(output), io_(io), direct_(direct) {
  for (const Shard& shard : output.shards) files_.push_back({.path = folder_ + "/" + shard.file});
}

ShardWriter::~ShardWriter() {
  for (File& file : files_) Close(file);
}

void ShardWriter::Close(File& file) {
  for (int* fd : {&file.fd, &file.direct_fd}) {
    if (*fd >= 0) close(std::exchange(*fd, -1));
  }
  file.written = false;
}

Status ShardWriter::OpenFile(int shard) {
  File& file = files_[shard];
  if (file.fd >= 0) return OkStatus();
  file.fd = open(file.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file.fd < 0) return IoError("{}: cannot be written: {}", file.path, std::strerror(errno));
  const int64_t bytes = output_.shards[shard].bytes;
  struct stat info = {};
  const bool longer = fstat(file.fd, &info) == 0 && info.st_size > bytes;
  int error = posix_fallocate(file.fd, 0, bytes);
  if (longer || error == EINVAL || error == EOPNOTSUPP) error = ftruncate(file.fd, bytes) == 0 ? 0 : errno;
  if (error != 0) {
    Close(file);
    return IoError("{}: cannot allocate {} bytes: {}", file.path, bytes, std::strerror(error));
  }
  if (!direct_) return OkStatus();
  file.direct_fd = open(file.path.c_str(), O_WRONLY | O_CLOEXEC | O_DIRECT);
  if (file.direct_fd >= 0) return OkStatus();
  Close(file);
  return Unimplemented("{}: its file system does not take direct writes; use --io buffered", file.path);
}

StatusOr<runtime::AsyncFiles::Ticket> ShardWriter::Start(int shard, std::span<const OutputExtent> extents) {
  RETURN_IF_ERROR(OpenFile(shard));
  File& file = files_[shard];
  file.written = true;
  std::vector<runtime::Transfer> transfers;
  for (const OutputExtent& extent : extents) {
    const int64_t end = extent.offset + static_cast<int64_t>(extent.bytes.size());
    const int64_t first_block = base::RoundUp(extent.offset, kDirectBlock),
                  last_block = end / kDirectBlock * kDirectBlock;
    if (!direct_ || first_block >= last_block) {
      transfers.push_back(TransferOf(extent, file.fd, true, file.path));
      continue;
    }
    transfers.push_back(TransferOf(Part(extent, extent.offset, first_block), file.fd, true, file.path));
    transfers.push_back(TransferOf(Part(extent, first_block, last_block), file.direct_fd, true, file.path));
    transfers.push_back(TransferOf(Part(extent, last_block, end), file.fd, true, file.path));
  }
  return io_.Submit(transfers);
}

StatusOr<runtime::AsyncFiles::Ticket> ShardWriter::StartCheck(int shard,
                                                              std::span<const OutputExtent> extents) {
  struct stat info = {};
  const std::string& path = files_[shard].path;
  if (stat(path.c_str(), &info) != 0 || info.st_size != output_.shards[shard].bytes) {
    return NotFound("{}: the file is missing or shorter than planned", path);
  }
  RETURN_IF_ERROR(OpenFile(shard));
  files_[shard].written = true;  // perhaps by a process that was killed before it flushed them
  std::vector<runtime::Transfer> transfers;
  for (const OutputExtent& extent : extents) {
    transfers.push_back(TransferOf(extent, files_[shard].fd, false, path));
  }
  return io_.Submit(transfers);
}

void ShardWriter::Flush(int shard, std::span<const OutputExtent> extents) const {
  for (const OutputExtent& extent : extents) {
    sync_file_range(files_[shard].fd, extent.offset, static_cast<off_t>(extent.bytes.size()),
                    SYNC_FILE_RANGE_WRITE);
  }
}

Status ShardWriter::Sync() {
  for (File& file : files_) {
    if (!file.written) continue;
    if (fdatasync(file.fd) != 0) {
      return IoError("{}: cannot be flushed to disk: {}", file.path, std::strerror(errno));
    }
    file.written = false;
  }
  return OkStatus();
}

Status ShardWriter::Finish(int shard, const std::string& header) {
  RETURN_IF_ERROR(OpenFile(shard));
  File& file = files_[shard];
  const int fd = file.fd;
  RETURN_IF_ERROR(WriteStart(fd, header, file.path));
  if (fdatasync(fd) != 0) {
    return IoError("{}: cannot be flushed to disk: {}", file.path, std::strerror(errno));
  }
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  Close(file);
  return OkStatus();
}

}  // namespace moesaic::quantizer
