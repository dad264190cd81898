#include "runtime/probe.h"

#include <emmintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "runtime/memory.h"
#include "runtime/topology.h"

namespace moesaic::runtime {
namespace {

constexpr int kPasses = 5;
constexpr int64_t kStep = 256;  // four cache lines: four independent sums hide the adder's latency

// Sums 16-byte aligned memory in 16-byte words, in whole steps. Outstanding cache misses bound a core's
// bandwidth, not the width of its loads, so the baseline instruction set measures the same as a wider one.
uint64_t SumBytes(const std::byte* data, int64_t bytes) {
  __m128i sums[4] = {};
  for (int64_t i = 0; i + kStep <= bytes; i += kStep) {
    for (int line = 0; line < 4; ++line) {
      const auto* p = reinterpret_cast<const __m128i*>(data + i + 64 * line);
      const __m128i a = _mm_add_epi64(_mm_load_si128(p), _mm_load_si128(p + 1));
      const __m128i b = _mm_add_epi64(_mm_load_si128(p + 2), _mm_load_si128(p + 3));
      sums[line] = _mm_add_epi64(sums[line], _mm_add_epi64(a, b));
    }
  }
  const __m128i sum = _mm_add_epi64(_mm_add_epi64(sums[0], sums[1]), _mm_add_epi64(sums[2], sums[3]));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(sum));
}

double Seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

int64_t ProbeBytes(int threads) {
  constexpr int64_t kMinBytes = int64_t{1} << 20, kMaxBytes = int64_t{256} << 20;
  const int64_t available = AvailableMemory();  // 0: unknown
  return available == 0 ? kMaxBytes : std::clamp(available / 4 / threads, kMinBytes, kMaxBytes);
}

StatusOr<ReadBandwidth> MeasureReadBandwidth(ThreadPool* pool, int64_t bytes_per_thread) {
  bytes_per_thread = std::max<int64_t>(bytes_per_thread / kStep * kStep, kStep);
  std::vector<Buffer> parts(pool->size());
  for (Buffer& part : parts) {
    ASSIGN_OR_RETURN(part, Buffer::Allocate(static_cast<size_t>(bytes_per_thread), /*huge=*/true));
  }
  // The reading worker touches its part first, so that the pages lie on its NUMA node. The value is not zero,
  // so that no page is the kernel's shared zero page.
  pool->RunOnEach([&](int64_t, int w) { std::memset(parts[w].data(), w + 1, parts[w].size()); });

  using Clock = std::chrono::steady_clock;
  std::atomic<uint64_t> sink{0};
  ReadBandwidth best;
  for (int pass = 0; pass < kPasses; ++pass) {
    auto begin = Clock::now();
    sink += SumBytes(parts[0].data(), bytes_per_thread);
    best.one_thread =
        std::max(best.one_thread, static_cast<double>(bytes_per_thread) / Seconds(Clock::now() - begin));
    begin = Clock::now();
    pool->RunOnEach([&](int64_t, int w) { sink += SumBytes(parts[w].data(), bytes_per_thread); });
    const auto total = static_cast<double>(bytes_per_thread) * pool->size();
    best.all_threads = std::max(best.all_threads, total / Seconds(Clock::now() - begin));
  }
  return best;
}

void ReadOnce(ThreadPool* pool, std::span<const std::byte> memory) {
  // Words are loaded aligned; less than a step is skipped at either end.
  const auto skipped = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(memory.data()) % kStep);
  const int64_t steps = std::max<int64_t>(std::ssize(memory) - skipped, 0) / kStep;
  std::atomic<uint64_t> sink{0};
  pool->RunOnEach([&](int64_t, int w) {
    const int64_t first = steps * w / pool->size(), end = steps * (w + 1) / pool->size();
    sink += SumBytes(memory.data() + skipped + first * kStep, (end - first) * kStep);
  });
}

}  // namespace moesaic::runtime
