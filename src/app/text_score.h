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

/// Tokens [begin, end) go through the model together; those from first_scored on count.
struct Window {
  int64_t begin, end, first_scored;
};

/// Windows of `window` tokens that begin every `stride` tokens. Each token counts once: in the first window
/// that holds it behind another one. stride == window: the first token of each window counts nowhere.
std::vector<Window> WindowsOf(int64_t tokens, int window, int stride);

/// Mean and standard error of values taken as independent.
struct Average {
  double mean = 0, error = 0;
  static Average Of(const std::vector<double>& values);
};

struct TextScore {
  std::vector<double> nll;  // [scored tokens] nats
  // Against saved predictions, when there are any:
  std::vector<double> base_nll;  // [scored tokens] of the saved model
  std::vector<double> kl;        // [scored tokens] KL(saved || this)
  std::vector<double> same_top;  // [scored tokens] 1 where both find the same token likeliest
};

/// What to do with the rows beside counting.
struct ScoreSinks {
  LogprobWriter* save = nullptr;
  const LogprobFile* base = nullptr;
};

/// `progress` is told after every chunk and stops the run with its status.
StatusOr<TextScore> ScoreText(engine::Engine& engine, runtime::ThreadPool& threads, const ScoredText& text,
                              const ScoreSinks& sinks,
                              const std::function<Status(const TextScore&)>& progress);

}  // namespace moesaic::app
