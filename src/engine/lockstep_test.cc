#include "engine/lockstep.h"

#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/transport/local_transport.h"

namespace moesaic::engine {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

/// Records its calls, "start 1: 3 rows of step 5", in a list that all executors share.
class RecordingExecutor : public Executor {
 public:
  RecordingExecutor(int replica, std::vector<std::string>* calls) : replica_(replica), calls_(calls) {}
  void Start(const StepBatch& batch) override {
    calls_->push_back(fmt::format("start {}: {} rows of step {}, {} parts of {}", replica_,
                                  batch.tokens.size(), batch.joint.number, batch.joint.parts,
                                  batch.joint.most_rows));
    rows_ = static_cast<int64_t>(batch.tokens.size());
    ops.push_back(fmt::format("{} before, {} after", batch.ops_before.size(), batch.ops_after.size()));
  }
  StatusOr<StepResult> Finish() override {
    calls_->push_back(fmt::format("finish {}", replica_));
    if (on_finish) on_finish();
    RETURN_IF_ERROR(std::exchange(failure, OkStatus()));
    StepResult result;
    result.experts_read = rows_;
    return result;
  }
  StatusOr<std::span<const float>> FetchLogits(std::span<const int32_t>) override {
    return std::span<const float>();
  }

  Status ExcludeRanks(std::span<const int> ranks) override {
    calls_->push_back(fmt::format("{} continues without {}", replica_, fmt::join(ranks, ", ")));
    return OkStatus();
  }
  void Lose(const Status&) override { failure = absl::UnavailableError("lost"); }

  Status failure;
  std::function<void()> on_finish;
  std::vector<std::string> ops;  // of the batches

 private:
  const int replica_;
  std::vector<std::string>* const calls_;
  int64_t rows_ = 0;
};

StepBatch BatchOf(int rows, StepKind kind = StepKind::kDecoder) {
  StepBatch batch{.kind = kind};
  const std::vector<int32_t> tokens(rows, 1), table(16, 0);
  if (rows > 0) batch.AddRows({.first_logits = 0}, tokens, {}, table);
  return batch;
}

class LockstepTest : public testing::Test {
 protected:
  void Make(int replicas, int stages = 1, Survival survival = {}) {
    const auto lockstep = std::make_shared<Lockstep>(stages, /*read_rows=*/1, std::move(survival));
    for (int i = 0; i < replicas; ++i) {
      auto recording = std::make_unique<RecordingExecutor>(i, &calls_);
      recording_.push_back(recording.get());
      executors_.push_back(Lockstep::Add(lockstep, std::move(recording)));
    }
  }
  std::vector<std::string> TakeCalls() { return std::exchange(calls_, {}); }

