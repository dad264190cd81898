// The order in which cached blocks are evicted. docs/contracts/cache-blocks.md, B12 to B12b, is normative.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

namespace moesaic::cache {

/// Future use of a conversation's blocks, by the client's statement.
enum class Session : uint8_t {
  kNone,          ///< The client made no statement.
  kContinues,     ///< The blocks will be used again.
  kEnds,          ///< They will not be used again.
  kNotReturning,  ///< They follow the part of a continuing conversation that will be used again.
};

/// A client's statement about its conversation. Times count requests, not seconds.
struct SessionHint {
  Session session = Session::kNone;
  /// Number of leading tokens of the request that will be used again, if the session continues.
  int64_t tokens = std::numeric_limits<int64_t>::max();
  double returns_at = 0;  ///< predicted time of that use; 0: unknown
};

/// The end of a node of the radix tree whose blocks are idle.
struct EvictionCandidate {
  uint64_t last_use;  ///< time at which a request last used the whole node
  uint32_t uses;  ///< sequences that continued after it in different ways, or brought it back after eviction
  Session session = Session::kNone;  ///< hint of the request that used it last
  double returns_at = 0;             ///< predicted time of the next use, by that hint; 0: unknown
  int64_t end_position = 0;          ///< number of tokens of the sequence up to the end of the node
};

/// Weight of the predicted time until reuse against LRU age, both in requests. Tuned on Mooncake's trace,
/// with hints from a part of the clients.
inline constexpr double kAwayPerAge = 2;

/// Scores candidates for eviction. Engine thread only.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  /// Returns the worth of keeping the candidate, as an equivalent time of last use. The candidate of lowest
  /// worth is evicted first. It is computed once per use of a node, so it must not depend on the time of
  /// eviction.
  virtual double Worth(const EvictionCandidate& candidate) = 0;
  /// Returns the predicted time of the next use; 0: unknown. Until that time it replaces the worth: the
  /// candidate with the latest time is evicted first. It is evicted before the candidate of least worth if
  /// the time until its use is at least kAwayPerAge times the time since the last use of that one.
  virtual double ReturnsAt(const EvictionCandidate& candidate) = 0;
  /// Called when `candidate`, or its end, was evicted at time `now`; `hash` is that of the first evicted
  /// block.
  virtual void OnEvict(const EvictionCandidate& candidate, uint64_t hash, uint64_t now) = 0;
  /// Returns how often a node that begins with block `hash` was used before its eviction; 0: unknown.
  virtual uint32_t UsesBefore(uint64_t hash) const = 0;
};

/// Evicts the least recently used node first.
std::unique_ptr<EvictionPolicy> MakeLruPolicy();

/// Weighs the chance of another use against the cost of computing the blocks again, per byte (all blocks have
/// the same size). *Lifetime* is the mean time that a node stays in the cache after its only use.
///
/// A node of a session that continues is worth as much as one that was used half a lifetime later. A node
/// with several uses is worth as much as one that was used 0.15 lifetimes later. Both gain up to a quarter of
/// that with the end position. Nodes of a session that ended are evicted first, unless other sessions used
/// them. So are nodes after the part that returns, unless more than eight sequences continued after them. A
/// node whose predicted return has passed counts as used at that time.
///
/// The policy remembers `remembered` evicted nodes. `attention_tokens` is the position at which attention
/// costs a token as much as the rest of the model.
std::unique_ptr<EvictionPolicy> MakeCostAwarePolicy(int64_t attention_tokens, int remembered);

}  // namespace moesaic::cache
