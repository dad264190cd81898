#include "engine/expert_balancer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
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
  const auto moves = PlanMoves(kInOrder, Skewed(), {.expert_bytes = kExpertBytes}, {.interval_s = 60});
  ASSERT_TRUE(moves.ok()) << Message(moves.status());
  ASSERT_EQ(moves->size(), 1U);
  EXPECT_EQ(moves->front().layer, 3);
  EXPECT_GT(moves->front().before, 1.9);
  EXPECT_LT(moves->front().after, 1.1);
  for (const std::vector<int>& experts : moves->front().next) EXPECT_TRUE(std::ranges::is_sorted(experts));
}

TEST(PlanMoves, ReplicatesAnExpertThatExceedsTheShareOfARank) {
  ExpertLoadStats load = Skewed();
  load.recent = {100, 10, 1, 1, 1, 1, 1, 1};
  const auto moves =
      PlanMoves(kInOrder, load, {.expert_bytes = kExpertBytes}, {.interval_s = 60, .redundant = 2});
  ASSERT_EQ(moves->size(), 1U);
  EXPECT_LT(moves->front().after, 1.05);
}

TEST(PlanMoves, StaysWhereTheGainIsLessThanItsCost) {
  EXPECT_TRUE(PlanMoves(kInOrder, Skewed(), {.expert_bytes = kExpertBytes},
                        {.interval_s = 1e-3, .move_bytes_per_s = 1e6})
                  ->empty());
  EXPECT_TRUE(
      PlanMoves(kInOrder, Skewed(), {.expert_bytes = kExpertBytes, .expert_share = 0}, {.interval_s = 60})
          ->empty());
  EXPECT_EQ(PlanMoves(kInOrder, Skewed(), {.expert_bytes = kExpertBytes, .expert_share = 0},
                      {.interval_s = 60, .least_gain = 0})
                ->size(),
            1U)
      << "any reduction suffices";
  ExpertLoadStats even = Skewed();
  even.recent.assign(8, 10);
  EXPECT_TRUE(PlanMoves(kInOrder, even, {.expert_bytes = kExpertBytes}, {.interval_s = 60})->empty());
}

// The slowest rank's experts take `before`, then `after` times the mean of the time of all experts.
TEST(PlanMoves, TheGainIsTheTimeOfTheSlowestExperts) {
  const BalanceConditions conditions = {.expert_bytes = kExpertBytes, .expert_share = 0.1};
  ExpertBalanceOptions options = {.interval_s = 60};
  const PlannedMove move = PlanMoves(kInOrder, Skewed(), conditions, options)->front();
  const double saved_s = (move.before - move.after) * 6;
  EXPECT_GT(saved_s, 5);
  options.move_bytes_per_s = static_cast<double>(move.moved * kExpertBytes) / saved_s;
  options.move_bytes_per_s *= 1.01;
  EXPECT_EQ(PlanMoves(kInOrder, Skewed(), conditions, options)->size(), 1U);
  options.move_bytes_per_s *= 0.98;
  EXPECT_TRUE(PlanMoves(kInOrder, Skewed(), conditions, options)->empty());
}

// The recent loads are those of one domain, and earlier windows those of another, whose hot experts are
// others.
ExpertLoadStats TwoDomains() {
  ExpertLoadStats load;
  load.layers = {3};
  load.experts = 8;
  load.recent = {900, 10, 800, 10, 10, 10, 10, 10};
  const std::vector<int64_t> earlier = {10, 10, 10, 10, 800, 900, 10, 10},
                             later = {900, 10, 800, 10, 10, 10, 10, 10};
  for (const auto& window : {earlier, earlier, later, later})
    load.windows.push_back(std::make_shared<const std::vector<int64_t>>(window));
  load.all_windows = 4;
  return load;
}

