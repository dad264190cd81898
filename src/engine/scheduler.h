// Plans steps: admission, chunked prefill, preemption and drafts. A plan is made on a scratch copy of the
// pool's capacity and changes nothing; Commit carries it out and cannot fail. docs/contracts/scheduler.md is
// normative.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kv_tier.h"
#include "cache/radix_tree.h"
#include "engine/event_rate.h"
#include "engine/sequence.h"
#include "engine/step_batch.h"

namespace moesaic::engine {

struct SchedulerOptions {
  int max_sequences = 0;
  int max_batch_tokens = 0;  // >= max_sequences
  int max_scored_rows = 0;   // maximum rows of a step that need prompt logprobs; >= 1
  int max_overtakes = 64;    // younger requests that may be admitted before a waiting one
  int max_in_flight = 1;     // steps that run at the same time, which divide the decodes
  bool prefix_cache = true;
};

/// One step: preempted and admitted sequences, and the tokens to compute, in batch order. Pins the cached
/// blocks that it counts on; dropping a plan changes nothing. Valid until the scheduler changes.
struct StepPlan {
  struct Admission {
    Sequence* sequence;
    cache::PrefixMatch prefix;
    cache::KvTier* tier;  // has blocks after the prefix; or null
    cache::TierHit hit;
    int tokens;  // leading tokens that are not computed: of the prefix, or more if a tier has blocks
    bool first;  // the sequence has not run before
  };
  struct ScheduledChunk {
    Sequence* sequence;
    int count;          // tokens from `computed` on, which an admission sets
    int new_blocks;     // blocks to allocate for them and the drafts
    int drafts = 0;     // leading draft tokens, computed after a decode's token
    int accepted = 0;   // drafts that were accepted and appended to the tokens
    bool late = false;  // the mask is not ready: the last token is computed again later
    /// Tokens that count as computed after the step.
    int kept() const { return count + accepted - (late ? 1 : 0); }
    int rows() const { return count + drafts; }
    /// First row that needs logits; all later ones do, too.
    int FirstLogits() const;
    /// Valid after drafts were accepted, until the sequence advances.
    bool is_decode() const { return count == 1 && sequence->remaining() == 1 + accepted; }
  };
  // Blocks that a tier fetches for a sequence that continues to wait.
  struct Fetch {
    Sequence* sequence;
    cache::PrefixMatch prefix;  // without a tail
    cache::KvTier* tier;
    cache::TierHit hit;
    std::vector<int32_t> taken = {};  // set by Commit: the blocks that are filled
  };
  std::vector<Sequence*> cancel;   // sequences whose fetches end, the youngest first
  std::vector<Sequence*> preempt;  // the last in rank first
  std::vector<Admission> admit;    // in the order of admission
  std::vector<Fetch> fetches;
  std::vector<ScheduledChunk> chunks;
};

/// Continuous batching with chunked prefill, shared prefixes and preemption by swap or recomputation. Waiting
/// sequences are ordered by priority, service of their client, deadline and arrival, with bounded overtaking.
class Scheduler {
 public:
  /// All are borrowed and must outlive the scheduler. `tiers` are searched in order. More may be appended
  /// before the first sequence is added.
  Scheduler(cache::BlockPool& pool, cache::RadixTree& tree, const std::vector<cache::KvTier*>& tiers,
            const SchedulerOptions& options);
  ~Scheduler();

  /// Adds a sequence that is younger than all others and whose limit fits the whole pool.
  void Add(std::unique_ptr<Sequence> sequence);
  /// Removes a sequence that ends for any reason and applies its session hint to the tree. Its blocks are
  /// released: free, or idle in the tree. False: the id is unknown.
  bool Remove(RequestId id);
  std::vector<RequestId> PastDeadline(Clock::time_point now) const;

  /// Begins a step: blocks of fetches that have ended enter the tree, and tiers store blocks. Before Plan.
  void BeginStep();
  /// Handles a block whose contents are damaged: sequences that hold it are preempted, and all idle blocks
  /// are evicted.
  void OnDamage(int32_t block);
  /// Evicts all idle blocks. Tiers do not keep them.
  void ClearTree();
  bool fetching() const;  ///< Returns whether a sequence waits for a fetch.

  /// Plans a step. While sequences are in flight, they keep their blocks, nothing is preempted, and no fetch
  /// is cancelled: a decode that lacks blocks waits for these sequences. `most_rows` limits the rows of the
  /// step further than the options do, except for decodes.
  StepPlan Plan(int most_rows = std::numeric_limits<int>::max()) const;
  /// Carries the plan out. The batch computes its chunks, after all pending operations.
  StepBatch Commit(StepPlan& plan);
  /// Takes the pending operations and ended sequences, as a batch without rows.
  StepBatch TakePending();
  /// Records that the plan's chunks were computed, and their accepted drafts. Whole blocks of tokens enter
  /// the tree; rows after the computed tokens are written again.
  void Advance(const StepPlan& plan);

  bool empty() const { return running_.empty() && waiting_.empty(); }
  const std::vector<std::unique_ptr<Sequence>>& running() const { return running_; }
  const std::vector<std::unique_ptr<Sequence>>& waiting() const { return waiting_; }
  RequestId front() const { return front_; }  ///< The running sequence that advances in every step; 0: none.

 private:
  void Preempt(Sequence* victim);
  cache::SessionHint HintOf(const SessionNote& note) const;
  cache::TierQuery QueryOf(const Sequence& sequence, int indexed_blocks) const;
  void StartFetch(StepPlan::Fetch& fetch);
  std::vector<cache::BlockRef> WithFresh(std::vector<cache::BlockRef> blocks, int count,
                                         std::vector<int32_t>* taken);
  static void ReleaseBlocks(Sequence& sequence);
  void CancelFetch(Sequence& sequence);
  void MakeFree(int blocks);
  void Admit(StepPlan::Admission& admission);
  int FirstInexact(const Sequence& sequence, const cache::BlockRef& tail) const;
  void TakeBlocks(const StepPlan& plan);
  void Index(const Sequence& sequence, std::span<cache::BlockRef> blocks, int known);
  StepBatch BatchOf(const StepPlan& plan);
  void ChooseFront();
  void JoinClient(Sequence& sequence);
  void LeaveClient(Sequence& sequence);

  cache::BlockPool& pool_;
  cache::RadixTree& tree_;
  const SchedulerOptions options_;
  const std::vector<cache::KvTier*>& tiers_;
  bool discards_ = false;        // tiers do not keep blocks that are evicted now
  cache::KvOps ops_;             // to be applied before the next step's rows
  std::vector<uint64_t> ended_;  // sequences whose state executors release with the next step
  std::vector<std::unique_ptr<Sequence>> running_;  // by arrival
  std::vector<std::unique_ptr<Sequence>> waiting_;  // by arrival
  std::map<std::string, ClientShare> shares_;
  EventRate admissions_;
  RequestId front_ = 0;
};

}  // namespace moesaic::engine
