// Assigns the neurons of a dense FFN to experts, given the experts that each token leaves out.
#pragma once

#include <span>
#include <vector>

#include "carve/least_squares.h"

namespace moesaic::carve {

/// Exchanges neurons between slices so that inactive experts lose less energy. A neuron costs its energy over
/// the tokens that leave its expert out; in the shared expert it costs nothing. Returns the improved
/// `expert_of`; slices keep their sizes.
/// - `energy` [tokens, neurons]: each neuron's share of a token's energy.
/// - `importance` [tokens]: weight of each token.
/// - `off` [tokens]: the experts that each token leaves out.
/// - `expert_of` [neurons]: current assignment, -1 for the shared expert.
std::vector<int> ImproveSlices(const RowMatrix& energy, std::span<const float> importance,
                               const std::vector<std::vector<int>>& off, int routed,
                               const std::vector<int>& expert_of);

}  // namespace moesaic::carve
