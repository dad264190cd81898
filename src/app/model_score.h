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
  std::string file;       // text file
  std::string reference;  // model to compare with, or ""
  std::string reference_dtype = "auto";
  /// Runs the reference first and keeps its predictions in a file. This is also done if memory does not hold
  /// both models.
  bool one_at_a_time = false;
  int window = 0, stride = 0;  // 0: kUsualWindow or the shorter context; the window
  int64_t max_tokens = 0;      // 0: all
  std::string save, base;      // log-probability files to write and to compare with, or ""
  std::string logits_dtype = "f16";
};

inline constexpr int kUsualWindow = 1024;

struct ModelScore {
  ScoredText text;
  TextScore score;
  std::optional<kernels::SparsityCounters> sparsity;
};

StatusOr<ModelScore> ScoreModel(const ScoreOptions& options);

/// Returns the numbers of a score by name, for --format json. A number is null if there are too few tokens or
/// windows for it.
nlohmann::json ScoreJson(const ModelScore& score);

}  // namespace moesaic::app
