#include "parallel/batch_split.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "comm/collectives/communicator.h"
#include "parallel/job_wait.h"

namespace moesaic::parallel {
namespace {

// After the tags of moves (expert_move.cc); those of exchanges begin at 2^28. A tag has 12 bits of the epoch
// and 12 of the split: messages before a failure are never matched by later ones.
constexpr comm::Tag kCountTags = comm::Tag{4} << comm::kCommunicatorTagBits;
constexpr comm::Tag kSpillTags = comm::Tag{5} << comm::kCommunicatorTagBits;
constexpr comm::Tag kPrefetchTags = comm::Tag{6} << comm::kCommunicatorTagBits;
constexpr int kBytesUnit = 64;    // a message has the size of an expert in this unit
constexpr int kFurtherWords = 2;  // a message ends with the size of an expert and the nanoseconds of a row

int64_t RowsOf(const std::vector<int64_t>& slots) {
  return std::accumulate(slots.begin(), slots.end(), int64_t{0});
}

// Time of the rank that computes longest, where a row takes `row_s` [ranks] seconds.
double SecondsOf(const BatchPlan& plan, std::span<const double> row_s) {
  double longest = 0;
  for (size_t rank = 0; rank < plan.tokens.size(); ++rank)
    longest = std::max(longest, static_cast<double>(RowsOf(plan.tokens[rank])) * row_s[rank]);
  return longest;
}

}  // namespace

BatchPlan PlanBatch(const LayerPlacement& layer, TokenSplit& split, std::span<const int64_t> tokens,
                    std::span<const double> speeds) {
  BatchPlan plan = {.experts = layer, .tokens = split.SplitTokens(tokens)};
  for (size_t rank = 0; rank < plan.tokens.size(); ++rank) {
    const int64_t rows = RowsOf(plan.tokens[rank]);
    plan.busiest = std::max(plan.busiest, rows);
    plan.slowest = std::max(plan.slowest, static_cast<double>(rows) / (speeds.empty() ? 1.0 : speeds[rank]));
  }
  plan.all = std::accumulate(tokens.begin(), tokens.end(), int64_t{0});
  return plan;
}

std::optional<BatchPlan> SpillBatch(const BatchPlan& plan, const LayerPlacement& layer, TokenSplit split,
                                    std::span<const int64_t> tokens, std::span<const double> speeds,
                                    const SpillOptions& spill) {
  const std::vector<double> loads(tokens.begin(), tokens.end());
  SpillPlan spilled = PlanSpill(split, loads, spill);
  if (spilled.moves.empty()) return std::nullopt;
  LayerPlacement next = layer;
  for (const SpillMove& move : spilled.moves) next[move.to].push_back(move.expert);
  TokenSplit split_of_next(next, static_cast<int>(tokens.size()), speeds);
  BatchPlan other = PlanBatch(next, split_of_next, tokens, speeds);
  if (other.slowest >= plan.slowest) return std::nullopt;
  other.spilled = std::move(spilled.moves);
  return other;
}

// The tokens that stay on no rank of their own are laid end to end in the order of ranks, and so is the room
// of replicas: near ranks exchange with near ones.
std::vector<int64_t> OwnTokens(std::span<const int64_t> tokens, std::span<const int> holders,
                               std::span<const int64_t> counts, int rank) {
  std::vector<int64_t> own(tokens.size(), 0), room(tokens.begin(), tokens.end());
  int64_t begin = 0;               // number of tokens that leave their rank, on ranks before this one
  int64_t leaving = counts[rank];  // number of tokens that leave this rank
  for (int source = 0; source < rank; ++source) begin += counts[source];
  for (size_t i = 0; i < holders.size(); ++i) {
    const int64_t stay = std::min(tokens[i], counts[holders[i]]);
    room[i] -= stay;
    if (holders[i] < rank) begin -= stay;
    if (holders[i] != rank) continue;
    own[i] = stay;
    leaving -= stay;
  }
  for (size_t i = 0; i < room.size() && leaving > 0; ++i) {
    const int64_t skipped = std::min(begin, room[i]);
    const int64_t taken = std::min(room[i] - skipped, leaving);
    begin -= skipped;
    leaving -= taken;
    own[i] += taken;
  }
  return own;
}

BatchSplit::BatchSplit(comm::Transport& job, comm::GroupTransport& ranks, int experts, double time_limit_s,
                       const BatchSplitOptions& options)
    : job_(job),
      ranks_(ranks),
      experts_(experts),
      words_(experts + kFurtherWords),
      time_limit_s_(time_limit_s),
      options_(options),
      dead_(ranks.size(), false),
      counts_(static_cast<size_t>(ranks.size()) * words_),
      totals_(experts),
      own_(experts) {}

BatchSplit::~BatchSplit() { CancelAll(); }

void BatchSplit::CancelAll() {
  for (auto* transfers :
       {&transfers_, &spilling_.sends, &spilling_.receives, &prefetching_.sends, &prefetching_.receives}) {
    Cancel(*transfers);
  }
}

void BatchSplit::Cancel(std::vector<comm::TransferId>& transfers) {
  for (const comm::TransferId& transfer : transfers) job_.Cancel(transfer);
  transfers.clear();
}

void BatchSplit::SetDead(const std::vector<bool>& dead) {
  CancelAll();
  dead_ = dead;
  spilled_here_ = 0;
  prefetched_for_ = nullptr;
  prefetched_.clear();
  ++epoch_;
  number_ = 0;
}

Status BatchSplit::WaitAll(std::vector<comm::TransferId>& transfers) {
  while (!transfers.empty()) {
    const comm::TransferId transfer = transfers.back();
    transfers.pop_back();
    const Status ended = WaitInJob(job_, transfer, time_limit_s_);
    if (ended.ok()) continue;
    Cancel(transfers);
    return ended;
  }
  return OkStatus();
}

// Sends this rank's row of counts_ to all others, and receives theirs.
Status BatchSplit::GatherCounts() {
  const comm::Tag tag = TagOf(kCountTags);
  const auto row = [&](int rank) {
    return std::as_writable_bytes(
        std::span(counts_).subspan(static_cast<size_t>(rank) * words_, static_cast<size_t>(words_)));
  };
  Status started;
  for (const bool sends : {true, false}) {
    for (int step = 1; step < ranks_.size() && started.ok(); ++step) {
      const int peer = (ranks_.rank() + step) % ranks_.size();
      if (dead_[peer]) continue;
      const StatusOr<comm::TransferId> transfer =
          sends ? ranks_.Send(peer, tag, row(ranks_.rank())) : ranks_.Receive(peer, tag, row(peer));
      started = transfer.status();
      if (started.ok()) transfers_.push_back(*transfer);
    }
  }
  if (started.ok()) return WaitAll(transfers_);
  Cancel(transfers_);
  return started;
}

// Bytes of an expert's weights; 0: the ranks can't send them.
int64_t BatchSplit::SpilledBytes() const {
  const int32_t units = CountsOf(ranks_.rank())[experts_];
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (!dead_[rank] && CountsOf(rank)[experts_] != units) return 0;
  }
  return int64_t{units} * kBytesUnit;
}

