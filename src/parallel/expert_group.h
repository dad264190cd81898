// The ranks of one stage in all replicas, which divide its routed experts: tokens travel to the ranks of
// their experts and outputs travel back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/exchange/exchange.h"
#include "comm/topology/topology.h"
#include "comm/transport/group_transport.h"
#include "parallel/batch_split.h"
#include "parallel/layout.h"
#include "parallel/row_time.h"
#include "parallel/shard.h"

namespace moesaic::parallel {

/// Work of one rank for its expert group. All numbers are totals over the life of the group.
struct ExpertTraffic {
  int64_t sent_rows = 0;         // tokens and outputs that were sent to other ranks
  int64_t computed_rows = 0;     // rows that this rank's experts computed, for tokens of any rank
  double seconds = 0;            // seconds spent in the exchange
  double computing_seconds = 0;  // seconds that this rank's experts took for `computed_rows`
  BatchSplitStats split;         // exact splits; their time is part of `seconds`
  // Rows of batches that are bound by computation, and the time that the rank's experts took for them.
  int64_t timed_rows = 0;
  double timed_seconds = 0;
  struct Level {
    std::string name;  // of the topology, outermost first
    int64_t bytes = 0;
  };
  std::vector<Level> levels;  // bytes sent over the links of each level
};

struct ExpertGroupOptions {
  int hidden = 0, experts = 0, top_k = 0;
  double time_limit_s = 60;
  /// Sums outputs in the order of a token's choices, with one row of traffic for each, so that results do not
  /// depend on the ranks of the experts. Otherwise ranks send one sum per token, and equal results need an
  /// equal placement. Always on if an expert has several replicas.
  bool sums_by_choice = false;
  BatchSplitOptions split = {};
  /// Layers from 0 on that follow each other in each pass. While one of them computes, weights that the next
  /// one will probably spill are fetched. Other layers run on their own.
  int pass_layers = 0;
  /// Relative speeds of the ranks until SetLoads() sets others. Empty: all equal.
  std::vector<double> speeds = {};
};

/// One rank's side of the expert group. All ranks of the group call Begin, Receive and Combine for the same
/// layers in the same order; zero rows are a valid batch. One thread.
class ExpertGroup {
 public:
  /// `by_layer` has, for each layer with routed experts, the experts of each rank, ascending. Borrows `job`,
  /// whose ranks are those of `layout`.
  static StatusOr<std::unique_ptr<ExpertGroup>> Create(
      comm::Transport& job, const comm::Topology& topology, const Layout& layout,
      const ExpertGroupOptions& options, const std::vector<std::vector<std::vector<int>>>& by_layer);
  ~ExpertGroup();

  /// Returns the range of rows that this rank sends, out of `rows` that all shards of its replica have.
  Range OwnRows(int rows) const;
  /// Sets the maximum rows of a replica in the next layers, equal on all ranks; 0: unknown. If they are few,
  /// rows travel in one message to each rank.
  void SetMostRows(int rows);

  /// Begins to send rows [OwnRows().count, hidden] to the ranks of their experts `ids` [rows, top_k], and
  /// returns. `x` is borrowed until Receive(). `own`, the weights of the rank's experts of the layer, is
  /// borrowed until Receive() has returned, and for layers below ExpertGroupOptions::pass_layers until
  /// SetExperts() or the next Begin() of the layer.
  Status Begin(int layer, std::span<const float> x, std::span<const int32_t> ids,
               std::span<const float> weights, const BatchSplit::Weights& own = {});

  /// Rows of this rank's experts, grouped by expert. Valid until Combine().
  struct Rows {
    int count = 0;
    int own = 0;                         // rows of the rank's own experts, which come first
    const float* x = nullptr;            // [count, hidden]
    std::span<const int32_t> expert;     // [count]: position among the rank's experts, or those of `spilled`
    const std::byte* spilled = nullptr;  // weights of experts of other ranks, for the rows after `own`
  };
  StatusOr<Rows> Receive();
  /// Sends outputs [Rows::count, hidden] back, and sets `out` [OwnRows().count, hidden] to the weighted sums
  /// of the outputs for this rank's rows.
  Status Combine(std::span<const float> outputs, std::span<float> out);

