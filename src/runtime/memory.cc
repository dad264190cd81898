#include "runtime/memory.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::runtime {
namespace {

size_t PageBytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void* MapAnonymous(size_t bytes, int extra_flags) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags, -1, 0);
}

// Maps `bytes`, a multiple of a huge page, aligned to a huge page. Only aligned ranges can be backed by huge
// pages, and mmap aligns to small pages.
std::byte* MapHugeAligned(size_t bytes) {
  void* raw = MapAnonymous(bytes + kHugePage, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const size_t head = base::RoundUp(address, kHugePage) - address;
  if (head > 0) munmap(begin, head);
  if (kHugePage > head) munmap(begin + head + bytes, kHugePage - head);
  return begin + head;
}

// Returns whether the system accepted the policy; errno holds the reason if not.
bool SetPolicy(void* data, size_t bytes, int policy, std::span<const int> nodes) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  const int most = *std::max_element(nodes.begin(), nodes.end());
  std::vector<unsigned long> mask(most / kBits + 1);
  for (const int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  // The kernel reads one bit less than the given count.
  const unsigned long bits = mask.size() * kBits + 1;
  return syscall(SYS_mbind, data, bytes, policy, mask.data(), bits, 0UL) == 0;
}

}  // namespace

StatusOr<Buffer> Buffer::Allocate(size_t bytes, bool huge) {
  Buffer buffer;
  if (bytes == 0) return buffer;
  if (bytes > SIZE_MAX / 2) return ResourceExhausted("can't map {} bytes of memory", bytes);
  buffer.size_ = bytes;
  if (huge && bytes >= kHugePage / 2) {
    buffer.mapped_ = base::RoundUp(bytes, kHugePage);
    // Without MAP_NORESERVE this fails immediately if too few pages are reserved.
    void* explicit_pages = MapAnonymous(buffer.mapped_, MAP_HUGETLB | (21 << MAP_HUGE_SHIFT));
    if (explicit_pages != MAP_FAILED) {
      buffer.data_ = static_cast<std::byte*>(explicit_pages);
      buffer.pages_ = PageKind::kExplicitHuge;
      return buffer;
    }
    buffer.data_ = MapHugeAligned(buffer.mapped_);
    if (buffer.data_ != nullptr) {
      const bool advised = madvise(buffer.data_, buffer.mapped_, MADV_HUGEPAGE) == 0;
      buffer.pages_ = advised ? PageKind::kTransparentHuge : PageKind::kSmall;
      return buffer;
    }
  }
  buffer.mapped_ = base::RoundUp(bytes, PageBytes());
  void* small_pages = MapAnonymous(buffer.mapped_, 0);
  if (small_pages == MAP_FAILED) {
    buffer.mapped_ = buffer.size_ = 0;
    return ResourceExhausted("can't map {} bytes of memory: {}", bytes, std::strerror(errno));
  }
  buffer.data_ = static_cast<std::byte*>(small_pages);
  return buffer;
}

Status Buffer::Interleave(std::span<const int> nodes) {
  if (data_ == nullptr || nodes.empty()) return OkStatus();
  if (SetPolicy(data_, mapped_, MPOL_INTERLEAVE, nodes)) return OkStatus();
  return IoError("can't interleave {} bytes over NUMA nodes {}: {}", mapped_, fmt::join(nodes, ", "),
                 std::strerror(errno));
}

Status Buffer::Prefer(size_t first, size_t bytes, int node) {
  MOESAIC_CHECK_LE(first + bytes, mapped_);
  if (bytes == 0 || SetPolicy(data_ + first, bytes, MPOL_PREFERRED, {&node, 1})) return OkStatus();
  return IoError("can't place {} bytes on NUMA node {}: {}", bytes, node, std::strerror(errno));
}

Status Buffer::Reserve(size_t bytes, bool huge) {
  if (size_ >= bytes) return OkStatus();
  *this = {};  // unmaps before the larger mapping is made
  ASSIGN_OR_RETURN(*this, Allocate(bytes, huge));
  return OkStatus();
}

void Buffer::Trim(size_t bytes) {
  const size_t used = base::RoundUp(bytes, pages_ == PageKind::kSmall ? PageBytes() : kHugePage);
  // If the system refuses, more memory stays resident; nothing else depends on it.
  if (used < mapped_) madvise(data_ + used, mapped_ - used, MADV_DONTNEED);
}

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)),
      pages_(other.pages_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  std::swap(pages_, other.pages_);
  return *this;
}

StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT) return NotFound("{}: no such file", path);
    return IoError("{}: can't open: {}", path, std::strerror(errno));
  }
  struct stat info {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return InvalidArgument("{}: not a regular file", path);
  }
  std::shared_ptr<MappedFile> file(new MappedFile());
  file->path_ = path;
  file->size_ = static_cast<size_t>(info.st_size);
  if (file->size_ > 0) {  // mmap refuses an empty file, which is a valid empty span
    void* data = mmap(nullptr, file->size_, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      file->size_ = 0;
      close(fd);
      return IoError("{}: can't map {} bytes: {}", path, info.st_size, std::strerror(error));
    }
    file->data_ = static_cast<const std::byte*>(data);
  }
  close(fd);
  return std::shared_ptr<const MappedFile>(std::move(file));
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::Prefetch(size_t offset, size_t length) const {
  if (offset >= size_) return;
  const size_t begin = offset / PageBytes() * PageBytes();
  const size_t end = offset + std::min(length, size_ - offset);
  madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_WILLNEED);
}

void MappedFile::Forget() const {
  if (size_ > 0) madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED);
}

ResidentMemory MeasureResidentMemory() {
  ResidentMemory memory;
  std::FILE* file = std::fopen("/proc/self/status", "re");
  if (file == nullptr) return memory;
  char line[256];
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    long long kib = 0;
    if (std::sscanf(line, "VmRSS: %lld kB", &kib) == 1) memory.now = kib * 1024;
    if (std::sscanf(line, "VmHWM: %lld kB", &kib) == 1) memory.peak = kib * 1024;
  }
  std::fclose(file);
  return memory;
}

}  // namespace moesaic::runtime