// Seconds that each rank takes for a row. Ranks that have not measured it count like the fastest one, so that
// they get rows and measure it.
std::vector<double> BatchSplit::RowSeconds() const {
  std::vector<double> seconds(ranks_.size(), 0);
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (!dead_[rank]) seconds[rank] = CountsOf(rank)[experts_ + 1] * 1e-9;
  }
  double fastest = std::ranges::max(seconds);
  for (const double each : seconds) fastest = each > 0 ? std::min(each, fastest) : fastest;
  for (double& each : seconds) each = each > 0 ? each : fastest;
  return seconds;
}

// Mean rows of a living rank.
double BatchSplit::EvenRows(const BatchPlan& plan) const {
  return static_cast<double>(plan.all) / static_cast<double>(std::ranges::count(dead_, false));
}

// Returns a plan that saves more time than the rank that sends or receives most weights needs.
std::optional<BatchPlan> BatchSplit::PlanSpilled(const BatchPlan& plan, const SpillInput& input) const {
  const int64_t bytes = input.layer.bytes;
  if (bytes == 0) return std::nullopt;
  const double expert_s = static_cast<double>(bytes) / options_.spill_bytes_per_s;
  const auto cost_s = [&](int experts) { return std::max(0.0, experts * expert_s - input.hidden_s); };
  const std::vector<double> row_s = RowSeconds();
  const double now_s = SecondsOf(plan, row_s);
  // Equal work is the most that any spill reaches.
  if (now_s - EvenRows(plan) * std::ranges::min(row_s) <= cost_s(1)) return std::nullopt;
  std::vector<int> held(ranks_.size(), 0);
  for (const SpillMove& move : input.prefetched) ++held[move.to];
  const SpillOptions limits = {.max_moves = kSpillSlots * ranks_.size(),
                               .prefetch_slots = kSpillSlots,
                               .held = held,
                               .tolerance = options_.spill_tolerance,
                               .expert_bytes = bytes,
                               .max_bytes = options_.spill_bytes - std::ssize(input.prefetched) * bytes};
  std::optional<BatchPlan> spilled =
      SpillBatch(plan, plan.experts, input.split, input.tokens, input.layer.speeds, limits);
  if (!spilled.has_value()) return std::nullopt;
  std::vector<int> sent(ranks_.size(), 0), received(ranks_.size(), 0);
  int most = 0;
  for (SpillMove& move : spilled->spilled) {
    // A rank with a temporary replica does not pass its weights on.
    const LayerPlacement& holders = input.layer.experts;
    const auto holds = [&](const std::vector<int>& experts) {
      return std::ranges::find(experts, move.expert) != experts.end();
    };
    if (!holds(holders[move.from]))
      move.from = static_cast<int>(std::ranges::find_if(holders, holds) - holders.begin());
    most = std::max({most, ++sent[move.from], ++received[move.to]});
  }
  if (now_s - SecondsOf(*spilled, row_s) <= cost_s(most)) return std::nullopt;
  return spilled;
}

