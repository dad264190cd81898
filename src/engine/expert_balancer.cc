#include "engine/expert_balancer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <system_error>
#include <utility>

#include "parallel/shard.h"

namespace moesaic::engine {
namespace {

constexpr size_t kHistory = 32;
constexpr double kMaxPollSeconds = 1;  // longer times without a step count as idle
constexpr double kMaxSlowdown = 20;    // of a measured rate against the assumed one

double ExpertSeconds(const std::vector<RankStats>& ranks) {
  double seconds = 0;
  for (const RankStats& rank : ranks) seconds += rank.expert_seconds;
  return seconds;
}

}  // namespace

ExpertBalancer::ExpertBalancer(const parallel::Layout& layout, const models::ModelInfo& info,
                               Lockstep& lockstep, std::vector<Executor*> replicas,
                               const ExpertBalanceOptions& options)
    : layout_(layout),
      info_(info),
      lockstep_(lockstep),
      replicas_(std::move(replicas)),
      options_(options),
      dead_(replicas_.size(), false) {}

ExpertBalancer::~ExpertBalancer() { *ending_ = true; }

void ExpertBalancer::Note(const std::string& event) {
  spdlog::info("experts: {}", event);
  stats_.history.push_back(event);
  if (stats_.history.size() > kHistory) stats_.history.erase(stats_.history.begin());
}

Status ExpertBalancer::Poll(const std::shared_ptr<const ExpertLoadStats>& load,
                            const std::function<std::vector<RankStats>()>& ranks, Clock::time_point now) {
  switch (state_) {
    case State::kIdle:
      if (load != nullptr && now - planned_ >= std::chrono::duration<double>(options_.interval_s) &&
          Plannable(*load)) {
        StartPlan(load, ranks(), now);
      }
      return OkStatus();
    case State::kPlanning:
      if (plan_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) return TakePlan(now);
      if (now - planned_ >= std::chrono::duration<double>(options_.plan_limit_s)) *plan_ends_ = true;
      return OkStatus();
    case State::kMoving:
      return Watch(now);
    case State::kChanging:
      if (lockstep_.steps() == steps_) return OkStatus();
      return BeginNext(now);
  }
  return OkStatus();
}

std::vector<Executor*> ExpertBalancer::Living() const {
  std::vector<Executor*> living;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (!dead_[i]) living.push_back(replicas_[i]);
  }
  return living;
}

// A move that all ranks have agreed to use (kChanging) is used with their next step.
void ExpertBalancer::Exclude(const std::vector<int>& replicas, const std::string& why) {
  dead_.assign(dead_.size(), false);
  for (const int replica : replicas) dead_[replica] = true;
  if (state_ == State::kMoving) {
    ++stats_.rolled_back;
    Note(fmt::format("move {} of layer {} is rolled back: {}", number_, queue_.front().layer, why));
    state_ = State::kIdle;
    stats_.state = "idle";
  } else if (state_ == State::kPlanning) {
    plan_is_void_ = true;
    *plan_ends_ = true;
  }
  if (state_ == State::kIdle) {  // a rollback may have ended at the rank that died
    for (Executor* replica : Living()) replica->DropExpertMove().IgnoreError();
  }
  Note(fmt::format("later moves are among the other ranks: {}", why));
  queue_.clear();  // planned with the rank
}

// Experts of the layers as they were loaded.
void ExpertBalancer::SetLayers(const ExpertLoadStats& load) {
  if (current_.empty()) current_ = LoadedPlacement(layout_, info_, load);
}

// Returns whether loads are newer than the last plan, and enough in each layer.
bool ExpertBalancer::Plannable(const ExpertLoadStats& load) {
  if (load.all_windows <= windows_) return false;
  SetLayers(load);
  for (size_t layer = 0; layer < load.layers.size(); ++layer) {
    const auto ranks = static_cast<double>(current_.at(load.layers[layer]).size());
    const auto loads = load.recent.begin() + static_cast<std::ptrdiff_t>(layer * load.experts);
    if (std::accumulate(loads, loads + load.experts, 0.0) < options_.least_tokens_per_rank * ranks)
      return false;
  }
  return true;
}

