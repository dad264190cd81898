#include "comm/collectives/planner.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace moesaic::comm {
namespace {

constexpr int kMaxSegments = 128;
constexpr int kSegmented = 6;  // candidates that are tried with several segments
constexpr int kSimulated = 4;  // candidates whose estimate is replaced by a simulation
constexpr int kStreamed = 3;   // hierarchies that are tried with several streams
constexpr int64_t kMaxStreamedMessages = 20'000;
// A plan of several streams has more messages, whose starts cost time that the model does not count.
constexpr double kStreamGain = 0.97;
constexpr int kMaxSkippedDepth = 5;  // trees of more levels are followed from the root only
// Greatest time of a plan with more segments or streams, relative to the plan before it.
constexpr double kMoreGain = 0.99;
constexpr int64_t kMaxSimulatedMessages = 40'000;
constexpr int64_t kMaxMessages = 150'000;   // of all ranks
constexpr int64_t kMinSegmentBytes = 2048;  // of a message
// AllReduce that sends whole vectors to all ranks is for small ones only.
constexpr int64_t kMaxDirectBytes = 64 << 10;
constexpr int kMaxDirectRanks = 32;
// Messages that a rank sends at once cost time of its processor, which the model of links does not count.
constexpr size_t kMaxChildrenAtOnce = 16;

bool IsReduction(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

bool IsAllToAll(Collective collective) {
  return collective == Collective::kAllToAll || collective == Collective::kAllToAllv;
}

int64_t MessagesOf(const Plan& plan) {
  int64_t messages = 0;
  for (const RankPlan& rank : plan.ranks) {
    for (const Stream& stream : rank.streams) {
      for (const Round& round : stream.rounds) messages += std::ssize(round.sends);
    }
  }
  return messages;
}

// Bytes of a message that a plan sends, about.
int64_t MessageBytes(const PlanRequest& request, const PlanShape& shape) {
  const int64_t bytes = RequestBytes(request) / shape.segments;
  return shape.top == Algorithm::kChain ? bytes : bytes / request.ranks;
}

bool SameAlgorithms(const Candidate& a, const Candidate& b) {
  return a.levels == b.levels && a.skipped == b.skipped && a.shape.top == b.shape.top &&
         a.shape.inner == b.shape.inner && a.shape.wire == b.shape.wire;
}

bool SendsToAll(Algorithm algorithm) {
  return algorithm == Algorithm::kDirect || algorithm == Algorithm::kLinear;
}

size_t MostChildrenBelow(const RankTree& tree) {
  size_t most = 0;
  for (const RankTree& child : tree.children) {
    most = std::max({most, child.children.size(), MostChildrenBelow(child)});
  }
  return most;
}

std::vector<int> RankOrder(int ranks) {
  std::vector<int> order(ranks);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

}  // namespace

std::string Name(const Candidate& candidate) {
  const PlanShape& shape = candidate.shape;
  std::string name = fmt::format("levels {}, {}, {}, segments {}, streams {}", candidate.levels,
                                 Name(shape.top), Name(shape.inner), shape.segments, shape.streams);
  for (int depth = 1; depth < candidate.levels; ++depth) {
    if ((candidate.skipped >> depth & 1U) != 0) name += fmt::format(", without depth {}", depth);
  }
  if (shape.fixed_order) name += ", fixed order";
  if (shape.wire != WireFormat::kExact) name += fmt::format(", {}", Name(shape.wire));
  return name;
}

int64_t RequestBytes(const PlanRequest& request) {
  // Counts of all ranks: equal on all of them.
  int64_t count = request.count;
  if (request.collective == Collective::kAllToAll) count *= request.ranks;
  for (const int64_t part : request.counts) count += part;
  int64_t pairs = 0;
  for (const int64_t part : request.matrix) pairs += part;
  count += pairs / request.ranks;
  return count * request.element_bytes;
}

Planner::Planner(Topology topology, PlannerOptions options)
    : topology_(std::move(topology)), options_(std::move(options)) {
  const RankTree tree = TreeOf(topology_);
  trees_.push_back({0, 0, FlatTree(RankOrder(topology_.ranks()))});
  const int depth = std::max(1, Depth(tree));
  for (int levels = 1; levels <= depth; ++levels) trees_.push_back({levels, 0, Cut(tree, levels)});
  if (depth > kMaxSkippedDepth) return;
  for (int levels = 3; levels <= depth; ++levels) {
    // The innermost groups stay: without them it is a tree of fewer levels.
    for (uint32_t skipped = 2; skipped < 1U << (levels - 1); skipped += 2) {
      RankTree reduced = Cut(tree, levels);
      for (int d = levels - 2; d > 0; --d) {
        if ((skipped >> d & 1U) != 0) reduced = Without(reduced, d);
      }
      trees_.push_back({levels, skipped, std::move(reduced)});
    }
  }
}

StatusOr<Plan> Planner::Build(const PlanRequest& request, const Candidate& candidate) const {
  for (const Levels& tree : trees_) {
    if (tree.levels == candidate.levels && tree.skipped == candidate.skipped) {
      return BuildPlan(request, tree.tree, candidate.shape);
    }
  }
  if (candidate.skipped == 0) {
    return InvalidArgument("topology {}: levels must be at most {}; found {}", topology_.name(),
                           std::max(1, Depth(TreeOf(topology_))), candidate.levels);
  }
  return InvalidArgument("topology {} has no tree of {} levels without those of mask {}", topology_.name(),
                         candidate.levels, candidate.skipped);
}

std::vector<Candidate> Planner::Candidates(const PlanRequest& request, const PlanMode& mode) const {
  std::vector<Candidate> candidates;
  const bool reduces = IsReduction(request.collective);
  const bool is_fixed = mode.fixed_order && reduces;
  const int64_t bytes = RequestBytes(request);
  using enum Algorithm;
  for (const auto& [levels, skipped, tree] : trees_) {
    if (levels == 1 && tree.ranks == trees_.front().tree.ranks) continue;
    if (skipped != 0 && !reduces && request.collective != Collective::kAllGather) continue;
    // kDirect comes first: it sends inputs, whose lines no step writes, and wins where costs are equal.
    for (const Algorithm top : {kDirect, kRing, kPairwise, kHalving, kBruck, kDoubling, kLinear,
                                kSingleCrossing, kBinomial, kChain, kScatterGather, kDissemination}) {
      if (!Supports(request.collective, top)) continue;
      if (levels > 1 && top == kBruck && IsAllToAll(request.collective)) continue;
      if (levels > 1 && top == kDirect && is_fixed) continue;  // it has one level
      if (top == kDirect && bytes > kMaxDirectBytes) continue;
      if (top == kDirect && levels <= 1 && request.ranks > kMaxDirectRanks) continue;
      // Two children have one message each way in all of these.
      const bool is_pair = tree.children.size() == 2 && !IsAllToAll(request.collective);
      if (is_pair && (top == kRing || top == kHalving || top == kLinear)) continue;
      if (is_fixed && (top == kDoubling || top == kSingleCrossing)) continue;
      if (top == kSingleCrossing && (bytes > kMaxDirectBytes || levels < 2)) continue;
      if (top == kSingleCrossing && request.ranks > kMaxDirectRanks) continue;
      const bool limits = !IsAllToAll(request.collective) && (levels > 1 || top == kLinear);
      if (limits && SendsToAll(top) && tree.children.size() > kMaxChildrenAtOnce) continue;
      for (const Algorithm inner : {kPairwise, kHalving, kLinear}) {
        const bool has_inner = levels > 1 && top != kSingleCrossing && !IsAllToAll(request.collective) &&
                               request.collective != Collective::kBarrier;
        if (inner != kPairwise && (!has_inner || MostChildrenBelow(tree) <= 2)) continue;
        if (inner == kLinear && MostChildrenBelow(tree) > kMaxChildrenAtOnce) continue;
        PlanShape shape = {.top = top, .inner = inner};
        shape.fixed_order = is_fixed;
        candidates.push_back({levels, shape, skipped});
        if (mode.wire == WireFormat::kExact || !reduces || is_fixed || top != kPairwise) continue;
        // It would encode sums inside groups of the topology.
        if ((levels < 2 && trees_.size() > 2) || (skipped & 2U) != 0) continue;
        shape.wire = mode.wire;
        candidates.push_back({levels, shape, skipped});
      }
    }
  }
  return candidates;
}

// Streams overlap the latency of one segment's phase with the bytes of another's. Estimates take the steps of
// all streams together, so these plans are simulated.
void Planner::AddStreams(const PlanRequest& request, std::vector<Entry>* entries) const {
  if (IsAllToAll(request.collective)) return;
  std::vector<Entry> bases;
  for (const Entry& entry : *entries) {
    const bool is_new = std::none_of(bases.begin(), bases.end(), [&](const Entry& base) {
      return SameAlgorithms(base.candidate, entry.candidate);
    });
    if (is_new && entry.candidate.levels > 1) bases.push_back(entry);
    if (std::ssize(bases) == kStreamed) break;
  }
  const double limit = kStreamGain * entries->front().seconds;
  // Each list is tried until a plan gains nothing on the one before it. Larger vectors need more segments.
  struct Parts {
    int streams, segments;
  };
  static const std::vector<std::vector<Parts>> kTried = {
      {{2, 2}, {4, 4}, {8, 8}}, {{2, 4}, {4, 8}, {8, 16}}, {{2, 8}, {4, 16}, {8, 32}}};
  for (const Entry& base : bases) {
    Candidate candidate = base.candidate;
    const int64_t messages = base.messages / std::max(base.candidate.shape.segments, 1);
    for (const std::vector<Parts>& list : kTried) {
      double best = std::numeric_limits<double>::infinity();
      for (const Parts& parts : list) {
        candidate.shape.segments = parts.segments;
        candidate.shape.streams = parts.streams;
        if (MessageBytes(request, candidate.shape) < kMinSegmentBytes) break;
        if (messages * parts.segments > 2 * kMaxStreamedMessages) break;  // not worth building
        const StatusOr<Plan> plan = Build(request, candidate);
        if (!plan.ok() || MessagesOf(*plan) > kMaxStreamedMessages) break;
        const PlanCost cost = SimulatePlan(*plan, topology_, options_.cost);
        if (cost.seconds >= kMoreGain * best) break;
        best = cost.seconds;
        if (best < limit) entries->push_back({candidate, best, cost.bottleneck_s, MessagesOf(*plan)});
      }
    }
  }
}

void Planner::CorrectByTuning(const PlanRequest& request, std::vector<Choice>* choices) const {
  int measured = 0;
  double ratio = std::numeric_limits<double>::infinity();  // least one of a measured and its predicted time
  std::vector<Choice*> predicted;
  for (Choice& choice : *choices) {
    const std::optional<double> seconds = options_.tuning->Find(
        request.collective, request.ranks, RequestBytes(request), Name(choice.candidate));
    if (!seconds.has_value()) {
      predicted.push_back(&choice);
      continue;
    }
    ++measured;
    if (choice.seconds > 0) ratio = std::min(ratio, *seconds / choice.seconds);
    choice.seconds = *seconds;
  }
  // One slow plan tells nothing about the others.
  if (measured < 2 || !std::isfinite(ratio)) return;
  for (Choice* choice : predicted) choice->seconds *= ratio;
}

std::vector<Choice> Planner::Compare(const PlanRequest& request, const PlanMode& mode) const {
  std::vector<Entry> entries;
  const auto add = [&](const Candidate& candidate) -> double {
    const StatusOr<Plan> plan = Build(request, candidate);
    if (!plan.ok()) return std::numeric_limits<double>::infinity();
    // Estimates take the steps of all streams together, of which only this algorithm has several here.
    const bool has_streams = candidate.shape.top == Algorithm::kSingleCrossing;
    const PlanCost cost = has_streams ? SimulatePlan(*plan, topology_, options_.cost)
                                      : EstimatePlan(*plan, topology_, options_.cost);
    entries.push_back({candidate, cost.seconds, cost.bottleneck_s, MessagesOf(*plan)});
    return cost.seconds;
  };
  const auto sort = [&] {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.seconds < b.seconds; });
  };
  for (const Candidate& candidate : Candidates(request, mode)) add(candidate);
  sort();
  if (entries.empty()) return {};
  // Segments hide all phases but that of the bottleneck, so those with the smallest one are tried.
  std::vector<Entry> segmented;
  for (const Entry& entry : entries) {
    const bool pipelines = entry.candidate.levels > 1 || entry.candidate.shape.top == Algorithm::kChain;
    if (pipelines && entry.bound < entries.front().seconds) segmented.push_back(entry);
  }
  std::stable_sort(segmented.begin(), segmented.end(), [](const Entry& a, const Entry& b) {
    return a.bound + a.seconds / 16 < b.bound + b.seconds / 16;
  });
  if (std::ssize(segmented) > kSegmented) segmented.resize(kSegmented);
  for (const Entry& entry : segmented) {
    double best = entry.seconds;
    Candidate candidate = entry.candidate;
    for (int segments = 2, worse = 0; segments <= kMaxSegments && worse < 2; segments *= 2) {
      candidate.shape.segments = segments;
      if (MessageBytes(request, candidate.shape) < kMinSegmentBytes) break;
      if (entry.messages * segments > kMaxMessages) break;
      const double seconds = add(candidate);
      worse = seconds < best ? 0 : worse + 1;
      best = std::min(best, seconds);
    }
  }
  sort();
  for (int i = 0, simulated = 0; i < std::ssize(entries) && simulated < kSimulated; ++i) {
    if (entries[i].messages > kMaxSimulatedMessages) continue;
    const StatusOr<Plan> plan = Build(request, entries[i].candidate);
    if (plan.ok()) entries[i].seconds = SimulatePlan(*plan, topology_, options_.cost).seconds;
    ++simulated;
  }
  sort();
  AddStreams(request, &entries);
  std::vector<Choice> choices;
  for (const Entry& entry : entries) choices.push_back({entry.candidate, entry.seconds});
  if (options_.tuning != nullptr) CorrectByTuning(request, &choices);
  std::stable_sort(choices.begin(), choices.end(),
                   [](const Choice& a, const Choice& b) { return a.seconds < b.seconds; });
  return choices;
}

