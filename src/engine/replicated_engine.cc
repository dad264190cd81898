#include "engine/replicated_engine.h"

#include <algorithm>
#include <limits>
#include <ranges>
#include <utility>

#include "base/check.h"

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
  for (const auto& replica : replicas_) {
    ASSIGN_OR_RETURN(const models::ExpertLoad load, replica->FetchExpertLoad());
    RETURN_IF_ERROR(AddExpertLoad(load, &sum));
  }
  load_->Add(sum, ExpertLoadRecorder::Clock::now());
  return OkStatus();
}

size_t ReplicatedEngine::ReplicaFor(const Request& request) const {
  size_t best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < replicas_.size(); ++i) {
    const int64_t work = replicas_[i]->PendingTokens() - replicas_[i]->CachedTokens(request);
    if (work >= least) continue;
    least = work;
    best = i;
  }
  return best;
}

StatusOr<RequestId> ReplicatedEngine::Add(Request request) {
  RETURN_IF_ERROR(Check(request));
  const size_t replica = ReplicaFor(request);
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
  if (balancer_ == nullptr) return OkStatus();
  return balancer_->Poll(
      load_->stats(), [this] { return Ranks(); }, now);
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
  for (const auto& replica : replicas_) demands.push_back(replica->Demand());
  const std::vector<int> limits = EvenLimits(demands, max_batch_tokens_);
  for (size_t i = 0; i < replicas_.size(); ++i) replicas_[i]->LimitRows(limits[i]);
}

Status ReplicatedEngine::Step(std::vector<TokenEvent>* events) {
  std::vector<StepSeconds> before;
  for (const auto& replica : replicas_) before.push_back(replica->seconds());
  const size_t known = events->size();
  EvenOut();
  // Replica 0 computes in this thread, so it begins last and ends first.
  for (const auto& replica : std::views::reverse(replicas_)) replica->Begin();
  Status failure;
  for (const auto& replica : replicas_) {
    Status status = replica->Finish(events);
    if (failure.ok()) failure = std::move(status);
  }
  CountTime(before);
  for (const TokenEvent& event : std::span(*events).subspan(known)) {
    if (event.finish != FinishReason::kNone) replica_of_.erase(event.request);
  }
  return failure.ok() && load_ != nullptr ? FollowLoad() : failure;
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
  for (const auto& replica : replicas_) replica->ClearCache();
}

bool ReplicatedEngine::saving() const {
  return std::ranges::any_of(replicas_, [](const auto& replica) { return replica->saving(); });
}

void ReplicatedEngine::SaveCache(const std::function<bool()>& stop) {
  for (const auto& replica : replicas_) replica->SaveCache(stop);
}

bool ReplicatedEngine::idle() const {
  return std::ranges::all_of(replicas_, [](const auto& replica) { return replica->idle(); });
}

EngineStats ReplicatedEngine::stats() const {
  EngineStats sum;
  std::vector<RankStats> ranks;
  for (const auto& replica : replicas_) {
    const EngineStats part = replica->stats();
    AddReplica(part, &sum);
    ranks.insert(ranks.end(), part.ranks.begin(), part.ranks.end());
  }
  sum.ranks = MergeByRank(ranks);
  if (balancer_ != nullptr) sum.balance = std::make_shared<const ExpertBalanceStats>(balancer_->stats());
  sum.link_levels = link_levels_;
  if (load_ != nullptr) sum.expert_load = load_->stats();
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
