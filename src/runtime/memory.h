// Aligned memory from the operating system, with huge pages where available, and memory-mapped files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "base/status.h"

namespace moesaic::runtime {

inline constexpr size_t kHugePage = size_t{2} << 20;

/// Kind of pages that back a Buffer.
enum class PageKind { kSmall, kTransparentHuge, kExplicitHuge };

/// Owns zeroed, page-aligned anonymous memory. Movable, not copyable. An empty buffer has size 0.
class Buffer {
 public:
  Buffer() = default;
  /// Maps `bytes` bytes, rounded up to a page. With `huge`, requests explicit 2 MiB pages if the system has
  /// reserved some, otherwise advises transparent huge pages. The first writer of a page faults it in.
  static StatusOr<Buffer> Allocate(size_t bytes, bool huge);
  /// Keeps the current mapping if it has at least `bytes`, otherwise unmaps it and maps `bytes`. Call it to
  /// avoid new page faults for reused memory.
  Status Reserve(size_t bytes, bool huge);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  /// Returns whole pages after the first `bytes` bytes to the system (huge pages where the buffer uses them).
  /// The returned range then reads as zeros.
  void Trim(size_t bytes);

  /// Interleaves pages that are faulted in later over the NUMA `nodes` (the operating system's numbers).
  Status Interleave(std::span<const int> nodes);

  /// Places pages of [first, first + bytes), a range of whole pages, on NUMA node `node` (the operating
  /// system's number) when they are faulted in later. Falls back to other nodes when that node is full.
  Status Prefer(size_t first, size_t bytes, int node);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  PageKind pages() const { return pages_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;    // requested bytes
  size_t mapped_ = 0;  // mapped bytes
  PageKind pages_ = PageKind::kSmall;
};

/// A whole file mapped read-only. It is safe to share between threads and is unmapped with the last
/// reference.
class MappedFile {
 public:
  static StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  /// Tells the kernel that [offset, offset + length) will be read soon (MADV_WILLNEED).
  void Prefetch(size_t offset, size_t length) const;
  /// Drops the file's pages from this process's resident memory. They are read from the file again on the
  /// next access.
  void Forget() const;

 private:
  MappedFile() = default;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

/// Resident memory of this process in bytes: now, and its peak since the process began. Values are 0 where
/// /proc is unavailable.
struct ResidentMemory {
  int64_t now = 0, peak = 0;
};
ResidentMemory MeasureResidentMemory();

/// Allocates 64-byte aligned scratch memory for one step; Reset() releases all of it together. The arena
/// grows by whole chunks and keeps them, so a steady step does not allocate. Use by one thread at a time.
class Arena {
 public:
  Arena();
  ~Arena();
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;

  /// Returns `count` uninitialised values of T, valid until Reset() or until Rewind() to an earlier mark.
  /// Throws std::bad_alloc if the memory can't be mapped.
  template <typename T>
  std::span<T> Take(size_t count) {
    static_assert(std::is_trivially_destructible_v<T>);
    return {static_cast<T*>(TakeBytes(count * sizeof(T))), count};
  }
  /// Throws std::bad_alloc if the memory can't be mapped.
  void* TakeBytes(size_t bytes);
  void Reset();
  size_t Mark() const;       ///< Returns a position for Rewind().
  void Rewind(size_t mark);  ///< Releases everything allocated since the matching Mark().
  size_t peak_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::runtime
