// Decides what runs in the next step. A plan is made on a scratch copy of the pool's capacity and changes
// nothing; Commit then pays for it and cannot fail. docs/contracts/scheduler.md is the law.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache/kv_pool.h"
#include "cache/radix_tree.h"
#include "cache/swap_space.h"
#include "engine/cold_blocks.h"
#include "engine/event_rate.h"
#include "engine/parked_blocks.h"
#include "engine/sequence.h"
#include "engine/warm_blocks.h"

namespace moesaic::engine {

struct SchedulerOptions {
  int max_sequences = 0;
  int max_batch_tokens = 0;  // >= max_sequences
  int max_scored_rows = 0;   // rows of one step whose prompt logprobs are wanted; >= 1
  int max_overtakes = 64;    // younger requests that may be admitted before one that waits
  bool prefix_cache = true;
};

/// One step: who leaves, who enters, and how many tokens of whom are computed, in batch order. Holds the
/// cached blocks that it counts on; dropping it changes nothing. Valid until the scheduler changes.
struct StepPlan {
  struct Admission {
    Sequence* sequence;
    cache::PrefixMatch prefix;
    int tokens;  // that need not be computed: the prefix's, or more where the swap space has what follows
    bool first;  // it has not run before
  };
  struct Part {
    Sequence* sequence;
    int count;          // tokens from `computed` on, which an admission sets to what its prefix holds
    int new_blocks;     // to take for them and for the drafts
    int drafts = 0;     // the first of draft.tokens, computed behind a decode's token
    int accepted = 0;   // drafts that are right, once it is known: they stand in the sequence's tokens
    bool late = false;  // its mask is not ready: the last token is computed again in a later step
    /// Tokens that are computed after the step.
    int kept() const { return count + accepted - (late ? 1 : 0); }
    int rows() const { return count + drafts; }
    /// Once its drafts are accepted, until the sequence advances.
    bool is_decode() const { return count == 1 && sequence->remaining() == 1 + accepted; }
  };
  struct Load {
    Sequence* sequence;
    cache::PrefixMatch prefix;        // without a tail
    int blocks;                       // that follow it, to be read from disk
    bool lazy;                        // their digests only: it can be admitted in the next step
    bool more;                        // lazy: and further ones come then
    std::vector<int32_t> taken = {};  // by Commit: the blocks of the pool that they are read into
  };
  struct Promotion {
    Sequence* sequence;
    cache::PrefixMatch prefix;         // without a tail
    std::vector<cache::SwapRef> warm;  // blocks that follow it: the tree has them in the next step
    std::vector<int32_t> taken = {};   // by Commit: the blocks of the pool that they come back in
  };
  std::vector<Sequence*> abandon;     // whose loads end, the youngest first
  std::vector<Sequence*> preempt;     // the last in rank first
  std::vector<Admission> admit;       // in the order of admission
  std::vector<Load> loads;            // of sequences that wait on
  std::vector<Promotion> promotions;  // likewise
  std::vector<Part> parts;
};

/// Continuous batching with chunked prefill, shared prefixes and preemption by swap or recomputation. Who
/// waits goes by priority, then by what its client has had, deadline and arrival; nobody is overtaken for
/// ever.
class Scheduler {
 public:
  /// All are borrowed and must outlive the scheduler. `swap` may be null: whatever the tree does not keep is
  /// then computed again.
  Scheduler(cache::KvPool& pool, cache::RadixTree& tree, cache::SwapSpace* swap,
            const SchedulerOptions& options);
  ~Scheduler();

  /// Takes in a sequence that is younger than all others and that fits into the whole pool (limit).
  void Add(std::unique_ptr<Sequence> sequence);
  /// Takes a sequence out, whatever became of it, and tells the tree what its client said of the session;
  /// blocks that only it held are free when this returns, or idle in the tree. False when there is none of
  /// that id.
  bool Remove(RequestId id);
  std::vector<RequestId> PastDeadline(Clock::time_point now) const;

  /// Blocks on disk are loaded before a sequence is admitted, and what ends is stored. `cold` is borrowed and
  /// must outlive the scheduler.
  void SetCold(ColdBlocks* cold) { cold_ = cold; }
  /// Blocks that the tree lets go are kept in fewer bytes and come back before a sequence is admitted. `warm`
  /// is borrowed and must outlive the scheduler.
  void SetWarm(WarmBlocks* warm) { warm_ = warm; }
  /// Blocks of loads that have ended enter the tree. Before Plan.
  void TakeLoaded();
  /// A block is not what it should be: who holds it is preempted, and all that nobody holds is given up.
  void Damaged(int32_t block);
  /// The tree lets all idle blocks go, and none is kept elsewhere for that.
  void ClearTree();
  bool loading() const;  ///< whether a sequence waits for its load

  /// As ParkedBlocks has it; until then copying costs nothing.
  void SetSwapCosts(double copy_tokens, int64_t attention_tokens) {
    parked_.SetCosts(copy_tokens, attention_tokens);
  }

  StepPlan Plan() const;
  void Commit(StepPlan& plan);
  /// Says that the plan's parts have been computed, and which drafts were accepted: whole blocks of tokens
  /// enter the tree. What stands behind them in the blocks is written again.
  void Advance(const StepPlan& plan);

  bool empty() const { return running_.empty() && waiting_.empty(); }
  const std::vector<std::unique_ptr<Sequence>>& running() const { return running_; }
  const std::vector<std::unique_ptr<Sequence>>& waiting() const { return waiting_; }
  RequestId front() const { return front_; }  ///< of the running sequence that moves in every step; 0: none

 private:
  void Preempt(Sequence* victim);
  cache::SessionHint HintOf(const SessionNote& note) const;
  void StartLoad(StepPlan::Load& load);
  void Promote(StepPlan::Promotion& promotion);
  std::vector<cache::BlockRef> WithFresh(std::vector<cache::BlockRef> blocks, int count,
                                         std::vector<int32_t>* taken);
  int FirstLossy(const Sequence& sequence, const cache::BlockRef& tail) const;
  static void LetGo(Sequence& sequence);
  void AbandonLoad(Sequence& sequence);
  void MakeFree(int blocks);
  void Admit(StepPlan::Admission& admission);
  void TakeBlocks(const StepPlan& plan);
  void ChooseFront();
  void JoinClient(Sequence& sequence);
  void LeaveClient(Sequence& sequence);

  cache::KvPool& pool_;
  cache::RadixTree& tree_;
  const SchedulerOptions options_;
  ParkedBlocks parked_;
  ColdBlocks* cold_ = nullptr;
  WarmBlocks* warm_ = nullptr;
  std::vector<std::unique_ptr<Sequence>> running_;  // by arrival
  std::vector<std::unique_ptr<Sequence>> waiting_;  // by arrival
  std::map<std::string, ClientShare> shares_;
  EventRate admissions_;
  RequestId front_ = 0;
};

}  // namespace moesaic::engine
