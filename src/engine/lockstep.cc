#include "engine/lockstep.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "engine/rank_messages.h"
#include "models/pipeline_parts.h"
#include "parallel/job_wait.h"

namespace moesaic::engine {
namespace {

// Longest time from the death of a rank until the transport of every other one knows of it (N13), doubled.
constexpr double kDetectionSeconds = 10;

// Parts that the stages of a replica make of a batch (SplitForPipeline), and the rows of the largest.
models::JointStep PartsOf(const StepBatch& batch, int stages, double read_rows) {
  std::vector<kernels::SequenceSlice> sequences;
  for (const BatchRows& rows : batch.rows) {
    sequences.push_back(
        {.block_table = nullptr, .start = rows.start, .count = rows.count, .row = rows.first_token});
  }
  if (batch.kind == StepKind::kMtp) stages = 1;
  models::JointStep joint;
  for (const models::PipelinePart& part : models::SplitForPipeline(
           {.tokens = batch.tokens, .sequences = sequences, .logit_rows = {}, .divides = batch.divides},
           stages, read_rows)) {
    ++joint.parts;
    joint.most_rows = std::max(joint.most_rows, part.rows.count);
  }
  return joint;
}

}  // namespace

// The executor of one replica.
class Lockstep::Member : public Executor {
 public:
  Member(std::shared_ptr<Lockstep> lockstep, size_t replica, std::unique_ptr<Executor> executor)
      : lockstep_(std::move(lockstep)), replica_(replica), executor_(std::move(executor)) {}

  void Start(const StepBatch& batch) override { lockstep_->Start(replica_, batch); }
  StatusOr<StepResult> Finish() override { return lockstep_->Finish(replica_); }
  StatusOr<std::span<const float>> FetchLogits(std::span<const int32_t> rows) override {
    return executor_->FetchLogits(rows);
  }
  Status CheckPeers() override {
    return lockstep_->survives() ? lockstep_->CheckRanks() : executor_->CheckPeers();
  }
  void BindCaller() override { executor_->BindCaller(); }
  StatusOr<models::ExpertLoad> FetchExpertLoad() override { return executor_->FetchExpertLoad(); }
  Status BeginExpertMove(const models::ExpertMoveOrder& order) override {
    return executor_->BeginExpertMove(order);
  }
  Status DropExpertMove() override { return executor_->DropExpertMove(); }
  std::vector<models::ExpertMoveReport> move_reports() const override { return executor_->move_reports(); }
  bool lost() const override { return executor_->lost(); }
  std::vector<RankStats> ranks() const override { return executor_->ranks(); }

 private:
  const std::shared_ptr<Lockstep> lockstep_;
  const size_t replica_;
  const std::unique_ptr<Executor> executor_;
};

std::unique_ptr<Executor> Lockstep::Add(const std::shared_ptr<Lockstep>& lockstep,
                                        std::unique_ptr<Executor> replica) {
  Replica& added = lockstep->replicas_.emplace_back();
  added.executor = replica.get();
  return std::make_unique<Member>(lockstep, lockstep->replicas_.size() - 1, std::move(replica));
}

void Lockstep::Start(size_t replica, const StepBatch& batch) {
  replicas_[replica].started = &batch;
  replicas_[replica].done = false;
}

// A batch without rows concerns its replica alone. Drafts of an MTP module are computed while batches of
// other replicas wait to be run, and do not run them.
StatusOr<StepResult> Lockstep::Finish(size_t replica) {
  Replica& own = replicas_[replica];
  if (!own.done) {
    if (own.started->rows.empty()) return own.executor->Run(*std::exchange(own.started, nullptr));
    RunJointly(replica);
  }
  own.done = false;
  RETURN_IF_ERROR(std::exchange(own.status, OkStatus()));
  return std::move(own.result);
}

models::JointStep Lockstep::Agree(const std::vector<bool>& computes) const {
  models::JointStep joint = {.number = steps_, .move = move_};
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (!computes[i]) continue;
    const models::JointStep own = PartsOf(replicas_[i].batch, stages_, read_rows_);
    joint.parts = std::max(joint.parts, own.parts);
    joint.most_rows = std::max(joint.most_rows, own.most_rows);
  }
  return joint;
}

// Runs the batches with rows of the kind that `asking` has.
void Lockstep::RunJointly(size_t asking) {
  const StepKind kind = replicas_[asking].started->kind;
  const Status checked = survives() ? ExcludeFailed() : OkStatus();
  std::vector<bool> computes(replicas_.size());
  for (size_t i = 0; i < replicas_.size(); ++i) {
    Replica& replica = replicas_[i];
    const StepBatch* batch = replica.started;
    const bool wanted = batch != nullptr && batch->kind == kind && !batch->rows.empty();
    if (!wanted) continue;
    replica.batch = *std::exchange(replica.started, nullptr);
    replica.done = true;
    replica.status = replica.excluded ? Lost(replica) : checked;
    computes[i] = replica.status.ok();
  }
  while (std::ranges::find(computes, true) != computes.end()) {
    Status idle_failure;
    const Status failure = RunOnce(kind, computes, &idle_failure);
    if (failure.ok()) return;
    if (!survives() || !IsOfPeer(failure) || !FindFailed(failure)) {
      if (!idle_failure.ok()) replicas_[asking].status = std::move(idle_failure);
      return;
    }
    for (size_t i = 0; i < replicas_.size(); ++i) {
      if (computes[i] && replicas_[i].excluded) replicas_[i].status = Lost(replicas_[i]);
      computes[i] = computes[i] && !replicas_[i].excluded;
    }
    if (!MustRepeat(computes)) return;
    // The operations before the rows stay applied, and so do those after the rows where the step succeeded.
    for (Replica& replica : replicas_) {
      replica.batch.ops_before.clear();
      replica.batch.ended.clear();
      if (replica.status.ok()) replica.batch.ops_after.clear();
    }
  }
}