// The temporary replicas that were prefetched for this split.
std::vector<SpillMove> BatchSplit::TakePrefetched() {
  if (std::exchange(prefetched_for_, nullptr) == nullptr) return {};
  buffer_ = 1 - buffer_;
  spilling_ = std::exchange(prefetching_, {});
  return std::exchange(prefetched_, {});
}

// Splits the counts over the experts of the layer and prefetched replicas, and spills further experts.
BatchPlan BatchSplit::PlanHere(Layer& layer, std::span<const SpillMove> prefetched) {
  LayerPlacement with;
  std::optional<TokenSplit> split_with;
  if (!prefetched.empty()) {
    with = layer.experts;
    for (const SpillMove& move : prefetched) with[move.to].push_back(move.expert);
    split_with.emplace(with, experts_, layer.speeds);
  }
  TokenSplit& split = split_with.has_value() ? *split_with : layer.split;
  BatchPlan plan = PlanBatch(prefetched.empty() ? layer.experts : with, split, totals_, layer.speeds);
  if (!options_.spills()) return plan;
  std::optional<BatchPlan> spilled =
      PlanSpilled(plan, {.layer = layer, .split = split, .tokens = totals_, .prefetched = prefetched});
  return spilled.has_value() ? *std::move(spilled) : plan;
}

void BatchSplit::CountUsed(const BatchPlan& plan, const Layer& layer, int64_t prefetched_here) {
  const std::vector<int64_t>& tokens = plan.tokens[ranks_.rank()];
  const auto first = tokens.begin() + std::ssize(layer.experts[ranks_.rank()]);
  stats_.prefetched_used += std::count_if(first, first + prefetched_here, [](int64_t n) { return n > 0; });
}

// Halving is exact, so that all ranks have the same numbers.
void BatchSplit::Remember(Layer& layer, const Weights& own) const {
  layer.recent.resize(experts_, 0);
  for (int expert = 0; expert < experts_; ++expert)
    layer.recent[expert] = layer.recent[expert] / 2 + static_cast<double>(totals_[expert]);
  layer.bytes = SpilledBytes();
  layer.weights = own.data;
}

