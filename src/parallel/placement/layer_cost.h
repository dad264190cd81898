// Predicted time of one batch in a layer: computation of the slowest rank, exchange of tokens, and moves of
// weights.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "parallel/placement/node_traffic.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Links between groups of ranks, such as nodes.
struct LinkLevel {
  int groups = 1;          ///< number of groups of adjacent ranks, of equal size
  double bytes_per_s = 0;  ///< rate at which one group receives
};

/// Rates of a machine and sizes of a model, in seconds and bytes.
struct CostModel {
  double batch_tokens = 0;  ///< tokens of a batch on all ranks
  Routing routing = {};
  int tile_rows = 1;  ///< rows of a tile of the grouped GEMM; a started tile takes the time of a full one
  double tile_s = 0;  ///< time of one tile of an expert on a rank of speed 1
  double read_s = 0;  ///< time to read the weights of an expert that has tokens on a rank of speed 1
  double token_bytes = 0;  ///< bytes of a token to another group and back
  std::vector<LinkLevel> levels = {};
  double expert_bytes = 0;
  double move_bytes_per_s = 0;  ///< rate at which one rank receives weights; 0: moves cost nothing
  double interval_batches = 1;  ///< batches between two plans, over which the time of moves is divided

  double rows() const { return batch_tokens * routing.top_k; }
};

/// InvalidArgument names the member that is out of range for this number of experts and ranks.
Status CheckCostModel(const CostModel& model, int experts, int ranks);

/// Parses a JSON object with the names of CostModel's members; those of Routing are "top_k", "groups" and
/// "top_groups", and "levels" is a list of objects. batch_tokens and tile_s are required.
StatusOr<CostModel> ParseCostModel(std::string_view text, const std::string& source);
StatusOr<CostModel> ReadCostModel(const std::string& path);

/// Expected time of an expert's rows on a rank. The rows of a batch are a Poisson variable: an expert with
/// few rows on average often has none, and its weights are then not read.
class ExpertTime {
 public:
  explicit ExpertTime(const CostModel& model);
  /// Time for `rows` expected rows. Rises with the rows, from 0.
  double operator()(double rows) const;

 private:
  double Tiles(double rows) const;

  const double tile_s_, read_s_;
  const int tile_rows_;
  double fine_ = 0, coarse_ = 0;    // steps of the tables
  std::vector<double> few_, many_;  // expected started tiles, at multiples of the steps
};

struct LayerCost {
  double compute_s = 0;   ///< computation of the slowest rank
  double exchange_s = 0;  ///< sum over levels of the time of the group that receives most
  double move_s = 0;      ///< time to move experts, divided by the batches between two plans
  double total() const { return compute_s + exchange_s + move_s; }
};

/// Predicts the times of a batch whose tokens have these loads, [experts]. Each replica of an expert gets an
/// equal share of its rows. `current` is the placement before the plan; null: nothing moves. All times are
/// zero for a layer without tokens.
LayerCost PredictCost(const LayerPlacement& layer, std::span<const double> loads, const CostModel& model,
                      const ExpertTime& time, std::span<const double> speeds = {},
                      const LayerPlacement* current = nullptr);

}  // namespace moesaic::parallel