// Speeds stay as they were until enough rows are measured again.
BalanceConditions ExpertBalancer::Measure(const std::vector<RankStats>& ranks, double expert_share) {
  BalanceConditions conditions = {.expert_bytes = info_.expert_bytes,
                                  .expert_share = expert_share,
                                  .routing = {.top_k = info_.experts_per_token,
                                              .groups = info_.expert_groups,
                                              .top_groups = info_.top_expert_groups},
                                  .token_bytes = 2.0 * sizeof(float) * info_.hidden_size};
  if (std::ranges::find(dead_, true) != dead_.end()) conditions.dead = dead_;
  int64_t rows = 0, fewest = std::numeric_limits<int64_t>::max();
  double seconds = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!conditions.dead.empty() && conditions.dead[layout_.IndexInExpertGroup(ranks[i].rank)]) continue;
    rows += ranks[i].timed_rows;
    seconds += ranks[i].timed_seconds;
    fewest = std::min(fewest, ranks[i].timed_rows - (i < measured_.size() ? measured_[i].timed_rows : 0));
  }
  if (options_.measured_speeds && fewest >= kMinTimedRows) {
    speeds_ = MeasuredSpeeds(layout_, measured_, ranks, conditions.dead);
    measured_ = ranks;
  }
  conditions.speeds = options_.measured_speeds ? speeds_ : layout_.speeds();
  stats_.speeds = conditions.speeds;
  if (rows < kMinTimedRows) return conditions;
  // The mean over ranks is that of a rank of mean speed.
  double speed = 1;
  if (!conditions.speeds.empty()) {
    speed = std::accumulate(conditions.speeds.begin(), conditions.speeds.end(), 0.0) /
            static_cast<double>(conditions.speeds.size());
  }
  conditions.row_s = seconds / static_cast<double>(rows) * speed;
  return conditions;
}

void ExpertBalancer::StartPlan(const std::shared_ptr<const ExpertLoadStats>& load,
                               const std::vector<RankStats>& ranks, Clock::time_point now) {
  // A rank has the layers of its stage: shares of the stages add up to that of all layers.
  const double seconds = ExpertSeconds(ranks);
  const std::chrono::duration<double> passed = now - planned_;
  const auto members = static_cast<double>(layout_.degrees().tensor * std::ranges::count(dead_, false));
  const double share = (seconds - std::exchange(expert_seconds_, seconds)) / (passed.count() * members);
  planned_ = now;
  windows_ = load->all_windows;
  ExpertBalanceOptions options = options_;
  if (step_seconds_ > 0) {
    options.move_bytes_per_s = std::max(static_cast<double>(received_bytes_) / step_seconds_,
                                        options_.move_bytes_per_s / kMaxSlowdown);
  }
  const BalanceConditions conditions = Measure(ranks, share);
  plan_ends_ = std::make_shared<std::atomic<bool>>(false);
  const auto make = [current = current_, load, conditions, options, ending = ending_, ends = plan_ends_]() {
    try {
      if (options.before_plan) options.before_plan();
      return PlanMoves(current, *load, conditions, options,
                       [ending, ends] { return ending->load() || ends->load(); });
    } catch (const std::exception& error) {  // of memory
      return StatusOr<std::vector<PlannedMove>>(ResourceExhausted("{}", error.what()));
    } catch (...) {
      return StatusOr<std::vector<PlannedMove>>(
          ResourceExhausted("the thread ended by an unknown exception"));
    }
  };
  ++stats_.plans;
  try {
    plan_ = std::async(std::launch::async, make);
  } catch (const std::system_error& error) {  // no more threads
    ++stats_.failed_plans;
    Note(fmt::format("the plan failed: {}", error.what()));
    return;
  }
  state_ = State::kPlanning;
  stats_.state = "planning";
}