double BusiestOf(const parallel::LayerPlacement& layer, const std::vector<int64_t>& tokens) {
  double most = 0, sum = 0;
  for (const std::vector<int>& experts : layer) {
    double rank = 0;
    for (const int expert : experts) rank += static_cast<double>(tokens[expert]);
    most = std::max(most, rank);
    sum += rank;
  }
  return most * static_cast<double>(layer.size()) / sum;
}

TEST(PlanMoves, APlanAlsoBalancesEarlierWindows) {
  const ExpertLoadStats load = TwoDomains();
  const auto both = PlanMoves(kInOrder, load, {.expert_bytes = kExpertBytes},
                              {.interval_s = 60, .least_tokens_per_rank = 100, .workloads = 2});
  ASSERT_EQ(both->size(), 1U);
  EXPECT_LT(BusiestOf(both->front().next, *load.windows.front()), 1.2);
  EXPECT_LT(BusiestOf(both->front().next, *load.windows.back()), 1.2);
  // The plan in use splits the recent domain already, but not the earlier one.
  const PlacementByLayer for_recent = {{3, {{0, 1, 3, 6}, {2, 4, 5, 7}}}};
  EXPECT_TRUE(PlanMoves(for_recent, load, {.expert_bytes = kExpertBytes}, {.interval_s = 60, .workloads = 0})
                  ->empty());
  EXPECT_EQ(PlanMoves(for_recent, load, {.expert_bytes = kExpertBytes},
                      {.interval_s = 60, .least_tokens_per_rank = 100, .workloads = 2})
                ->size(),
            1U);
}

TEST(WorkloadsOf, LeavesOutPartsWithTooFewTokens) {
  ExpertLoadStats load = TwoDomains();
  EXPECT_EQ(WorkloadsOf(load, 2, 800).size(), 3U);
  EXPECT_EQ(WorkloadsOf(load, 4, 800).size(), 5U);
  EXPECT_EQ(WorkloadsOf(load, 64, 800).size(), 5U) << "one part for each window";
  EXPECT_EQ(WorkloadsOf(load, 0, 800).size(), 1U);
  load.windows[0] = std::make_shared<const std::vector<int64_t>>(std::vector<int64_t>(8, 1));
  EXPECT_EQ(WorkloadsOf(load, 4, 800).size(), 4U);
}

TEST(PlanMoves, ASlowRankReceivesFewerTokens) {
  ExpertLoadStats load = Skewed();
  load.recent = {100, 100, 100, 100, 100, 100, 100, 100};
  const std::vector<double> speeds = {1, 1.0 / 3};
  const auto moves = PlanMoves(kInOrder, load, {.expert_bytes = kExpertBytes, .speeds = speeds},
                               {.interval_s = 60, .redundant = 4, .least_tokens_per_rank = 10});
  ASSERT_EQ(moves->size(), 1U);
  EXPECT_NEAR(moves->front().before, 2, 1e-9) << "half of the tokens take the slow rank twice the mean";
  EXPECT_LT(moves->front().after, 1.05);
  EXPECT_EQ(moves->front().speeds, speeds);
}

