// Scores a model on a text, alone or against another one: what `perplexity` and `report` tell.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "app/session.h"
#include "app/text_score.h"

namespace moesaic::app {

struct ScoreOptions {
  ModelFlags model;
  std::string file;       // the text
  std::string reference;  // a model to hold it against, or ""
  std::string reference_dtype = "auto";
  /// Runs the reference first and keeps its predictions in a file, as is done where memory does not hold
  /// both.
  bool one_at_a_time = false;
  int window = 0, stride = 0;  // 0: kUsualWindow or the shorter context; the window
  int64_t max_tokens = 0;      // 0: all
  std::string save, base;      // files of log-probabilities to write, and to hold the model against; or ""
  std::string logits_dtype = "f16";
};

inline constexpr int kUsualWindow = 1024;

struct ModelScore {
  ScoredText text;
  TextScore score;
  std::optional<kernels::SparsityCounters> sparsity;
};

StatusOr<ModelScore> ScoreModel(const ScoreOptions& options);

/// The numbers of a score by name, for --format json; null where there are too few tokens or windows to tell.
nlohmann::json ScoreJson(const ModelScore& score);

}  // namespace moesaic::app
