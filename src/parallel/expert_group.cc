#include "parallel/expert_group.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "parallel/job_wait.h"
#include "parallel/placement/token_split.h"

namespace moesaic::parallel {
namespace {

// Rows of a decode step travel in one message to each rank, whose buffers have a fixed size: at most this for
// all ranks. DeepSeek-V3 in f32 takes 3.7 MB for 128 rows of a rank.
constexpr int64_t kFixedBufferBytes = int64_t{64} << 20;
constexpr int kMaxFixedRows = 128;
// From about this many rows of an expert on, its products take longer than reading its weights, so that time
// tells how fast the rank is.
constexpr int64_t kTimedRowsPerExpert = 16;

int FixedRows(const ExpertGroupOptions& options, int ranks) {
  const int64_t row = comm::RowRoutingBytes(options.top_k) + int64_t{4} * options.hidden;
  return static_cast<int>(std::clamp<int64_t>(kFixedBufferBytes / (row * ranks), 1, kMaxFixedRows));
}

// Of a replica on a dead rank: below that of all others.
constexpr double kNoCredit = -1e300;

class Stopwatch {
 public:
  Stopwatch(const comm::Transport& job, double* total) : job_(job), total_(total), begin_(job.Now()) {}
  ~Stopwatch() { *total_ += job_.Now() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  const comm::Transport& job_;
  double* const total_;
  const double begin_;
};

}  // namespace

ExpertGroup::~ExpertGroup() = default;

StatusOr<std::unique_ptr<ExpertGroup>> ExpertGroup::Create(
    comm::Transport& job, const comm::Topology& topology, const Layout& layout,
    const ExpertGroupOptions& options, const std::vector<std::vector<std::vector<int>>>& by_layer) {
  std::unique_ptr<ExpertGroup> group(new ExpertGroup(job, layout, options));
  const std::vector<int> ranks = layout.ExpertGroup(job.rank());
  ASSIGN_OR_RETURN(group->ranks_, comm::GroupTransport::Create(job, ranks));
  ASSIGN_OR_RETURN(group->topology_, topology.Selected(ranks));
  group->dead_.assign(ranks.size(), false);
  group->split_ =
      std::make_unique<BatchSplit>(job, *group->ranks_, options.experts, options.time_limit_s, options.split);
  for (const auto& by_rank : by_layer) {
    ASSIGN_OR_RETURN(Layer layer, group->MakeLayer(by_rank));
    group->has_replicas_ |= layer.has_replicas;
    group->layers_.push_back(std::move(layer));
  }
  if (group->layers_.empty()) return group;  // a stage of dense layers
  group->few_rows_ = FixedRows(options, static_cast<int>(ranks.size()));
  comm::ExchangeOptions exchange;
  exchange.dispatch_payload = exchange.combine_payload = comm::Payload::kF32;
  exchange.reduction = options.sums_by_choice || options.split.spills() || group->has_replicas_
                           ? comm::Reduction::kBySlot
                           : comm::Reduction::kPartialSums;
  exchange.low_latency_tokens = group->few_rows_;
  exchange.low_latency_slots = options.top_k;
  exchange.time_limit_s = options.time_limit_s;
  ASSIGN_OR_RETURN(group->exchange_,
                   comm::ExpertExchange::Create(*group->ranks_, *group->topology_,
                                                *group->layers_.front().map, options.hidden, exchange));
  return group;
}

StatusOr<ExpertGroup::Layer> ExpertGroup::MakeLayer(const std::vector<std::vector<int>>& by_rank) const {
  Layer layer;
  ASSIGN_OR_RETURN(comm::ExpertMap map, comm::ExpertMap::Create(options_.experts, by_rank));
  layer.map = std::make_shared<const comm::ExpertMap>(std::move(map));
  layer.by_rank = by_rank;
  layer.has_replicas = layer.map->physical_experts() > options_.experts;
  layer.loads.assign(options_.experts, 1.0);
  layer.speeds = options_.speeds;
  RETURN_IF_ERROR(Divide(layer));
  return layer;
}

Status ExpertGroup::Divide(Layer& layer) const {
  if (!layer.has_replicas && !options_.split.spills()) return OkStatus();
  LayerPlacement living = parallel::LivingPart(layer.by_rank, dead_);
  std::vector<double> speeds = layer.speeds;
  if (speeds.empty()) speeds.assign(living.size(), 1.0);
  for (size_t rank = 0; rank < living.size(); ++rank) {
    if (dead_[rank]) speeds[rank] = kDeadSpeed;
  }
  TokenSplit split(living, options_.experts, speeds);
  std::vector<double> served = layer.loads;
  for (int expert = 0; expert < options_.experts; ++expert) {
    if (CopiesOf(layer, expert) == 0) served[expert] = 0;
  }
  split.Solve(served);
  layer.shares.resize(layer.map->physical_experts());
  for (int i = 0; i < layer.map->physical_experts(); ++i) {
    const comm::ExpertReplica& replica = layer.map->physical(i);
    const double load = served[replica.expert];
    const double equal = dead_[replica.rank] ? 0 : 1.0 / CopiesOf(layer, replica.expert);
    layer.shares[i] = load > 0 ? split.LoadOn(replica.expert, replica.rank) / load : equal;
  }
  if (options_.split.exact) {
    layer.split = BatchSplit::Layer{
        .experts = std::move(living), .speeds = std::move(speeds), .split = std::move(split)};
  }
  return OkStatus();
}

// Whether counts are exchanged for the next batch. Equal on all ranks.
bool ExpertGroup::SplitsExactly(const Layer& layer) const {
  return layer.split.has_value() && IsLargeBatch();
}

// Replicas of the expert on living ranks.
int ExpertGroup::CopiesOf(const Layer& layer, int expert) const {
  return static_cast<int>(std::ranges::count_if(
      layer.map->ReplicasOf(expert), [&](int32_t copy) { return !dead_[layer.map->physical(copy).rank]; }));
}

Status ExpertGroup::SetDead(std::span<const int> job_ranks) {
  pending_.reset();
  received_.reset();
  std::vector<int> members;
  for (const int rank : job_ranks) {
    const auto found = std::ranges::find(ranks_->ranks(), rank);
    if (found != ranks_->ranks().end()) members.push_back(static_cast<int>(found - ranks_->ranks().begin()));
  }
  if (exchange_ != nullptr) RETURN_IF_ERROR(exchange_->SetDead(members));
  dead_.assign(dead_.size(), false);
  for (const int member : members) dead_[member] = true;
  split_->SetDead(dead_);
  for (Layer& layer : layers_) {
    layer.loads.assign(options_.experts, 1.0);
    RETURN_IF_ERROR(Divide(layer));
  }
  return OkStatus();
}

std::vector<int> ExpertGroup::LostExperts(int layer) const {
  std::vector<int> lost;
  for (int expert = 0; expert < options_.experts; ++expert) {
    if (CopiesOf(layers_[layer], expert) == 0) lost.push_back(expert);
  }
  return lost;
}

Status ExpertGroup::SetLoads(int layer, std::span<const double> loads, std::span<const double> speeds) {
  if (layer < 0 || layer >= layers() || std::ssize(loads) != options_.experts) {
    return InvalidArgument("loads of {} experts of layer {} do not fit {} layers of {}", loads.size(), layer,
                           layers(), options_.experts);
  }
  if (!speeds.empty() && (speeds.size() != dead_.size() || !(std::ranges::min(speeds) > 0))) {
    return InvalidArgument("speeds must be positive numbers for {} ranks, found {} of which {} is the least",
                           dead_.size(), speeds.size(), std::ranges::min(speeds));
  }
  RETURN_IF_ERROR(split_->DropPrefetched());
  layers_[layer].loads.assign(loads.begin(), loads.end());
  layers_[layer].speeds.assign(speeds.begin(), speeds.end());
  return Divide(layers_[layer]);
}

Status ExpertGroup::CheckExperts(const LayerPlacement& by_rank) const {
  if (by_rank.size() != ranks_->ranks().size()) {
    return InvalidArgument("a placement of experts must have {} ranks, found {}", ranks_->ranks().size(),
                           by_rank.size());
  }
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (!std::ranges::is_sorted(by_rank[rank])) {
      return InvalidArgument("experts of rank {} must be ascending", rank);
    }
  }
  return comm::ExpertMap::Create(options_.experts, by_rank).status();
}

Status ExpertGroup::SetExperts(int layer, const LayerPlacement& by_rank) {
  RETURN_IF_ERROR(CheckExperts(by_rank));
  RETURN_IF_ERROR(split_->DropPrefetched());
  ASSIGN_OR_RETURN(layers_[layer], MakeLayer(by_rank));
  return OkStatus();
}

Range ExpertGroup::OwnRows(int rows) const {
  const int shards = layout_.degrees().tensor;
  return parallel::Divide(rows, 1, shards)[layout_.At(job_.rank()).shard];
}

void ExpertGroup::SetMostRows(int rows) {
  const int shards = layout_.degrees().tensor;
  most_sent_ = (rows + shards - 1) / shards;
}

// A smooth weighted round: each token of an expert goes to the replica that lacks most of its share. Ranks
// begin with different replicas, so that short batches spread, too.
std::span<const int32_t> ExpertGroup::ChooseReplicas(const Layer& layer, std::span<const int32_t> ids) {
  const comm::ExpertMap& map = *layer.map;
  credit_.resize(map.physical_experts());
  for (int expert = 0; expert < options_.experts; ++expert) {
    const std::span<const int32_t> copies = map.ReplicasOf(expert);
    for (size_t i = 0; i < copies.size(); ++i) {
      const size_t turn = (i + static_cast<size_t>(ranks_->rank())) % copies.size();
      credit_[copies[i]] =
          layer.shares[copies[i]] * static_cast<double>(turn) / static_cast<double>(copies.size());
      if (dead_[map.physical(copies[i]).rank]) credit_[copies[i]] = kNoCredit;
    }
  }
  replicas_.assign(ids.size(), 0);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) continue;
    const std::span<const int32_t> copies = map.ReplicasOf(ids[i]);
    size_t best = 0;
    for (size_t c = 0; c < copies.size(); ++c) {
      credit_[copies[c]] += layer.shares[copies[c]];
      if (credit_[copies[c]] > credit_[copies[best]]) best = c;
    }
    credit_[copies[best]] -= 1;
    replicas_[i] = static_cast<int32_t>(best);
  }
  return replicas_;
}

