#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/round.h"
#include "runtime/memory.h"

namespace moesaic::runtime {
namespace {

constexpr size_t kAlignment = 64;                // a cache line and an AVX-512 register
constexpr size_t kFirstChunk = size_t{4} << 20;  // two huge pages
// A mark stores the chunk index above the offset: chunks may have up to 16 TiB.
constexpr int kOffsetBits = 44;

class ScratchExhausted final : public std::bad_alloc {
 public:
  explicit ScratchExhausted(const std::string& reason) : text_("scratch memory: " + reason) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

}  // namespace

struct Arena::Impl {
  std::vector<Buffer> chunks;
  size_t chunk = 0;         // the chunk that memory is taken from
  size_t offset = 0;        // position in the chunk
  size_t bytes_before = 0;  // bytes of earlier chunks, including their unused tails
  size_t peak = 0;
};

Arena::Arena() : impl_(std::make_unique<Impl>()) {}
Arena::~Arena() = default;
Arena::Arena(Arena&&) noexcept = default;
Arena& Arena::operator=(Arena&&) noexcept = default;

void* Arena::TakeBytes(size_t bytes) {
  Impl& a = *impl_;
  bytes = base::RoundUp(bytes, kAlignment);
  while (a.chunk < a.chunks.size() && a.chunks[a.chunk].size() - a.offset < bytes) {
    a.bytes_before += a.chunks[a.chunk].size();
    ++a.chunk;
    a.offset = 0;
  }
  if (a.chunk == a.chunks.size()) {
    // Doubling keeps the number of chunks logarithmic in the largest step.
    const size_t last = a.chunks.empty() ? kFirstChunk / 2 : a.chunks.back().size();
    auto chunk = Buffer::Allocate(std::max(2 * last, bytes), /*huge=*/true);
    if (!chunk.ok()) chunk = Buffer::Allocate(bytes, /*huge=*/true);  // less than the double may be left
    if (!chunk.ok()) throw ScratchExhausted(Message(chunk.status()));
    a.chunks.push_back(*std::move(chunk));
  }
  void* taken = a.chunks[a.chunk].data() + a.offset;
  a.offset += bytes;
  a.peak = std::max(a.peak, a.bytes_before + a.offset);
  return taken;
}

void Arena::Reset() { Rewind(0); }

size_t Arena::Mark() const { return (impl_->chunk << kOffsetBits) | impl_->offset; }

void Arena::Rewind(size_t mark) {
  Impl& a = *impl_;
  const size_t chunk = mark >> kOffsetBits;
  MOESAIC_CHECK_LE(chunk, a.chunk);
  while (a.chunk > chunk) a.bytes_before -= a.chunks[--a.chunk].size();
  a.offset = mark & ((size_t{1} << kOffsetBits) - 1);
}

size_t Arena::peak_bytes() const { return impl_->peak; }

}  // namespace moesaic::runtime
