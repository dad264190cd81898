// Scores a model on a text in windows: perplexity, and divergence from saved predictions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/logprob_file.h"
#include "base/status.h"
#include "engine/engine.h"
#include "runtime/thread_pool.h"

namespace moesaic::app {

/// Returns the tokens of a window that predict another one: all but the last.
std::span<const int32_t> TokensOf(const ScoredText& text, const Window& window);
/// Returns the number of rows, of `count` rows from `first_row` of a window on, that predict no scored token.
int64_t SkippedRows(const Window& window, int64_t first_row, int64_t count);

/// Mean of values and its standard error.
struct Average {
  double mean = 0, error = 0;
  /// Treats the values as independent.
  static Average Of(const std::vector<double>& values);
  /// Treats only runs of `sizes` values as independent (a ratio estimate over clusters), because neighbouring
  /// values of a text are correlated. The error of a single run is NaN.
  static Average OfRuns(const std::vector<double>& values, const std::vector<int64_t>& sizes);
};

/// Returns the 0.975 quantile of Student's t with `freedom` >= 1 degrees: half the width of a 95% confidence
/// interval in standard errors. Accurate to 0.2%.
double StudentT975(int64_t freedom);

struct TextScore {
  std::vector<double> nll;       // [scored tokens] nats
  std::vector<int64_t> windows;  // number of scored tokens of each window
  // Comparison with a reference's predictions, if there are any.
  std::vector<double> base_nll;  // [scored tokens], of the reference
  std::vector<double> kl;        // [scored tokens], KL(reference || this)
  std::vector<double> same_top;  // [scored tokens], 1 if both have the same likeliest token
  RouterFlips flips;             // if the reference's routes are known
};

/// Receivers of the rows in addition to scoring.
struct ScoreSinks {
  LogprobWriter* save = nullptr;
  RouteRecord* save_routes = nullptr;
  ReferenceRows* base = nullptr;
};

/// Converts logits to log-probabilities.
void LogSoftmax(std::span<const float> logits, std::span<float> out);

/// `progress` is called after every chunk; its error stops the run.
StatusOr<TextScore> ScoreText(engine::Engine& engine, runtime::ThreadPool& threads, const ScoredText& text,
                              const ScoreSinks& sinks,
                              const std::function<Status(const TextScore&)>& progress);

}  // namespace moesaic::app