Status ExpertGroup::Begin(int layer, std::span<const float> x, std::span<const int32_t> ids,
                          std::span<const float> weights, const BatchSplit::Weights& own) {
  const Stopwatch watch(job_, &seconds_);
  layer_ = layer;
  Layer& placed = layers_[layer];
  comm::TopK topk{.tokens = std::ssize(x) / options_.hidden,
                  .k = options_.top_k,
                  .ids = ids,
                  .weights = weights,
                  .replicas = {}};
  std::shared_ptr<const comm::ExpertMap> map = placed.map;
  own_experts_ = placed.map->local_experts(ranks_->rank());
  if (SplitsExactly(placed)) {
    StatusOr<BatchSplit::Choice> choice =
        split_->Split(*placed.split, *placed.map, ids, own, row_time_.seconds());
    if (!choice.ok()) return Explain(choice.status());
    if (choice->map != nullptr) map = choice->map;
    topk.replicas = choice->replicas;
  } else if (placed.has_replicas) {
    topk.replicas = ChooseReplicas(placed, ids);
  }
  RETURN_IF_ERROR(exchange_->SetMap(std::move(map)));
  const bool few = most_sent_ > 0 && most_sent_ <= few_rows_;
  timed_ = IsLargeBatch();
  StatusOr<comm::PendingDispatch> begun = few ? exchange_->BeginDispatch(comm::RowsOf(x), topk)
                                              : exchange_->BeginThroughputDispatch(comm::RowsOf(x), topk);
  if (!begun.ok()) return Explain(begun.status());
  pending_.emplace(*std::move(begun));
  return OkStatus();
}