StatusOr<BatchSplit::Choice> BatchSplit::Split(Layer& layer, const comm::ExpertMap& map,
                                               std::span<const int32_t> ids, const Weights& own,
                                               double row_seconds) {
  if (prefetched_for_ != &layer) RETURN_IF_ERROR(DropPrefetched());
  const double begin = job_.Now();
  const std::vector<SpillMove> prefetched = TakePrefetched();
  spilled_here_ = std::ranges::count(prefetched, ranks_.rank(), &SpillMove::to);
  int32_t* const counts = counts_.data() + static_cast<size_t>(ranks_.rank()) * words_;
  std::fill_n(counts, experts_, 0);
  for (const int32_t id : ids) {
    if (id >= 0) ++counts[id];
  }
  const bool sendable = options_.spills() && own.bytes % kBytesUnit == 0;
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  counts[experts_] = sendable ? static_cast<int32_t>(std::min(own.bytes / kBytesUnit, kMax)) : 0;
  counts[experts_ + 1] = static_cast<int32_t>(std::min(row_seconds * 1e9, static_cast<double>(kMax)));
  RETURN_IF_ERROR(GatherCounts());
  std::ranges::fill(totals_, 0);
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    if (dead_[rank]) continue;
    const int32_t* const of_rank = CountsOf(rank);
    for (int expert = 0; expert < experts_; ++expert) totals_[expert] += of_rank[expert];
  }
  if (std::ranges::find(dead_, true) != dead_.end()) {
    for (int expert = 0; expert < experts_; ++expert) {
      const bool lost = std::ranges::all_of(map.ReplicasOf(expert),
                                            [&](int32_t copy) { return dead_[map.physical(copy).rank]; });
      if (lost) totals_[expert] = 0;
    }
  }
  if (options_.spills()) Remember(layer, own);
  const BatchPlan plan = PlanHere(layer, prefetched);
  CountUsed(plan, layer, spilled_here_);
  Choice choice;
  if (!prefetched.empty() || !plan.spilled.empty()) {
    // Experts of dead ranks stay in the map, which the exchange knows to be dead.
    std::vector<std::vector<int>> by_rank(ranks_.size());
    for (int i = 0; i < map.physical_experts(); ++i)
      by_rank[map.physical(i).rank].push_back(map.physical(i).expert);
    for (const auto moves : {std::span(prefetched), std::span(plan.spilled)}) {
      for (const SpillMove& move : moves) by_rank[move.to].push_back(move.expert);
    }
    ASSIGN_OR_RETURN(comm::ExpertMap with_spilled, comm::ExpertMap::Create(experts_, by_rank));
    choice.map = std::make_shared<const comm::ExpertMap>(std::move(with_spilled));
    const int64_t slot = spilled_here_;
    spilled_here_ += std::ranges::count(plan.spilled, ranks_.rank(), &SpillMove::to);
    stats_.spilled += spilled_here_ - slot;
    RETURN_IF_ERROR(StartTransfers(
        plan.spilled, {.layer = layer, .tag = TagOf(kSpillTags), .buffer = buffer_}, slot, spilling_));
  }
  Choose(plan, choice.map != nullptr ? *choice.map : map, ids);
  choice.replicas = replicas_;
  const double even_rows = EvenRows(plan);
  computing_s_ = options_.spills() ? even_rows * std::ranges::min(RowSeconds()) : 0;
  ++number_;
  ++stats_.splits;
  stats_.busiest_rows += plan.busiest;
  stats_.mean_rows += even_rows;
  stats_.seconds += job_.Now() - begin;
  return choice;
}

