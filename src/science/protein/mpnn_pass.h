// Parts of ProteinMPNN's passes, shared by the forward and the backward one.
#pragma once

#include "science/protein/mpnn_features.h"

namespace moesaic::science {

/// Masks of nodes and of edges whose ends are both known.
struct MpnnMasks {
  std::vector<float> known, both;  // [L], [L, K]
  MpnnMasks(const MpnnInput& input, const MpnnEncoding& e);
};

/// Inputs of one layer.
struct MpnnState {
  std::vector<float> nodes, edges;  // [L, H], [L, K, H]; a decoder's edges are those of the encoding
};

Status CheckMpnnInput(const MpnnInput& input);

/// The graph whose destination i has edges from sources[i K .. (i + 1) K).
StatusOr<graph::Graph> NeighborGraph(const MpnnEncoding& e, std::span<const int32_t> sources,
                                     int64_t num_src);

/// Sources [L, K] of the decoder: row j if it is decoded before the destination, otherwise row L + j with the
/// encoder's features. Fails if a letter does not exist or `order` is no permutation.
StatusOr<std::vector<int32_t>> DecoderSources(const MpnnEncoding& e, std::span<const int32_t> sequence,
                                              std::span<const int32_t> order);

}  // namespace moesaic::science
