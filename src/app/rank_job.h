// The ranks that run one model together: this process and those that it starts, or those of a launcher.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "app/flags.h"
#include "app/local_ranks.h"
#include "base/status.h"
#include "comm/topology/topology.h"
#include "comm/transport/opened_transport.h"
#include "parallel/layout.h"
#include "parallel/link_levels.h"
#include "parallel/rank_groups.h"

namespace moesaic::app {

struct RankFlags {
  parallel::Degrees degrees;
  parallel::Split split;                // set by --layout auto and --layer-split auto
  std::string layers, experts;          // --layer-split, --expert-split: numbers, or "auto" for layers
  bool expert_parallel = false;         // --enable-expert-parallel
  std::string layout;                   // "tp=2,pp=2"; "auto": chosen for the topology
  double rebalance_s = 0;               // --rebalance-experts; 0: experts stay
  double rebalance_min_gain = 0.1;      // --rebalance-min-gain
  int redundant_experts = 0;            // --redundant-experts
  int rebalance_workloads = 3;          // --rebalance-workloads
  bool tolerate_failures = false;       // --tolerate-rank-failure
  std::string replica_split = "exact";  // --replica-split
  parallel::BatchSplitOptions spill;    // --spill-experts, --spill-tolerance
  std::string rank_speeds;              // --rank-speeds: numbers, or "measured"; "": those of the topology
  std::string topology;                 // file; "": assumed links
  std::string collective_tuning;        // file of --collective-tuning; "": predictions alone
  std::string placement;                // file of --expert-placement; "": experts are divided in order
  std::string sum_dtype = "f32";        // --tp-sum-dtype: f32, bf16 or int8
  double time_limit_s = 60;

  /// Returns an error if there are sizes in addition to `layout`. The flags exclude each other, but a file of
  /// --config may have both.
  Status CheckLayoutHasNoSizes() const;
  /// False where --layout auto may still choose one rank.
  bool several() const { return degrees.ranks() > 1 || !layout.empty(); }
};

/// The layout of the flags. InvalidArgument: degrees that do not go together, or a placement of experts that
/// does not fit them.
StatusOr<parallel::Layout> LayoutOf(const RankFlags& flags);

/// Declares --tensor-parallel-size, --pipeline-parallel-size, --data-parallel-size, --enable-expert-parallel,
/// --expert-parallel-size, --expert-placement, --replica-split, --spill-experts, --spill-tolerance,
/// --rank-speeds, --layer-split, --expert-split, --layout, --topology, --collective-tuning, --tp-sum-dtype
/// and --rank-time-limit. If the verb `answers` requests, also those of a model that changes meanwhile:
/// --rebalance-experts, --rebalance-min-gain, --redundant-experts, --rebalance-workloads and
/// --tolerate-rank-failure.
void AddRankFlags(Verb& verb, RankFlags& flags, bool answers);

/// A rank's part of the cores on which its process may run.
struct CoreShare {
  int index = 0, count = 1;
  bool operator==(const CoreShare&) const = default;
};

/// Returns the share of `rank`. Ranks of one host whose processes have the same mask of cores divide it; a
/// launcher that binds ranks gives them different ones. `hosts` and `masks` are those of all ranks.
CoreShare CoresOfRank(int rank, std::span<const std::string> hosts, std::span<const std::string> masks);

class RankJob {
 public:
  /// Starts the other ranks of the flags' layout on this machine, or joins the job of which a launcher
  /// (mpirun, or MOESAIC_RENDEZVOUS) has made this process a rank. Returns when all ranks have met.
  /// Binds this process to its part of the machine's cores. Null: one rank. Call it before the process has
  /// threads. `fingerprint` describes the model and its settings; it must be equal on all ranks.
  /// `kernels` describes the kernels of this machine; it must be equal on the ranks of a tensor group, which
  /// route the same rows on their own. InvalidArgument: flags, a job with another number of ranks, or a rank
  /// with another fingerprint or other kernels.
  static StatusOr<std::shared_ptr<RankJob>> Start(const RankFlags& flags, const std::string& fingerprint,
                                                  const std::string& kernels);

  int rank() const { return transport_->rank(); }
  int local_ranks() const { return local_size_; }  ///< ranks on this machine
  const parallel::Layout& layout() const { return layout_; }
  comm::Transport& transport() const { return *transport_; }
  double time_limit_s() const { return flags_.time_limit_s; }
  /// Links between groups of the ranks that divide experts, of --topology; empty without the flag.
  const std::vector<parallel::LinkLevel>& link_levels() const { return link_levels_; }
  /// "TP2 x PP2 on 4 processes of this machine"
  std::string Describe() const;

  StatusOr<std::shared_ptr<parallel::RankGroups>> MakeGroups() const;
  /// The first started rank that failed. Ok if none has, or if a launcher started the ranks, or if the job
  /// continues without it. Any thread.
  Status Failure() const;
  /// From now on, ranks that end do not end the job (--tolerate-rank-failure).
  void TolerateFailures() { tolerates_failures_ = true; }
  /// Kills a started rank without which the job continues.
  void KillRank(int rank);
  /// Ends the started ranks after the verb: waits for them if it succeeded, otherwise kills them. Returns
  /// `status`, or the failure of a rank that caused it.
  Status End(Status status);
  /// After a failure of this rank: ends a job whose other ranks would not notice it (Transport::EndJob), and
  /// reports `status` before.
  void Abandon(const Status& status);

 private:
  Status CheckFingerprints(const std::string& own) const;
  Status CheckKernels(const std::string& own) const;
  Status BindToCores() const;

  RankJob(const RankFlags& flags, const parallel::Layout& layout, comm::OpenedTransport transport)
      : flags_(flags), layout_(layout), transport_(std::move(transport)) {}

  RankFlags flags_;
  parallel::Layout layout_;
  comm::OpenedTransport transport_;
  std::vector<std::string> hosts_;                   // of all ranks
  std::optional<comm::Topology> topology_;           // set by Start
  std::shared_ptr<const comm::TuningTable> tuning_;  // of --collective-tuning; null: none
  std::vector<parallel::LinkLevel> link_levels_;
  int local_size_ = 1;
  std::atomic<bool> tolerates_failures_ = false;
  std::unique_ptr<LocalRanks> children_;  // null: a launcher started the ranks
};

}  // namespace moesaic::app
