// Time of the division of one batch of a layer over the replicas of its experts, on one rank: counting its
// choices, adding the counts of all ranks, the exact split, and the replica of each choice. Messages take no
// time here. The layer has 256 experts in 288 slots, planned for one load; batches are of others.
//   parallel_batch_split_bench --benchmark_filter=32/128
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "parallel/batch_split.h"
#include "parallel/placement/load_generator.h"
#include "parallel/placement/planner.h"

namespace moesaic::parallel {
namespace {

constexpr int kExperts = 256, kSlots = 288, kTopK = 8, kLayers = 4;

/// Rank 0 of a job whose other ranks have sent their messages, which are set.
class SentMessages : public comm::Transport {
 public:
  explicit SentMessages(int ranks) : ranks_(ranks) {}
  std::string_view name() const override { return "sent"; }
  int rank() const override { return 0; }
  int size() const override { return ranks_; }
  StatusOr<comm::TransferId> Send(int, comm::Tag, std::span<const std::byte>) override {
    return comm::TransferId();
  }
  StatusOr<comm::TransferId> Receive(int peer, comm::Tag, std::span<std::byte> data) override {
    std::memcpy(data.data(), (*from)[peer].data(), data.size());
    return comm::TransferId();
  }
  void Progress() override {}
  bool Test(comm::TransferId, Status* result) override {
    *result = OkStatus();
    return true;
  }
  void Cancel(comm::TransferId) override {}
  bool failed(int) const override { return false; }
  double Now() const override { return 0; }

  const std::vector<std::vector<int32_t>>* from = nullptr;  // [ranks]

 private:
  const int ranks_;
};

// Distinct experts for each token, by their loads.
std::vector<int32_t> DrawChoices(std::span<const double> loads, int tokens, std::mt19937& random) {
  std::discrete_distribution<int32_t> expert(loads.begin(), loads.end());
  std::vector<int32_t> ids;
  for (int token = 0; token < tokens; ++token) {
    const auto begin = static_cast<std::ptrdiff_t>(ids.size());
    while (std::ssize(ids) < begin + kTopK) {
      const int32_t id = expert(random);
      if (std::find(ids.begin() + begin, ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

void SplitBatch(benchmark::State& state) {
  const auto ranks = static_cast<int>(state.range(0)), tokens = static_cast<int>(state.range(1));
  const std::vector<Workload> loads =
      *GenerateLoads({.layers = kLayers, .experts = kExperts, .workloads = 2});
  PlannerOptions planner;
  planner.slots = EqualSlots(kSlots, ranks);
  const PlannedPlacement planned = *PlanPlacement(std::span(&loads[0].total, 1), planner);
  std::mt19937 random(1);
  SentMessages job(ranks);
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  const auto group = *comm::GroupTransport::Create(job, all);
  BatchSplit split(job, *group, kExperts, /*time_limit_s=*/1, {});
  struct Prepared {
    comm::ExpertMap map;
    BatchSplit::Layer layer;
    std::vector<int32_t> ids;                  // of this rank
    std::vector<std::vector<int32_t>> counts;  // of the others
  };
  std::vector<Prepared> layers;
  for (int i = 0; i < kLayers; ++i) {
    LayerPlacement experts = planned.placement.layers[i];
    for (std::vector<int>& own : experts) std::ranges::sort(own);
    Prepared& layer = layers.emplace_back(
        Prepared{.map = *comm::ExpertMap::Create(kExperts, experts),
                 .layer = {.experts = experts,
                           .speeds = std::vector<double>(ranks, 1.0),
                           .split = TokenSplit(experts, kExperts, std::vector<double>(ranks, 1.0))},
                 .ids = {},
                 .counts = {}});
    const std::span<const double> load = std::as_const(loads[1].total).layer(i);
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<int32_t> ids = DrawChoices(load, tokens, random);
      std::vector<int32_t>& counts = layer.counts.emplace_back(kExperts + 2, 0);
      for (const int32_t id : ids) ++counts[id];
      if (rank == 0) layer.ids = ids;
    }
  }
  size_t turn = 0;
  for (auto _ : state) {
    Prepared& layer = layers[turn++ % layers.size()];
    job.from = &layer.counts;
    const auto choice = split.Split(layer.layer, layer.map, layer.ids, {}, 0);
    if (!choice.ok()) state.SkipWithError(Message(choice.status()).c_str());
    benchmark::DoNotOptimize(choice->replicas.data());
  }
  state.counters["busiest_over_mean"] =
      static_cast<double>(split.stats().busiest_rows) / split.stats().mean_rows;
}
BENCHMARK(SplitBatch)->ArgsProduct({{16, 32, 72, 144}, {33, 128, 512}})->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace moesaic::parallel
