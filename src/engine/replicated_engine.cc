#include "engine/replicated_engine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "engine/lockstep.h"

namespace moesaic::engine {
namespace {

void AddTiers(const EngineStats& part, EngineStats* sum) {
  sum->swapped_out += part.swapped_out;
  sum->swapped_in += part.swapped_in;
  sum->swapped_blocks += part.swapped_blocks;
  sum->swap_blocks += part.swap_blocks;
  cache::WarmTierStats& warm = sum->warm;
  warm.blocks += part.warm.blocks;
  warm.capacity_blocks += part.warm.capacity_blocks;
  warm.bytes += part.warm.bytes;
  warm.stored_blocks += part.warm.stored_blocks;
  warm.restored_blocks += part.warm.restored_blocks;
  warm.evicted_blocks += part.warm.evicted_blocks;
  warm.refused_blocks += part.warm.refused_blocks;
  warm.dropped_blocks += part.warm.dropped_blocks;
  warm.store_seconds += part.warm.store_seconds;
  warm.restore_seconds += part.warm.restore_seconds;
}

void AddSpeculation(const SpeculationStats& part, SpeculationStats* sum) {
  sum->drafts += part.drafts;
  sum->draft_tokens += part.draft_tokens;
  sum->accepted_tokens += part.accepted_tokens;
  for (size_t i = 0; i < part.accepted_at.size(); ++i) sum->accepted_at[i] += part.accepted_at[i];
}

// Replicas have no disk tier. Seconds and ranks are merged by the caller.
void AddReplica(const EngineStats& part, EngineStats* sum) {
  sum->running += part.running;
  sum->waiting += part.waiting;
  for (const auto& [client, count] : part.waiting_of) sum->waiting_of[client] += count;
  sum->free_blocks += part.free_blocks;
  sum->cached_blocks += part.cached_blocks;
  sum->total_blocks += part.total_blocks;
  sum->tree_nodes += part.tree_nodes;
  sum->prompt_tokens += part.prompt_tokens;
  sum->output_tokens += part.output_tokens;
  sum->preemptions += part.preemptions;
  sum->steps += part.steps;
  sum->cache_queries += part.cache_queries;
  sum->cache_hits += part.cache_hits;
  sum->cache_evictions += part.cache_evictions;
  AddTiers(part, sum);
  AddSpeculation(part.speculation, &sum->speculation);
  AddCounters(part.sparsity, &sum->sparsity);
  sum->replicas.push_back({.running = part.running,
                           .waiting = part.waiting,
                           .free_blocks = part.free_blocks,
                           .cached_blocks = part.cached_blocks,
                           .total_blocks = part.total_blocks,
                           .prompt_tokens = part.prompt_tokens,
                           .output_tokens = part.output_tokens});
}

}  // namespace

ReplicatedEngine::ReplicatedEngine(std::vector<std::unique_ptr<ContinuousEngine>> replicas,
                                   const EngineOptions& options, std::vector<std::string> link_levels)
    : replicas_(std::move(replicas)),
      max_batch_tokens_(options.max_batch_tokens),
      link_levels_(std::move(link_levels)),
      layout_(options.layout) {
  MOESAIC_CHECK(!replicas_.empty());
  if (options.expert_load.window_s > 0) load_ = std::make_unique<ExpertLoadRecorder>(options.expert_load);
}

ReplicatedEngine::~ReplicatedEngine() {
  if (load_ != nullptr && load_->has_sink()) {
    RecordLoad().IgnoreError();  // the last window; ranks may be dead
  }
}

Status ReplicatedEngine::RecordLoad() {
  models::ExpertLoad sum;
  last_load_.resize(replicas_.size());
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (!is_excluded(i)) {
      StatusOr<models::ExpertLoad> load = replicas_[i]->FetchExpertLoad();
      if (!load.ok() && !FailedOf(i)) return load.status();
      if (load.ok()) last_load_[i] = *std::move(load);
    }
    RETURN_IF_ERROR(AddExpertLoad(last_load_[i], &sum));
  }
  load_->Add(sum, ExpertLoadRecorder::Clock::now());
  return OkStatus();
}

// That of the largest replica: Check() accepts a request that one of them holds.
int ReplicatedEngine::max_context() const {
  int most = 0;
  for (const auto& replica : replicas_) most = std::max(most, replica->max_context());
  return most;
}

// The sizes of replicas do not change, so that any thread may ask.
Status ReplicatedEngine::Check(const Request& request) const {
  Status first_error;
  for (const auto& replica : replicas_) {
    Status status = replica->Check(request);
    if (status.ok()) return status;
    if (first_error.ok()) first_error = std::move(status);
  }
  return first_error;
}

