#include "engine/expert_balancer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <system_error>
#include <utility>

#include "parallel/batch_split.h"
#include "parallel/placement/planner.h"
#include "parallel/placement/token_split.h"
#include "parallel/shard.h"

namespace moesaic::engine {
namespace {

using parallel::LayerPlacement;

constexpr size_t kHistory = 32;
constexpr double kMaxPollSeconds = 1;  // longer times without a step count as idle
constexpr double kMaxSlowdown = 20;    // of a measured rate against the assumed one

constexpr int64_t kLeastTimedRows = 4096;  // of a rank, for its speed
constexpr double kLeastDifference = 0.1;   // of speeds, relative: shared cores vary by less

// Largest load / speed of a rank over the mean in the worst workload, with tokens divided exactly over
// replicas.
double Balance(const LayerPlacement& layer, std::span<const parallel::LoadMatrix> workloads, int index,
               std::span<const double> speeds) {
  double worst = 1;
  parallel::TokenSplit split(layer, workloads.front().experts, speeds);
  double speed = 0;
  for (int rank = 0; rank < split.ranks(); ++rank) speed += split.speed(rank);
  for (const parallel::LoadMatrix& workload : workloads) {
    const std::span<const double> loads = workload.layer(index);
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    if (sum > 0) worst = std::max(worst, split.Solve(loads) * speed / sum);
  }
  return worst;
}

// Predicted time of a batch in the worst workload, without moves.
double BatchSeconds(const LayerPlacement& layer, std::span<const parallel::LoadMatrix> workloads, int index,
                    const parallel::CostModel& model, const parallel::ExpertTime& time,
                    std::span<const double> speeds) {
  double worst = 0;
  for (const parallel::LoadMatrix& workload : workloads)
    worst = std::max(worst, parallel::PredictCost(layer, workload.layer(index), model, time, speeds).total());
  return worst;
}

// Most experts that one rank of `next` receives.
int MostReceived(const LayerPlacement& current, const LayerPlacement& next) {
  int most = 0;
  for (size_t rank = 0; rank < next.size(); ++rank) {
    most = std::max(most, static_cast<int>(std::ranges::count_if(next[rank], [&](int expert) {
                      return std::ranges::find(current[rank], expert) == current[rank].end();
                    })));
  }
  return most;
}

LayerPlacement Sorted(LayerPlacement layer) {
  for (std::vector<int>& experts : layer) std::ranges::sort(experts);
  return layer;
}

double ComputingSeconds(const std::vector<RankStats>& ranks) {
  double seconds = 0;
  for (const RankStats& rank : ranks) seconds += rank.step_seconds - rank.exchange_seconds;
  return seconds;
}

}  // namespace

std::vector<parallel::LoadMatrix> WorkloadsOf(const ExpertLoadStats& load, int parts, double least_tokens) {
  const auto layers = static_cast<int>(load.layers.size());
  std::vector<parallel::LoadMatrix> workloads = {
      {.layers = layers, .experts = load.experts, .tokens = load.recent}};
  const size_t windows = load.windows.size();
  parts = static_cast<int>(std::min<size_t>(static_cast<size_t>(parts), windows));
  for (int part = 0; part < parts && windows > 1; ++part) {
    parallel::LoadMatrix sum = {
        .layers = layers, .experts = load.experts, .tokens = std::vector<double>(load.recent.size(), 0.0)};
    for (size_t i = windows * part / parts; i < windows * (part + 1) / parts; ++i) {
      std::ranges::transform(*load.windows[i], sum.tokens, sum.tokens.begin(),
                             [](int64_t tokens, double all) { return all + static_cast<double>(tokens); });
    }
    bool enough = true;
    for (int layer = 0; layer < layers; ++layer) {
      const std::span<const double> loads = std::as_const(sum).layer(layer);
      enough &= std::accumulate(loads.begin(), loads.end(), 0.0) >= least_tokens;
    }
    if (enough) workloads.push_back(std::move(sum));
  }
  return workloads;
}

std::vector<double> MeasuredSpeeds(const parallel::Layout& layout, const std::vector<RankStats>& before,
                                   const std::vector<RankStats>& now, const std::vector<bool>& dead) {
  const auto members = static_cast<size_t>(layout.degrees().tensor * layout.degrees().data);
  std::vector<double> seconds(members, 0), speeds(members, 0);
  std::vector<int64_t> rows(members, 0);
  for (size_t i = 0; i < now.size(); ++i) {
    const int member = layout.IndexInExpertGroup(now[i].rank);
    const RankStats none, &old = i < before.size() ? before[i] : none;
    rows[member] += now[i].timed_rows - old.timed_rows;
    seconds[member] += now[i].timed_seconds - old.timed_seconds;
  }
  double fastest = 0, slowest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < members; ++i) {
    if (i < dead.size() && dead[i]) continue;
    if (rows[i] < kLeastTimedRows || seconds[i] <= 0) return {};
    speeds[i] = static_cast<double>(rows[i]) / seconds[i];
    fastest = std::max(fastest, speeds[i]);
    slowest = std::min(slowest, speeds[i]);
  }
  if (slowest > fastest * (1 - kLeastDifference)) return {};
  for (double& speed : speeds) speed = speed > 0 ? speed / fastest : 1;
  return speeds;
}