StatusOr<ExpertGroup::Rows> ExpertGroup::Receive() {
  const Stopwatch watch(job_, &seconds_);
  StatusOr<comm::Dispatched> received = pending_->Finish();
  pending_.reset();
  if (!received.ok()) return Explain(received.status());
  received_ = *std::move(received);
  expert_of_row_.resize(received_->rows());
  const std::span<const int64_t> begin = received_->expert_begin();
  for (size_t expert = 0; expert + 1 < begin.size(); ++expert) {
    std::fill(expert_of_row_.begin() + begin[expert], expert_of_row_.begin() + begin[expert + 1],
              static_cast<int32_t>(expert));
  }
  computed_rows_ += received_->rows();
  const auto own = static_cast<int>(begin[own_experts_]);
  for (size_t row = own; row < expert_of_row_.size(); ++row) expert_of_row_[row] -= own_experts_;
  const StatusOr<const std::byte*> spilled = split_->AwaitSpilled();
  if (!spilled.ok()) return Explain(spilled.status());
  if (const Status prefetching = PrefetchNext(); !prefetching.ok()) return Explain(prefetching);
  received_at_ = job_.Now();
  if (timed_) {
    int64_t active = 0;  // experts with rows, those of other ranks included
    for (size_t expert = 0; expert + 1 < begin.size(); ++expert)
      active += begin[expert] < begin[expert + 1] ? 1 : 0;
    timed_ = active > 0 && received_->rows() >= kTimedRowsPerExpert * active;
    if (!timed_) row_time_.Skip();
  }
  return Rows{.count = static_cast<int>(received_->rows()),
              .own = own,
              .x = reinterpret_cast<const float*>(received_->data().data()),
              .expert = expert_of_row_,
              .spilled = *spilled};
}

