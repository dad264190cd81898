// A small region of shared memory beside the zone: the worker processes and messages between them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace moesaic::proxy {

inline constexpr int kMaxWorkers = 64;

/// All zero is the empty board.
class Board {
 public:
  /// A message to one worker about one of its requests.
  struct Letter {
    static constexpr size_t kMaxBytes = 32 << 10;
    enum : uint32_t { kFree, kWriting, kReady };
    std::atomic<uint32_t> phase;
    int32_t worker;
    uint32_t slot, generation;
    uint32_t bytes;
    char text[kMaxBytes];
  };

  std::array<std::atomic<int32_t>, kMaxWorkers> pids;  ///< by number of RegisterWorker; 0: none
  std::atomic<uint64_t> kv_messages, kv_gaps, kv_errors;
  std::atomic<uint64_t> takeovers;      ///< leases acquired from another process
  std::atomic<uint64_t> retries, released_kv;
  std::atomic<uint64_t> token_hits, token_misses;      ///< bytes of segments
  std::atomic<uint64_t> rendered, unrendered;          ///< prompts
  std::array<Letter, 32> letters;

  int NumberOf(int32_t pid) const {
    for (int i = 0; i < kMaxWorkers; ++i) {
      if (pids[static_cast<size_t>(i)].load(std::memory_order_acquire) == pid) return i;
    }
    return -1;
  }

  /// False: the text is too long, or no letter is free.
  bool Send(int worker, uint32_t slot, uint32_t generation, std::string_view text) {
    if (text.size() > Letter::kMaxBytes) return false;
    for (Letter& letter : letters) {
      uint32_t free = Letter::kFree;
      if (!letter.phase.compare_exchange_strong(free, Letter::kWriting, std::memory_order_acquire)) continue;
      letter.worker = worker;
      letter.slot = slot;
      letter.generation = generation;
      letter.bytes = static_cast<uint32_t>(text.size());
      std::memcpy(letter.text, text.data(), text.size());
      letter.phase.store(Letter::kReady, std::memory_order_release);
      return true;
    }
    return false;
  }

  /// Calls `take(slot, generation, text)` for each letter to `worker` and frees it.
  template <typename Take>
  void Receive(int worker, Take take) {
    for (Letter& letter : letters) {
      if (letter.phase.load(std::memory_order_acquire) != Letter::kReady || letter.worker != worker) continue;
      const std::string text(letter.text, letter.bytes);
      const uint32_t slot = letter.slot, generation = letter.generation;
      letter.phase.store(Letter::kFree, std::memory_order_release);
      take(slot, generation, text);
    }
  }
};

}  // namespace moesaic::proxy