void BatchSplit::Choose(const BatchPlan& plan, const comm::ExpertMap& map, std::span<const int32_t> ids) {
  for (std::vector<int64_t>& own : own_) own.clear();
  replicas_.assign(ids.size(), 0);
  std::vector<int64_t> tokens, counts(ranks_.size());
  std::vector<int> holders;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int32_t expert = ids[i];
    if (expert < 0) continue;
    const std::span<const int32_t> copies = map.ReplicasOf(expert);
    if (copies.size() < 2) continue;
    std::vector<int64_t>& own = own_[expert];
    if (own.empty()) {
      tokens.clear();
      holders.clear();
      for (const int32_t copy : copies) {
        const int rank = map.physical(copy).rank;
        const auto slot = std::ranges::find(plan.experts[rank], expert);
        holders.push_back(rank);
        tokens.push_back(slot == plan.experts[rank].end()
                             ? 0  // a dead rank
                             : plan.tokens[rank][slot - plan.experts[rank].begin()]);
      }
      for (int rank = 0; rank < ranks_.size(); ++rank)
        counts[rank] = dead_[rank] ? 0 : CountsOf(rank)[expert];
      own = OwnTokens(tokens, holders, counts, ranks_.rank());
    }
    const auto left = std::ranges::find_if(own, [](int64_t count) { return count > 0; });
    if (left == own.end()) continue;  // no rank has the expert
    --*left;
    replicas_[i] = static_cast<int32_t>(left - own.begin());
  }
}

// Sends the weights of this rank's experts that others get, and receives those that it gets into the buffer,
// from `first_slot` on.
Status BatchSplit::StartTransfers(std::span<const SpillMove> moves, const SpillSource& source,
                                  int64_t first_slot, Transfers& transfers) {
  const int rank = ranks_.rank();
  const Layer& layer = source.layer;
  const auto bytes = static_cast<size_t>(layer.bytes);
  runtime::Buffer& buffer = spilled_[source.buffer];
  if (std::ranges::find(moves, rank, &SpillMove::to) != moves.end())
    RETURN_IF_ERROR(buffer.Reserve(kSpillSlots * bytes, /*huge=*/true));
  int64_t slot = first_slot;
  for (const SpillMove& move : moves) {
    if (move.from == rank) {
      const auto at = std::ranges::find(layer.experts[rank], move.expert) - layer.experts[rank].begin();
      ASSIGN_OR_RETURN(const comm::TransferId sent,
                       ranks_.Send(move.to, source.tag, {layer.weights + at * layer.bytes, bytes}));
      transfers.sends.push_back(sent);
      stats_.spilled_bytes += layer.bytes;
    }
    if (move.to == rank) {
      ASSIGN_OR_RETURN(const comm::TransferId received,
                       ranks_.Receive(move.from, source.tag, {buffer.data() + slot++ * layer.bytes, bytes}));
      transfers.receives.push_back(received);
    }
  }
  return OkStatus();
}

StatusOr<const std::byte*> BatchSplit::AwaitSpilled() {
  RETURN_IF_ERROR(WaitAll(spilling_.receives));
  RETURN_IF_ERROR(WaitAll(spilling_.sends));
  return std::exchange(spilled_here_, 0) > 0 ? spilled_[buffer_].data() : nullptr;
}

Status BatchSplit::Prefetch(Layer& next) {
  const double recent = std::accumulate(next.recent.begin(), next.recent.end(), 0.0);
  if (!options_.spills() || next.bytes == 0 || !(recent > 0)) return OkStatus();
  const double begin = job_.Now();
  // A batch has equally many tokens in all layers.
  const auto all = static_cast<double>(std::accumulate(totals_.begin(), totals_.end(), int64_t{0}));
  std::vector<int64_t> tokens;
  for (const double each : next.recent) tokens.push_back(std::llround(each * all / recent));
  const BatchPlan plan = PlanBatch(next.experts, next.split, tokens, next.speeds);
  std::optional<BatchPlan> ahead =
      PlanSpilled(plan, {.layer = next, .split = next.split, .tokens = tokens, .hidden_s = computing_s_});
  Status started;
  if (ahead.has_value()) {
    prefetched_for_ = &next;
    prefetched_ = std::move(ahead->spilled);
    stats_.prefetched += std::ranges::count(prefetched_, ranks_.rank(), &SpillMove::to);
    started = StartTransfers(prefetched_, {.layer = next, .tag = TagOf(kPrefetchTags), .buffer = 1 - buffer_},
                             0, prefetching_);
  }
  stats_.seconds += job_.Now() - begin;
  return started;
}

Status BatchSplit::DropPrefetched() {
  prefetched_for_ = nullptr;
  prefetched_.clear();
  RETURN_IF_ERROR(WaitAll(prefetching_.receives));
  return WaitAll(prefetching_.sends);
}

}  // namespace moesaic::parallel
