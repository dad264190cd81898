#include "quantizer/shard_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace moesaic::quantizer {
namespace {

std::vector<runtime::Transfer> Transfers(std::span<const OutputExtent> extents, int fd, bool write,
                                         const std::string& path) {
  std::vector<runtime::Transfer> transfers;
  for (const OutputExtent& extent : extents) {
    transfers.push_back({.fd = fd,
                         .write = write,
                         .offset = extent.offset,
                         .bytes = extent.bytes,
                         .path = &path,
                         .needed = static_cast<int64_t>(extent.bytes.size())});
  }
  return transfers;
}

}  // namespace

ShardWriter::ShardWriter(std::string folder, const OutputPlan& output, runtime::AsyncFiles& io)
    : folder_(std::move(folder)), output_(output), io_(io), fds_(output.shards.size(), -1) {
  for (const Shard& shard : output.shards) paths_.push_back(folder_ + "/" + shard.file);
}

ShardWriter::~ShardWriter() {
  for (const int fd : fds_) {
    if (fd >= 0) close(fd);
  }
}

Status ShardWriter::OpenFile(int shard) {
  int& fd = fds_[shard];
  if (fd >= 0) return OkStatus();
  const std::string& path = paths_[shard];
  fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return IoError("{}: can't be written: {}", path, std::strerror(errno));
  const int64_t bytes = output_.shards[shard].bytes;
  int error = posix_fallocate(fd, 0, bytes);
  if (error == EINVAL || error == EOPNOTSUPP) error = ftruncate(fd, bytes) == 0 ? 0 : errno;
  if (error == 0) return OkStatus();
  close(std::exchange(fd, -1));
  return IoError("{}: {} bytes can't be had: {}", path, bytes, std::strerror(error));
}

StatusOr<runtime::AsyncFiles::Ticket> ShardWriter::Start(int shard, std::span<const OutputExtent> extents) {
  RETURN_IF_ERROR(OpenFile(shard));
  return io_.Submit(Transfers(extents, fds_[shard], true, paths_[shard]));
}

StatusOr<runtime::AsyncFiles::Ticket> ShardWriter::StartCheck(int shard,
                                                              std::span<const OutputExtent> extents) {
  struct stat info = {};
  const std::string& path = paths_[shard];
  if (stat(path.c_str(), &info) != 0 || info.st_size != output_.shards[shard].bytes) {
    return NotFound("{}: not there, or not as long as planned", path);
  }
  RETURN_IF_ERROR(OpenFile(shard));
  return io_.Submit(Transfers(extents, fds_[shard], false, path));
}

void ShardWriter::Flush(int shard, std::span<const OutputExtent> extents) const {
  for (const OutputExtent& extent : extents) {
    sync_file_range(fds_[shard], extent.offset, static_cast<off_t>(extent.bytes.size()),
                    SYNC_FILE_RANGE_WRITE);
  }
}

Status ShardWriter::Finish(int shard, const std::string& header) {
  RETURN_IF_ERROR(OpenFile(shard));
  const std::string& path = paths_[shard];
  const int fd = fds_[shard];
  const ssize_t written = pwrite(fd, header.data(), header.size(), 0);
  if (written != static_cast<ssize_t>(header.size()) || fdatasync(fd) != 0) {
    return IoError("{}: writing the header failed: {}", path, std::strerror(errno));
  }
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  close(std::exchange(fds_[shard], -1));
  return OkStatus();
}

}  // namespace moesaic::quantizer
