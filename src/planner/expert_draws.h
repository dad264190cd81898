// Expected use of routed experts that are divided into parts.
#pragma once

namespace moesaic::planner {

/// Mean use of the busiest part over steps. Routing is uniform.
struct ExpertUse {
  double experts = 0;  ///< distinct experts that rows use
  double rows = 0;     ///< pairs of row and expert
};

/// Returns the use if each of `rows` rows draws `top_k` distinct experts of `experts`, which are divided
/// evenly into `parts`. Many rows are approximated by their mean. Deterministic.
ExpertUse BusiestPart(int experts, int top_k, int parts, int rows);

}  // namespace moesaic::planner
