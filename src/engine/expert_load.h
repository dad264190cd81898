// Record of the tokens that routers sent to each expert, for the placement of experts.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "models/model.h"

namespace moesaic::engine {

/// Immutable once it is shared. All matrices are [layers, experts].
struct ExpertLoadStats {
  std::vector<int> layers;  // decoder layers with routed experts
  int experts = 0;
  std::vector<int64_t> total;  // tokens since the start
  std::vector<double> recent;  // tokens whose weight halves every kExpertLoadHalfLife
  std::vector<std::shared_ptr<const std::vector<int64_t>>> windows;  // the last ones, the oldest first
  int64_t all_windows = 0;                                           // since the start

  /// Largest recent load of an expert of a layer, divided by the mean. 1: balanced; 0: no tokens.
  double Skew(size_t layer) const;
};

inline constexpr int kExpertLoadWindows = 64;
inline constexpr std::chrono::seconds kExpertLoadHalfLife{300};

struct ExpertLoadOptions {
  double window_s = 0;  ///< Length of a window; 0: loads are not recorded.
  /// Called by the engine's thread after each window with tokens, and when the engine ends; may be empty.
  std::function<void(std::shared_ptr<const ExpertLoadStats>)> sink = nullptr;
  /// Returns the number of times that `sink` could not store its loads. Called by the engine's thread; may be
  /// empty.
  std::function<int64_t()> write_errors = nullptr;
};

/// Divides the routers' totals into windows. One thread.
class ExpertLoadRecorder {
 public:
  using Clock = std::chrono::steady_clock;
  explicit ExpertLoadRecorder(ExpertLoadOptions options) : options_(std::move(options)) {}

  /// Returns whether the current window ends at or before `now`.
  bool Due(Clock::time_point now) const;
  /// Returns whether the options have a sink.
  bool has_sink() const { return options_.sink != nullptr; }
  int64_t write_errors() const { return options_.write_errors ? options_.write_errors() : 0; }
  /// Ends the current window. `totals` are the tokens of all ranks since the start. A window without tokens
  /// is not kept.
  void Add(const models::ExpertLoad& totals, Clock::time_point now);
  std::shared_ptr<const ExpertLoadStats> stats() const { return stats_; }  ///< Null before the first window.

 private:
  const ExpertLoadOptions options_;
  Clock::time_point begin_ = Clock::now();  // of the window
  std::shared_ptr<const ExpertLoadStats> stats_;
};

/// Returns the loads as JSON that `moesaic placement` reads: "logical_count" [windows][layers][experts], and
/// "layers". The first window also has the tokens of older windows that are not kept any more. "recent"
/// [layers][experts] has the tokens whose weight halves every "half_life_s".
std::string ToJson(const ExpertLoadStats& stats);

/// Adds the loads of other layers or replicas to `*sum`, whose layers stay ascending. InvalidArgument: the
/// numbers of experts differ.
Status AddExpertLoad(const models::ExpertLoad& part, models::ExpertLoad* sum);

}  // namespace moesaic::engine