// Ranks of two nodes: a plan for tokens is never predicted to be faster than one for the time of a batch, and
// is slower for some loads.
TEST(PlanMoves, PlansIncludeTheTimeOfSlowLinksBetweenNodes) {
  const PlacementByLayer in_order = {{3, {{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}}};
  const parallel::Routing routing = {.top_k = 4, .groups = 4, .top_groups = 2};
  const BalanceConditions conditions = {
      .expert_bytes = kExpertBytes, .row_s = 1e-6, .routing = routing, .token_bytes = 8192};
  const std::vector<parallel::LinkLevel> levels = {{.groups = 2, .bytes_per_s = 8e9}};
  const parallel::CostModel model = {.batch_tokens = 1024,
                                     .routing = routing,
                                     .tile_s = conditions.row_s,
                                     .token_bytes = conditions.token_bytes,
                                     .levels = levels};
  const parallel::ExpertTime time(model);
  std::mt19937 random(7);
  int faster = 0;
  for (int trial = 0; trial < 10; ++trial) {
    ExpertLoadStats load;
    load.layers = {3};
    load.experts = 16;
    load.all_windows = 1;
    for (int expert = 0; expert < 16; ++expert) {
      load.recent.push_back(10 + static_cast<double>(random() % 1000) * (random() % 4 == 0 ? 4 : 1));
    }
    ExpertBalanceOptions options = {.interval_s = 3600, .least_gain = 0, .least_tokens_per_rank = 10};
    const auto seconds = [&] {
      const auto moves = PlanMoves(in_order, load, conditions, options);
      EXPECT_TRUE(moves.ok()) << Message(moves.status());
      return parallel::PredictCost(moves->empty() ? in_order.at(3) : moves->front().next, load.recent, model,
                                   time)
          .total();
    };
    const double by_tokens = seconds();
    options.levels = levels;
    options.batch_tokens = model.batch_tokens;
    const double by_time = seconds();
    EXPECT_LE(by_time, by_tokens * 1.001);
    faster += by_time < by_tokens * 0.99 ? 1 : 0;
  }
  EXPECT_GE(faster, 1);
}

// Rank 1 of three has died. Expert 5 was its own, and stays so; its replica of expert 0 is not counted.
TEST(PlanMoves, ExpertsOfTheLivingRanksMoveAmongThem) {
  ExpertLoadStats load;
  load.layers = {3};
  load.experts = 8;
  load.recent = {900, 800, 100, 10, 10, 5000, 10, 10};
  const PlacementByLayer current = {{3, {{0, 1, 2}, {0, 5}, {3, 4, 6, 7}}}};
  const auto moves = PlanMoves(current, load, {.expert_bytes = kExpertBytes, .dead = {false, true, false}},
                               {.interval_s = 60, .redundant = 2, .least_tokens_per_rank = 10});
  ASSERT_TRUE(moves.ok()) << Message(moves.status());
  ASSERT_EQ(moves->size(), 1U);
  const parallel::LayerPlacement& next = moves->front().next;
  EXPECT_EQ(next[1], std::vector<int>({5}));
  EXPECT_GT(moves->front().before, 1.8);
  EXPECT_LT(moves->front().after, 1.1);
  std::vector<int> held = next[0];
  held.insert(held.end(), next[2].begin(), next[2].end());
  for (const int expert : {0, 1, 2, 3, 4, 6, 7}) EXPECT_THAT(held, testing::Contains(expert));
  EXPECT_THAT(held, testing::Not(testing::Contains(5)));
}

TEST(MeasuredSpeeds, AreRowsPerSecondOfComputation) {
  const parallel::Layout layout = *parallel::Layout::Create({.data = 2, .expert = 2});
  std::vector<RankStats> before = {{.rank = 0, .timed_rows = 100, .timed_seconds = 9},
                                   {.rank = 1, .timed_rows = 100, .timed_seconds = 9}};
  std::vector<RankStats> now = {{.rank = 0, .timed_rows = 10100, .timed_seconds = 10},
                                {.rank = 1, .timed_rows = 10100, .timed_seconds = 13}};
  EXPECT_THAT(MeasuredSpeeds(layout, before, now, {}),
              testing::ElementsAre(testing::DoubleEq(1), testing::DoubleEq(0.25)));
  now[1].timed_seconds = 10.05;
  EXPECT_THAT(MeasuredSpeeds(layout, before, now, {}), testing::IsEmpty()) << "about equal";
  now[1] = {.rank = 1, .timed_rows = 200, .timed_seconds = 10};
  EXPECT_THAT(MeasuredSpeeds(layout, before, now, {}), testing::IsEmpty()) << "too few rows";
}

TEST(MeasuredSpeeds, ExcludeDeadRanks) {
  const parallel::Layout layout = *parallel::Layout::Create({.data = 3, .expert = 3});
  const std::vector<RankStats> now = {{.rank = 0, .timed_rows = 10000, .timed_seconds = 1},
                                      {.rank = 1, .timed_rows = 0, .timed_seconds = 0},
                                      {.rank = 2, .timed_rows = 10000, .timed_seconds = 2}};
  EXPECT_THAT(MeasuredSpeeds(layout, {}, now, {}), testing::IsEmpty());
  EXPECT_THAT(MeasuredSpeeds(layout, {}, now, {false, true, false}), testing::ElementsAre(1, 1, 0.5));
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
    return {{.number = begun.number,
             .state = state,
             .sent_bytes = kExpertBytes,
             .step_seconds = step_seconds,
             .rank = 3,
             .failure = state == models::MoveState::kFailed ? "no memory" : ""}};
  }

  models::ExpertMoveOrder begun;
  models::MoveState state = models::MoveState::kMoving;
  double step_seconds = 1e-3;
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
    Make({.interval_s = 60});
  }

  void Make(const ExpertBalanceOptions& options) {
    models::ModelInfo info;
    info.layers = 4;
    info.experts = 8;
    info.expert_bytes = kExpertBytes;
    balancer_ = std::make_unique<ExpertBalancer>(
        layout_, info, *lockstep_, std::vector<Executor*>{members_[0].get(), members_[1].get()}, options);
  }

  void Poll() {
    ASSERT_TRUE(balancer_
                    ->Poll(
                        load_, [this] { return work_; }, now_)
                    .ok());
  }
  // Experts take `expert_share` of the next 100 s.
  void Work(double expert_share = 0.2) {
    now_ += std::chrono::seconds(100);
    for (RankStats& rank : work_) {
      rank.step_seconds += 90;
      rank.expert_seconds += 100 * expert_share;
    }
  }
  // Waits for the plan and begins its first move.
  void Begin(double expert_share = 0.2) {
    Work(expert_share);
    Poll();
    Wait();
  }
  void Wait() {
    for (int i = 0; i < 10000 && balancer_->stats().state == "planning"; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      Poll();
    }
  }
  // Moves experts within 10 s, of which steps lose `step_seconds`. Then plans for a load of which the experts
  // of rank 0 get most.
  void MoveAndLoadOthers(double step_seconds, double expert_share) {
    for (MovingExecutor* rank : ranks_) rank->step_seconds = step_seconds;
    Begin(expert_share);
    ASSERT_EQ(balancer_->stats().state, "moving");
    for (int second = 0; second < 10; ++second) {
      now_ += std::chrono::seconds(1);
      Poll();
    }
    for (MovingExecutor* rank : ranks_) rank->state = models::MoveState::kReady;
    Poll();
    Step();
    Poll();
    ASSERT_EQ(balancer_->stats().moved_layers, 1);
    for (MovingExecutor* rank : ranks_) rank->state = models::MoveState::kMoving;
    auto later = std::make_shared<ExpertLoadStats>(Skewed());
    later->all_windows = 2;
    later->recent.assign(8, 10);
    later->recent[ranks_[0]->begun.next[0][0]] = 900;
    later->recent[ranks_[0]->begun.next[0][1]] = 800;
    load_ = later;
    Begin(expert_share);
  }
  // Ends the wait of a plan, whose thread the balancer joins.
  void TearDown() override { Continue(); }
  void Continue() {
    continues_ = true;
    continues_.notify_all();
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
  std::atomic<bool> continues_ = false;  // a plan that waits for it
  std::unique_ptr<ExpertBalancer> balancer_;
  std::shared_ptr<const ExpertLoadStats> load_ = std::make_shared<ExpertLoadStats>(Skewed());
  std::vector<RankStats> work_ = {{.rank = 0}, {.rank = 1}};
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
  EXPECT_EQ(balancer_->stats().state, "changing");
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

// The counters of results never fall, so a plan counts when its result is known.
TEST_F(ExpertBalancerTest, CountsAPlanWhenItsResultIsKnown) {
  Work();
  Poll();
  ASSERT_EQ(balancer_->stats().state, "planning");
  EXPECT_EQ(balancer_->stats().plans, 1);
  EXPECT_EQ(balancer_->stats().plans_with_moves, 0);
  Begin();
  EXPECT_EQ(balancer_->stats().plans_with_moves, 1);
  EXPECT_EQ(balancer_->stats().plans_without_gain, 0);
}

TEST_F(ExpertBalancerTest, APlanThatTakesTooLongFailsAndTheNextOneIsMade) {
  Make({.interval_s = 60, .plan_limit_s = 5, .before_plan = [this] { continues_.wait(false); }});
  Work();
  Poll();
  ASSERT_EQ(balancer_->stats().state, "planning");
  now_ += std::chrono::seconds(6);
  Poll();
  EXPECT_EQ(balancer_->stats().state, "planning") << "the thread has not ended yet";
  Continue();
  Wait();
  EXPECT_EQ(balancer_->stats().state, "idle");
  EXPECT_EQ(balancer_->stats().failed_plans, 1);
  EXPECT_THAT(balancer_->stats().history.back(), HasSubstr("the plan failed: it took longer than 5 s"));
  auto later = std::make_shared<ExpertLoadStats>(Skewed());
  later->all_windows = 2;
  load_ = later;
  Begin();
  EXPECT_EQ(balancer_->stats().plans_with_moves, 1);
  EXPECT_EQ(balancer_->stats().state, "moving");
}

// Ranks compute 90% of the time, but their experts so little that faster ones would not pay for the weights.
TEST_F(ExpertBalancerTest, OnlyTheTimeOfExpertsIsSaved) {
  Begin(/*expert_share=*/1e-6);
  EXPECT_EQ(balancer_->stats().plans_without_gain, 1);
  EXPECT_EQ(balancer_->stats().state, "idle");
}

// Weights take 10 s in the background. A later move of others saves about 10 ms of steps.
TEST_F(ExpertBalancerTest, AMoveInTheBackgroundHasNoCost) {
  MoveAndLoadOthers(/*step_seconds=*/1e-4, /*expert_share=*/2e-4);
  EXPECT_EQ(balancer_->stats().state, "moving");
}

TEST_F(ExpertBalancerTest, AMoveCostsTheTimeThatStepsLoseToIt) {
  MoveAndLoadOthers(/*step_seconds=*/1, /*expert_share=*/2e-4);
  EXPECT_EQ(balancer_->stats().plans_without_gain, 1);
  EXPECT_EQ(balancer_->stats().state, "idle");
}

TEST_F(ExpertBalancerTest, AMoveThatOneRankFailsIsRolledBack) {
  Begin();
  ranks_[0]->state = models::MoveState::kReady;
  ranks_[1]->state = models::MoveState::kFailed;
  Poll();
  EXPECT_EQ(balancer_->stats().rolled_back, 1);
  EXPECT_EQ(ranks_[0]->dropped, 1);
  EXPECT_EQ(ranks_[1]->dropped, 1);
  EXPECT_THAT(balancer_->stats().history.back(),
              HasSubstr("rolled back: rank 3 could not gather its experts: no memory"));
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

TEST_F(ExpertBalancerTest, AMoveIsRolledBackWithARankAndTheOthersMoveLater) {
  Begin();
  ranks_[0]->state = models::MoveState::kReady;
  balancer_->Exclude({1}, "rank 1 died");
  EXPECT_EQ(balancer_->stats().rolled_back, 1);
  EXPECT_EQ(balancer_->stats().state, "idle");
  EXPECT_EQ(ranks_[0]->dropped, 1);
  EXPECT_EQ(ranks_[1]->dropped, 0);
  Poll();
  Step();
  EXPECT_EQ(ranks_[0]->applied, 0U);
  auto later = std::make_shared<ExpertLoadStats>(Skewed());
  later->all_windows = 2;
  load_ = later;
  Begin();
  EXPECT_EQ(balancer_->stats().plans, 2);
  EXPECT_EQ(balancer_->stats().failed_plans, 0);
  EXPECT_EQ(balancer_->stats().state, "idle") << "one rank can't be balanced";
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
