#include "engine/expert_balancer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace moesaic::engine {
namespace {

using testing::HasSubstr;

constexpr int64_t kExpertBytes = 1 << 20;

// One layer of 8 experts, of which the first two get most tokens.
ExpertLoadStats Skewed() {
  ExpertLoadStats load;
  load.layers = {3};
  load.experts = 8;
  load.recent = {900, 800, 10, 10, 10, 10, 10, 10};
  load.all_windows = 1;
  return load;
}

const PlacementByLayer kInOrder = {{3, {{0, 1, 2, 3}, {4, 5, 6, 7}}}};

TEST(PlanMoves, MovesExpertsOfTheBusiestRank) {
  const auto moves = PlanMoves(kInOrder, Skewed(), kExpertBytes, /*busy=*/1, {.interval_s = 60});
  ASSERT_TRUE(moves.ok()) << Message(moves.status());
  ASSERT_EQ(moves->size(), 1U);
  EXPECT_EQ(moves->front().layer, 3);
  EXPECT_GT(moves->front().before, 1.9);
  EXPECT_LT(moves->front().after, 1.1);
  for (const std::vector<int>& experts : moves->front().next) EXPECT_TRUE(std::ranges::is_sorted(experts));
}

TEST(PlanMoves, UsesRedundantExpertsWhereOneExpertIsTooMuchForARank) {
  ExpertLoadStats load = Skewed();
  load.recent = {100, 10, 1, 1, 1, 1, 1, 1};
  const auto moves = PlanMoves(kInOrder, load, kExpertBytes, 1, {.interval_s = 60, .redundant = 2});
  ASSERT_EQ(moves->size(), 1U);
  EXPECT_LT(moves->front().after, 1.05);
}

TEST(PlanMoves, StaysWhereTheGainIsLessThanItsCost) {
  EXPECT_TRUE(
      PlanMoves(kInOrder, Skewed(), kExpertBytes, 1, {.interval_s = 1e-3, .move_bytes_per_s = 1e6})->empty());
  EXPECT_TRUE(PlanMoves(kInOrder, Skewed(), kExpertBytes, /*busy=*/0, {.interval_s = 60})->empty());
  ExpertLoadStats even = Skewed();
  even.recent.assign(8, 10);
  EXPECT_TRUE(PlanMoves(kInOrder, even, kExpertBytes, 1, {.interval_s = 60})->empty());
}

/// An executor of one rank whose part of a move becomes `state`.
class MovingExecutor : public Executor {
 public:
  void Start(const StepBatch& batch) override { applied = batch.joint.move; }
  StatusOr<StepResult> Finish() override { return StepResult(); }
  StatusOr<std::span<const float>> FetchLogits(std::span<const int32_t>) override {
    return std::span<const float>();
  }
  Status BeginExpertMove(const models::ExpertMoveOrder& order) override {
    begun = order;
    return begins;
  }
  Status DropExpertMove() override {
    ++dropped;
    return OkStatus();
  }
  std::vector<models::ExpertMoveReport> move_reports() const override {
    return {{.number = begun.number, .state = state, .sent_bytes = kExpertBytes}};
  }

  models::ExpertMoveOrder begun;
  models::MoveState state = models::MoveState::kMoving;
  Status begins;
  uint64_t applied = 0;
  int dropped = 0;
};

class ExpertBalancerTest : public testing::Test {
 protected:
  ExpertBalancerTest() {
    for (int i = 0; i < 2; ++i) {
      auto executor = std::make_unique<MovingExecutor>();
      ranks_.push_back(executor.get());
      members_.push_back(Lockstep::Add(lockstep_, std::move(executor)));
    }
    layout_.LetExpertsMove();
    models::ModelInfo info;
    info.layers = 4;
    info.experts = 8;
    info.expert_bytes = kExpertBytes;
    balancer_ = std::make_unique<ExpertBalancer>(layout_, info, *lockstep_,
                                                 std::vector<Executor*>{members_[0].get(), members_[1].get()},
                                                 ExpertBalanceOptions{.interval_s = 60});
  }

  void Poll() {
    ASSERT_TRUE(balancer_
                    ->Poll(
                        load_, [this] { return work_; }, now_)
                    .ok());
  }
  // Waits for the plan and begins its first move.
  void Begin() {
    now_ += std::chrono::seconds(100);
    work_ = {{.rank = 0, .step_seconds = seconds_ += 90}, {.rank = 1, .step_seconds = seconds_}};
    Poll();
    for (int i = 0; i < 10000 && balancer_->stats().state == "planning"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      Poll();
    }
  }
  void Step() {
    StepBatch batch;
    const std::vector<int32_t> tokens = {1}, table = {0};
    batch.AddRows({.first_logits = 0}, tokens, {}, table);
    ASSERT_TRUE(members_[0]->Run(batch).ok());
  }