StatusOr<size_t> ReplicatedEngine::ReplicaFor(const Request& request) const {
  std::optional<size_t> best;
  Status refused;
  std::pair<int64_t, int64_t> least;  // tokens that are cut, and work
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (is_excluded(i)) continue;
    const ContinuousEngine& replica = *replicas_[i];
    if (Status status = replica.Check(request); !status.ok()) {
      refused = std::move(status);
      continue;
    }
    const int64_t cached = replica.CachedTokens(request);
    const int64_t work = replica.PendingTokens() - cached + replica.MissingTokens(request, cached);
    const std::pair score(replica.CutTokens(request), work);
    if (best && score >= least) continue;
    least = score;
    best = i;
  }
  if (!best) return refused;
  return *best;
}

StatusOr<RequestId> ReplicatedEngine::Add(Request request) {
  ASSIGN_OR_RETURN(const size_t replica, ReplicaFor(request));
  RETURN_IF_ERROR(replicas_[replica]->AddAs(last_id_ + 1, std::move(request)));
  replica_of_[++last_id_] = replica;
  return last_id_;
}

void ReplicatedEngine::Cancel(RequestId id) {
  if (const auto it = replica_of_.find(id); it != replica_of_.end()) replicas_[it->second]->Cancel(id);
}

Status ReplicatedEngine::FollowLoad() {
  const auto now = ExpertLoadRecorder::Clock::now();
  if (load_->Due(now)) RETURN_IF_ERROR(RecordLoad());
  FollowRankLoads();
  if (balancer_ == nullptr || FailuresToFollow()) return OkStatus();
  Status polled = balancer_->Poll(
      load_->stats(), [this] { return Ranks(); }, now);
  if (polled.ok() || lockstep_ == nullptr) return polled;
  RETURN_IF_ERROR(lockstep_->CheckRanks());
  return FailuresToFollow() ? OkStatus() : polled;  // the next step stops the balancer
}

// Again after each window, and after each change of the placement.
void ReplicatedEngine::FollowRankLoads() {
  const std::shared_ptr<const ExpertLoadStats> load = load_->stats();
  const uint64_t epoch = balancer_ != nullptr ? balancer_->stats().epoch : 0;
  if (load == nullptr || !layout_.exchanges_tokens()) return;
  if (load == rank_loads_from_ && epoch == rank_loads_epoch_) return;
  const bool moved = balancer_ != nullptr && !balancer_->placement().empty();
  rank_loads_ = std::make_shared<const RankLoads>(
      RankLoadsOf(*load, moved ? balancer_->placement() : LoadedPlacement(layout_, model(), *load)));
  rank_loads_from_ = load;
  rank_loads_epoch_ = epoch;
}

std::vector<RankStats> ReplicatedEngine::Ranks() const {
  std::vector<RankStats> ranks;
  for (const auto& replica : replicas_) {
    const std::vector<RankStats> part = replica->executor().ranks();
    ranks.insert(ranks.end(), part.begin(), part.end());
  }
  return MergeByRank(ranks);
}

void ReplicatedEngine::EvenOut() {
  std::vector<StepDemand> demands;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    demands.push_back(is_excluded(i) ? StepDemand() : replicas_[i]->Demand());
  }
  const std::vector<int> limits = EvenLimits(demands, max_batch_tokens_);
  for (size_t i = 0; i < replicas_.size(); ++i) replicas_[i]->LimitRows(limits[i]);
}

Status ReplicatedEngine::Step(std::vector<TokenEvent>* events) {
  std::vector<StepSeconds> before;
  for (const auto& replica : replicas_) before.push_back(replica->seconds());
  const size_t known = events->size();
  EvenOut();
  // Replica 0 computes in this thread, so it begins last and ends first.
  for (size_t i = replicas_.size(); i-- > 0;) {
    if (!is_excluded(i)) replicas_[i]->Begin();
  }
  Status failure;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    Status status = is_excluded(i) ? OkStatus() : replicas_[i]->Finish(events);
    if (!status.ok() && failure.ok() && !FailedOf(i)) failure = std::move(status);
  }
  CountTime(before);
  FollowFailures(events);
  int64_t ended = 0;
  for (const TokenEvent& event : std::span(*events).subspan(known)) {
    if (event.finish == FinishReason::kNone) continue;
    replica_of_.erase(event.request);
    ++ended;
  }
  if (survival_ != nullptr && survival_->left_out_experts > 0 && ended > 0) {
    auto stats = std::make_shared<SurvivalStats>(*survival_);
    stats->reduced_requests += ended;
    survival_ = std::move(stats);
  }
  return failure.ok() && load_ != nullptr ? FollowLoad() : failure;
}

void ReplicatedEngine::Tolerate(std::shared_ptr<Lockstep> lockstep, const models::Model& model) {
  lockstep_ = std::move(lockstep);
  model_ = &model;
  UpdateSurvival();
}