// Runs a joint step, and returns the first error of a replica. `idle_failure` is set to that of one without
// rows. Replica 0 computes in this thread: it starts last and ends first.
Status Lockstep::RunOnce(StepKind kind, const std::vector<bool>& computes, Status* idle_failure) {
  ++steps_;
  const models::JointStep joint = Agree(computes);
  for (size_t i = replicas_.size(); i-- > 0;) {
    Replica& replica = replicas_[i];
    if (replica.excluded) continue;
    if (!computes[i]) replica.batch = StepBatch{.kind = kind};
    replica.batch.joint = joint;
    replica.executor->Start(replica.batch);
  }
  Status failure;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    Replica& replica = replicas_[i];
    if (replica.excluded) continue;
    // The replies of ranks that the driver has waited for in vain would not come, either.
    if (survives() && HasFailed(i, failure)) {
      replica.executor->Lose(absl::UnavailableError(fmt::format("rank {} failed", i)));
    }
    StatusOr<StepResult> result = replica.executor->Finish();
    if (failure.ok()) failure = result.status();
    if (!computes[i]) {
      if (idle_failure->ok()) *idle_failure = result.status();
      continue;
    }
    replica.status = result.status();
    if (result.ok()) replica.result = *std::move(result);
  }
  return failure;
}

Status Lockstep::Lost(const Replica& replica) {
  return absl::UnavailableError(fmt::format("the request ran on a rank that failed: {}", replica.reason));
}

// Whether a replica that computes has no result. Those of replicas that only took part are not needed.
bool Lockstep::MustRepeat(const std::vector<bool>& computes) const {
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (computes[i] && !replicas_[i].status.ok()) return true;
  }
  return false;
}

// After the time limit of a step, the ranks that SilentRanks() returns have failed, too.
bool Lockstep::HasFailed(size_t replica, const Status& failure) const {
  const int rank = static_cast<int>(replica);
  if (rank == survival_.job->rank() || replicas_[replica].excluded) return false;
  return survival_.job->failed(rank) || replicas_[replica].executor->lost() ||
         (failure.code() == StatusCode::kDeadlineExceeded &&
          std::ranges::binary_search(parallel::SilentRanks(*survival_.job, excluded_), rank));
}

Status Lockstep::CheckRanks() {
  constexpr int kPolls = 128;  // transports read clocks once per some polls
  for (int poll = 0; poll < kPolls; ++poll) survival_.job->Progress();
  return ExcludeFailed();
}

Status Lockstep::ExcludeFailed() {
  std::vector<int> failed;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (HasFailed(i, OkStatus())) failed.push_back(static_cast<int>(i));
  }
  return failed.empty() ? OkStatus() : Exclude(failed, OkStatus());
}

// Continues without the ranks that caused `failure` of a step. Another rank may have learned of a death
// before this one. False: no other rank has failed, or the job can't continue.
bool Lockstep::FindFailed(const Status& failure) {
  comm::Transport& job = *survival_.job;
  const double end = job.Now() + kDetectionSeconds;
  std::vector<int> failed;
  for (;;) {
    for (size_t i = 0; i < replicas_.size(); ++i) {
      if (HasFailed(i, failure)) failed.push_back(static_cast<int>(i));
    }
    if (!failed.empty() || job.Now() >= end) break;
    job.Progress();
    job.Idle();
  }
  if (failed.empty()) return false;
  const Status excluded = Exclude(failed, failure);
  if (!excluded.ok()) spdlog::error("{}", Message(excluded));
  return excluded.ok();
}

// Has all other ranks continue without `ranks`. Each of them reads the command after the step that failed,
// and before the next one.
Status Lockstep::Exclude(const std::vector<int>& ranks, const Status& failure) {
  for (const int rank : ranks) {
    Replica& replica = replicas_[rank];
    replica.excluded = true;
    replica.reason = survival_.job->failed(rank) && survival_.job->SilentSeconds(rank) == 0
                         ? fmt::format("rank {} died", rank)
                         : fmt::format("rank {} did not answer for {} s", rank, survival_.time_limit_s);
    spdlog::error("{}; the job continues without it", replica.reason);
    replica.executor->Lose(Lost(replica));
    failures_.push_back(replica.reason);
    excluded_.push_back(rank);
    if (survival_.on_excluded) survival_.on_excluded(rank);
  }
  if (!failure.ok()) spdlog::info("the step that is repeated failed: {}", Message(failure));
  std::ranges::sort(excluded_);
  Status first;
  for (size_t i = replicas_.size(); i-- > 0;) {
    Replica& replica = replicas_[i];
    if (replica.excluded) continue;
    const Status status = replica.executor->ExcludeRanks(excluded_);
    // A rank that died meanwhile is found before the next step.
    if (!status.ok() && !replica.executor->lost() && first.ok()) first = status;
  }
  return first;
}

}  // namespace moesaic::engine
