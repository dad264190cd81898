// Tokens that the router sent to each expert of each layer.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::parallel {

/// Bounds of accepted inputs. Every reader enforces them before it allocates memory.
inline constexpr int kMaxLayers = 4096;
inline constexpr int kMaxExperts = 65536;
inline constexpr int kMaxRanks = 65536;
/// Largest number of values of one matrix: 32 Mi doubles are 256 MiB.
inline constexpr int64_t kMaxLoadValues = int64_t{32} << 20;
inline constexpr int kMaxWindows = 65536;

/// Tokens per layer and expert. Values are finite and not negative.
struct LoadMatrix {
  int layers = 0;
  int experts = 0;
  std::vector<double> tokens = {};  // [layers, experts]

  std::span<const double> layer(int index) const {
    return {tokens.data() + static_cast<size_t>(index) * experts, static_cast<size_t>(experts)};
  }
};

/// Load of one workload: the windows of a recording, in order of time, and their sum.
struct Workload {
  std::string name;
  LoadMatrix total = {};
  std::vector<LoadMatrix> windows = {};  ///< Empty for a recording without windows.
};

/// Returns the totals of the workloads, in their order.
std::vector<LoadMatrix> Totals(std::span<const Workload> workloads);

/// Returns InvalidArgument for sizes out of bounds, values that are negative or not finite, and a load
/// without any token. `source` begins the message.
Status CheckLoad(const LoadMatrix& load, const std::string& source);

/// Scales each layer so that its loads sum to `sum`. A layer without tokens gets equal loads.
LoadMatrix ScaledLoad(const LoadMatrix& load, double sum);

/// Returns whether a router sent any token to the experts of `layer`. Recorders also count dense layers,
/// which have no tokens; measures over layers leave these layers out.
bool HasTokens(const LoadMatrix& load, int layer);

/// Sums matrices of one shape.
LoadMatrix SumOfLoads(std::span<const LoadMatrix> loads);

}  // namespace moesaic::parallel
