// A small region of shared memory next to the zone. It lists the worker processes and has messages between
// them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "proxy/state/stage.h"

namespace moesaic::proxy {

/// Maximum worker processes of one zone, those of old configurations included.
inline constexpr int kMaxWorkers = 1024;

/// All zero is the empty board.
class Board {
 public:
  struct Worker {
    std::atomic<int32_t> pid;        ///< 0: the number is free
    std::atomic<uint32_t> retiring;  ///< it was asked to exit and finishes its requests
    std::atomic<uint64_t> wake;      ///< name of the socket that wakes it
  };

  /// A message to one worker about one of its requests.
  struct Message {
    static constexpr size_t kMaxBytes = 32 << 10;
    enum : uint64_t { kFree, kReady, kWriting };  // kWriting: with the writer's pid in the upper half
    std::atomic<uint64_t> phase;
    int32_t worker;
    uint32_t slot, generation;
    uint32_t id_bytes, bytes;
    std::array<char, 128> id;  ///< the request's id as the sender knows it
    char text[kMaxBytes];
  };

  /// Times of a request that has ended, for traces.
  struct Ended {
    int32_t worker = 0;
    uint32_t slot = 0, prompt_tokens = 0, output_tokens = 0;
    std::array<Nanos, kNumStages> entered{};
  };
  static constexpr size_t kKeptEnded = 1024;

  std::array<Worker, kMaxWorkers> workers;  ///< by number of RegisterWorker
  std::atomic<int> num_workers;             ///< one more than the largest number that was ever used
  std::atomic<uint64_t> kv_messages, kv_gaps, kv_errors;
  std::atomic<uint64_t> takeovers;  ///< leases acquired from another process
  std::atomic<Nanos> master_since;  ///< time of the last one
  std::atomic<uint64_t> retries, released_kv, failed_releases;
  std::atomic<uint64_t> rendered, unrendered;  ///< prompts
  std::atomic<uint64_t> discovery_errors;      ///< failed lookups, answers of etcd and values in it
  std::array<Message, 32> messages;
  std::atomic<uint64_t> num_ended;

