// The state of one request in the scheduler: tokens, progress, and blocks.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kv_tier.h"
#include "engine/mask_worker.h"
#include "engine/request.h"
#include "engine/sampling.h"
#include "engine/speculative.h"

namespace moesaic::engine {

/// Service that a client has received, for fairness. Owned by the scheduler.
struct ClientShare {
  double service = 0;  // prompt tokens computed, and twice the tokens drawn
  int sequences = 0;   // waiting and running
};

/// Recent acceptance of a sequence's drafts, weighted towards the latest: by place in the draft, given that
/// all tokens before it were accepted.
struct DraftRecord {
  std::array<float, kMaxDrafts> tried = {}, accepted = {};
  bool last_accepted = false;  // the first token of the last draft was accepted
  int whole = 0;               // number of last drafts that were accepted entirely
  int64_t last_step = 0;       // step of the last draft, counted by DepthPolicy
};

/// State of speculation for a sequence.
struct DraftState {
  std::vector<int32_t> tokens;  // draft to be verified after Sequence::tokens in the next step
  bool cut = false;             // the grammar refuses the token that was drafted after `tokens`
  DraftRecord record;           // of the main drafter
  DraftRecord lookup_record;    // of the additional look-up drafter
  bool looked_up = false;       // the last draft came from the look-up drafter
  // Look-up result after the first `found_at` tokens that no step has verified.
  std::vector<int32_t> found;
  int found_at = 0;
  // MTP: its layer has rows of positions [64 * mtp_first, mtp_computed). `hidden` are the states that it
  // needs for the next rows: [computed - mtp_computed, hidden_size].
  int mtp_first = 0;
  int mtp_computed = 0;
  int32_t mtp_block = -1;  // block of the last of these rows if they do not fill it; -1: unknown
  std::vector<float> hidden;

  // Forgets the draft, not what is known about earlier ones.
  void Drop() {
    tokens.clear();
    cut = false;
  }
};

/// Owned by the scheduler. Engine thread only.
struct Sequence {
  RequestId id = 0;
  Request request;
  std::vector<int32_t> tokens;  // prompt, then output
  int limit = 0;                // maximum size of tokens
  int computed = 0;             // leading tokens with keys and values in `blocks`
  uint64_t seed = 0;
  TokenHistory history;
  std::vector<LogprobEntry> prompt_logprobs;  // known so far; kept over preemption
  bool first_event_sent = false;              // the first event, with prompt_logprobs, was reported
  bool prompt_counted = false;                // counted in EngineStats::prompt_tokens
  RequestTimes times;
  MaskTicket mask;            // of the next token, until it is drawn
  bool slow_masks = false;    // a mask took long: masks are computed at low priority, before a step
  std::vector<float> hidden;  // [hidden_size] of the last prompt token, for an embedding
  // Settings; without them, the rows read all blocks.
  std::optional<kernels::SparsitySettings> sparsity;
  // Namespace of its blocks: that of the request, and how they are computed.
  std::string cache_namespace;
  // First token computed by rows that choose blocks although a prompt's rows would not: later blocks stay out
  // of the tree.
  int shared_limit = std::numeric_limits<int>::max();

  std::vector<cache::BlockRef> blocks;
  std::vector<int32_t> block_table;  // [blocks] block numbers for the kernels
  int indexed_blocks = 0;            // leading blocks that are in the radix tree
  int cached_tokens = 0;             // prompt tokens found in the tree at the first admission
  // First block whose contents may differ from an exact computation of its tokens, as may all later blocks.
  int first_inexact_block = std::numeric_limits<int>::max();
  // Tier that fills the blocks after the indexed ones while the sequence waits; null: none.
  cache::KvTier* fetching = nullptr;
  DraftState draft;

  bool in_flight = false;  // rows whose results it needs have started: no step may plan, move or remove it
  FinishReason ending = FinishReason::kNone;  // of an end that waits for these rows; kNone: none

  ClientShare* share = nullptr;
  int overtaken = 0;  // younger sequences admitted before it
  bool aged = false;  // preempted, or overtaken as often as allowed: ordered by arrival alone

  int size() const { return static_cast<int>(tokens.size()); }
  int prompt_size() const { return static_cast<int>(request.prompt.size()); }
  int outputs() const { return size() - prompt_size(); }
  int remaining() const { return size() - computed; }  // 1: a decode; more: a prefill
  bool draws_after(int count) const { return computed + count == size() && size() < limit; }
  /// Returns whether its mask is late, so that running it would be useless. Valid before the masks of a step
  /// begin.
  bool waits_for_mask() const { return mask && !mask->done(); }
  bool wants_prompt_logprobs() const {
    return request.prompt_logprobs && !first_event_sent &&
           static_cast<int>(prompt_logprobs.size()) < prompt_size() - 1;
  }
};

}  // namespace moesaic::engine
