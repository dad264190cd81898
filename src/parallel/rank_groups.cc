#include "parallel/rank_groups.h"

#include <algorithm>
#include <utility>

namespace moesaic::parallel {
namespace {

constexpr comm::Tag kTensorTag = kFirstGroupTag;
constexpr comm::Tag kHiddenTag = 2 * kFirstGroupTag;

}  // namespace

StatusOr<std::unique_ptr<RankGroups>> RankGroups::Create(comm::Transport& job, const comm::Topology& topology,
                                                         const Layout& layout, double time_limit_s) {
  if (job.size() != layout.ranks()) {
    return InvalidArgument("the layout {} has {} ranks, but the job has {}", Name(layout.degrees()),
                           layout.ranks(), job.size());
  }
  std::unique_ptr<RankGroups> groups(new RankGroups(job, layout, time_limit_s));
  if (layout.degrees().tensor > 1) {
    const std::vector<int> ranks = layout.TensorGroup(job.rank());
    comm::CommunicatorOptions options;
    options.time_limit_s = time_limit_s;
    options.first_tag = kTensorTag;
    ASSIGN_OR_RETURN(comm::Topology shards, topology.Selected(ranks));
    ASSIGN_OR_RETURN(groups->tensor_ranks_, comm::GroupTransport::Create(job, ranks));
    ASSIGN_OR_RETURN(groups->tensor_,
                     comm::Communicator::Create(*groups->tensor_ranks_, std::move(shards), options));
  }
  return groups;
}

RankGroups::~RankGroups() {
  for (const PendingSend& send : sends_) job_.Cancel(send.id);
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
  Keep(tensor_->AllReduce(bytes, bytes, tensor::DType::kF32));
  traffic_.summed_bytes += std::ssize(bytes);
  traffic_.seconds += job_.Now() - begin;
}

void RankGroups::SendHidden(std::span<const float> hidden) {
  if (!failure_.ok()) return;
  PendingSend send;
  if (!free_.empty()) {
    send.hidden = std::move(free_.back());
    free_.pop_back();
  }
  send.hidden.assign(hidden.begin(), hidden.end());
  const StatusOr<comm::TransferId> id =
      job_.Send(StageRank(1), kHiddenTag, std::as_bytes(std::span<const float>(send.hidden)));
  if (!id.ok()) return Keep(id.status());
  send.id = *id;
  traffic_.hidden_bytes += std::ssize(std::as_bytes(hidden));
  sends_.push_back(std::move(send));
}

void RankGroups::ReceiveHidden(std::span<float> hidden) {
  std::fill(hidden.begin(), hidden.end(), 0.0F);
  if (!failure_.ok()) return;
  const double begin = job_.Now();
  const StatusOr<comm::TransferId> id =
      job_.Receive(StageRank(-1), kHiddenTag, std::as_writable_bytes(hidden));
  Keep(id.ok() ? comm::Wait(job_, *id, time_limit_s_) : id.status());
  traffic_.seconds += job_.Now() - begin;
}

Status RankGroups::Finish() {
  for (PendingSend& send : sends_) {
    if (failure_.ok()) {
      Keep(comm::Wait(job_, send.id, time_limit_s_));
    } else {
      job_.Cancel(send.id);
    }
    free_.push_back(std::move(send.hidden));
  }
  sends_.clear();
  return TakeFailure();
}

Status RankGroups::TakeFailure() { return std::exchange(failure_, OkStatus()); }

}  // namespace moesaic::parallel
