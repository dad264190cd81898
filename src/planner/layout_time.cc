#include "planner/layout_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "base/round.h"
#include "comm/collectives/planner.h"
#include "comm/exchange/exchange_cost.h"
#include "planner/expert_draws.h"

namespace moesaic::planner {
namespace {

using parallel::Degrees;
using parallel::Layout;
using parallel::RankWork;

constexpr int kSumsPerLayer = 2;   // after attention and after the feed-forward network
constexpr double kFloatBytes = 4;  // hidden states travel as f32

std::vector<int> Divisors(int number) {
  std::vector<int> divisors;
  for (int d = 1; d <= number; ++d) {
    if (number % d == 0) divisors.push_back(d);
  }
  return divisors;
}

// The rows of a step that the busiest replica has.
StepShape OfReplica(StepShape shape, const Layout& layout) {
  shape.sequences = base::CeilDiv(shape.sequences, layout.degrees().data);
  return shape;
}

int MostParts(const Layout& layout, const StepShape& shape) {
  const int stages = layout.degrees().pipeline;
  if (shape.rows_per_sequence == 1) return std::min(stages, shape.sequences);
  return std::clamp(shape.rows() / parallel::kMinPartRows, 1, parallel::kPartsPerStage * stages);
}

// Everything that predictions read from a topology. Ranks with equal texts have equal times.
std::string TextOf(const comm::Topology& topology) {
  std::string text;
  for (const comm::Group& group : topology.groups()) {
    const comm::Link& link = group.link;
    text += fmt::format("{}/{}/{}/{}/{}/{}/{}/{}/{};", group.parent, group.level, group.device_type,
                        group.children.empty() ? group.ranks.front() : -1, group.port_bytes_per_s,
                        link.latency_s, link.bytes_per_s, link.full_duplex, link.shared);
  }
  return text;
}

}  // namespace

// The links between some ranks, and the times that were predicted for them.
struct LayoutPlanner::Links {
  explicit Links(const comm::Topology& ranks) : topology(ranks), sums(ranks) {}
  comm::Topology topology;
  comm::Planner sums;
  std::map<int64_t, double> sum_seconds;                         // by count of elements
  std::map<std::tuple<int, int, int>, double> exchange_seconds;  // by experts, top-k and tokens of a rank
};

struct LayoutPlanner::Known {
  std::map<std::string, std::unique_ptr<Links>> links;  // by TextOf
  std::map<std::array<int, 4>, ExpertUse> uses;         // by arguments of BusiestPart
};

struct LayoutPlanner::Stage {
  std::vector<int> ranks;   // of all replicas
  std::vector<int> shards;  // of the first replica
  RankWork work;
  Links* sums = nullptr;      // of `shards`; null: one rank
  Links* exchange = nullptr;  // of `ranks`, if they divide the experts
};

struct LayoutPlanner::StageTime {
  double compute = 0, sums = 0;  // sums: and exchanges
  double seconds() const { return compute + sums; }
};

// A part of a step that flows through the stages.
struct LayoutPlanner::PartShape {
  StepShape own;     // of the busiest replica
  int all_rows = 0;  // of all replicas
};

// The largest of `parts` parts: those of decode steps have some of the sequences, others some of the rows.
LayoutPlanner::PartShape LayoutPlanner::PartOf(const Layout& layout, const StepShape& shape, int parts) {
  PartShape part = {.own = OfReplica(shape, layout), .all_rows = base::CeilDiv(shape.rows(), parts)};
  int& divided = shape.rows_per_sequence == 1 ? part.own.sequences : part.own.rows_per_sequence;
  divided = base::CeilDiv(divided, parts);
  return part;
}

LayoutPlanner::LayoutPlanner(comm::Topology topology, int hidden, WorkOfRank work)
    : topology_(std::move(topology)),
      hidden_(hidden),
      work_(std::move(work)),
      known_(std::make_shared<Known>()) {}

StatusOr<LayoutPlanner> LayoutPlanner::Create(comm::Topology topology, int hidden,
                                              const std::string& flops_type, WorkOfRank work) {
  LayoutPlanner planner(std::move(topology), hidden, std::move(work));
  for (int rank = 0; rank < planner.topology_.ranks(); ++rank) {
    const comm::DeviceType& device = planner.topology_.device_type(rank);
    const auto flops = device.flops.find(flops_type);
    if (device.memory_bytes_per_s <= 0 || flops == device.flops.end()) {
      return InvalidArgument(
          "topology {}: device \"{}\" needs memory_gb_per_s and flops of {} to predict times",
          planner.topology_.name(), device.name, flops_type);
    }
    planner.flops_.push_back(flops->second);
  }
  return planner;
}

// Most stages of a layout, and many layouts, have ranks on equal links.
StatusOr<LayoutPlanner::Links*> LayoutPlanner::LinksOf(const std::vector<int>& ranks) const {
  ASSIGN_OR_RETURN(const comm::Topology selected, topology_.Selected(ranks));
  std::unique_ptr<Links>& links = known_->links[TextOf(selected)];
  if (links == nullptr) links = std::make_unique<Links>(selected);
  return links.get();
}

ExpertUse LayoutPlanner::UseOf(const RankWork& work, int parts, int rows) const {
  const auto [known, added] = known_->uses.try_emplace({work.all_experts, work.top_k, parts, rows});
  if (added) known->second = BusiestPart(work.all_experts, work.top_k, parts, rows);
  return known->second;
}

StatusOr<std::vector<LayoutPlanner::Stage>> LayoutPlanner::Stages(const Layout& layout) const {
  std::vector<Stage> stages(layout.degrees().pipeline);
  for (int s = 0; s < layout.degrees().pipeline; ++s) {
    Stage& stage = stages[s];
    const int first = layout.RankAt({.stage = s});
    stage.ranks = layout.ExpertGroup(first);
    stage.shards = layout.TensorGroup(first);
    ASSIGN_OR_RETURN(stage.work, work_(layout, first));
    if (layout.exchanges_tokens()) {
      ASSIGN_OR_RETURN(stage.exchange, LinksOf(stage.ranks));
    }
    if (stage.shards.size() == 1) continue;
    ASSIGN_OR_RETURN(stage.sums, LinksOf(stage.shards));
  }
  return stages;
}

double LayoutPlanner::SumSeconds(const Stage& stage, double bytes) const {
  if (stage.sums == nullptr) return 0;
  const auto count = static_cast<int64_t>(bytes / kFloatBytes);
  const auto [known, added] = stage.sums->sum_seconds.emplace(count, 0);
  if (added) {
    const comm::PlanRequest request = {.collective = comm::Collective::kAllReduce,
                                       .ranks = static_cast<int>(stage.shards.size()),
                                       .count = count};
    known->second = stage.sums->sums.Compare(request, {}).front().seconds;
  }
  return known->second;
}

// Time in which the tokens of a layer travel to the ranks of their experts, and outputs travel back. The
// simulation has `mean_tokens` on every rank. The `most_tokens` of the busiest rank pass its own port, too.
double LayoutPlanner::ExchangeSeconds(const Stage& stage, int most_tokens, int mean_tokens) const {
  if (stage.exchange == nullptr) return 0;
  const comm::Topology& links = stage.exchange->topology;
  const int ranks = links.ranks(), experts = stage.work.all_experts;
  const comm::ExpertMap map = comm::ExpertMap::Even(experts, ranks);
  const auto [simulated, added] =
      stage.exchange->exchange_seconds.emplace(std::tuple(experts, stage.work.top_k, mean_tokens), 0);
  if (added) {
    comm::ExchangeOptions options;
    options.dispatch_payload = options.combine_payload = comm::Payload::kF32;
    const comm::ExchangeWorkload workload = {
        .tokens_per_rank = mean_tokens, .k = stage.work.top_k, .hidden = hidden_};
    const auto estimate = comm::EstimateExchange(links, map, workload, options);
    if (estimate.ok()) simulated->second = estimate->dispatch_s + estimate->combine_s;
  }
  double bandwidth = 0, hits = 0;
  for (int rank = 1; rank < ranks; ++rank) {
    bandwidth = std::max(bandwidth, links.Bandwidth(0, rank));
    hits += comm::HitProbability(experts, map.local_experts(rank), stage.work.top_k);
  }
  const double port = 2 * most_tokens * hits * kFloatBytes * hidden_ / bandwidth;
  return std::max(port, simulated->second);
}

// `part` flows through the stage, and `use` is the use of experts by its rows.
LayoutPlanner::StageTime LayoutPlanner::TimeOf(const Stage& stage, const PartShape& part,
                                               const ExpertUse& use) const {
  const RankWork& work = stage.work;
  const int rows = part.own.rows();
  const double heads = work.has_head ? part.own.sequences : 0;
  const double read = work.read_bytes + work.expert_layers * use.experts * work.expert_bytes +
                      (heads > 0 ? work.head_bytes : 0) +
                      work.kv_bytes_per_token * part.own.context * part.own.sequences;
  const double flops = rows * work.flops_per_row + heads * work.head_flops_per_row +
                       work.expert_layers * use.rows * work.expert_flops_per_row;
  StageTime time;
  for (const int rank : stage.ranks) {
    const comm::DeviceType& device = topology_.device_type(rank);
    time.compute = std::max({time.compute, read / device.memory_bytes_per_s, flops / flops_[rank]});
  }
  const auto shards = static_cast<int>(stage.shards.size());
  time.sums = (kSumsPerLayer * work.layers + (work.has_embedding ? 1 : 0)) *
              SumSeconds(stage, kFloatBytes * hidden_ * rows);
  const auto ranks = static_cast<int>(stage.ranks.size());
  time.sums += work.expert_layers *
               ExchangeSeconds(stage, base::CeilDiv(rows, shards), base::CeilDiv(part.all_rows, ranks));
  return time;
}

StepTime LayoutPlanner::TimeOf(const Layout& layout, const std::vector<Stage>& stages,
                               const StepShape& shape) const {
  const auto transfer = [&](size_t index, int rows) {
    if (index + 1 == stages.size()) return 0.0;
    const int from = stages[index].ranks[0], to = stages[index + 1].ranks[0];
    return topology_.Latency(from, to) + kFloatBytes * hidden_ * rows / topology_.Bandwidth(from, to);
  };
  StepTime best;
  for (int parts = 1; parts <= MostParts(layout, OfReplica(shape, layout)); ++parts) {
    const PartShape part = PartOf(layout, shape, parts);
    const RankWork& any = stages.front().work;  // the router of the model
    const ExpertUse use = UseOf(any, layout.degrees().expert, part.all_rows);
    StepTime step = {.parts = parts};
    StageTime slowest;
    for (size_t s = 0; s < stages.size(); ++s) {
      const StageTime time = TimeOf(stages[s], part, use);
      const double sending = transfer(s, part.own.rows());
      step.seconds += time.seconds() + sending;
      step.communication += time.sums + sending;
      if (time.seconds() > slowest.seconds()) slowest = time;
    }
    step.seconds += (parts - 1) * slowest.seconds();
    step.communication += (parts - 1) * slowest.sums;
    step.interval = parts * slowest.seconds();
    if (parts == 1 || step.seconds < best.seconds) {
      const double interval = parts == 1 ? step.interval : best.interval;  // whole batches in turn
      best = step;
      best.interval = interval;
    }
  }
  return best;
}

bool LayoutPlanner::HasEqualDevices() const {
  const comm::DeviceType& first = topology_.device_type(0);
  for (int rank = 1; rank < topology_.ranks(); ++rank) {
    const comm::DeviceType& device = topology_.device_type(rank);
    const bool equal = device.memory_bytes_per_s == first.memory_bytes_per_s &&
                       device.memory_bytes == first.memory_bytes && flops_[rank] == flops_[0];
    if (!equal) return false;
  }
  return true;
}

// Least memory that a device has left; infinity where memory is unknown.
double LayoutPlanner::FreeBytes(const Stage& stage) const {
  double left = std::numeric_limits<double>::infinity();
  for (const int rank : stage.ranks) {
    const double memory = topology_.device_type(rank).memory_bytes;
    if (memory > 0) left = std::min(left, memory - stage.work.weight_bytes);
  }
  return left;
}

// Seconds of each stage; missing bytes are worth more than any time.
std::vector<double> LayoutPlanner::StageCosts(const Layout& layout, const std::vector<Stage>& stages,
                                              const StepShape& shape) const {
  constexpr double kMissing = 1e9;
  const RankWork& any = stages.front().work;
  const ExpertUse use = UseOf(any, layout.degrees().expert, shape.rows());
  std::vector<double> costs;
  for (const Stage& stage : stages) {
    const double left = FreeBytes(stage);
    costs.push_back(TimeOf(stage, PartOf(layout, shape, 1), use).seconds() +
                    (left < 0 ? kMissing * (1 - left) : 0));
  }
  return costs;
}

StatusOr<parallel::Split> LayoutPlanner::BalanceLayers(const Layout& layout, const StepShape& shape) const {
  parallel::Split split = layout.split();
  split.layers = {};
  const size_t stages = layout.degrees().pipeline;
  if (stages == 1) return split;
  const auto costs_of = [&](const parallel::Split& of,
                            std::vector<int>* layers) -> StatusOr<std::vector<double>> {
    ASSIGN_OR_RETURN(const Layout tried, Layout::Create(layout.degrees(), of));
    ASSIGN_OR_RETURN(const std::vector<Stage> parts, Stages(tried));
    layers->clear();
    for (const Stage& stage : parts) layers->push_back(stage.work.layers);
    return StageCosts(tried, parts, shape);
  };
  std::vector<int> layers, ignored;
  ASSIGN_OR_RETURN(std::vector<double> costs, costs_of(split, &layers));
  const std::vector<int> equal = layers;
  // Of several stages that are equally slow, one is relieved after the other.
  const auto longest_first = [](std::vector<double> of) {
    std::ranges::sort(of, std::greater());
    return of;
  };
  // The split whose longest time is the least: relieving some of these stages is no gain.
  std::vector<int> kept = layers;
  double longest = std::ranges::max(costs);
  for (bool improved = true; improved;) {
    improved = false;
    const size_t from = std::ranges::max_element(costs) - costs.begin();
    if (layers[from] == 1) break;
    parallel::Split best;
    std::vector<double> best_costs = costs;
    for (size_t to = 0; to < stages; ++to) {
      if (to == from) continue;
      parallel::Split tried = split;
      tried.layers = layers;
      --tried.layers[from];
      ++tried.layers[to];
      ASSIGN_OR_RETURN(std::vector<double> now, costs_of(tried, &ignored));
      if (longest_first(now) >= longest_first(best_costs)) continue;
      best = std::move(tried);
      best_costs = std::move(now);
      improved = true;
    }
    if (!improved) break;
    layers = best.layers;
    costs = std::move(best_costs);
    if (std::ranges::max(costs) >= longest) continue;
    longest = std::ranges::max(costs);
    kept = layers;
  }
  if (kept != equal) split.layers = kept;
  return split;
}

StatusOr<LayoutPlanner::Prediction> LayoutPlanner::Predict(const Degrees& degrees,
                                                           const std::vector<StepShape>& shapes) const {
  Prediction prediction;
  ASSIGN_OR_RETURN(prediction.layout, Layout::Create(degrees));
  if (prediction.layout.ranks() != topology_.ranks()) {
    return InvalidArgument("{} has {} ranks, but the topology {} has {}", Name(degrees),
                           prediction.layout.ranks(), topology_.name(), topology_.ranks());
  }
  if (!HasEqualDevices() && !shapes.empty()) {
    ASSIGN_OR_RETURN(parallel::Split split, BalanceLayers(prediction.layout, shapes.front()));
    ASSIGN_OR_RETURN(prediction.layout, Layout::Create(degrees, std::move(split)));
  }
  ASSIGN_OR_RETURN(const std::vector<Stage> stages, Stages(prediction.layout));
  double left = std::numeric_limits<double>::infinity();
  for (const Stage& stage : stages) {
    prediction.weight_bytes = std::max(prediction.weight_bytes, stage.work.weight_bytes);
    left = std::min(left, FreeBytes(stage));
  }
  if (std::isfinite(left)) prediction.free_bytes = left;
  prediction.fits = prediction.free_bytes >= 0;
  for (const StepShape& shape : shapes) prediction.steps.push_back(TimeOf(prediction.layout, stages, shape));
  return prediction;
}

// Whether the model has routed experts for all ranks, which replicas could divide.
StatusOr<bool> LayoutPlanner::HasExperts() const {
  for (const int stages : Divisors(topology_.ranks())) {  // any layout that the model can be divided into
    const int tensor = topology_.ranks() / stages;
    ASSIGN_OR_RETURN(const Layout layout, Layout::Create({.tensor = tensor, .pipeline = stages}));
    const StatusOr<RankWork> work = work_(layout, 0);
    if (work.ok()) return work->all_experts > 0;
  }
  return false;
}

StatusOr<std::vector<LayoutPlanner::Prediction>> LayoutPlanner::Compare(
    const std::vector<StepShape>& shapes) const {
  std::vector<Prediction> predictions;
  Status refused;
  const auto predict = [&](const Degrees& degrees) {
    auto prediction = Predict(degrees, shapes);
    if (prediction.ok()) {
      predictions.push_back(*std::move(prediction));
    } else {
      refused = prediction.status();
    }
  };
  ASSIGN_OR_RETURN(const bool has_experts, HasExperts());
  for (const int tensor : Divisors(topology_.ranks())) {
    const int others = topology_.ranks() / tensor;
    for (const int expert : Divisors(tensor)) {
      predict({.tensor = tensor, .pipeline = others, .expert = expert});
    }
    for (const int data : Divisors(others)) {
      if (data == 1 || !has_experts) continue;
      predict({.tensor = tensor, .pipeline = others / data, .data = data, .expert = tensor * data});
    }
  }
  if (predictions.empty()) return refused;
  std::ranges::stable_sort(predictions, [](const Prediction& a, const Prediction& b) {
    if (a.fits != b.fits) return a.fits;
    return a.fits ? a.steps[0].seconds < b.steps[0].seconds : a.weight_bytes < b.weight_bytes;
  });
  return predictions;
}

}  // namespace moesaic::planner