StatusOr<Candidate> Planner::Choose(const PlanRequest& request, const PlanMode& mode) {
  RETURN_IF_ERROR(ValidateRequest(request));
  if (request.ranks != topology_.ranks()) {
    return InvalidArgument("topology {} has {} ranks; the request has {}", topology_.name(),
                           topology_.ranks(), request.ranks);
  }
  // Two classes per power of two: the second one begins at 1.5 times the power.
  const auto bytes = static_cast<uint64_t>(RequestBytes(request));
  const int octave = std::bit_width(bytes);
  const int half = octave > 1 ? static_cast<int>((bytes >> (octave - 2)) & 1U) : 0;
  const ClassKey key = {request.collective, 2 * octave + half, request.element_bytes, request.root, mode};
  const auto found = choices_.find(key);
  if (found != choices_.end()) return found->second;
  const std::vector<Choice> choices = Compare(request, mode);
  if (choices.empty()) return InvalidArgument("{}: no algorithm was found", Name(request.collective));
  return choices_[key] = choices.front().candidate;
}

StatusOr<Plan> Planner::PlanCollective(const PlanRequest& request, const PlanMode& mode) {
  ASSIGN_OR_RETURN(const Candidate candidate, Choose(request, mode));
  return Build(request, candidate);
}

}  // namespace moesaic::comm
