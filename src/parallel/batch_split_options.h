// Options of the division of tokens over the replicas of their experts.
#pragma once

#include <cstdint>

namespace moesaic::parallel {

/// Maximum temporary replicas on a rank for one batch of a layer.
inline constexpr int kSpillSlots = 2;
/// Buffers of a rank for their weights: those of the layer that computes, and those of the next one.
inline constexpr int kSpillBuffers = 2;

/// Division of tokens over the replicas of their experts while a model runs. Equal on all ranks.
struct BatchSplitOptions {
  /// False: each replica gets a fixed share of its expert's tokens, until the experts move.
  bool exact = true;
  /// Minimum tokens of a rank for an exact split; smaller batches use fixed shares. An exchange of counts
  /// takes one message to each rank, and small batches are bound by reading weights, which an even split does
  /// not reduce.
  int least_tokens = 33;
  /// Maximum bytes of weights that ranks of a layer send to others for one batch; 0: none.
  int64_t spill_bytes = 0;
  /// Accepted excess of the busiest rank over the mean, relative.
  double spill_tolerance = 0.1;
  /// Assumed bytes per second of these weights. Weights are sent only if they take less time than the busiest
  /// rank saves.
  double spill_bytes_per_s = 1e9;

  bool spills() const { return exact && spill_bytes > 0; }
  bool operator==(const BatchSplitOptions&) const = default;
};

}  // namespace moesaic::parallel
