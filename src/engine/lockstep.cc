#include "engine/lockstep.h"

#include <algorithm>
#include <utility>

#include "models/pipeline_parts.h"

namespace moesaic::engine {
namespace {

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
  Status CheckPeers() override { return executor_->CheckPeers(); }
  void BindCaller() override { executor_->BindCaller(); }
  StatusOr<models::ExpertLoad> FetchExpertLoad() override { return executor_->FetchExpertLoad(); }
  Status BeginExpertMove(const models::ExpertMoveOrder& order) override {
    return executor_->BeginExpertMove(order);
  }
  Status DropExpertMove() override { return executor_->DropExpertMove(); }
  std::vector<models::ExpertMoveReport> move_reports() const override { return executor_->move_reports(); }
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
    const models::JointStep own = PartsOf(*replicas_[i].started, stages_, read_rows_);
    joint.parts = std::max(joint.parts, own.parts);
    joint.most_rows = std::max(joint.most_rows, own.most_rows);
  }
  return joint;
}

// Runs the batches with rows of the kind that `asking` has. Replica 0 computes in this thread: it starts last
// and ends first.
void Lockstep::RunJointly(size_t asking) {
  const StepKind kind = replicas_[asking].started->kind;
  std::vector<bool> computes(replicas_.size());
  for (size_t i = 0; i < replicas_.size(); ++i) {
    const StepBatch* batch = replicas_[i].started;
    computes[i] = batch != nullptr && batch->kind == kind && !batch->rows.empty();
  }
  ++steps_;
  const models::JointStep joint = Agree(computes);
  for (size_t i = replicas_.size(); i-- > 0;) {
    Replica& replica = replicas_[i];
    replica.batch = computes[i] ? *std::exchange(replica.started, nullptr) : StepBatch{.kind = kind};
    replica.batch.joint = joint;
    replica.executor->Start(replica.batch);
  }
  Status idle_failure;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    Replica& replica = replicas_[i];
    StatusOr<StepResult> result = replica.executor->Finish();
    if (!computes[i]) {
      if (idle_failure.ok()) idle_failure = result.status();
      continue;
    }
    replica.done = true;
    replica.status = result.status();
    if (result.ok()) replica.result = *std::move(result);
  }
  if (!idle_failure.ok()) replicas_[asking].status = std::move(idle_failure);
}

}  // namespace moesaic::engine
