// Parts of an operator's output that its caller uses while the others are computed.
#pragma once

#include <algorithm>
#include <functional>

#include "base/round.h"

namespace moesaic::kernels {

/// Ranges of an output's columns that an operator computes one after the other, in ascending order. Results
/// do not depend on their number.
struct ColumnParts {
  struct Range {
    int first = 0, count = 0;
  };

  int count = 1;
  /// Called on the calling thread when a range is complete in all rows; or empty.
  std::function<void(int first, int count)> done;

  /// Range `part` of `columns`; it may be empty. Ranges begin at multiples of 64.
  Range Of(int columns, int part) const {
    const int width = base::RoundUp(base::CeilDiv(columns, count), 64);
    const int first = std::min(columns, part * width);
    return {first, std::min(columns - first, width)};
  }
  void Done(int first, int columns) const {
    if (done) done(first, columns);
  }
  /// Calls `done` for each range of an output that is complete.
  void DoneAll(int columns) const {
    for (int part = 0; part < count; ++part) {
      const Range range = Of(columns, part);
      if (range.count > 0) Done(range.first, range.count);
    }
  }
};

}  // namespace moesaic::kernels