namespace {

bool IsDead(const BalanceConditions& conditions, size_t rank) {
  return rank < conditions.dead.size() && conditions.dead[rank];
}

// `layer` without the experts of dead ranks.
LayerPlacement LivingPart(LayerPlacement layer, const BalanceConditions& conditions) {
  for (size_t rank = 0; rank < layer.size(); ++rank) {
    if (IsDead(conditions, rank)) layer[rank].clear();
  }
  return layer;
}

// Plans one layer for the ranks that live and the experts that they have. Each dead rank keeps those of its
// experts that no other rank has, which routers leave out.
StatusOr<LayerPlacement> PlanForLiving(const LayerPlacement& current,
                                       std::span<const parallel::LoadMatrix> workloads, int index,
                                       const BalanceConditions& conditions,
                                       const parallel::PlannerOptions& options) {
  const LayerPlacement living = LivingPart(current, conditions);
  std::vector<int> number(workloads.front().experts, -1), expert_of;  // of experts that living ranks have
  for (const std::vector<int>& experts : living) {
    for (const int expert : experts) number[expert] = 0;
  }
  for (size_t expert = 0; expert < number.size(); ++expert) {
    if (number[expert] < 0) continue;
    number[expert] = static_cast<int>(expert_of.size());
    expert_of.push_back(static_cast<int>(expert));
  }
  const auto count = static_cast<int>(expert_of.size());
  std::vector<parallel::LoadMatrix> loads;
  for (const parallel::LoadMatrix& workload : workloads) {
    parallel::LoadMatrix& own = loads.emplace_back(parallel::LoadMatrix{.layers = 1, .experts = count});
    for (const int expert : expert_of) own.tokens.push_back(workload.layer(index)[expert]);
  }
  parallel::Placement known = {.experts = count, .layers = {{}}};
  parallel::PlannerOptions planner = options;
  planner.slots.clear();
  planner.speeds.clear();
  for (size_t rank = 0; rank < living.size(); ++rank) {
    if (IsDead(conditions, rank)) continue;
    std::vector<int>& experts = known.layers[0].emplace_back();
    for (const int expert : living[rank]) experts.push_back(number[expert]);
    planner.slots.push_back(std::max(options.slots[rank], static_cast<int>(experts.size())));
    if (!options.speeds.empty()) planner.speeds.push_back(options.speeds[rank]);
  }
  planner.current = &known;
  ASSIGN_OR_RETURN(const parallel::PlannedPlacement planned, PlanPlacement(loads, planner));
  LayerPlacement next(current.size());
  std::vector<bool> kept(number.size(), false);
  for (size_t rank = 0, other = 0; rank < current.size(); ++rank) {
    if (!IsDead(conditions, rank)) {
      for (const int expert : planned.placement.layers[0][other]) next[rank].push_back(expert_of[expert]);
      ++other;
      continue;
    }
    for (const int expert : current[rank]) {
      if (number[expert] >= 0 || kept[expert]) continue;
      next[rank].push_back(expert);
      kept[expert] = true;
    }
  }
  return next;
}

// Plans all layers of `known`.
StatusOr<std::vector<LayerPlacement>> PlanLayers(const parallel::Placement& known,
                                                 std::span<const parallel::LoadMatrix> workloads,
                                                 const BalanceConditions& conditions,
                                                 const parallel::PlannerOptions& options) {
  if (conditions.dead.empty()) {
    ASSIGN_OR_RETURN(parallel::PlannedPlacement planned, PlanPlacement(workloads, options));
    return std::move(planned.placement.layers);
  }
  std::vector<LayerPlacement> layers;
  for (size_t i = 0; i < known.layers.size(); ++i) {
    ASSIGN_OR_RETURN(layers.emplace_back(),
                     PlanForLiving(known.layers[i], workloads, static_cast<int>(i), conditions, options));
  }
  return layers;
}

// Experts that only dead ranks have get no more tokens.
void DropLostLoads(const parallel::Placement& known, const BalanceConditions& conditions,
                   std::vector<parallel::LoadMatrix>& workloads) {
  for (size_t i = 0; i < known.layers.size() && !conditions.dead.empty(); ++i) {
    std::vector<bool> living(known.experts, false);
    for (const std::vector<int>& experts : LivingPart(known.layers[i], conditions)) {
      for (const int expert : experts) living[expert] = true;
    }
    for (parallel::LoadMatrix& workload : workloads) {
      for (int expert = 0; expert < known.experts; ++expert) {
        if (!living[expert]) workload.tokens[i * known.experts + expert] = 0;
      }
    }
  }
}

}  // namespace