  /// Sets the fixed shares of replicas so that ranks with these relative speeds (empty: all equal) have equal
  /// work under these loads [experts]. `loads` may differ between ranks; `speeds` may not.
  Status SetLoads(int layer, std::span<const double> loads, std::span<const double> speeds = {});

  /// Experts of each rank in a layer.
  const LayerPlacement& experts(int layer) const { return layers_[layer].by_rank; }
  /// InvalidArgument: not a placement of the group's experts on its ranks, ascending on each.
  Status CheckExperts(const LayerPlacement& by_rank) const;
  /// Changes the placement of a layer, on all ranks between the same operations. The sums of tokens change in
  /// the last bits unless ExpertGroupOptions::sums_by_choice is on.
  Status SetExperts(int layer, const LayerPlacement& by_rank);

  /// Continues without exactly these ranks of the job. Operations in flight end; the next one is the same on
  /// all other ranks. Experts of dead ranks are computed by their other replicas.
  Status SetDead(std::span<const int> job_ranks);
  /// `by_rank` without the experts of dead ranks.
  LayerPlacement LivingPart(LayerPlacement by_rank) const {
    return parallel::LivingPart(std::move(by_rank), dead_);
  }
  /// Experts of a layer that only dead ranks have, ascending. Their outputs are left out of the sums.
  std::vector<int> LostExperts(int layer) const;

  const ExpertGroupOptions& options() const { return options_; }
  int rank() const { return ranks_->rank(); }  ///< of the group
  comm::Transport& transport() { return *ranks_; }
  int layers() const { return static_cast<int>(layers_.size()); }
  ExpertTraffic traffic() const;

 private:
  struct Layer {
    std::shared_ptr<const comm::ExpertMap> map;
    std::vector<std::vector<int>> by_rank;
    bool has_replicas = false;
    std::vector<double> loads = {}, speeds = {};  // SetLoads()
    std::vector<double> shares = {};              // [physical experts]: of the expert's tokens
    std::optional<BatchSplit::Layer> split = {};  // where it may be used
  };
  ExpertGroup(comm::Transport& job, const Layout& layout, const ExpertGroupOptions& options)
      : job_(job), layout_(layout), options_(options) {}
  StatusOr<Layer> MakeLayer(const std::vector<std::vector<int>>& by_rank) const;
  Status Divide(Layer& layer) const;
  Status PrefetchNext();
  bool SplitsExactly(const Layer& layer) const;
  bool IsLargeBatch() const { return most_sent_ == 0 || most_sent_ >= options_.split.least_tokens; }
  int CopiesOf(const Layer& layer, int expert) const;
  std::span<const int32_t> ChooseReplicas(const Layer& layer, std::span<const int32_t> ids);
  Status Explain(const Status& status) const;

  comm::Transport& job_;
  const Layout layout_;
  const ExpertGroupOptions options_;
  std::unique_ptr<comm::GroupTransport> ranks_;
  std::vector<bool> dead_;  // [ranks of the group]
  std::optional<comm::Topology> topology_;
  std::vector<Layer> layers_;
  bool has_replicas_ = false;
  std::unique_ptr<comm::ExpertExchange> exchange_;
  int most_sent_ = 0;  // of a rank in the next layers; 0: unknown
  int few_rows_ = 0;   // limit of the low-latency mode
  std::optional<comm::PendingDispatch> pending_;
  std::optional<comm::Dispatched> received_;
  std::vector<int32_t> expert_of_row_, replicas_;
  std::vector<double> credit_;  // [physical experts] of the layer
  std::unique_ptr<BatchSplit> split_;
  int layer_ = 0;        // of the last dispatch
  int own_experts_ = 0;  // of the last dispatch; experts of other ranks follow
  bool timed_ = false;   // the last dispatch was one of a large batch
  double received_at_ = 0;
  RowTime row_time_;  // of recent large batches
  int64_t computed_rows_ = 0, timed_rows_ = 0;
  double seconds_ = 0, computing_seconds_ = 0, timed_seconds_ = 0;
};

}  // namespace moesaic::parallel
