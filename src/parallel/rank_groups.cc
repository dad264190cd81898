#include "parallel/rank_groups.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "parallel/job_wait.h"

namespace moesaic::parallel {
namespace {

constexpr comm::Tag kTensorTag = kFirstGroupTag;
constexpr comm::Tag kHiddenTag = 2 * kFirstGroupTag;

}  // namespace

StatusOr<std::unique_ptr<RankGroups>> RankGroups::Create(comm::Transport& job, const comm::Topology& topology,
                                                         const Layout& layout, double time_limit_s,
                                                         comm::WireFormat sums,
                                                         std::shared_ptr<const comm::TuningTable> tuning) {
  if (job.size() != layout.ranks()) {
    return InvalidArgument("the layout {} has {} ranks, but the job has {}", layout.Name(), layout.ranks(),
                           job.size());
  }
  std::unique_ptr<RankGroups> groups(new RankGroups(job, layout, time_limit_s));
  if (layout.exchanges_tokens()) groups->topology_ = topology;
  if (layout.degrees().tensor > 1) {
    const std::vector<int> ranks = layout.TensorGroup(job.rank());
    comm::CommunicatorOptions options;
    options.time_limit_s = time_limit_s;
    options.compression = sums;
    options.first_tag = kTensorTag;
    options.planner.tuning = std::move(tuning);
    ASSIGN_OR_RETURN(comm::Topology shards, topology.Selected(ranks));
    ASSIGN_OR_RETURN(groups->tensor_ranks_, comm::GroupTransport::Create(groups->job_, ranks));
    ASSIGN_OR_RETURN(groups->tensor_,
                     comm::Communicator::Create(*groups->tensor_ranks_, std::move(shards), options));
  }
  return groups;
}

Status RankGroups::JoinExperts(const ExpertGroupOptions& options,
                               const std::vector<std::vector<std::vector<int>>>& by_layer) {
  ExpertGroupOptions limited = options;
  limited.time_limit_s = time_limit_s_;
  ASSIGN_OR_RETURN(experts_, ExpertGroup::Create(job_, *topology_, layout_, limited, by_layer));
  return OkStatus();
}

RankGroups::~RankGroups() {
  sums_.clear();     // cancels them
  experts_.reset();  // ends transfers of the job
  for (const PendingSend& send : sends_) job_.Cancel(send.id);
  DropExpected();
}

Status RankGroups::Exclude(std::span<const int> ranks) {
  for (const int dead : ranks) {
    if (dead < 0 || dead >= job_.size() || dead == rank()) {
      return InvalidArgument("rank {} of {} can't continue without rank {}", rank(), job_.size(), dead);
    }
  }
  for (const int dead : ranks) job_.Ignore(dead);
  failure_ = OkStatus();
  return experts_ == nullptr ? OkStatus() : experts_->SetDead(ranks);
}

int RankGroups::StageRank(int step) const {
  Coordinates coordinates = at();
  coordinates.stage += step;
  return layout_.RankAt(coordinates);
}

void RankGroups::Keep(Status status) {
  if (failure_.ok()) failure_ = std::move(status);
}

void RankGroups::Sum(std::span<float> values) {
  if (tensor_ == nullptr || !failure_.ok() || values.empty()) return;
  const double begin = job_.Now();
  const std::span<std::byte> bytes = std::as_writable_bytes(values);
  KeepSum(tensor_->AllReduce(bytes, bytes, tensor::DType::kF32));
  traffic_.seconds += job_.Now() - begin;
}

void RankGroups::StartSum(std::span<float> values) {
  if (tensor_ == nullptr || !failure_.ok() || values.empty()) return;
  const std::span<std::byte> bytes = std::as_writable_bytes(values);
  StatusOr<comm::CollectiveHandle> sum = tensor_->StartAllReduce(bytes, bytes, tensor::DType::kF32);
  if (!sum.ok()) return KeepSum(sum.status());
  sums_.push_back(*std::move(sum));
}

void RankGroups::FinishSums() {
  const double begin = job_.Now();
  for (comm::CollectiveHandle& sum : sums_) {
    if (failure_.ok()) {
      KeepSum(sum.Wait());
    } else {
      sum.Cancel();
    }
  }
  sums_.clear();
  traffic_.seconds += job_.Now() - begin;
}

// The status names members of the group.
void RankGroups::KeepSum(const Status& summed) {
  if (summed.ok()) return;
  Keep(Annotate(summed, fmt::format("sum over the job's ranks {}, which are numbered from 0 here",
                                    fmt::join(tensor_ranks_->ranks(), ", "))));
}

void RankGroups::SendHidden(std::span<const float> hidden) {
  if (!failure_.ok()) return;
  FreeSends();
  PendingSend send;
  if (!free_.empty()) {
    send.hidden = std::move(free_.back());
    free_.pop_back();
  }
  send.hidden.assign(hidden.begin(), hidden.end());
  const StatusOr<comm::TransferId> id =
      job_.SendAhead(StageRank(1), kHiddenTag, std::as_bytes(std::span<const float>(send.hidden)));
  if (!id.ok()) return Keep(id.status());
  send.id = *id;
  sends_.push_back(std::move(send));
  PushSends(hidden.size_bytes());
}

// Shared memory takes some hundred KB of a message at a time, as fast as the receiver empties it. The rank
// helps for about as long as the copy takes, because the next call of Progress() may be a layer away.
void RankGroups::PushSends(size_t bytes) {
  constexpr double kBytesPerS = 5e8;
  constexpr size_t kBytesPerPoll = 128;
  const double end = job_.Now() + static_cast<double>(bytes) / kBytesPerS;
  for (size_t polls = bytes / kBytesPerPoll; polls > 0 && !sends_.empty() && job_.Now() < end; --polls) {
    FreeSends();
  }
}

// Sends end in order as far as the transport delivers in order; a later one that has ended waits here.
void RankGroups::FreeSends() {
  job_.Progress();
  for (Status result; !sends_.empty() && job_.Test(sends_.front().id, &result);) {
    Keep(std::move(result));
    free_.push_back(std::move(sends_.front().hidden));
    sends_.pop_front();
  }
}

void RankGroups::ExpectHidden(std::span<float> hidden) {
  Expected expected = {.id = {}, .hidden = hidden};
  if (failure_.ok()) {
    const StatusOr<comm::TransferId> id =
        job_.Receive(StageRank(-1), kHiddenTag, std::as_writable_bytes(hidden));
    expected.started = id.ok();
    if (id.ok()) expected.id = *id;
    Keep(id.status());
  }
  expected_.push_back(expected);
}

void RankGroups::AwaitHidden() {
  const Expected expected = expected_.front();
  expected_.pop_front();
  if (failure_.ok()) {
    const double begin = job_.Now();
    Keep(Annotate(WaitInJob(job_, expected.id, time_limit_s_),
                  fmt::format("waiting for hidden states of rank {}", StageRank(-1))));
    traffic_.seconds += job_.Now() - begin;
  } else if (expected.started) {
    job_.Cancel(expected.id);
  }
  if (!failure_.ok()) std::fill(expected.hidden.begin(), expected.hidden.end(), 0.0F);
}

void RankGroups::DropExpected() {
  for (const Expected& expected : expected_) {
    if (expected.started) job_.Cancel(expected.id);
  }
  expected_.clear();
}

Status RankGroups::Finish() {
  for (PendingSend& send : sends_) {
    if (failure_.ok()) {
      Keep(WaitInJob(job_, send.id, time_limit_s_));
    } else {
      job_.Cancel(send.id);
    }
    free_.push_back(std::move(send.hidden));
  }
  sends_.clear();
  return TakeFailure();
}

Status RankGroups::TakeFailure() {
  DropExpected();
  return std::exchange(failure_, OkStatus());
}

}  // namespace moesaic::parallel