StatusOr<std::vector<PlannedMove>> PlanMoves(const PlacementByLayer& current, const ExpertLoadStats& load,
                                             const BalanceConditions& conditions,
                                             const ExpertBalanceOptions& options,
                                             const std::function<bool()>& stop) {
  parallel::Placement known{.experts = load.experts};
  for (const int layer : load.layers) known.layers.push_back(current.at(layer));
  const int ranks = known.ranks();
  std::vector<parallel::LoadMatrix> workloads =
      WorkloadsOf(load, options.workloads, options.least_tokens_per_rank * ranks);
  DropLostLoads(known, conditions, workloads);
  std::vector<double> speeds = conditions.speeds;  // with those of dead ranks
  if (!conditions.dead.empty()) {
    speeds.resize(ranks, 1);
    for (int rank = 0; rank < ranks; ++rank) {
      if (conditions.dead[rank]) speeds[rank] = parallel::kDeadSpeed;
    }
  }
  const double layers = static_cast<double>(load.layers.size());
  const double batch_s = conditions.row_s * options.batch_tokens * conditions.routing.top_k * layers / ranks;
  const parallel::CostModel cost = {
      .batch_tokens = options.batch_tokens,
      .routing = conditions.routing,
      .tile_s = conditions.row_s,
      .token_bytes = conditions.token_bytes,
      .levels = options.levels,
      .expert_bytes = static_cast<double>(conditions.expert_bytes),
      .move_bytes_per_s = options.move_bytes_per_s,
      .interval_batches = std::max(1.0, batch_s > 0 ? conditions.busy * options.interval_s / batch_s : 1)};
  const bool by_time = !options.levels.empty() && batch_s > 0 && conditions.dead.empty();
  parallel::PlannerOptions planner;
  planner.slots = parallel::EqualSlots(load.experts + options.redundant, ranks);
  planner.current = &known;
  planner.speeds = conditions.speeds;
  if (by_time) planner.cost = &cost;
  planner.threads = 1;  // ranks compute meanwhile
  planner.stop = stop;
  ASSIGN_OR_RETURN(const std::vector<LayerPlacement> planned,
                   PlanLayers(known, workloads, conditions, planner));
  std::vector<PlannedMove> moves;
  const parallel::ExpertTime time(cost);
  for (size_t i = 0; i < load.layers.size(); ++i) {
    const auto index = static_cast<int>(i);
    const std::span<const double> loads = workloads.front().layer(index);
    const LayerPlacement& old = known.layers[i];
    PlannedMove move{.layer = load.layers[i],
                     .next = Sorted(planned[i]),
                     .loads = {loads.begin(), loads.end()},
                     .speeds = conditions.speeds,
                     .before = Balance(LivingPart(old, conditions), workloads, index, speeds)};
    move.after = Balance(LivingPart(move.next, conditions), workloads, index, speeds);
    move.moved = MostReceived(old, move.next);
    double saved = 1 - move.after / move.before;
    if (by_time) {
      saved = 1 - BatchSeconds(move.next, workloads, index, cost, time, conditions.speeds) /
                      BatchSeconds(old, workloads, index, cost, time, conditions.speeds);
    }
    const double saved_s = saved * conditions.busy * options.interval_s / layers;
    const double cost_s =
        static_cast<double>(move.moved * conditions.expert_bytes) / options.move_bytes_per_s;
    if (move.moved > 0 && saved >= options.least_gain && saved_s > cost_s) moves.push_back(std::move(move));
  }
  std::ranges::stable_sort(moves, [](const PlannedMove& a, const PlannedMove& b) {
    return a.after / a.before < b.after / b.before;
  });
  return moves;
}

