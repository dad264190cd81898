// Scores a model on a text, alone or against another one, for `perplexity` and `report`.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "app/session.h"
#include "app/text_score.h"

namespace moesaic::app {

struct ScoreOptions {
  ModelFlags model;
  std::string file;       // text to score
  std::string reference;  // model to compare with, or ""
  std::string reference_dtype = "auto";
  /// Runs the reference first and keeps its predictions in a temporary file, as if memory did not hold both
  /// models. Otherwise both run together if they fit.
  bool one_at_a_time = false;
  int window = 0;          // tokens; 0: kUsualWindow, or the context of the models if that is shorter
  int stride = 0;          // tokens between the starts of two windows; 0: `window`
  int64_t max_tokens = 0;  // tokens of the text to use; 0: all
  std::string save;        // log-probability file to write, or ""
  std::string base;        // log-probability file to compare with, or ""; ignored if there is a `reference`
  std::string logits_dtype = "f16";
};

inline constexpr int kUsualWindow = 1024;  ///< tokens

struct ModelScore {
  ScoredText text;
  TextScore score;
  std::optional<kernels::SparsityCounters> sparsity;  // only with block-sparse attention
};

/// Loads the model, and the reference if there is one, and scores the text with a progress bar.
/// InvalidArgument if the two models, or the text and the file `base`, do not match; Cancelled after an
/// interrupt.
StatusOr<ModelScore> ScoreModel(const ScoreOptions& options);

/// Returns the numbers of a score by name, for --format json. An error or a bound that needs more tokens or
/// windows is null.
nlohmann::json ScoreJson(const ModelScore& score);

}  // namespace moesaic::app
