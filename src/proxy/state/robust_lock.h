// A mutex in shared memory that survives the death of its owner.
#pragma once

#include <pthread.h>

#include <optional>

namespace moesaic::proxy {

/// A process-shared robust mutex. When the owner was killed, the next Lock() returns kRepair: the caller
/// holds the lock and must bring the protected data to a valid state before it unlocks.
class RobustLock {
 public:
  enum class Acquired { kClean, kRepair };

  /// Formats the lock. Only for memory that no process uses yet.
  void Init();
  Acquired Lock();
  /// Like Lock(), but returns nothing if another thread or process has the lock.
  std::optional<Acquired> TryLock();
  void Unlock();

 private:
  Acquired AcquiredWith(int error);

  pthread_mutex_t mutex_;
};

}  // namespace moesaic::proxy