Status ReplicatedEngine::CheckRanks() {
  if (lockstep_ == nullptr) return replicas_.front()->CheckRanks();
  RETURN_IF_ERROR(lockstep_->CheckRanks());
  UpdateSurvival();
  return OkStatus();
}

// Whether an error of a replica is that of its rank, which has failed.
bool ReplicatedEngine::FailedOf(size_t replica) {
  if (lockstep_ == nullptr) return false;
  return lockstep_->CheckRanks().ok() && lockstep_->is_excluded(replica);
}

bool ReplicatedEngine::FailuresToFollow() const {
  return lockstep_ != nullptr && lockstep_->excluded().size() > followed_;
}

// Ends the requests of replicas that have failed since the last call.
void ReplicatedEngine::FollowFailures(std::vector<TokenEvent>* events) {
  if (!FailuresToFollow()) return;
  const std::vector<int>& excluded = lockstep_->excluded();
  followed_ = excluded.size();
  int64_t failed = 0;
  for (const int rank : excluded) failed += replicas_[rank]->Abort(lockstep_->FailureOf(rank), events);
  if (balancer_ != nullptr) balancer_->Exclude(excluded, lockstep_->failures().back());
  UpdateSurvival();
  auto stats = std::make_shared<SurvivalStats>(*survival_);
  stats->failed_requests += failed;
  survival_ = std::move(stats);
}

void ReplicatedEngine::UpdateSurvival() {
  const int alive = static_cast<int>(replicas_.size() - lockstep_->excluded().size());
  const std::vector<models::LeftOutExperts> left_out = model_->left_out_experts();
  if (survival_ != nullptr && survival_->alive == alive && survival_->left_out == left_out) return;
  auto stats =
      survival_ == nullptr ? std::make_shared<SurvivalStats>() : std::make_shared<SurvivalStats>(*survival_);
  stats->ranks = static_cast<int>(replicas_.size());
  stats->alive = alive;
  stats->failures = lockstep_->failures();
  stats->left_out = left_out;
  stats->left_out_experts = 0;
  for (const models::LeftOutExperts& layer : left_out) stats->left_out_experts += std::ssize(layer.experts);
  survival_ = std::move(stats);
}

// Adds the longest step of a replica, divided between prefill and decode like the time of all.
void ReplicatedEngine::CountTime(std::span<const StepSeconds> before) {
  StepSeconds all;
  double longest = 0;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    const StepSeconds now = replicas_[i]->seconds();
    const double prefill = now.prefill - before[i].prefill, decode = now.decode - before[i].decode;
    all.prefill += prefill;
    all.decode += decode;
    longest = std::max(longest, prefill + decode);
  }
  if (longest <= 0) return;
  seconds_.prefill += longest * all.prefill / (all.prefill + all.decode);
  seconds_.decode += longest * all.decode / (all.prefill + all.decode);
}

void ReplicatedEngine::ClearCache() {
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (!is_excluded(i)) replicas_[i]->ClearCache();
  }
}

bool ReplicatedEngine::saving() const {
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (!is_excluded(i) && replicas_[i]->saving()) return true;
  }
  return false;
}

void ReplicatedEngine::SaveCache(const std::function<bool()>& stop) {
  for (size_t i = 0; i < replicas_.size(); ++i) {
    if (!is_excluded(i)) replicas_[i]->SaveCache(stop);
  }
}

bool ReplicatedEngine::idle() const {
  // The requests of an excluded replica end with the next step.
  return std::ranges::all_of(replicas_, [](const auto& replica) { return replica->idle(); });
}

EngineStats ReplicatedEngine::stats() const {
  EngineStats sum;
  std::vector<RankStats> ranks;
  for (size_t i = 0; i < replicas_.size(); ++i) {
    EngineStats part = replicas_[i]->stats();
    if (is_excluded(i)) part.free_blocks = part.cached_blocks = part.total_blocks = part.tree_nodes = 0;
    AddReplica(part, &sum);
    ranks.insert(ranks.end(), part.ranks.begin(), part.ranks.end());
  }
  sum.ranks = MergeByRank(ranks);
  if (balancer_ != nullptr) sum.balance = std::make_shared<const ExpertBalanceStats>(balancer_->stats());
  sum.survival = survival_;
  sum.link_levels = link_levels_;
  if (load_ != nullptr) {
    sum.expert_load = load_->stats();
    sum.expert_load_write_errors = load_->write_errors();
  }
  sum.rank_loads = rank_loads_;
  sum.prefill_seconds = seconds_.prefill;
  sum.decode_seconds = seconds_.decode;
  return sum;
}

Status ReplicatedEngine::Score(std::span<const int32_t> ids,
                               const std::function<Status(int64_t, std::span<const float>)>& sink,
                               models::RouteTap* routes) {
  if (!idle()) return absl::FailedPreconditionError("scoring needs an engine without requests");
  return first().Score(ids, sink, routes);
}

}  // namespace moesaic::engine
