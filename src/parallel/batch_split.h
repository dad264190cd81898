// Exact split of the tokens of one batch over the replicas of their experts. All ranks of a group compute the
// same split from the same counts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "comm/exchange/expert_map.h"
#include "comm/transport/group_transport.h"
#include "parallel/batch_split_options.h"
#include "parallel/placement/spill.h"
#include "parallel/placement/token_split.h"
#include "runtime/memory.h"

namespace moesaic::parallel {

/// Split of one layer of a batch.
struct BatchPlan {
  std::vector<SpillMove> spilled = {};            ///< experts that get a temporary replica
  LayerPlacement experts = {};                    ///< of each rank, the temporary ones last
  std::vector<std::vector<int64_t>> tokens = {};  ///< of each slot of `experts`
  int64_t busiest = 0, all = 0;                   ///< tokens of the busiest rank, and of all
  double slowest = 0;                             ///< largest number of tokens of a rank over its speed
};

/// Splits `tokens` [experts] over the replicas of `layer`. `speeds` are those of ranks, or empty. Dead ranks
/// hold no experts in `layer` and have speed kDeadSpeed. Deterministic. Experts without replica must have no
/// tokens.
BatchPlan PlanBatch(const LayerPlacement& layer, TokenSplit& split, std::span<const int64_t> tokens,
                    std::span<const double> speeds);
inline constexpr double kDeadSpeed = 1e-12;

/// Returns a plan with temporary replicas whose slowest rank is faster than that of `plan`, the result of
/// PlanBatch() with the same arguments; null: there is none within the limits of `spill`.
std::optional<BatchPlan> SpillBatch(const BatchPlan& plan, const LayerPlacement& layer, TokenSplit split,
                                    std::span<const int64_t> tokens, std::span<const double> speeds,
                                    const SpillOptions& spill);

/// Divides the tokens that one rank has of an expert over its replicas: [replicas]. `tokens` [replicas] are
/// those of all ranks, `holders` the replicas' ranks, and `counts` [ranks] the tokens of each rank, with
/// equal sums. Tokens stay on their own rank as far as the split allows.
std::vector<int64_t> OwnTokens(std::span<const int64_t> tokens, std::span<const int> holders,
                               std::span<const int64_t> counts, int rank);

/// Work of a rank's splits. All numbers are totals.
struct BatchSplitStats {
  int64_t splits = 0;           ///< layers of batches that were split exactly
  double seconds = 0;           ///< spent in exchanging counts and computing splits
  int64_t busiest_rows = 0;     ///< sum over splits of the busiest rank's rows
  double mean_rows = 0;         ///< sum over splits of the mean rows of a rank
  int64_t spilled = 0;          ///< temporary replicas that this rank received for a batch with known counts
  int64_t spilled_bytes = 0;    ///< weights that this rank sent, prefetched ones included
  int64_t prefetched = 0;       ///< temporary replicas that this rank received ahead of the batch's counts
  int64_t prefetched_used = 0;  ///< those of them that got tokens
};

/// One rank's side of the split. All ranks call Split() for the same layers in the same order. One thread.
class BatchSplit {
 public:
  /// Borrows both transports. `ranks` has the ranks of the expert group.
  BatchSplit(comm::Transport& job, comm::GroupTransport& ranks, int experts, double time_limit_s,
             const BatchSplitOptions& options);
  ~BatchSplit();  ///< Cancels transfers in flight.
  BatchSplit(const BatchSplit&) = delete;
  BatchSplit& operator=(const BatchSplit&) = delete;

  /// Continues without the dead ranks of the group [ranks]. All other ranks call it between the same splits.
  void SetDead(const std::vector<bool>& dead);

