// The lock of all processes that apply KV events. Only the library's own files include this header.
#pragma once

#include <mutex>

#include "proxy/index/index_layout.h"
#include "proxy/state/robust_lock.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

/// Held while a batch of events is applied, and while the blocks of a reused entry are cleared.
/// It needs no repair: the sequence number of a batch is stored after its changes, so that a successor
/// applies a batch again of which its predecessor has made a part. Taken before every other lock.
///
/// A process that is stopped inside a batch keeps the lock until it continues or is killed. An event loop
/// therefore tries the lock before it makes a call that waits for it.
class WritersLock {
 public:
  explicit WritersLock(const Zone& zone) : lock_(zone.index().writers) { lock_.Lock(); }
  WritersLock(const Zone& zone, std::try_to_lock_t)
      : lock_(zone.index().writers), is_locked_(lock_.TryLock().has_value()) {}
  ~WritersLock() {
    if (is_locked_) lock_.Unlock();
  }
  WritersLock(const WritersLock&) = delete;
  WritersLock& operator=(const WritersLock&) = delete;
  bool is_locked() const { return is_locked_; }

 private:
  RobustLock& lock_;
  bool is_locked_ = true;
};

}  // namespace moesaic::proxy
