// The time that a rank's experts take for a row.
#pragma once

#include <cstdint>

namespace moesaic::parallel {

/// Seconds per row over recent batches of any layer. The weight of a batch falls by 5% with each later one.
/// Used by one thread.
class RowTime {
 public:
  /// Adds a batch of `rows` rows that took `seconds`. The first kColdBatches are not counted, because they
  /// touch buffers for the first time.
  void Add(int64_t rows, double seconds) {
    skipped_ = 0;
    if (batches_ < kColdBatches) {
      ++batches_;
      return;
    }
    rows_ = kKept * rows_ + static_cast<double>(rows);
    seconds_ = kKept * seconds_ + seconds;
  }
  /// A batch had too few rows here to be timed. After kMaxSkipped of them in succession, the time is unknown
  /// until the next timed batch. Otherwise a rank that was slow once, and therefore gets no rows, would never
  /// be measured again.
  void Skip() {
    if (++skipped_ < kMaxSkipped) return;
    rows_ = seconds_ = 0;
    skipped_ = 0;
  }
  double seconds() const { return rows_ > 0 ? seconds_ / rows_ : 0; }  ///< 0: unknown

  static constexpr int kColdBatches = 8, kMaxSkipped = 256;

 private:
  static constexpr double kKept = 0.95;  // factor of the earlier batches' weight when a batch is added
  double rows_ = 0, seconds_ = 0;
  int batches_ = 0, skipped_ = 0;
};

}  // namespace moesaic::parallel