  std::vector<std::string> calls_;
  std::vector<RecordingExecutor*> recording_;
  std::vector<std::unique_ptr<Executor>> executors_;
};

TEST_F(LockstepTest, BatchesOfAllReplicasFormOneStep) {
  Make(2);
  const StepBatch a = BatchOf(3), b = BatchOf(7);
  executors_[1]->Start(b);
  executors_[0]->Start(a);
  EXPECT_THAT(TakeCalls(), IsEmpty());
  EXPECT_EQ(executors_[0]->Finish()->experts_read, 3);
  EXPECT_THAT(TakeCalls(), ElementsAre("start 1: 7 rows of step 1, 1 parts of 7",
                                       "start 0: 3 rows of step 1, 1 parts of 7", "finish 0", "finish 1"));
  EXPECT_EQ(executors_[1]->Finish()->experts_read, 7);
  EXPECT_THAT(TakeCalls(), IsEmpty());
}

TEST_F(LockstepTest, ReplicasWithoutRowsRunAnEmptyBatch) {
  Make(3);
  const StepBatch batch = BatchOf(5);
  for (int step = 1; step <= 2; ++step) {
    ASSERT_TRUE(executors_[1]->Run(batch).ok());
    const std::string joint = fmt::format(" rows of step {}, 1 parts of 5", step);
    EXPECT_THAT(TakeCalls(), ElementsAre("start 2: 0" + joint, "start 1: 5" + joint, "start 0: 0" + joint,
                                         "finish 0", "finish 1", "finish 2"));
  }
}

TEST_F(LockstepTest, ABatchWithoutRowsRunsOnItsReplicaAlone) {
  Make(2);
  const StepBatch moves = BatchOf(0), rows = BatchOf(2);
  executors_[1]->Start(rows);
  executors_[0]->Start(moves);
  ASSERT_TRUE(executors_[0]->Finish().ok());
  EXPECT_THAT(TakeCalls(), ElementsAre("start 0: 0 rows of step 0, 0 parts of 0", "finish 0"));
  EXPECT_EQ(executors_[1]->Finish()->experts_read, 2);
  EXPECT_THAT(TakeCalls(), ElementsAre("start 1: 2 rows of step 1, 1 parts of 2",
                                       "start 0: 0 rows of step 1, 1 parts of 2", "finish 0", "finish 1"));
}

TEST_F(LockstepTest, DraftsDoNotRunTheBatchesThatWait) {
  Make(2);
  const StepBatch rows = BatchOf(2), draft = BatchOf(1, StepKind::kMtp);
  executors_[1]->Start(rows);
  ASSERT_TRUE(executors_[0]->Run(draft).ok());
  EXPECT_THAT(TakeCalls(), ElementsAre("start 1: 0 rows of step 1, 1 parts of 1",
                                       "start 0: 1 rows of step 1, 1 parts of 1", "finish 0", "finish 1"));
  EXPECT_EQ(executors_[1]->Finish()->experts_read, 2);
}

TEST_F(LockstepTest, TheReplicaWithTheMostRowsDeterminesTheParts) {
  Make(2, /*stages=*/2);
  const StepBatch chunk = BatchOf(130), decode = BatchOf(1);
  executors_[1]->Start(decode);
  executors_[0]->Start(chunk);
  ASSERT_TRUE(executors_[0]->Finish().ok());
  EXPECT_EQ(TakeCalls().front(), "start 1: 1 rows of step 1, 4 parts of 33");
}

TEST_F(LockstepTest, AFailureOfAnIdleReplicaFailsTheStep) {
  Make(2);
  recording_[1]->failure = absl::UnavailableError("rank 1 died");
  EXPECT_EQ(Message(executors_[0]->Run(BatchOf(1)).status()), "rank 1 died");
  EXPECT_TRUE(executors_[0]->Run(BatchOf(1)).ok());
}

// Rank 2 dies in a step that rank 1 can't end without it. Operations that were applied are not repeated.
TEST_F(LockstepTest, AStepIsRepeatedWithoutARankThatDied) {
  comm::LocalJob job(3);
  std::vector<int> excluded;
  Make(3, 1, {.job = &job.end(0), .on_excluded = [&](int rank) { excluded.push_back(rank); }});
  StepBatch a = BatchOf(3), b = BatchOf(2);
  const StepBatch c = BatchOf(1);
  a.ops_before = b.ops_before = {{.kind = cache::KvOpKind::kCopy}};
  a.ops_after = b.ops_after = a.ops_before;
  for (int i = 2; i >= 0; --i) executors_[i]->Start(i == 0 ? a : i == 1 ? b : c);
  recording_[1]->failure = absl::UnavailableError("rank 2 died");
  recording_[1]->on_finish = [&] { job.Kill(2); };
  EXPECT_EQ(executors_[0]->Finish()->experts_read, 3);
  EXPECT_EQ(executors_[1]->Finish()->experts_read, 2);
  EXPECT_EQ(Message(executors_[2]->Finish().status()), "the request ran on a rank that failed: rank 2 died");
  EXPECT_THAT(
      TakeCalls(),
      ElementsAre("start 2: 1 rows of step 1, 1 parts of 3", "start 1: 2 rows of step 1, 1 parts of 3",
                  "start 0: 3 rows of step 1, 1 parts of 3", "finish 0", "finish 1", "finish 2",
                  "1 continues without 2", "0 continues without 2", "start 1: 2 rows of step 2, 1 parts of 3",
                  "start 0: 3 rows of step 2, 1 parts of 3", "finish 0", "finish 1"));
  EXPECT_EQ(excluded, std::vector<int>{2});
  EXPECT_THAT(recording_[0]->ops, ElementsAre("1 before, 1 after", "0 before, 0 after"));
  EXPECT_THAT(recording_[1]->ops, ElementsAre("1 before, 1 after", "0 before, 1 after"));
  // The next step runs on the other ranks.
  executors_[0]->Start(c);
  EXPECT_TRUE(executors_[0]->Finish().ok());
  EXPECT_EQ(TakeCalls().size(), 4U);
}

TEST_F(LockstepTest, AFailureWithoutADeadRankEndsTheJob) {
  comm::LocalJob job(2);
  Make(2, 1, {.job = &job.end(0)});
  const StepBatch a = BatchOf(3);
  executors_[0]->Start(a);
  recording_[0]->failure = absl::InternalError("no memory");
  EXPECT_EQ(executors_[0]->Finish().status().code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace moesaic::engine
