// Options of an expert exchange, equal on all ranks of a job.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/exchange/expert_map.h"
#include "comm/exchange/payload.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

/// Path of a row to the ranks of its experts.
enum class Forwarding : uint8_t {
  kHierarchical,  ///< Once over each link that its destinations share; forwarded within groups.
  kDirect,        ///< Once per destination rank.
};

/// Path of expert outputs back to the token's owner.
enum class Reduction : uint8_t {
  /// Weighted sums, f32, of a token's outputs below each link; ordered by slot on a rank, then by phase and
  /// peer.
  /// Results depend on the topology's shape, not on arrival.
  kPartialSums,
  /// Each output travels separately and unweighted, and the owner sums by slot. Results are bitwise equal for
  /// all topologies and forwardings. It sends more bytes: one row per slot.
  kBySlot,
};

/// Number of low bits of a tag that an exchange uses.
inline constexpr int kExchangeTagBits = 20;
inline constexpr Tag kDefaultExchangeTags = Tag{1} << 28;

struct ExchangeOptions {
  Payload dispatch_payload = Payload::kBf16;
  /// kF32 or kBf16. With kBySlot, rows of bf16 travel as bf16.
  Payload combine_payload = Payload::kBf16;
  Forwarding forwarding = Forwarding::kHierarchical;
  /// Levels whose groups forward rows (Group::level); empty: all. Leave out levels with fast links, because
  /// every level adds a hop.
  std::vector<std::string> forward_levels = {};
  ReplicaChoice replica_choice = ReplicaChoice::kNearest;
  Reduction reduction = Reduction::kPartialSums;
  /// False: the caller has applied the router's weights, and Combine() adds rows unweighted.
  bool apply_weights = true;
  /// Level whose groups ExchangeLayout::tokens_per_group counts; empty: the root's children.
  std::string layout_level = {};
  /// Consecutive tokens of a rank that travel together. Forwarding ends about one segment after the last
  /// arrival: a batch of 128 tokens has 8 segments, of which one is not hidden.
  int segment_tokens = 16;
  /// Fixed buffers of the low-latency mode: tokens per rank, and slots per token.
  int low_latency_tokens = 128;
  int low_latency_slots = 8;
  /// Limit of each blocking call, and of the polls of an operation, in seconds of Transport::Now().
  double time_limit_s = 30;
  /// First tag of a range of 2^kExchangeTagBits, a multiple of it.
  Tag first_tag = kDefaultExchangeTags;
};

}  // namespace moesaic::comm
