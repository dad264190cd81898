#include "planner/layout_time.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "base/round.h"
#include "comm/collectives/planner.h"
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

int MostParts(const Layout& layout, const StepShape& shape) {
  const int stages = layout.degrees().pipeline;
  if (shape.rows_per_sequence == 1) return std::min(stages, shape.sequences);
  return std::clamp(shape.rows() / parallel::kMinPartRows, 1, parallel::kPartsPerStage * stages);
}

}  // namespace

struct LayoutPlanner::Stage {
  std::vector<int> ranks;
  RankWork work;
  std::unique_ptr<comm::Planner> sums;            // null: one rank
  mutable std::map<int64_t, double> sum_seconds;  // by count of elements
};

struct LayoutPlanner::StageTime {
  double compute = 0, sums = 0;
  double seconds() const { return compute + sums; }
};

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

StatusOr<std::vector<LayoutPlanner::Stage>> LayoutPlanner::Stages(const Layout& layout) const {
  std::vector<Stage> stages(layout.degrees().pipeline);
  for (int s = 0; s < layout.degrees().pipeline; ++s) {
    Stage& stage = stages[s];
    const int first = layout.RankAt({.stage = s});
    stage.ranks = layout.TensorGroup(first);
    ASSIGN_OR_RETURN(stage.work, work_(layout, first));
    if (stage.ranks.size() == 1) continue;
    ASSIGN_OR_RETURN(comm::Topology part, topology_.Selected(stage.ranks));
    stage.sums = std::make_unique<comm::Planner>(std::move(part));
  }
  return stages;
}

double LayoutPlanner::SumSeconds(const Stage& stage, double bytes) const {
  if (stage.sums == nullptr) return 0;
  const auto count = static_cast<int64_t>(bytes / kFloatBytes);
  const auto [known, added] = stage.sum_seconds.emplace(count, 0);
  if (added) {
    const comm::PlanRequest request = {.collective = comm::Collective::kAllReduce,
                                       .ranks = static_cast<int>(stage.ranks.size()),
                                       .count = count};
    known->second = stage.sums->Compare(request, {}).front().seconds;
  }
  return known->second;
}

// `part` is the part of a step that flows through the stage.
LayoutPlanner::StageTime LayoutPlanner::TimeOf(const Stage& stage, const StepShape& part,
                                               const ExpertUse& use) const {
  const RankWork& work = stage.work;
  const int rows = part.rows();
  const double heads = work.has_head ? part.sequences : 0;
  const double read = work.read_bytes + work.expert_layers * use.experts * work.expert_bytes +
                      (heads > 0 ? work.head_bytes : 0) +
                      work.kv_bytes_per_token * part.context * part.sequences;
  const double flops = rows * work.flops_per_row + heads * work.head_flops_per_row +
                       work.expert_layers * use.rows * work.expert_flops_per_row;
  StageTime time;
  for (const int rank : stage.ranks) {
    const comm::DeviceType& device = topology_.device_type(rank);
    time.compute = std::max({time.compute, read / device.memory_bytes_per_s, flops / flops_[rank]});
  }
  time.sums = (kSumsPerLayer * work.layers + (work.has_embedding ? 1 : 0)) *
              SumSeconds(stage, kFloatBytes * hidden_ * rows);
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
  for (int parts = 1; parts <= MostParts(layout, shape); ++parts) {
    StepShape part = shape;
    (shape.rows_per_sequence == 1 ? part.sequences : part.rows_per_sequence) =
        base::CeilDiv(shape.rows_per_sequence == 1 ? shape.sequences : shape.rows_per_sequence, parts);
    const RankWork& any = stages.front().work;  // the router of the model
    const ExpertUse use = BusiestPart(any.all_experts, any.top_k, layout.degrees().expert, part.rows());
    StepTime step = {.parts = parts};
    StageTime slowest;
    for (size_t s = 0; s < stages.size(); ++s) {
      const StageTime time = TimeOf(stages[s], part, use);
      const double sending = transfer(s, part.rows());
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
  const ExpertUse use = BusiestPart(any.all_experts, any.top_k, layout.degrees().expert, shape.rows());
  std::vector<double> costs;
  for (const Stage& stage : stages) {
    const double left = FreeBytes(stage);
    costs.push_back(TimeOf(stage, shape, use).seconds() + (left < 0 ? kMissing * (1 - left) : 0));
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
      if (std::ranges::max(now) >= std::ranges::max(best_costs)) continue;
      best = std::move(tried);
      best_costs = std::move(now);
      improved = true;
    }
    if (!improved) break;
    layers = best.layers;
    costs = std::move(best_costs);
  }
  if (layers != equal) split.layers = layers;
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

StatusOr<std::vector<LayoutPlanner::Prediction>> LayoutPlanner::Compare(
    const std::vector<StepShape>& shapes) const {
  std::vector<Prediction> predictions;
  Status refused;
  for (const int tensor : Divisors(topology_.ranks())) {
    for (const int expert : Divisors(tensor)) {
      auto prediction =
          Predict({.tensor = tensor, .pipeline = topology_.ranks() / tensor, .expert = expert}, shapes);
      if (prediction.ok()) {
        predictions.push_back(*std::move(prediction));
      } else {
        refused = prediction.status();
      }
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
