#include "engine/lockstep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

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
  }
  StatusOr<StepResult> Finish() override {
    calls_->push_back(fmt::format("finish {}", replica_));
    RETURN_IF_ERROR(std::exchange(failure, OkStatus()));
    StepResult result;
    result.experts_read = rows_;
    return result;
  }
  StatusOr<std::span<const float>> FetchLogits(std::span<const int32_t>) override {
    return std::span<const float>();
  }

  Status failure;

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
  void Make(int replicas, int stages = 1) {
    const auto lockstep = std::make_shared<Lockstep>(stages);
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

TEST_F(LockstepTest, BatchesOfAllReplicasAreOneStep) {
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

TEST_F(LockstepTest, ABatchWithoutRowsConcernsItsReplicaAlone) {
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

TEST_F(LockstepTest, PartsAreThoseOfTheReplicaWithMost) {
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

}  // namespace
}  // namespace moesaic::engine
