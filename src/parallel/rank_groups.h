// Communication inside one forward pass: sums over the shards of a stage, and hidden states between stages.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "comm/collectives/communicator.h"
#include "comm/topology/topology.h"
#include "comm/transport/group_transport.h"
#include "parallel/counted_transport.h"
#include "parallel/expert_group.h"
#include "parallel/layout.h"

namespace moesaic::parallel {

/// First tag that groups use. Lower tags are free for other messages of the job.
inline constexpr comm::Tag kFirstGroupTag = comm::Tag{1} << comm::kCommunicatorTagBits;

/// Bytes that one rank sent, and time that it waited for other ranks. All are totals over the life of the
/// groups.
struct GroupTraffic {
  int64_t sent_bytes = 0;  // bytes of all messages
  double seconds = 0;      // spent in sums, receives, and exchanges of tokens
  ExpertTraffic experts;   // zero if replicas do not divide the experts
};

/// The groups of one rank. Layers call it between kernels and cannot handle failures there. Therefore the
/// object keeps the first failure until TakeFailure(), and later calls do nothing. One thread.
class RankGroups {
 public:
  /// Borrows the job's transport. The transport and the topology have layout.ranks() ranks. A wait of more
  /// than `time_limit_s` is a failure. `sums` is the encoding of sums between hosts
  /// (CommunicatorOptions::compression). `tuning` has measured times of sums; null: there are none.
  static StatusOr<std::unique_ptr<RankGroups>> Create(
      comm::Transport& job, const comm::Topology& topology, const Layout& layout, double time_limit_s = 60,
      comm::WireFormat sums = comm::WireFormat::kExact,
      std::shared_ptr<const comm::TuningTable> tuning = nullptr);
  ~RankGroups();

  const Layout& layout() const { return layout_; }
  int rank() const { return job_.rank(); }
  Coordinates at() const { return layout_.At(rank()); }

  /// Returns whether the stage has several shards, whose outputs are partial sums.
  bool has_shards() const { return tensor_ != nullptr; }
  /// Replaces `values` by the sum over the shards of the stage, which is bitwise equal on all of them.
  void Sum(std::span<float> values);
  /// Starts Sum() of `values`, which are borrowed until FinishSums(). All shards start the same sums in the
  /// same order.
  void StartSum(std::span<float> values);
  /// Waits for all sums that were started.
  void FinishSums();
  /// Joins the ranks that divide the experts of the stage's layers, in a layout that exchanges tokens.
  /// Arguments are those of ExpertGroup::Create().
  Status JoinExperts(const ExpertGroupOptions& options,
                     const std::vector<std::vector<std::vector<int>>>& by_layer);
  /// Null unless JoinExperts() was called. Layers report its errors to Fail().
  ExpertGroup* experts() { return experts_.get(); }
  /// Continues without exactly these dead ranks of the job. All other ranks call it between the same steps.
  /// Supported only in a layout that tolerates failures.
  Status Exclude(std::span<const int> ranks);
  /// Records a failure; only the first one is kept.
  void Fail(Status status) { Keep(std::move(status)); }
  /// Sends hidden states to the next stage, which receives them in order; `hidden` is copied. Memory of
  /// sends that have ended is used again.
  void SendHidden(std::span<const float> hidden);
  /// Starts to receive hidden states of the previous stage into `hidden`, which is borrowed until
  /// AwaitHidden() or TakeFailure().
  void ExpectHidden(std::span<float> hidden);
  /// Waits for the oldest hidden states that are expected. They are zero after a failure.
  void AwaitHidden();
  /// Advances messages between stages, and sums that were started, while the rank computes.
  void Progress() {
    if (!sums_.empty()) {
      tensor_->Progress();
    } else if (layout_.degrees().pipeline > 1) {
      job_.Progress();
    }
  }
  /// Returns whether a call failed since the last TakeFailure().
  bool failed() const { return !failure_.ok(); }
  /// Returns the first failure since the last call, and forgets it.
  Status TakeFailure();
  /// Waits until all hidden states are sent, and returns like TakeFailure().
  Status Finish();

  GroupTraffic traffic() const {
    GroupTraffic traffic = traffic_;
    traffic.sent_bytes = job_.sent_bytes();
    if (experts_ != nullptr) traffic.experts = experts_->traffic();
    traffic.seconds += traffic.experts.seconds;
    return traffic;
  }
  /// Returns the number of hidden states whose sends have not ended.
  int pending_sends() const { return static_cast<int>(sends_.size()); }

 private:
  struct PendingSend {
    comm::TransferId id;
    std::vector<float> hidden;
  };
  struct Expected {
    comm::TransferId id;
    std::span<float> hidden;
    bool started = false;
  };
  RankGroups(comm::Transport& job, const Layout& layout, double time_limit_s)
      : job_(job), layout_(layout), time_limit_s_(time_limit_s) {}
  int StageRank(int step) const;
  void Keep(Status status);
  void KeepSum(const Status& summed);
  void FreeSends();
  void PushSends(size_t bytes);
  void DropExpected();

  CountedTransport job_;
  Layout layout_;
  double time_limit_s_;
  std::optional<comm::Topology> topology_;  // of the job
  std::unique_ptr<ExpertGroup> experts_;
  std::unique_ptr<comm::GroupTransport> tensor_ranks_;
  std::unique_ptr<comm::Communicator> tensor_;  // null: one shard
  std::vector<comm::CollectiveHandle> sums_;    // started
  std::deque<PendingSend> sends_;
  std::deque<Expected> expected_;
  std::vector<std::vector<float>> free_;  // memory of earlier sends
  Status failure_;
  GroupTraffic traffic_;
};

}  // namespace moesaic::parallel