  parallel::Layout layout_ = *parallel::Layout::Create({.data = 2, .expert = 2});
  std::shared_ptr<Lockstep> lockstep_ = std::make_shared<Lockstep>(1);
  std::vector<MovingExecutor*> ranks_;
  std::vector<std::unique_ptr<Executor>> members_;
  std::unique_ptr<ExpertBalancer> balancer_;
  std::shared_ptr<const ExpertLoadStats> load_ = std::make_shared<ExpertLoadStats>(Skewed());
  std::vector<RankStats> work_ = {{.rank = 0}, {.rank = 1}};
  double seconds_ = 0;
  ExpertBalancer::Clock::time_point now_ = ExpertBalancer::Clock::now();
};

TEST_F(ExpertBalancerTest, AllRanksChangeInTheSameStep) {
  Begin();
  ASSERT_EQ(balancer_->stats().state, "moving");
  EXPECT_EQ(ranks_[0]->begun.layer, 3);
  EXPECT_EQ(ranks_[0]->begun.next, ranks_[1]->begun.next);
  ranks_[0]->state = models::MoveState::kReady;
  Poll();
  Step();
  EXPECT_EQ(ranks_[0]->applied, 0U) << "rank 1 is not ready";
  ranks_[1]->state = models::MoveState::kReady;
  Poll();
  Step();
  EXPECT_EQ(ranks_[0]->applied, 1U);
  EXPECT_EQ(ranks_[1]->applied, 1U);
  Poll();
  EXPECT_EQ(balancer_->stats().state, "idle");
  EXPECT_EQ(balancer_->stats().moved_layers, 1);
  EXPECT_EQ(balancer_->stats().epoch, 1U);
  EXPECT_EQ(balancer_->stats().moved_bytes, 2 * kExpertBytes);
  EXPECT_EQ(ranks_[0]->dropped, 0);
}

TEST_F(ExpertBalancerTest, AMoveThatOneRankFailsIsRolledBack) {
  Begin();
  ranks_[0]->state = models::MoveState::kReady;
  ranks_[1]->state = models::MoveState::kFailed;
  Poll();
  EXPECT_EQ(balancer_->stats().rolled_back, 1);
  EXPECT_EQ(ranks_[0]->dropped, 1);
  EXPECT_EQ(ranks_[1]->dropped, 1);
  EXPECT_THAT(balancer_->stats().history.back(), HasSubstr("rolled back"));
  Step();
  EXPECT_EQ(ranks_[0]->applied, 0U);
  // The same experts move later, as another move.
  auto later = std::make_shared<ExpertLoadStats>(Skewed());
  later->all_windows = 2;
  load_ = later;
  ranks_[1]->state = models::MoveState::kMoving;
  Begin();
  EXPECT_EQ(balancer_->stats().state, "moving");
  EXPECT_EQ(ranks_[0]->begun.number, 2U);
}

TEST_F(ExpertBalancerTest, AMoveThatCannotBeginIsDroppedEverywhere) {
  ranks_[1]->begins = Unimplemented("static scales");
  Begin();
  EXPECT_EQ(balancer_->stats().rolled_back, 1);
  EXPECT_THAT(balancer_->stats().history.back(), HasSubstr("static scales"));
  EXPECT_EQ(ranks_[0]->dropped, 1);
}

TEST_F(ExpertBalancerTest, PlansWhenEveryLayerHasEnoughTokens) {
  auto few = std::make_shared<ExpertLoadStats>(Skewed());
  few->layers = {2, 3};
  few->recent = {900, 800, 10, 10, 10, 10, 10, 10, 400, 399, 0, 0, 0, 0, 0, 0};
  load_ = few;
  Begin();
  EXPECT_EQ(balancer_->stats().plans, 0);
  auto enough = std::make_shared<ExpertLoadStats>(*few);
  enough->recent.back() = 1;
  load_ = enough;
  Begin();
  EXPECT_EQ(balancer_->stats().plans, 1);
}

TEST_F(ExpertBalancerTest, OldLoadsAreNotPlannedForAgain) {
  load_ = nullptr;
  Begin();
  EXPECT_EQ(balancer_->stats().plans, 0);
  load_ = std::make_shared<ExpertLoadStats>(Skewed());
  Begin();
  EXPECT_EQ(balancer_->stats().plans, 1);
  ranks_[0]->state = ranks_[1]->state = models::MoveState::kReady;
  Poll();
  Step();
  Poll();
  Begin();
  EXPECT_EQ(balancer_->stats().plans, 1);
}

}  // namespace
}  // namespace moesaic::engine
