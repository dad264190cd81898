// The numbers by which blocks name instances, and their lock. Only the library's own files include this
// header.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "proxy/index/key_table.h"

namespace moesaic::proxy {

using NumberBits = std::array<std::atomic<uint64_t>, kMaxNumbers / 64>;

inline bool HasNumber(const NumberBits& bits, int number) {
  return (bits[static_cast<size_t>(number) / 64].load(std::memory_order_acquire) >> (number % 64) & 1) != 0;
}
inline void AddNumber(NumberBits& bits, int number) {
  bits[static_cast<size_t>(number) / 64].fetch_or(uint64_t{1} << (number % 64), std::memory_order_acq_rel);
}
inline bool AnyNumber(const NumberBits& bits) {
  for (const auto& word : bits) {
    if (word.load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}
inline int CountNumbers(const NumberBits& bits) {
  int count = 0;
  for (const auto& word : bits) count += std::popcount(word.load(std::memory_order_acquire));
  return count;
}

/// Protects the ring of expectations, and the numbers of instances. The ring needs no repair when its owner
/// was killed: an entry is written before its mark and removed after it, so that each state between two
/// stores is valid. A change of numbers that its process did not end is ended by the next owner of the lock.
class ExpectationsLock {
 public:
  explicit ExpectationsLock(const KeyTable& table);
  ~ExpectationsLock() { lock_.Unlock(); }
  ExpectationsLock(const ExpectationsLock&) = delete;
  ExpectationsLock& operator=(const ExpectationsLock&) = delete;

 private:
  RobustLock& lock_;
};

/// Returns a number that no instance and no block has, or -1. The caller holds the lock.
int FreeNumber(const KeyTable& table);
/// Gives the instance the number `fresh`; the blocks of its old one must be removed. The caller holds the
/// lock.
void Renumber(const KeyTable& table, int instance, int fresh);

}  // namespace moesaic::proxy
