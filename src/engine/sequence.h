// One request on its way through the engine: its tokens, how far they are computed, and the blocks that hold
// them.
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

/// What a client has been given, by which the engine is shared evenly. Owned by the scheduler.
struct ClientShare {
  double service = 0;  // tokens: prompt tokens computed, and twice those drawn
  int sequences = 0;   // in the scheduler
};

/// How a sequence's drafts fared, the latest counting most: by place in the draft, given that all before it
/// were accepted.
struct DraftRecord {
  std::array<float, kMaxDrafts> tried = {}, accepted = {};
  bool last_accepted = false;  // the first token of the last draft was
  int whole = 0;               // the last so many drafts were accepted to their end
  int64_t last_step = 0;       // of DepthPolicy: when it was last drafted for
};

/// What speculation keeps of a sequence.
struct DraftState {
  std::vector<int32_t> tokens;  // drafted, to be verified behind Sequence::tokens in the next step
  DraftRecord record;           // of drafts that were computed, or of the only drafter there is
  DraftRecord lookup_record;    // of those that were looked up beside it
  bool looked_up = false;       // the last draft was, beside a drafter that computes
  // What a look-up found behind the first `found_behind` tokens and no step has verified.
  std::vector<int32_t> found;
  int found_behind = 0;
  // MTP: its layer holds rows of positions [64 * mtp_first, mtp_computed), and `hidden` those that it needs
  // for what follows: [computed - mtp_computed, hidden_size].
  int mtp_first = 0;
  int mtp_computed = 0;
  int32_t mtp_block = -1;  // that has the last of these rows, while they don't fill it; -1: nobody knows
  std::vector<float> hidden;
};

/// Owned by the scheduler; the engine thread only.
struct Sequence {
  RequestId id = 0;
  Request request;
  std::vector<int32_t> tokens;  // the prompt, then what was drawn
  int limit = 0;                // tokens.size() at which it ends by length
  int computed = 0;             // leading tokens whose keys and values stand in `blocks`
  uint64_t seed = 0;
  TokenHistory history;
  std::vector<LogprobEntry> prompt_logprobs;  // as far as they are known; kept over preemption
  bool first_event_sent = false;              // the first event is out, prompt_logprobs with it
  bool prompt_counted = false;                // in EngineStats::prompt_tokens
  RequestTimes times;
  MaskTicket mask;            // of the next token under request.grammar, until that is drawn
  bool slow_masks = false;    // one took long: from now on they are computed at low priority, before a step
  std::vector<float> hidden;  // [hidden_size] of the last prompt token, when an embedding is wanted
  std::optional<kernels::BlockSparsity>
      sparsity;                 // settings, without pointers; none: its rows read all blocks
  std::string cache_namespace;  // that its blocks are of: the request's, and how they were computed
  // Tokens from here on were computed by choosing, as a request that has them in its prompt would not: their
  // blocks stay out of the tree.
  int shared_limit = std::numeric_limits<int>::max();

  std::vector<cache::BlockRef> blocks;
  std::vector<int32_t> block_table;  // [blocks] their numbers, as kernels want them
  int indexed_blocks = 0;            // leading ones that are in the radix tree
  int cached_tokens = 0;             // of the prompt: found in the tree when it was first admitted
  cache::KvTier* fetching =
      nullptr;  // tier that fills the blocks after the known ones while the sequence waits
  DraftState draft;

  ClientShare* share = nullptr;
  int overtaken = 0;  // younger ones that were admitted before it
  bool aged = false;  // was preempted, or overtaken as often as is allowed: goes by arrival alone

  int size() const { return static_cast<int>(tokens.size()); }
  int prompt_size() const { return static_cast<int>(request.prompt.size()); }
  int outputs() const { return size() - prompt_size(); }
  int remaining() const { return size() - computed; }  // 1: a decode; more: a prefill
  bool draws_after(int count) const { return computed + count == size() && size() < limit; }
  /// Before the masks of a step begin: its mask is late, and it would run for nothing.
  bool waits_for_mask() const { return mask && !mask->done(); }
  bool wants_prompt_logprobs() const {
    return request.prompt_logprobs && !first_event_sent &&
           static_cast<int>(prompt_logprobs.size()) < prompt_size() - 1;
  }
};

}  // namespace moesaic::engine
