// Which cached blocks go first when room is needed.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

namespace moesaic::cache {

/// Whether blocks of a conversation will be asked for again. kBehind: the client said how much will be, and
/// they stand behind that.
enum class Session : uint8_t { kNone, kContinues, kEnds, kBehind };

/// What a client knows of its conversation. Times count requests, not seconds.
struct SessionHint {
  Session session = Session::kNone;
  /// Of one that continues: so many of the request's first tokens will be asked for again.
  int64_t tokens = std::numeric_limits<int64_t>::max();
  double returns_at = 0;  ///< when they will be; 0: not known
};

/// The end of a run of blocks that nobody needs now.
struct EvictionCandidate {
  uint64_t last_use;  ///< when a request last used the whole run
  uint32_t uses;  ///< sequences that went on behind it each in its own way, or brought it back after it went
  Session session = Session::kNone;  ///< of the last that used it
  double returns_at = 0;             ///< likewise
  int64_t end_position = 0;          ///< tokens up to the end of the run, from the first of the sequence on
};

/// Requests until a known return that are as bad as one since the last use of what nobody knows about. Found
/// on Mooncake's trace with a part of the clients telling (docs/benchmarks.md).
inline constexpr double kAwayPerAge = 2;

/// One engine's choice. Engine thread only.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  /// What keeping the candidate is worth, as the time of a last use: the least goes first. Asked once for
  /// each use of a run, so it may depend on what is known then, not on the time of eviction.
  virtual double Worth(const EvictionCandidate& candidate) = 0;
  /// When the candidate will be asked for, 0 where that is not known. Until then that decides, not its worth:
  /// the latest goes first, and before the least of worth where the time until then is kAwayPerAge times the
  /// time since that one's last use or more.
  virtual double ReturnsAt(const EvictionCandidate& candidate) = 0;
  /// `candidate`, or its end, has gone at time `now`; `hash` names the first block that went.
  virtual void OnEvict(const EvictionCandidate& candidate, uint64_t hash, uint64_t now) = 0;
  /// How often a run that begins with block `hash` was used before it went; 0: not known.
  virtual uint32_t UsesBefore(uint64_t hash) const = 0;
};

/// The run that was not used for longest goes first.
std::unique_ptr<EvictionPolicy> MakeLruPolicy();

/// Weighs the chance of another use with what computing the blocks again would cost, per byte (all blocks are
/// equally large). Lifetime: the time that a run lives in the cache after its only use. A run whose client
/// says that the session continues is worth as much as one used half a lifetime later, one with more than one
/// use as much as 0.15 lifetimes later, and either a quarter more of that the further back in its sequence it
/// ends. Runs whose client says that the session ended go first, unless others used them too; so do those
/// that stand behind what it says will be asked for again, unless more than eight sequences went on behind
/// them. Where the client says when it returns, runs count as used then once that has passed. Remembers
/// `remembered` runs that went. attention_tokens: position at which attention costs a token as much as the
/// rest of the model.
std::unique_ptr<EvictionPolicy> MakeCostAwarePolicy(int64_t attention_tokens, int remembered);

}  // namespace moesaic::cache
