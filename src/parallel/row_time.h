// The time that a rank's experts take for a row.
#pragma once

#include <cstdint>

namespace moesaic::parallel {

/// Mean over recent batches, each of which counts less than the next one. One thread.
class RowTime {
 public:
  /// A batch of `rows` took `seconds`. The first kColdBatches do not count: they touch memory for the first
  /// time.
  void Add(int64_t rows, double seconds) {
    skipped_ = 0;
    if (++batches_ <= kColdBatches) return;
    rows_ = kKept * rows_ + static_cast<double>(rows);
    seconds_ = kKept * seconds_ + seconds;
  }
  /// A batch had too few rows here to be timed. After kMaxSkipped of them in a row, the time is unknown: a
  /// rank that gets no rows because it was slow once would otherwise never get any.
  void Skip() {
    if (++skipped_ >= kMaxSkipped) *this = {};
  }
  double seconds() const { return rows_ > 0 ? seconds_ / rows_ : 0; }  ///< 0: unknown

  static constexpr int kColdBatches = 8, kMaxSkipped = 256;

 private:
  static constexpr double kKept = 0.95;  // of the batches before
  double rows_ = 0, seconds_ = 0;
  int batches_ = 0, skipped_ = 0;
};

}  // namespace moesaic::parallel