  /// Experts of a layer on living ranks.
  struct Layer {
    LayerPlacement experts;
    std::vector<double> speeds;  // [ranks]; those of dead ranks are kDeadSpeed
    TokenSplit split;
    // Set by Split(), for Prefetch(), and equal on all ranks except the address:
    std::vector<double> recent = {};     // [experts] tokens; each batch counts twice as much as the last one
    int64_t bytes = 0;                   // of an expert; 0: the ranks can't send weights
    const std::byte* weights = nullptr;  // of this rank's experts
  };
  /// Weights of this rank's experts of the layer. An expert has `bytes` bytes, a multiple of 64; 0: they
  /// can't be sent.
  struct Weights {
    const std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  struct Choice {
    std::shared_ptr<const comm::ExpertMap> map;  ///< with temporary replicas; null: there are none
    std::span<const int32_t> replicas;           ///< of each id, as comm::TopK has them
  };
  /// Exchanges the counts of `ids`, and begins to send weights of temporary replicas. `own` is borrowed until
  /// AwaitSpilled() has returned, and by Prefetch() of the layer. `row_seconds` is the time that this rank's
  /// experts take for a row; 0: unknown.
  StatusOr<Choice> Split(Layer& layer, const comm::ExpertMap& map, std::span<const int32_t> ids,
                         const Weights& own, double row_seconds);
  /// Waits for the weights of this rank's temporary replicas, which follow each other in memory, and until
  /// its own ones have been sent: a rank that computes does not advance transfers. Null: none are received.
  StatusOr<const std::byte*> AwaitSpilled();

  /// Begins to fetch weights for the next Split(), which is one of `next`: of the experts that a batch like
  /// the recent ones of that layer would spill. They travel while the ranks compute, so that they may take as
  /// long as that without saving as much. Called after AwaitSpilled(), by all ranks alike.
  Status Prefetch(Layer& next);
  /// Waits for prefetched weights and discards them. All ranks call it between the same splits, before the
  /// experts or weights of the layer change.
  Status DropPrefetched();

  const BatchSplitStats& stats() const { return stats_; }

 private:
  Status GatherCounts();
  // Weights on their way, and where they are stored.
  struct Transfers {
    std::vector<comm::TransferId> sends = {}, receives = {};
  };
  struct SpillSource {
    const Layer& layer;
    comm::Tag tag;
    int buffer;
  };
  Status StartTransfers(std::span<const SpillMove> moves, const SpillSource& source, int64_t first_slot,
                        Transfers& transfers);
  Status WaitAll(std::vector<comm::TransferId>& transfers);
  void Cancel(std::vector<comm::TransferId>& transfers);
  void CancelAll();
  std::vector<SpillMove> TakePrefetched();
  BatchPlan PlanHere(Layer& layer, std::span<const SpillMove> prefetched);
  void CountUsed(const BatchPlan& plan, const Layer& layer, int64_t prefetched_here);
  void Remember(Layer& layer, const Weights& own) const;
  void Choose(const BatchPlan& plan, const comm::ExpertMap& map, std::span<const int32_t> ids);
  int64_t SpilledBytes() const;
  // Input of a plan of temporary replicas.
  struct SpillInput {
    const Layer& layer;
    const TokenSplit& split;                     // of the plan, with prefetched replicas
    std::span<const int64_t> tokens;             // [experts]
    std::span<const SpillMove> prefetched = {};  // part of the plan
    double hidden_s = 0;                         // time of transfers that costs nothing
  };
  std::optional<BatchPlan> PlanSpilled(const BatchPlan& plan, const SpillInput& input) const;
  std::vector<double> RowSeconds() const;
  double EvenRows(const BatchPlan& plan) const;
  comm::Tag TagOf(comm::Tag first) const { return first | (epoch_ & 0xfffU) << 12 | (number_ & 0xfffU); }
  const int32_t* CountsOf(int rank) const { return counts_.data() + static_cast<size_t>(rank) * words_; }

  comm::Transport& job_;
  comm::GroupTransport& ranks_;
  const int experts_, words_;  // of a rank's message
  const double time_limit_s_;
  const BatchSplitOptions options_;
  std::vector<bool> dead_;       // [ranks]
  std::vector<int32_t> counts_;  // [ranks, words_]
  std::vector<int64_t> totals_;  // [experts]
  std::vector<int32_t> replicas_;
  std::vector<std::vector<int64_t>> own_;  // [experts][replicas] tokens of this rank that are not sent yet
  uint32_t epoch_ = 0, number_ = 0;
  std::vector<comm::TransferId> transfers_;  // of counts
  Transfers spilling_, prefetching_;
  runtime::Buffer spilled_[kSpillBuffers];  // weights of temporary replicas, the prefetched ones first
  int buffer_ = 0;                          // the one of the current batch; prefetches use the other one
  int64_t spilled_here_ = 0;                // temporary replicas in it
  const Layer* prefetched_for_ = nullptr;   // layer of the next split; null: nothing is prefetched
  std::vector<SpillMove> prefetched_;       // of all ranks
  double computing_s_ = 0;                  // expected time of the current layer's experts
  BatchSplitStats stats_;
};

}  // namespace moesaic::parallel