PlacementByLayer LoadedPlacement(const parallel::Layout& layout, const models::ModelInfo& info,
                                 const ExpertLoadStats& load) {
  const parallel::ModelShape shape{.layers = info.layers, .experts = info.experts, .moe_layers = load.layers};
  PlacementByLayer placement;
  for (const int layer : load.layers) placement[layer] = parallel::ExpertsByRank(layout, shape, layer);
  return placement;
}

ExpertBalancer::ExpertBalancer(const parallel::Layout& layout, const models::ModelInfo& info,
                               Lockstep& lockstep, std::vector<Executor*> replicas,
                               const ExpertBalanceOptions& options)
    : layout_(layout),
      info_(info),
      lockstep_(lockstep),
      replicas_(std::move(replicas)),
      options_(options),
      dead_(replicas_.size(), false),
      move_bytes_per_s_(options.move_bytes_per_s) {}

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
BalanceConditions ExpertBalancer::Measure(const std::vector<RankStats>& ranks, double busy) {
  BalanceConditions conditions = {.expert_bytes = info_.expert_bytes,
                                  .busy = busy,
                                  .routing = {.top_k = info_.experts_per_token,
                                              .groups = info_.expert_groups,
                                              .top_groups = info_.top_expert_groups},
                                  .token_bytes = 2.0 * sizeof(float) * info_.hidden_size};
  if (std::ranges::find(dead_, true) != dead_.end()) conditions.dead = dead_;
  int64_t rows = 0, fewest = std::numeric_limits<int64_t>::max();
  double seconds = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (IsDead(conditions, layout_.IndexInExpertGroup(ranks[i].rank))) continue;
    rows += ranks[i].timed_rows;
    seconds += ranks[i].timed_seconds;
    fewest = std::min(fewest, ranks[i].timed_rows - (i < measured_.size() ? measured_[i].timed_rows : 0));
  }
  if (options_.measured_speeds && fewest >= kLeastTimedRows) {
    speeds_ = MeasuredSpeeds(layout_, measured_, ranks, conditions.dead);
    measured_ = ranks;
  }
  conditions.speeds = options_.measured_speeds ? speeds_ : layout_.speeds();
  stats_.speeds = conditions.speeds;
  if (rows < kLeastTimedRows) return conditions;
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
  const double computing = ComputingSeconds(ranks);
  const std::chrono::duration<double> passed = now - planned_;
  const double living = static_cast<double>(ranks.size()) *
                        static_cast<double>(std::ranges::count(dead_, false)) /
                        static_cast<double>(dead_.size());
  const double busy = std::min(1.0, (computing - computing_) / (passed.count() * std::max(1.0, living)));
  computing_ = computing;
  planned_ = now;
  windows_ = load->all_windows;
  ExpertBalanceOptions options = options_;
  options.move_bytes_per_s = move_bytes_per_s_;
  const BalanceConditions conditions = Measure(ranks, busy);
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
  Note(fmt::format("{} layers move; the first has a busiest rank of {:.2f} times the mean, then {:.2f}",
                   moves->size(), moves->front().before, moves->front().after));
  // Layers whose last move failed come after the others.
  std::ranges::stable_partition(*moves,
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
  int64_t bytes = 0, most = 0;
  for (const Executor* replica : Living()) {
    for (const models::ExpertMoveReport& report : replica->move_reports()) {
      const bool of_this = report.number == number_;
      if (of_this && report.state == models::MoveState::kFailed) {
        return RollBack("a rank could not gather its experts", now);
      }
      ready &= of_this && report.state == models::MoveState::kReady;
      bytes += report.sent_bytes;
      most = std::max(most, report.sent_bytes);
    }
  }
  if (!ready) {
    if (moving_s_ < options_.move_limit_s) return OkStatus();
    return RollBack(fmt::format("it took longer than {} s", options_.move_limit_s), now);
  }
  lockstep_.ApplyMove(number_);
  steps_ = lockstep_.steps();
  const PlannedMove& move = queue_.front();
  if (most > 0 && moving_s_ > 0) {
    move_bytes_per_s_ =
        std::max(static_cast<double>(most) / moving_s_, options_.move_bytes_per_s / kMaxSlowdown);
  }
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
