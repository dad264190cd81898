// Communication of forward steps in a layout, with the libraries that the engine uses, between computations
// that take the time of a roofline. It runs on virtual time, under SMPI, or in real time with slowed links.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/collectives/communicator.h"
#include "comm/exchange/exchange.h"
#include "comm/exchange/traffic.h"
#include "comm/topology/topology.h"
#include "comm/transport/group_transport.h"
#include "parallel/counted_transport.h"
#include "parallel/layout.h"
#include "parallel/rank_groups.h"
#include "parallel/rank_work.h"

namespace moesaic::bench {

struct Deployment {
  std::string model;
  parallel::Degrees degrees;
  int hidden = 0;
  std::string flops_type;                  ///< name in DeviceType::flops
  std::vector<parallel::RankWork> stages;  ///< of the first shard of each stage
  int expert_slots = 0;                    ///< experts with their replicas
  bool forwards = true;                    ///< false: rows of dispatches go directly to each rank
  std::vector<std::string> forward_levels;
  int segment_tokens = 16;  ///< of ExchangeOptions

  /// Experts are divided over replicas, whose tokens are exchanged. Otherwise the shards' outputs are summed.
  bool exchanges() const { return degrees.data > 1 && degrees.expert > 1; }
};

/// Reads the output of parallel_step_work.
StatusOr<Deployment> ReadDeployment(const std::string& json);

/// Rows of a step of each replica.
struct StepRows {
  int sequences = 1, rows_per_sequence = 1;
  int context = 0;  ///< tokens whose keys and values each sequence reads
  int rows() const { return sequences * rows_per_sequence; }
};

enum class StepPart { kDense, kExperts, kHead, kSum, kDispatch, kCombine, kTransfer, kCount };
inline constexpr std::array<const char*, static_cast<size_t>(StepPart::kCount)> kStepPartNames = {
    "dense", "experts", "head", "sums", "dispatch", "combine", "transfer"};
using PartSeconds = std::array<double, static_cast<size_t>(StepPart::kCount)>;

/// Bytes that a rank sent, by level of the topology where the two ranks' paths meet.
class LevelBytesTransport final : public parallel::CountedTransport {
 public:
  LevelBytesTransport(comm::Transport& job, const comm::Topology& topology)
      : CountedTransport(job), traffic_(topology, job.rank()) {}
  const comm::TrafficCounter& traffic() const { return traffic_; }
  void Reset() { traffic_.Reset(); }

  StatusOr<comm::TransferId> Send(int peer, comm::Tag tag, std::span<const std::byte> data) override {
    Count(peer, data);
    return CountedTransport::Send(peer, tag, data);
  }
  StatusOr<comm::TransferId> SendAhead(int peer, comm::Tag tag, std::span<const std::byte> data) override {
    Count(peer, data);
    return CountedTransport::SendAhead(peer, tag, data);
  }
  Status Exchange(int peer, comm::Tag tag, std::span<const std::byte> data, std::span<std::byte> received,
                  double limit_s) override {
    Count(peer, data);
    return CountedTransport::Exchange(peer, tag, data, received, limit_s);
  }

 private:
  void Count(int peer, std::span<const std::byte> data) {
    if (peer != rank()) traffic_.CountRows(peer, 0, std::ssize(data));
  }
  comm::TrafficCounter traffic_;
};

/// Lets the rank compute for some seconds, while its messages advance.
using Compute = std::function<void(double seconds)>;

/// One rank's steps. Errors of communication end the process: a benchmark cannot continue.
class StepSchedule {
 public:
  /// Borrows all but `compute`. `dilation` multiplies times of computations.
  StepSchedule(comm::Transport& job, const comm::Topology& topology, const Deployment& deployment,
               const StepRows& rows, double dilation, Compute compute);
  ~StepSchedule();

  /// Seconds from the start of a step to its end at the last stage, when no other step is in flight. All
  /// ranks return the same.
  double Latency();
  /// Seconds between the ends of steps when as many as there are stages are in flight; adds the parts of
  /// `steps` steps to parts(). Decode steps wait for the tokens of their predecessors.
  double Interval(int steps);

  /// Of this rank, in Interval().
  const PartSeconds& parts() const { return parts_; }
  const std::vector<comm::LevelTraffic>& bytes() const { return counted_.traffic().levels(); }
  int rank() const { return counted_.rank(); }

 private:
  void Step();
  void Layer(bool has_experts);
  void Exchange();
  void Spend(StepPart part, double seconds);
  void Sum();
  template <typename Call>
  void Time(StepPart part, const Call& call);
  double Roofline(double bytes, double flops) const;
  double Maximum(double value);
  int RankOfStage(int stage) const;
  void SendToken();
  void AwaitToken();
  bool last_stage() const { return stage_ + 1 == deployment_.degrees.pipeline; }

  const Deployment& deployment_;
  const StepRows rows_;
  const double dilation_;
  const Compute compute_;
  LevelBytesTransport counted_;
  const comm::DeviceType& device_;
  double flops_per_s_ = 0;
  int stage_ = 0;
  parallel::RankWork work_;
  std::unique_ptr<parallel::RankGroups> groups_;
  std::unique_ptr<comm::GroupTransport> shard_ranks_, expert_ranks_;
  std::unique_ptr<comm::Communicator> shards_;  // null: one shard, or outputs are summed
  std::unique_ptr<comm::ExpertExchange> exchange_;
  std::vector<int64_t> share_counts_;  // elements of hidden states by shard
  std::vector<float> hidden_;          // [rows, hidden]
  std::vector<float> share_;           // this shard's rows
  std::vector<float> expert_rows_;     // outputs of experts
  std::vector<int32_t> ids_;           // [own rows, top_k]
  std::vector<float> weights_;
  PartSeconds parts_{};
};

}  // namespace moesaic::bench
