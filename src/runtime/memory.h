// Aligned memory from the operating system, with huge pages where they can be had, and files mapped in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "base/status.h"

namespace moesaic::runtime {

/// What backs a Buffer's pages.
enum class PageKind { kSmall, kTransparentHuge, kExplicitHuge };

/// Owns zeroed, page-aligned anonymous memory. Movable, not copyable. An empty buffer has size 0.
class Buffer {
 public:
  Buffer() = default;
  /// Maps `bytes` bytes (rounded up to a page). With `huge`, asks for explicit 2 MiB pages if the system has
  /// reserved some, else advises transparent ones. Pages are touched by whoever writes first.
  static StatusOr<Buffer> Allocate(size_t bytes, bool huge);
  /// Keeps what it has if that is at least `bytes`, else lets go of it and maps so many: new pages take time.
  Status Reserve(size_t bytes, bool huge);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  /// Has pages that are first touched from now on lie in turn on the NUMA `nodes`, by the operating system's
  /// numbers.
  Status Interleave(std::span<const int> nodes);

  /// Has pages of [first, first + bytes), a range of whole pages, that are first touched from now on lie on
  /// the NUMA node `node` by the operating system's number, or on another once that is full.
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
  size_t size_ = 0;    // bytes asked for
  size_t mapped_ = 0;  // bytes mapped
  PageKind pages_ = PageKind::kSmall;
};

/// A whole file mapped read-only. Safe to share; unmapped with the last reference.
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
  /// Takes the pages that were read so far out of this process's resident memory; they are read again when
  /// somebody looks at them.
  void Forget() const;

 private:
  MappedFile() = default;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  std::string path_;
};

/// This process's memory that is resident, in bytes: now, and at most since it began. 0 where /proc does not
/// tell.
struct ResidentMemory {
  int64_t now = 0, peak = 0;
};
ResidentMemory MeasureResidentMemory();

/// Hands out 64-byte aligned scratch memory of one step; Reset() takes all of it back at once.
/// Grows by whole chunks, which it keeps, so a steady step allocates nothing. One thread at a time.
class Arena {
 public:
  Arena();
  ~Arena();
  Arena(Arena&&) noexcept;
  Arena& operator=(Arena&&) noexcept;

  /// `count` uninitialised values of T; valid until Reset() or until Rewind() to an earlier mark.
  template <typename T>
  std::span<T> Take(size_t count) {
    static_assert(std::is_trivially_destructible_v<T>);
    return {static_cast<T*>(TakeBytes(count * sizeof(T))), count};
  }
  void* TakeBytes(size_t bytes);
  void Reset();
  size_t Mark() const;       ///< A point to which Rewind() can return.
  void Rewind(size_t mark);  ///< Takes back all that was handed out since Mark().
  size_t peak_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::runtime
