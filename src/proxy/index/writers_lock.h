// The lock of all processes that apply KV events. Only the library's own files include this header.
#pragma once

#include "proxy/index/index_layout.h"
#include "proxy/state/robust_lock.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

/// Held while a batch of events is applied, and while the blocks of a reused entry are cleared.
/// It needs no repair: the sequence number of a batch is stored after its changes, so that a successor
/// applies a batch again of which its predecessor has made a part. Taken before every other lock.
class WritersLock {
 public:
  explicit WritersLock(const Zone& zone) : lock_(zone.index().writers) { lock_.Lock(); }
  ~WritersLock() { lock_.Unlock(); }
  WritersLock(const WritersLock&) = delete;
  WritersLock& operator=(const WritersLock&) = delete;

 private:
  RobustLock& lock_;
};

}  // namespace moesaic::proxy
