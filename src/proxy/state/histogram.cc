#include "proxy/state/histogram.h"

#include <algorithm>

namespace moesaic::proxy {

void Histogram::Add(Nanos value) {
  const auto* bound = std::lower_bound(kHistogramBounds.begin(), kHistogramBounds.end(), value);
  counts_[bound - kHistogramBounds.begin()].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
  count_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace moesaic::proxy