// The weights travel while this layer computes.
Status ExpertGroup::PrefetchNext() {
  const int next = layer_ + 1;
  if (next >= options_.pass_layers || !SplitsExactly(layers_[layer_]) || !SplitsExactly(layers_[next]))
    return OkStatus();
  return split_->Prefetch(*layers_[next].split);
}

Status ExpertGroup::Combine(std::span<const float> outputs, std::span<float> out) {
  const Stopwatch watch(job_, &seconds_);
  const double seconds = job_.Now() - received_at_;
  computing_seconds_ += seconds;
  if (timed_) {
    timed_rows_ += received_->rows();
    timed_seconds_ += seconds;
    row_time_.Add(received_->rows(), seconds);
  }
  const Status combined = exchange_->Combine(comm::RowsOf(outputs), received_->handle(), comm::OutputOf(out));
  received_.reset();
  return combined.ok() ? combined : Explain(combined);
}

Status ExpertGroup::Explain(const Status& status) const {
  const Status dead = CheckRanks(job_);
  if (!dead.ok()) return dead;
  return Annotate(status, fmt::format("experts of the job's ranks {}, which are numbered from 0 here",
                                      fmt::join(ranks_->ranks(), ", ")));
}

ExpertTraffic ExpertGroup::traffic() const {
  ExpertTraffic traffic;
  traffic.computed_rows = computed_rows_;
  traffic.seconds = seconds_;
  traffic.computing_seconds = computing_seconds_;
  traffic.split = split_->stats();
  traffic.timed_rows = timed_rows_;
  traffic.timed_seconds = timed_seconds_;
  if (exchange_ == nullptr) return traffic;
  for (const auto* levels : {&exchange_->dispatch_traffic(), &exchange_->combine_traffic()}) {
    traffic.levels.resize(levels->size());
    for (size_t i = 0; i < levels->size(); ++i) {
      const comm::LevelTraffic& level = (*levels)[i];
      traffic.sent_rows += level.rows;
      traffic.levels[i].name = level.level;
      traffic.levels[i].bytes += level.row_bytes + level.routing_bytes;
    }
  }
  return traffic;
}

}  // namespace moesaic::parallel
