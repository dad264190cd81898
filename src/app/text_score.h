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

/// Returns the tokens of a window that the model reads: all except the last, which is only predicted.
std::span<const int32_t> TokensOf(const ScoredText& text, const Window& window);
/// Returns how many of a window's rows [first_row, first_row + count) come before the first row whose next
/// token is scored. A row is the prediction after one token of the window.
int64_t SkippedRows(const Window& window, int64_t first_row, int64_t count);

/// Mean of values and its standard error.
struct Average {
  double mean = 0, error = 0;
  /// Treats the values as independent. The error of a single value is 0.
  static Average Of(const std::vector<double>& values);
  /// Divides the values into adjacent runs of the given sizes, such as windows, and treats only runs as
  /// independent (a ratio estimate over clusters), because neighbouring values of a text are correlated. The
  /// error of a single run is NaN.
  static Average OfRuns(const std::vector<double>& values, const std::vector<int64_t>& sizes);
};

/// Returns the 0.975 quantile of Student's t distribution with `freedom` >= 1 degrees of freedom. A 95%
/// confidence interval extends this many standard errors to each side. Accurate to 0.2%.
double StudentT975(int64_t freedom);

/// Result per scored token, in the order of the text.
struct TextScore {
  std::vector<double> nll;       // [scored tokens], negative log-likelihood in nats
  std::vector<int64_t> windows;  // number of scored tokens of each window
  // Comparison with a reference's predictions; empty without a reference.
  std::vector<double> base_nll;  // [scored tokens], `nll` of the reference
  std::vector<double> kl;        // [scored tokens], KL(reference || this) in nats
  std::vector<double> same_top;  // [scored tokens], 1 if both have the same likeliest token
  RouterFlips flips;             // changed choices of experts; empty if the reference's are unknown
};

/// Further uses of the predicted rows; null: not requested. All objects are borrowed during ScoreText.
struct ScoreSinks {
  LogprobWriter* save = nullptr;       // receives each scored row; the caller commits it
  RouteRecord* save_routes = nullptr;  // receives the routers' choices
  ReferenceRows* base = nullptr;       // reference to compare the rows with
};

/// Converts logits [vocab] to natural log-probabilities [vocab].
void LogSoftmax(std::span<const float> logits, std::span<float> out);

/// Runs the windows of `text` through the engine and scores their predictions. `progress` is called after
/// each chunk of rows with the score so far, on the calling thread; its error stops the run. Internal if the
/// model's logits are not finite.
StatusOr<TextScore> ScoreText(engine::Engine& engine, runtime::ThreadPool& threads, const ScoredText& text,
                              const ScoreSinks& sinks,
                              const std::function<Status(const TextScore&)>& progress);

}  // namespace moesaic::app
