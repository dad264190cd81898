// Predicted layouts of a model on a topology: the table of `moesaic inspect --topology` and the choice of
// --layout auto.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "planner/layout_time.h"

namespace moesaic::app {

struct LayoutQuestion {
  const checkpoint::Checkpoint& model;
  std::string dtype = "auto", kv_dtype = "auto";
  std::string topology;   // file
  bool load_mtp = false;  // count the weights of MTP modules
};

/// Returns the steps that the table predicts: decode of 8 sequences, by which layouts are ordered; decode of
/// one; prefill of 512 rows.
const std::vector<planner::StepShape>& PredictedSteps();

/// Returns all layouts of as many ranks as the topology has devices, best first.
StatusOr<std::vector<planner::LayoutPlanner::Prediction>> PredictLayouts(const LayoutQuestion& question);

/// Returns the layers of the stages of `layout` that balance their times and fit the devices.
StatusOr<parallel::Split> PredictSplit(const LayoutQuestion& question, const parallel::Layout& layout);

/// Returns the table, with one line per layout and at most `lines` of them.
std::string LayoutTable(const std::vector<planner::LayoutPlanner::Prediction>& predictions, size_t lines);

}  // namespace moesaic::app
