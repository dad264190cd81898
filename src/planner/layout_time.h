// Predicted time of a step in each layout of a model on a topology: a roofline of every rank's device, the
// planner's collectives, the exchange of tokens where replicas divide the experts, and the overlap of
// pipeline stages.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/topology/topology.h"
#include "parallel/layout.h"
#include "parallel/rank_work.h"

namespace moesaic::planner {

struct ExpertUse;

/// Rows of a step. A decode step has one row per sequence, and the logits of all; a prefill step has many
/// rows of one sequence, and the logits of one. Data parallel replicas divide the sequences.
struct StepShape {
  int sequences = 1;
  int rows_per_sequence = 1;
  int context = 0;  ///< tokens of each sequence whose keys and values the rows read

  int rows() const { return sequences * rows_per_sequence; }
};

struct StepTime {
  double seconds = 0;        ///< from the start of the first stage to the end of the last one
  double communication = 0;  ///< part of `seconds` spent in sums, exchanges and transfers between ranks
  int parts = 1;             ///< number of parts into which the pipeline divides the batch
  double interval = 0;       ///< seconds between the ends of steps while other sequences keep all stages busy
};

/// A rank's share of a model in a layout. The planner requests the first shard of each stage, which is the
/// largest.
using WorkOfRank = std::function<StatusOr<parallel::RankWork>(const parallel::Layout& layout, int rank)>;

/// Compares layouts. Rank i of a layout is rank i of the topology. Predicted times are kept and used again:
/// calls must not overlap.
class LayoutPlanner {
 public:
  /// `hidden`: elements of a hidden state. `flops_type`: name in DeviceType::flops ("bf16"). InvalidArgument
  /// if a device has no memory bandwidth or no such FLOP/s.
  static StatusOr<LayoutPlanner> Create(comm::Topology topology, int hidden, const std::string& flops_type,
                                        WorkOfRank work);

  struct Prediction {
    parallel::Layout layout;
    double weight_bytes = 0;  ///< weights of the rank with the most
    double free_bytes = 0;    ///< minimum free memory of a device, negative if it is too small; 0 if unknown
    bool fits = true;
    std::vector<StepTime> steps;  ///< one per shape
  };
  /// Devices that differ get unequal numbers of layers (BalanceLayers).
  StatusOr<Prediction> Predict(const parallel::Degrees& degrees, const std::vector<StepShape>& shapes) const;
  /// The split of `layout` with layers moved between its stages, until moving another one would not shorten
  /// the longest time of a stage for `shape`. Several stages that are equally slow are relieved one after the
  /// other. A stage that exceeds its devices' memory is the longest.
  StatusOr<parallel::Split> BalanceLayers(const parallel::Layout& layout, const StepShape& shape) const;
  /// All layouts of as many ranks as the topology has, that the model can be divided into, by the time of the
  /// first shape; those that do not fit come last. Of layouts with replicas, those that divide the experts
  /// are compared: others are several jobs. InvalidArgument if there is none.
  StatusOr<std::vector<Prediction>> Compare(const std::vector<StepShape>& shapes) const;

 private:
  LayoutPlanner(comm::Topology topology, int hidden, WorkOfRank work);
  struct Links;
  struct Known;
  struct Stage;
  struct StageTime;
  struct PartShape;
  static PartShape PartOf(const parallel::Layout& layout, const StepShape& shape, int parts);
  StatusOr<Links*> LinksOf(const std::vector<int>& ranks) const;
  ExpertUse UseOf(const parallel::RankWork& work, int parts, int rows) const;
  StatusOr<std::vector<Stage>> Stages(const parallel::Layout& layout) const;
  StageTime TimeOf(const Stage& stage, const PartShape& part, const ExpertUse& use) const;
  std::vector<double> StageCosts(const parallel::Layout& layout, const std::vector<Stage>& stages,
                                 const StepShape& shape) const;
  bool HasEqualDevices() const;
  StatusOr<bool> HasExperts() const;
  double FreeBytes(const Stage& stage) const;
  StepTime TimeOf(const parallel::Layout& layout, const std::vector<Stage>& stages,
                  const StepShape& shape) const;
  double SumSeconds(const Stage& stage, double bytes) const;
  double ExchangeSeconds(const Stage& stage, int most_tokens, int mean_tokens) const;

  comm::Topology topology_;
  int hidden_;
  WorkOfRank work_;
  std::vector<double> flops_;  // by rank
  std::shared_ptr<Known> known_;
};

}  // namespace moesaic::planner
