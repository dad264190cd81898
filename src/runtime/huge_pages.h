// Huge pages for large arrays that are written once: on virtual machines a page fault costs microseconds.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

namespace moesaic::runtime {

/// Asks the system to back a range that is written next by huge pages, as far as it has whole ones. Pages
/// that are present stay as they are. If the system refuses, only faults become slower.
void AdviseHugePages(void* first, size_t bytes);

/// Bytes of freed blocks that are kept for later allocations of the same size.
constexpr size_t kKeptHugeBytes = 64 << 20;

/// Allocates memory aligned to cache lines; from 2 MiB on it is aligned to huge pages and advised. The system
/// clears new pages, which takes as long as a pass over them: blocks that were freed before are used first.
/// Throws std::bad_alloc.
void* AllocateHuge(size_t bytes);
/// Frees memory of AllocateHuge(); `bytes` must be the argument of that call.
void FreeHuge(void* memory, size_t bytes);

/// Allocator of large arrays for std::vector. resize() leaves new elements uninitialized.
template <typename T>
struct HugePageAllocator {
  using value_type = T;
  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>&) {}  // NOLINT: as std::allocator
  T* allocate(size_t count) { return static_cast<T*>(AllocateHuge(count * sizeof(T))); }
  void deallocate(T* memory, size_t count) { FreeHuge(memory, count * sizeof(T)); }
  template <typename U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
  template <typename U, typename... Args>
  void construct(U* at, Args&&... args) {
    std::construct_at(at, std::forward<Args>(args)...);
  }
  friend bool operator==(const HugePageAllocator&, const HugePageAllocator&) { return true; }
};

}  // namespace moesaic::runtime
