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

/// The tokens of a window that predict one in it: all but the last.
std::span<const int32_t> TokensOf(const ScoredText& text, const Window& window);
/// Of `count` rows from `first_row` of a window on, those that predict no scored token.
int64_t SkippedRows(const Window& window, int64_t first_row, int64_t count);

/// Mean of values and its standard error.
struct Average {
  double mean = 0, error = 0;
  /// Values taken as independent.
  static Average Of(const std::vector<double>& values);
  /// Values that come in runs of `sizes`, of which only the runs are taken as independent (a ratio estimate
  /// over clusters); values of a text depend on their neighbours. The error of a single run is NaN.
  static Average OfRuns(const std::vector<double>& values, const std::vector<int64_t>& sizes);
};

/// The 0.975 quantile of Student's t with `freedom` degrees, at least 1: half the width of a 95% confidence
/// interval in standard errors. Within 0.2%.
double StudentT975(int64_t freedom);

struct TextScore {
  std::vector<double> nll;       // [scored tokens] nats
  std::vector<int64_t> windows;  // scored tokens of each
  // Against a reference's predictions, when there are any:
  std::vector<double> base_nll;  // [scored tokens] of the reference
  std::vector<double> kl;        // [scored tokens] KL(reference || this)
  std::vector<double> same_top;  // [scored tokens] 1 where both find the same token likeliest
  RouterFlips flips;             // where the reference's routes are known
};

/// What to do with the rows beside counting.
struct ScoreSinks {
  LogprobWriter* save = nullptr;
  RouteRecord* save_routes = nullptr;
  ReferenceRows* base = nullptr;
};

/// Turns logits into log-probabilities.
void LogSoftmax(std::span<const float> logits, std::span<float> out);

/// `progress` is told after every chunk and stops the run with its status.
StatusOr<TextScore> ScoreText(engine::Engine& engine, runtime::ThreadPool& threads, const ScoredText& text,
                              const ScoreSinks& sinks,
                              const std::function<Status(const TextScore&)>& progress);

}  // namespace moesaic::app