Status ExpertBalancer::TakePlan(Clock::time_point now) {
  state_ = State::kIdle;
  stats_.state = "idle";
  StatusOr<std::vector<PlannedMove>> moves = plan_.get();
  if (std::exchange(plan_is_void_, false)) {
    ++stats_.failed_plans;
    return OkStatus();
  }
  if (*plan_ends_ && moves.ok()) {
    moves = absl::DeadlineExceededError(fmt::format("it took longer than {} s", options_.plan_limit_s));
  }
  if (!moves.ok()) {
    ++stats_.failed_plans;
    Note(fmt::format("the plan failed: {}", Message(moves.status())));
    return OkStatus();
  }
  if (moves->empty()) {
    ++stats_.plans_without_gain;
    return OkStatus();
  }
  ++stats_.plans_with_moves;
  Note(fmt::format("{} layers move; the first has a busiest rank of {:.2f} times the mean, then {:.2f}",
                   moves->size(), moves->front().before, moves->front().after));
  // Layers whose last move failed come after the others.
  std::stable_partition(moves->begin(), moves->end(),
                        [&](const PlannedMove& move) { return !failed_.contains(move.layer); });
  queue_.assign(std::make_move_iterator(moves->begin()), std::make_move_iterator(moves->end()));
  return BeginNext(now);
}

Status ExpertBalancer::BeginNext(Clock::time_point now) {
  if (queue_.empty()) {
    state_ = State::kIdle;
    stats_.state = "idle";
    return OkStatus();
  }
  state_ = State::kMoving;
  stats_.state = "moving";
  polled_ = now;
  moving_s_ = 0;
  const PlannedMove& move = queue_.front();
  const models::ExpertMoveOrder order = {.number = ++number_,
                                         .layer = move.layer,
                                         .next = move.next,
                                         .loads = move.loads,
                                         .speeds = move.speeds};
  for (Executor* replica : Living()) {
    const Status begun = replica->BeginExpertMove(order);
    if (!begun.ok()) return RollBack(Message(begun), now);
  }
  return OkStatus();
}

// Reports are those of the last batch of each rank, which may have run before the move began.
Status ExpertBalancer::Watch(Clock::time_point now) {
  const std::chrono::duration<double> passed = now - std::exchange(polled_, now);
  moving_s_ += std::min(passed.count(), kMaxPollSeconds);
  bool ready = true;
  int64_t bytes = 0;
  double step_seconds = 0;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (dead_[i]) continue;
    for (const models::ExpertMoveReport& report : replicas_[i]->move_reports()) {
      const bool of_this = report.number == number_;
      if (of_this && report.state == models::MoveState::kFailed) {
        return RollBack(fmt::format("rank {} could not gather its experts: {}", report.rank, report.failure),
                        now);
      }
      ready &= of_this && report.state == models::MoveState::kReady;
      bytes += report.sent_bytes;
      step_seconds = std::max(step_seconds, report.step_seconds);
    }
  }
  if (!ready) {
    if (moving_s_ < options_.move_limit_s) return OkStatus();
    return RollBack(fmt::format("it took longer than {} s", options_.move_limit_s), now);
  }
  lockstep_.ApplyMove(number_);
  steps_ = lockstep_.steps();
  const PlannedMove& move = queue_.front();
  received_bytes_ += move.moved * info_.expert_bytes;
  step_seconds_ += step_seconds;
  for (size_t rank = 0; rank < move.next.size(); ++rank) {
    const std::vector<int>& old = current_[move.layer][rank];
    stats_.moved_experts += std::ranges::count_if(
        move.next[rank], [&](int expert) { return std::ranges::find(old, expert) == old.end(); });
  }
  failed_.erase(move.layer);
  ++stats_.moved_layers;
  stats_.moved_bytes += bytes;
  stats_.epoch = number_;
  current_[move.layer] = move.next;
  Note(fmt::format("layer {} changed by move {}: busiest rank {:.2f} times the mean, before {:.2f}",
                   move.layer, number_, move.after, move.before));
  queue_.pop_front();
  state_ = State::kChanging;
  stats_.state = "changing";
  return OkStatus();
}

// The next layer of the plan moves then.
Status ExpertBalancer::RollBack(const std::string& why, Clock::time_point now) {
  ++stats_.rolled_back;
  const int layer = queue_.front().layer;
  Note(fmt::format("move {} of layer {} is rolled back: {}", number_, layer, why));
  failed_.insert(layer);
  queue_.pop_front();
  state_ = State::kIdle;  // until the next move begins: an error ends here
  stats_.state = "idle";
  for (Executor* replica : Living()) RETURN_IF_ERROR(replica->DropExpertMove());
  return BeginNext(now);
}

}  // namespace moesaic::engine
