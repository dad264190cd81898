// The lease of the scheduling master: one process at a time schedules for all workers.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "proxy/state/stage.h"

namespace moesaic::proxy {

/// Times of the lease. A holder renews at least every `renew`; others may take over a lease that was not
/// renewed for `timeout`, or at once when its holder no longer exists.
struct LeaseOptions {
  Nanos renew = 15 * kMillisecond;
  Nanos timeout = 60 * kMillisecond;
};

/// Identifies one tenure of the lease. It becomes invalid when another process takes over.
struct LeaseToken {
  uint64_t word = 0;  // pid in the upper half, tenure number in the lower half
  explicit operator bool() const { return word != 0; }
};

/// Lives in shared memory; all zero is a free lease. Lock-free.
class Lease {
 public:
  /// Acquires a free, expired or orphaned lease; renews one that `pid` already holds. Returns none while
  /// another live process holds it. `dead`: a process that is known to have ended; its lease is free.
  std::optional<LeaseToken> Acquire(int32_t pid, Nanos now, const LeaseOptions& options = {},
                                    int32_t dead = 0);
  /// Renews; false when the tenure has ended.
  bool Renew(LeaseToken token, Nanos now);
  /// True while `token` is the current tenure.
  bool Holds(LeaseToken token) const { return word_.load(std::memory_order_acquire) == token.word; }
  /// Ends the tenure, so that the next Acquire of any process succeeds.
  void Release(LeaseToken token);

  int32_t holder() const { return static_cast<int32_t>(word_.load(std::memory_order_acquire) >> 32); }
  uint32_t tenure() const { return static_cast<uint32_t>(word_.load(std::memory_order_acquire)); }
  Nanos renewed() const { return renewed_.load(std::memory_order_acquire); }

 private:
  std::atomic<uint64_t> word_;
  std::atomic<int64_t> renewed_;
};

/// True when process `pid` exists and is no zombie.
bool ProcessLives(int32_t pid);

}  // namespace moesaic::proxy
