// DeepSeek's expert parallelism load balancer, with the results of the published Python bit for bit.
// https://github.com/deepseek-ai/EPLB (eplb.py). The baseline keeps its defects: it may place two replicas of
// one expert on a rank, and it ignores drift, rank speeds and moved weights.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {

struct EplbSizes {
  int replicas = 0;  ///< physical experts of a layer, over all GPUs; a multiple of `gpus`
  int groups = 1;    ///< expert groups of the router
  int nodes = 1;     ///< hierarchical policy if it divides `groups`, otherwise the global one
  int gpus = 0;      ///< a multiple of `nodes`
};

/// Arrays that rebalance_experts() of the Python file returns, row-major.
struct EplbPlan {
  int layers = 0, experts = 0, replicas = 0, max_copies = 0;
  std::vector<int64_t> phy2log = {};  // [layers, replicas]
  std::vector<int64_t> log2phy = {};  // [layers, experts, max_copies], padded with -1
  std::vector<int64_t> logcnt = {};   // [layers, experts]
};

/// Returns InvalidArgument if `log2phy` of the plan's sizes is above kMaxLoadValues. One expert with many
/// copies makes it large.
Status CheckLogicalToPhysical(const EplbPlan& plan);

/// Plans all layers. Loads are rounded to f32 first, as the Python file does. InvalidArgument for sizes that
/// the Python file rejects by assertion, and for CheckLogicalToPhysical(). A layer without tokens is
/// accepted.
StatusOr<EplbPlan> PlanEplb(const LoadMatrix& load, const EplbSizes& sizes);

}  // namespace moesaic::parallel
