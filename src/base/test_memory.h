// Counts the memory that a test program allocates by `new`. It replaces the operators of the whole program,
// so that one source of a program may include it.
#pragma once

#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace moesaic::base {

inline std::atomic<int64_t> allocations = 0, live_bytes = 0;
/// Maximum of `live_bytes` since a test has set it.
inline std::atomic<int64_t> peak_bytes = 0;

}  // namespace moesaic::base

[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const made = std::malloc(bytes);
  if (made == nullptr) throw std::bad_alloc();
  using namespace moesaic::base;
  ++allocations;
  const auto added = static_cast<int64_t>(malloc_usable_size(made));
  const int64_t live = live_bytes.fetch_add(added) + added;
  for (int64_t peak = peak_bytes; live > peak && !peak_bytes.compare_exchange_weak(peak, live);) {
  }
  return made;
}
[[gnu::noinline]] void operator delete(void* freed) noexcept {
  moesaic::base::live_bytes -= static_cast<int64_t>(malloc_usable_size(freed));
  std::free(freed);
}
[[gnu::noinline]] void operator delete(void* freed, size_t) noexcept { operator delete(freed); }
