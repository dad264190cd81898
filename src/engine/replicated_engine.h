// The engine of a model with data parallel replicas: one continuous engine for each, which one thread steps
// together. docs/contracts/executors.md, X21 to X26, is normative.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/continuous_engine.h"
#include "engine/engine.h"

namespace moesaic::engine {

/// Each replica has its own scheduler, KV blocks and prefix tree. Replica 0 computes in this process.
class ReplicatedEngine : public Engine {
 public:
  /// `replicas` are at least one, created with `options`. `link_levels` are those of EngineStats.
  ReplicatedEngine(std::vector<std::unique_ptr<ContinuousEngine>> replicas, const EngineOptions& options,
                   std::vector<std::string> link_levels = {});
  ~ReplicatedEngine() override;
  /// Moves experts between the ranks of these replicas, whose loads are recorded.
  void SetBalancer(std::unique_ptr<ExpertBalancer> balancer) { balancer_ = std::move(balancer); }
  /// Continues without replicas that `lockstep` excludes: their requests end with an error. `model` is the
  /// driver's part of the model; borrowed.
  void Tolerate(std::shared_ptr<Lockstep> lockstep, const models::Model& model);

  void BindCaller() override { first().BindCaller(); }
  /// A request is accepted if a replica accepts it: ranks may have caches of different sizes. Replicas that
  /// have failed count, since any thread may call; Add returns the error if only they accept it.
  Status Check(const Request& request) const override;
  /// Adds the request to the replica with the least work, of those that accept it and whose cache cuts the
  /// answer least. Work is the tokens to be computed, those of its other requests and those of this prompt
  /// that are not in its prefix tree, and the tokens for which its KV cache then lacks blocks. Of equal
  /// replicas, the first is chosen.
  StatusOr<RequestId> Add(Request request) override;
  void Cancel(RequestId id) override;
  /// Starts the step of every replica before it waits for any. Chunks of prompts are limited so that no
  /// replica makes the others wait (EvenLimits). If a replica fails, the others still end their steps, and
  /// the first error is returned.
  Status Step(std::vector<TokenEvent>* events) override;
  Status CheckRanks() override;  // checks the ranks of all replicas
  void ClearCache() override;
  bool saving() const override;
  void SaveCache(const std::function<bool()>& stop) override;
  bool idle() const override;
  /// Sums over the replicas. Seconds are those of common steps.
  EngineStats stats() const override;
  std::shared_ptr<const SurvivalStats> survival() const override { return survival_; }
  const models::ModelInfo& model() const override { return first().model(); }
  int max_context() const override;
  const SpeculativeOptions& speculative() const override { return first().speculative(); }
  const SparsityOptions& sparsity() const override { return first().sparsity(); }
  /// Replica 0 computes all rows.
  Status Score(std::span<const int32_t> ids,
               const std::function<Status(int64_t first_row, std::span<const float> rows)>& sink,
               models::RouteTap* routes) override;

 private:
  ContinuousEngine& first() const { return *replicas_.front(); }
  StatusOr<size_t> ReplicaFor(const Request& request) const;
  void EvenOut();
  Status RecordLoad();
  Status FollowLoad();
  void FollowRankLoads();
  std::vector<RankStats> Ranks() const;
  void CountTime(std::span<const StepSeconds> before);
  bool is_excluded(size_t replica) const { return lockstep_ != nullptr && lockstep_->is_excluded(replica); }
  bool FailedOf(size_t replica);
  bool FailuresToFollow() const;
  void FollowFailures(std::vector<TokenEvent>* events);
  void UpdateSurvival();

  const std::vector<std::unique_ptr<ContinuousEngine>> replicas_;
  const int max_batch_tokens_;
  const std::vector<std::string> link_levels_;
  absl::flat_hash_map<RequestId, size_t> replica_of_;  // of the requests that have not ended
  RequestId last_id_ = 0;
  StepSeconds seconds_;
  const parallel::Layout layout_;
  std::shared_ptr<const RankLoads> rank_loads_;             // null: none yet
  std::shared_ptr<const ExpertLoadStats> rank_loads_from_;  // the loads of rank_loads_
  uint64_t rank_loads_epoch_ = 0;                           // of the placement
  std::unique_ptr<ExpertLoadRecorder> load_;                // null: not recorded
  std::unique_ptr<ExpertBalancer> balancer_;                // null: experts stay
  std::vector<models::ExpertLoad> last_load_;               // [replicas] as last fetched
  // Null: a failed rank ends the job.
  std::shared_ptr<Lockstep> lockstep_;
  const models::Model* model_ = nullptr;
  size_t followed_ = 0;                            // ranks whose failure has been followed
  std::shared_ptr<const SurvivalStats> survival_;  // replaced when it changes
};

}  // namespace moesaic::engine