  /// Keeps the request until kKeptEnded others have ended.
  void AddEnded(const Ended& ended) {
    const uint64_t number = num_ended.fetch_add(1, std::memory_order_relaxed);
    EndedEntry& entry = ended_[number % kKeptEnded];
    entry.version.store(2 * number + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.words[0].store(uint64_t{static_cast<uint32_t>(ended.worker)} << 32 | ended.slot,
                         std::memory_order_relaxed);
    entry.words[1].store(uint64_t{ended.prompt_tokens} << 32 | ended.output_tokens,
                         std::memory_order_relaxed);
    for (size_t i = 0; i < ended.entered.size(); ++i)
      entry.words[2 + i].store(static_cast<uint64_t>(ended.entered[i]), std::memory_order_relaxed);
    entry.version.store(2 * number + 2, std::memory_order_release);
  }

  /// Calls `see(ended)` for each of them that no process is writing.
  template <typename See>
  void ForEachEnded(See see) const {
    for (const EndedEntry& entry : ended_) {
      const uint64_t version = entry.version.load(std::memory_order_acquire);
      if (version == 0 || version % 2 != 0) continue;
      Ended ended;
      const uint64_t place = entry.words[0].load(std::memory_order_relaxed);
      const uint64_t tokens = entry.words[1].load(std::memory_order_relaxed);
      for (size_t i = 0; i < ended.entered.size(); ++i)
        ended.entered[i] = static_cast<Nanos>(entry.words[2 + i].load(std::memory_order_relaxed));
      std::atomic_thread_fence(std::memory_order_acquire);
      if (entry.version.load(std::memory_order_relaxed) != version) continue;
      ended.worker = static_cast<int32_t>(place >> 32);
      ended.slot = static_cast<uint32_t>(place);
      ended.prompt_tokens = static_cast<uint32_t>(tokens >> 32);
      ended.output_tokens = static_cast<uint32_t>(tokens);
      see(ended);
    }
  }

  void Join(int number, int32_t pid, uint64_t wake) {
    Worker& worker = workers[static_cast<size_t>(number)];
    worker.wake.store(wake, std::memory_order_relaxed);
    worker.retiring.store(0, std::memory_order_relaxed);
    worker.pid.store(pid, std::memory_order_release);
    int known = num_workers.load(std::memory_order_relaxed);
    while (known <= number &&
           !num_workers.compare_exchange_weak(known, number + 1, std::memory_order_release)) {
    }
  }
  void Leave(int number) { workers[static_cast<size_t>(number)].pid.store(0, std::memory_order_release); }
  int32_t Pid(int number) const {
    return number < 0 || number >= kMaxWorkers
               ? 0
               : workers[static_cast<size_t>(number)].pid.load(std::memory_order_acquire);
  }
  uint64_t Wake(int number) const {
    return workers[static_cast<size_t>(number)].wake.load(std::memory_order_relaxed);
  }
  int Numbers() const { return std::min(num_workers.load(std::memory_order_acquire), kMaxWorkers); }
  int NumberOf(int32_t pid) const {
    for (int i = 0; i < Numbers(); ++i) {
      if (Pid(i) == pid) return i;
    }
    return -1;
  }
  /// Returns whether a worker other than `number` may be the master: it is registered and shall not exit.
  bool HasSuccessor(int number) const {
    for (int i = 0; i < Numbers(); ++i) {
      if (i != number && Pid(i) != 0 &&
          workers[static_cast<size_t>(i)].retiring.load(std::memory_order_relaxed) == 0)
        return true;
    }
    return false;
  }

  /// Frees the number and the messages of a process that has died.
  void Forget(int32_t pid) {
    const int number = NumberOf(pid);
    for (Message& message : messages) {
      uint64_t phase = message.phase.load(std::memory_order_acquire);
      const bool to_it = phase == Message::kReady && message.worker == number;
      if (to_it || phase == WritingBy(pid))
        message.phase.compare_exchange_strong(phase, Message::kFree, std::memory_order_acq_rel);
    }
    if (number >= 0) {
      int32_t old = pid;
      workers[static_cast<size_t>(number)].pid.compare_exchange_strong(old, 0, std::memory_order_acq_rel);
    }
  }

  /// Called by process `pid`. False: the text is too long, or no message is free.
  bool Send(int32_t pid, int worker, uint32_t slot, uint32_t generation, std::string_view id,
            std::string_view text) {
    if (text.size() > Message::kMaxBytes || id.size() > sizeof(Message::id)) return false;
    for (Message& message : messages) {
      uint64_t free = Message::kFree;
      if (!message.phase.compare_exchange_strong(free, WritingBy(pid), std::memory_order_acquire)) continue;
      message.worker = worker;
      message.slot = slot;
      message.generation = generation;
      message.id_bytes = static_cast<uint32_t>(id.size());
      message.bytes = static_cast<uint32_t>(text.size());
      std::memcpy(message.id.data(), id.data(), id.size());
      std::memcpy(message.text, text.data(), text.size());
      message.phase.store(Message::kReady, std::memory_order_release);
      return true;
    }
    return false;
  }

  /// Calls `take(slot, generation, id, text)` for each message to `worker` and frees it.
  template <typename Take>
  void Receive(int worker, Take take) {
    for (Message& message : messages) {
      if (message.phase.load(std::memory_order_acquire) != Message::kReady || message.worker != worker)
        continue;
      const std::string id(message.id.data(), message.id_bytes), text(message.text, message.bytes);
      const uint32_t slot = message.slot, generation = message.generation;
      message.phase.store(Message::kFree, std::memory_order_release);
      take(slot, generation, id, text);
    }
  }

 private:
  struct EndedEntry {
    std::atomic<uint64_t> version;  // odd: it is being written
    std::array<std::atomic<uint64_t>, 2 + kNumStages> words;
  };
  std::array<EndedEntry, kKeptEnded> ended_;

  static uint64_t WritingBy(int32_t pid) { return static_cast<uint64_t>(pid) << 32 | Message::kWriting; }
};

}  // namespace moesaic::proxy
