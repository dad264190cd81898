// Which neurons of a dense FFN become one expert, from what tokens can do without.
#pragma once

#include <span>
#include <vector>

#include "carve/least_squares.h"

namespace moesaic::carve {

/// Exchanges neurons between slices so that less is lost with the experts that are off. `energy` [tokens,
/// neurons] is each neuron's share of a token's energy, `importance` [tokens] what a token counts, `off`
/// [tokens] the experts that each token leaves out. A neuron costs its energy over the tokens that leave its
/// expert out; in the shared expert (-1 in `expert_of`) nothing. Returns `expert_of` [neurons] improved; the
/// slices keep their sizes.
std::vector<int> ImproveSlices(const RowMatrix& energy, std::span<const float> importance,
                               const std::vector<std::vector<int>>& off, int routed,
                               const std::vector<int>& expert_of);

}  // namespace moesaic::carve
