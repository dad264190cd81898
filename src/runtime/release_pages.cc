#include "runtime/release_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/round.h"

namespace moesaic::runtime {

void ReleasePages(const Buffer& buffer, size_t first, size_t bytes) {
  const size_t page =
      buffer.pages() == PageKind::kSmall ? static_cast<size_t>(sysconf(_SC_PAGESIZE)) : kHugePage;
  const size_t begin = base::RoundUp(first, page), end = std::min(first + bytes, buffer.size()) / page * page;
  // If the system refuses, more memory stays resident; nothing else depends on it.
  if (begin < end) madvise(buffer.data() + begin, end - begin, MADV_DONTNEED);
}

}  // namespace moesaic::runtime
