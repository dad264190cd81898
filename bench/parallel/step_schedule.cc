#include "bench/parallel/step_schedule.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "bench/comm/bench_rank.h"
#include "planner/expert_draws.h"

namespace moesaic::bench {
namespace {

constexpr double kLimitSeconds = 1e5;  // of virtual time
constexpr comm::Tag kControlTag = 1, kTokenTag = 2;
// Tags of the shards' reduce-scatters and all-gathers, above those of RankGroups and below those of the
// exchange.
constexpr comm::Tag kShardTag = comm::Tag{8} << comm::kCommunicatorTagBits;

}  // namespace

StatusOr<Deployment> ReadDeployment(const std::string& json) {
  const auto root = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return InvalidArgument("the work file is no JSON");
  try {
    Deployment deployment;
    deployment.model = root.at("model");
    const auto& degrees = root.at("degrees");
    deployment.degrees = {.tensor = degrees.at("tensor"),
                          .pipeline = degrees.at("pipeline"),
                          .data = degrees.at("data"),
                          .expert = degrees.at("expert")};
    deployment.hidden = root.at("hidden");
    deployment.flops_type = root.at("flops_type");
    deployment.expert_slots = root.at("expert_slots");
    deployment.forwards = root.at("forwards");
    deployment.forward_levels = root.at("forward_levels").get<std::vector<std::string>>();
    deployment.segment_tokens = root.at("segment_tokens");
    for (const auto& stage : root.at("stages")) {
      deployment.stages.push_back({.kv_bytes_per_token = stage.at("kv_bytes_per_token"),
                                   .layers = stage.at("layers"),
                                   .has_embedding = stage.at("has_embedding"),
                                   .has_head = stage.at("has_head"),
                                   .read_bytes = stage.at("read_bytes"),
                                   .flops_per_row = stage.at("flops_per_row"),
                                   .head_bytes = stage.at("head_bytes"),
                                   .head_flops_per_row = stage.at("head_flops_per_row"),
                                   .expert_layers = stage.at("expert_layers"),
                                   .all_experts = stage.at("all_experts"),
                                   .top_k = stage.at("top_k"),
                                   .expert_bytes = stage.at("expert_bytes"),
                                   .expert_flops_per_row = stage.at("expert_flops_per_row")});
    }
    return deployment;
  } catch (const nlohmann::json::exception& e) {
    return InvalidArgument("the work file: {}", e.what());
  }
}

StepSchedule::StepSchedule(comm::Transport& job, const comm::Topology& topology, const Deployment& deployment,
                           const StepRows& rows, double dilation, Compute compute)
    : deployment_(deployment),
      rows_(rows),
      dilation_(dilation),
      compute_(std::move(compute)),
      counted_(job, topology),
      device_(topology.device_type(job.rank())) {
  const auto layout = Succeed(parallel::Layout::Create(deployment.degrees));
  if (layout.ranks() != job.size()) {
    ExitOn(InvalidArgument("the layout {} has {} ranks, the job {}", Name(deployment.degrees), layout.ranks(),
                           job.size()));
  }
  const auto flops = device_.flops.find(deployment.flops_type);
  if (flops == device_.flops.end() || device_.memory_bytes_per_s <= 0) {
    ExitOn(InvalidArgument("device \"{}\" needs memory_gb_per_s and flops of {}", device_.name,
                           deployment.flops_type));
  }
  flops_per_s_ = flops->second;
  const parallel::Coordinates at = layout.At(job.rank());
  stage_ = at.stage;
  work_ = deployment.stages[stage_];
  groups_ = Succeed(parallel::RankGroups::Create(counted_, topology, layout, kLimitSeconds));
  const int64_t hidden = deployment.hidden;
  hidden_.resize(rows.rows() * hidden);
  if (!deployment.exchanges()) return;

  const int shards = deployment.degrees.tensor;
  for (int shard = 0; shard < shards; ++shard) {
    share_counts_.push_back((rows.rows() / shards + (shard < rows.rows() % shards ? 1 : 0)) * hidden);
  }
  const int64_t own_rows = share_counts_[at.shard] / hidden;
  share_.resize(own_rows * hidden);
  if (shards > 1) {
    const std::vector<int> ranks = layout.TensorGroup(job.rank());
    shard_ranks_ = Succeed(comm::GroupTransport::Create(counted_, ranks));
    shards_ = Succeed(comm::Communicator::Create(
        *shard_ranks_, Succeed(topology.Selected(ranks)),
        {.time_limit_s = kLimitSeconds, .check_calls = false, .first_tag = kShardTag, .planner = {}}));
  }
  std::vector<int> ranks;  // of the stage, in all replicas
  for (int replica = 0; replica < deployment.degrees.data; ++replica) {
    for (int shard = 0; shard < shards; ++shard) ranks.push_back(layout.RankAt({replica, stage_, shard}));
  }
  expert_ranks_ = Succeed(comm::GroupTransport::Create(counted_, ranks));
  std::vector<std::vector<int>> by_rank(ranks.size());
  const int slots = deployment.expert_slots, count = static_cast<int>(ranks.size());
  for (int rank = 0, slot = 0; rank < count; ++rank) {
    for (const int end = slot + slots / count + (rank < slots % count ? 1 : 0); slot < end; ++slot) {
      by_rank[rank].push_back(slot % work_.all_experts);
    }
  }
  comm::ExchangeOptions options = {.replica_choice = comm::ReplicaChoice::kSpread,
                                   .time_limit_s = kLimitSeconds};
  options.forwarding = deployment.forwards ? comm::Forwarding::kHierarchical : comm::Forwarding::kDirect;
  options.forward_levels = deployment.forward_levels;
  options.segment_tokens = deployment.segment_tokens;
  exchange_ = Succeed(comm::ExpertExchange::Create(
      *expert_ranks_, Succeed(topology.Selected(ranks)),
      Succeed(comm::ExpertMap::Create(work_.all_experts, by_rank)), deployment.hidden, options));
  std::mt19937 random(static_cast<uint32_t>(job.rank()) + 1);
  std::vector<int32_t> experts(work_.all_experts);
  for (int e = 0; e < work_.all_experts; ++e) experts[e] = e;
  for (int64_t row = 0; row < own_rows; ++row) {
    for (int k = 0; k < work_.top_k; ++k) {
      std::swap(experts[k], experts[k + random() % (experts.size() - k)]);
      ids_.push_back(experts[k]);
    }
  }
  weights_.assign(ids_.size(), 1.0F / static_cast<float>(work_.top_k));
}
StepSchedule::~StepSchedule() = default;

double StepSchedule::Roofline(double bytes, double flops) const {
  return std::max(bytes / device_.memory_bytes_per_s, flops / flops_per_s_);
}

template <typename Call>
void StepSchedule::Time(StepPart part, const Call& call) {
  const double start = counted_.Now();
  call();
  parts_[static_cast<size_t>(part)] += counted_.Now() - start;
}

void StepSchedule::Spend(StepPart part, double seconds) {
  Time(part, [&] { compute_(seconds * dilation_); });
}

void StepSchedule::Sum() {
  if (deployment_.degrees.tensor > 1) Time(StepPart::kSum, [&] { groups_->Sum(hidden_); });
}

// Tokens of the replica are divided among its shards, which dispatch them.
void StepSchedule::Exchange() {
  const auto share_bytes = std::as_writable_bytes(std::span(share_));
  const comm::TopK topk = {std::ssize(share_) / deployment_.hidden, work_.top_k, ids_, weights_, {}};
  StatusOr<comm::Dispatched> got = Cancelled("not run");
  Time(StepPart::kDispatch,
       [&] { got = exchange_->Dispatch(comm::RowsOf(std::span<const float>(share_)), topk); });
  ExitOn(got.status());
  int used = 0;
  for (size_t e = 0; e + 1 < got->expert_begin().size(); ++e) {
    if (got->expert_begin()[e] < got->expert_begin()[e + 1]) ++used;
  }
  Spend(StepPart::kExperts,
        Roofline(used * work_.expert_bytes, static_cast<double>(got->rows()) * work_.expert_flops_per_row));
  expert_rows_.resize(got->rows() * deployment_.hidden);
  Time(StepPart::kCombine, [&] {
    ExitOn(exchange_->Combine(comm::RowsOf(std::span<const float>(expert_rows_)), got->handle(),
                              comm::OutputOf(std::span(share_))));
  });
  if (shards_ == nullptr) return;
  Time(StepPart::kSum, [&] {
    ExitOn(shards_->AllGather(share_bytes, std::as_writable_bytes(std::span(hidden_)), share_counts_,
                              tensor::DType::kF32));
  });
}

void StepSchedule::Layer(bool has_experts) {
  const int rows = rows_.rows(), layers = std::max(1, work_.layers);
  const double kv_bytes = work_.kv_bytes_per_token * rows_.context * rows_.sequences;
  // Half of the layer's dense part precedes the first sum: attention. The rest are dense or shared experts.
  const double dense =
      Roofline((work_.read_bytes + kv_bytes) / layers, rows * work_.flops_per_row / layers) / 2;
  Spend(StepPart::kDense, dense);
  if (has_experts && exchange_ != nullptr) {
    if (shards_ != nullptr) {
      Time(StepPart::kSum, [&] {
        ExitOn(shards_->ReduceScatter(std::as_bytes(std::span(hidden_)),
                                      std::as_writable_bytes(std::span(share_)), share_counts_,
                                      tensor::DType::kF32));
      });
    }
    Spend(StepPart::kDense, dense);
    Exchange();
    return;
  }
  Sum();
  Spend(StepPart::kDense, dense);
  if (has_experts) {
    const planner::ExpertUse use =
        planner::BusiestPart(work_.all_experts, work_.top_k, deployment_.degrees.expert, rows);
    Spend(StepPart::kExperts,
          Roofline(use.experts * work_.expert_bytes, use.rows * work_.expert_flops_per_row));
  }
  Sum();
}

void StepSchedule::Step() {
  if (stage_ > 0) {
    Time(StepPart::kTransfer, [&] {
      groups_->ExpectHidden(hidden_);
      groups_->AwaitHidden();
    });
  } else if (work_.has_embedding && !deployment_.exchanges()) {
    Sum();
  }
  for (int layer = 0; layer < work_.layers; ++layer) Layer(layer >= work_.layers - work_.expert_layers);
  if (work_.has_head) {
    Spend(StepPart::kHead, Roofline(work_.head_bytes, rows_.sequences * work_.head_flops_per_row));
  }
  if (!last_stage()) {
    Time(StepPart::kTransfer, [&] { groups_->SendHidden(hidden_); });
  }
  ExitOn(groups_->TakeFailure());
}

double StepSchedule::Maximum(double value) {
  return MaximumOfAll(counted_, kControlTag, value, kLimitSeconds);
}

// The rank of another stage with this one's shard and replica.
int StepSchedule::RankOfStage(int stage) const {
  parallel::Coordinates at = groups_->at();
  at.stage = stage;
  return groups_->layout().RankAt(at);
}

// The chosen tokens of a step return from the last stage to the first one.
void StepSchedule::SendToken() {
  const int token = 0;
  Await(counted_, counted_.Send(RankOfStage(0), kTokenTag, std::as_bytes(std::span(&token, 1))),
        kLimitSeconds);
}

void StepSchedule::AwaitToken() {
  int token = 0;
  const int last = deployment_.degrees.pipeline - 1;
  Await(counted_,
        counted_.Receive(RankOfStage(last), kTokenTag, std::as_writable_bytes(std::span(&token, 1))),
        kLimitSeconds);
}

double StepSchedule::Latency() {
  Maximum(0);
  const double start = counted_.Now();
  Step();
  const double seconds = Maximum(counted_.Now() - start);
  ExitOn(groups_->Finish());
  return seconds;
}

double StepSchedule::Interval(int steps) {
  const int stages = deployment_.degrees.pipeline;
  Maximum(0);
  parts_ = {};
  counted_.Reset();
  std::vector<double> ends;
  for (int step = 0; step < steps; ++step) {
    if (stages > 1 && stage_ == 0 && step >= stages) Time(StepPart::kTransfer, [&] { AwaitToken(); });
    Step();
    if (stages > 1 && last_stage() && step + stages < steps) SendToken();
    ends.push_back(counted_.Now());
  }
  ExitOn(groups_->Finish());
  // Steps before `first` filled the pipeline.
  const int first = std::min(stages, steps - 1);
  const double own = last_stage() && steps > 1 ? (ends[steps - 1] - ends[first - 1]) / (steps - first) : 0;
  return Maximum(own);
}

}  // namespace moesaic::bench
