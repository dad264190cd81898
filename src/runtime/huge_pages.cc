#include "runtime/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <new>
#include <vector>

#include "base/round.h"
#include "runtime/memory.h"

namespace moesaic::runtime {
namespace {

// Freed blocks, the oldest first. A thread does not wait for another one: it allocates or frees instead. So a
// child of fork() cannot wait for a thread that it does not have.
class KeptBlocks {
 public:
  KeptBlocks() { blocks_.reserve(kKeptHugeBytes / kHugePage); }  // Keep() then never allocates

  // Returns a block of `size` bytes, or null.
  void* Take(size_t size) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return nullptr;
    const auto found =
        std::find_if(blocks_.rbegin(), blocks_.rend(), [&](const Block& b) { return b.size == size; });
    if (found == blocks_.rend()) return nullptr;
    void* memory = found->memory;
    bytes_ -= size;
    blocks_.erase(std::next(found).base());
    return memory;
  }

  // Keeps a block, and frees the oldest ones beyond kKeptHugeBytes. Returns false if the block is not kept.
  bool Keep(void* memory, size_t size) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (size > kKeptHugeBytes || !lock.owns_lock()) return false;
    while (bytes_ + size > kKeptHugeBytes) {
      std::free(blocks_.front().memory);
      bytes_ -= blocks_.front().size;
      blocks_.erase(blocks_.begin());
    }
    blocks_.push_back({memory, size});
    bytes_ += size;
    return true;
  }

 private:
  struct Block {
    void* memory;
    size_t size;
  };
  std::mutex mutex_;
  std::vector<Block> blocks_;
  size_t bytes_ = 0;
};

KeptBlocks& Kept() {
  static auto* kept = new KeptBlocks;  // used by destructors of static objects, too
  return *kept;
}

}  // namespace

void AdviseHugePages(void* first, size_t bytes) {
  const auto begin = base::RoundUp(reinterpret_cast<uintptr_t>(first), kHugePage),
             end = (reinterpret_cast<uintptr_t>(first) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

void* AllocateHuge(size_t bytes) {
  constexpr size_t kCacheLine = 64;
  const bool huge = bytes >= kHugePage;
  const size_t alignment = huge ? kHugePage : kCacheLine,
               size = base::RoundUp(std::max<size_t>(bytes, 1), alignment);
  void* memory = huge ? Kept().Take(size) : nullptr;
  if (memory != nullptr) return memory;
  memory = std::aligned_alloc(alignment, size);
  if (memory == nullptr) throw std::bad_alloc();
  if (huge) AdviseHugePages(memory, size);
  return memory;
}

void FreeHuge(void* memory, size_t bytes) {
  const bool huge = bytes >= kHugePage;
  if (!huge || !Kept().Keep(memory, base::RoundUp(bytes, kHugePage))) std::free(memory);
}

}  // namespace moesaic::runtime
