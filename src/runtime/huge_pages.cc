#include "runtime/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "base/round.h"
#include "runtime/memory.h"

namespace moesaic::runtime {

void AdviseHugePages(void* first, size_t bytes) {
  const auto begin = base::RoundUp(reinterpret_cast<uintptr_t>(first), kHugePage),
             end = (reinterpret_cast<uintptr_t>(first) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void* AllocateHuge(size_t bytes) {
  constexpr size_t kCacheLine = 64;
  const bool huge = bytes >= kHugePage;
  const size_t alignment = huge ? kHugePage : kCacheLine;
  void* memory = std::aligned_alloc(alignment, base::RoundUp(std::max<size_t>(bytes, 1), alignment));
  if (memory == nullptr) throw std::bad_alloc();
  if (huge) AdviseHugePages(memory, bytes);
  return memory;
}

void FreeHuge(void* memory) { std::free(memory); }

}  // namespace moesaic::runtime
