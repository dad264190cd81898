// A histogram of durations in shared memory: fixed buckets, atomic counts.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "proxy/state/stage.h"

namespace moesaic::proxy {

/// Bucket i counts durations up to kHistogramBounds[i]; the last bucket has no bound.
inline constexpr std::array<Nanos, 25> kHistogramBounds = {
    kMillisecond / 10,  kMillisecond / 4,    kMillisecond / 2,    kMillisecond,       2 * kMillisecond,
    5 * kMillisecond,   10 * kMillisecond,   20 * kMillisecond,   30 * kMillisecond,  50 * kMillisecond,
    75 * kMillisecond,  100 * kMillisecond,  200 * kMillisecond,  300 * kMillisecond, 500 * kMillisecond,
    750 * kMillisecond, 1000 * kMillisecond, 2000 * kMillisecond, 5 * kSecond,        10 * kSecond,
    20 * kSecond,       40 * kSecond,        80 * kSecond,        160 * kSecond,      640 * kSecond};

/// All zero is the empty histogram. Any process may add at any time.
class Histogram {
 public:
  void Add(Nanos value);
  uint64_t bucket(int i) const { return counts_[i].load(std::memory_order_relaxed); }
  static constexpr int num_buckets() { return static_cast<int>(kHistogramBounds.size()) + 1; }
  uint64_t count() const { return count_.load(std::memory_order_relaxed); }
  Nanos sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  std::array<std::atomic<uint64_t>, kHistogramBounds.size() + 1> counts_;
  std::atomic<uint64_t> count_;
  std::atomic<int64_t> sum_;
};

}  // namespace moesaic::proxy
