// Sequence numbers of KV event messages: finds duplicates, gaps and restarts.
#pragma once

#include <cstdint>
#include <optional>

namespace moesaic::proxy {

/// Sequence number of the message that ends a replay.
inline constexpr uint64_t kReplayEnd = ~uint64_t{0};

class SequenceTracker {
 public:
  enum class Verdict : uint8_t {
    kNext,       ///< apply it
    kDuplicate,  ///< it was applied before
    kGap,        ///< messages before it are missing
    kRestart,    ///< the publisher counts from the beginning again
  };

  SequenceTracker() = default;
  explicit SequenceTracker(std::optional<uint64_t> next) : next_(next) {}

  Verdict Check(uint64_t sequence) const;
  void Applied(uint64_t sequence) { next_ = sequence + 1; }
  void Reset() { next_.reset(); }
  /// Number of the next message; none before the first.
  std::optional<uint64_t> next() const { return next_; }

 private:
  std::optional<uint64_t> next_;
};

}  // namespace moesaic::proxy
