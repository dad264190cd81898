// The executor of a replica of a model on several ranks. The driver, rank 0 of the job, has the engine; it
// sends each batch to the replica's other ranks, which run it on their layers, heads and experts.
// docs/contracts/executors.md is normative.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/kv_store.h"
#include "comm/transport/transport.h"
#include "engine/executor.h"
#include "engine/expert_load.h"
#include "engine/local_executor.h"
#include "engine/rank_messages.h"
#include "engine/rank_reply.h"
#include "engine/sparsity.h"
#include "parallel/counted_transport.h"
#include "parallel/layout.h"

namespace moesaic::engine {

/// Settings of the driver's cache that all ranks have in common.
struct RankSetup {
  tensor::DType dtype{};
  bool key_summaries = false;
  KeySummaryKind summary_kind{};
  int blocks = 0, swap_slots = 0, warm_slots = 0;
  bool warm_exact = false;
  int first_sparse_layer = 0;
  int in_flight = 1;  // batches that may have started and not finished
};

/// Executor of the driver (rank 0). After a rank fails, every later Finish returns the same error. If the
/// layout tolerates failures, Finish keeps failing only when this replica's own rank is unreachable: a rank
/// that reports an error waits for the next batch.
class RankedExecutor : public Executor {
 public:
  /// Has the replica's other ranks create their caches, and waits for them. `local` runs the driver's part of
  /// replica 0; null: another replica, all of whose ranks are remote. All are borrowed. `check` is that of
  /// EngineOptions.
  static StatusOr<std::unique_ptr<RankedExecutor>> Create(
      std::unique_ptr<LocalExecutor> local, runtime::ThreadPool& threads, const models::ModelInfo& info,
      comm::Transport& job, const parallel::Layout& layout, const RankSetup& setup, double time_limit_s,
      int replica = 0, const std::function<Status()>& check = {});
  /// Ends the RunRank() of the replica's other ranks.
  ~RankedExecutor() override;

  void Start(const StepBatch& batch) override;
  StatusOr<StepResult> Finish() override;
  /// One for each pipeline stage.
  int max_in_flight() const override { return layout_.degrees().pipeline; }
  StatusOr<std::span<const float>> FetchLogits(std::span<const int32_t> rows) override;
  Status CheckPeers() override;
  StatusOr<models::ExpertLoad> FetchExpertLoad() override;
  Status BeginExpertMove(const models::ExpertMoveOrder& order) override;
  Status DropExpertMove() override;
  std::vector<models::ExpertMoveReport> move_reports() const override { return moves_; }
  Status ExcludeRanks(std::span<const int> ranks) override;
  void Lose(const Status& why) override;
  bool lost() const override { return !failure_.ok(); }
  std::vector<RankStats> ranks() const override { return totals_; }
  void BindCaller() override {
    if (local_ != nullptr) local_->BindCaller();
  }

 private:
  // The part of the results that a rank computes.
  struct Peer {
    int rank = 0;
    parallel::Range vocab;        // columns of the head; empty: none
    bool returns_hidden = false;  // first shard of the last stage
    bool counts_experts = false;  // first shard of its stage
  };
  RankedExecutor(std::unique_ptr<LocalExecutor> local, runtime::ThreadPool& threads,
                 const models::ModelInfo& info, comm::Transport& job, const parallel::Layout& layout,
                 double time_limit_s, int replica);
  // A batch that has started.
  struct Started {
    const StepBatch* batch = nullptr;
    std::vector<ExpectedMessage> replies = {};  // [peers_]
    StepResult own = {};                        // of this process
    Status status = {};                         // of this process
    SliceSummaries slices = {};                 // of its part of the head
  };
  Status SetUp(RankSetup setup, const std::function<Status()>& check);
  Status StartOnAll(Started& started);
  StatusOr<StepResult> RunHere(const StepBatch& batch);
  StatusOr<StepResult> FinishOnAll(Started& started);
  Status Collect(const Peer& peer, ExpectedMessage& expected, const StepBatch& batch, StepResult* result);
  StatusOr<std::span<const float>> FetchFromAll(std::span<const int32_t> rows);
  StatusOr<models::ExpertLoad> FetchLoadOfAll();
  Status Fail(const Status& status);
  bool IsReported() const;
  void Place(std::span<const float> part, parallel::Range vocab);

  const std::unique_ptr<LocalExecutor> local_;
  runtime::ThreadPool& threads_;
  const models::ModelInfo& info_;
  parallel::CountedTransport job_;
  const parallel::Layout layout_;
  const double time_limit_s_;
  std::vector<int> remote_;          // ranks of the replica without the driver
  const parallel::Range own_vocab_;  // columns of the driver's head; empty: none
  std::vector<Peer> peers_;
  MessageSender commands_;
  std::deque<Started> started_;  // batches without results, the oldest first
  std::vector<float> logits_, part_, hidden_;
  std::vector<SliceSummaries> slices_;           // of the ranks that have part of the head
  std::vector<parallel::Range> columns_;         // of slices_
  std::vector<RowSummary> summaries_;            // of the last batch
  std::vector<models::ExpertMoveReport> moves_;  // of the ranks, after the last batch
  std::vector<RankStats> work_, totals_;         // [driver and ranks of the replica] of one step, and of all
  int64_t counted_bytes_ = 0;                    // of the driver's own messages
  bool reported_ = false;                        // the rank replied to the last batch with an error
  Status failure_;
  bool has_sent_end_ = false;  // by Lose()
};

/// A rank whose step failed by another rank leaves the end of the job to the driver, which then names that
/// other rank. It waits so many seconds longer than the time limit, so that a server's clients can read their
/// errors meanwhile.
inline constexpr int kEndSeconds = 120;

/// Runs the driver's batches on this rank until the driver ends the job. Returns the error of the rank or of
/// its peers. `local_ranks` ranks share the memory of this machine.
Status RunRank(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
               comm::Transport& job, const parallel::Layout& layout, double time_limit_s = 60,
               int local_ranks = 1);

}  // namespace moesaic::engine
