#include "proxy/state/robust_lock.h"

#include <cerrno>

#include "base/check.h"

namespace moesaic::proxy {

void RobustLock::Init() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  MOESAIC_CHECK_EQ(pthread_mutex_init(&mutex_, &attributes), 0);
  pthread_mutexattr_destroy(&attributes);
}

RobustLock::Acquired RobustLock::Lock() { return AcquiredWith(pthread_mutex_lock(&mutex_)); }

std::optional<RobustLock::Acquired> RobustLock::TryLock() {
  const int error = pthread_mutex_trylock(&mutex_);
  if (error == EBUSY) return std::nullopt;
  return AcquiredWith(error);
}

RobustLock::Acquired RobustLock::AcquiredWith(int error) {
  if (error == EOWNERDEAD) {
    // The caller repairs while it holds the lock. If it dies as well, the next owner is sent here again.
    MOESAIC_CHECK_EQ(pthread_mutex_consistent(&mutex_), 0);
    return Acquired::kRepair;
  }
  MOESAIC_CHECK_EQ(error, 0);
  return Acquired::kClean;
}

void RobustLock::Unlock() { MOESAIC_CHECK_EQ(pthread_mutex_unlock(&mutex_), 0); }

}  // namespace moesaic::proxy
