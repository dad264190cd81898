#include "proxy/events/sequence.h"

namespace moesaic::proxy {

SequenceTracker::Verdict SequenceTracker::Check(uint64_t sequence) const {
  if (!next_ || sequence == *next_) return Verdict::kNext;
  if (sequence > *next_) return Verdict::kGap;
  // A publisher that was restarted begins at 0 or 1. Small numbers may also be late messages of a fresh
  // publisher.
  constexpr uint64_t kFresh = 64;
  if ((sequence == 0 && *next_ > 2) || (sequence == 1 && *next_ > kFresh)) return Verdict::kRestart;
  return Verdict::kDuplicate;
}

}  // namespace moesaic::proxy
