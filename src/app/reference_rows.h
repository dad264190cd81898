// Sources of reference predictions: another model, or a file.
#pragma once

#include <utility>

#include "app/logprob_file.h"
#include "app/text_score.h"

namespace moesaic::app {

/// Saved predictions, and the routers' choices if they are known.
class SavedRows : public ReferenceRows {
 public:
  SavedRows(LogprobFile file, RouteRecord routes) : file_(std::move(file)), routes_(std::move(routes)) {}

  Status Prepare(const Window& /*window*/, int64_t /*first_row*/) override { return OkStatus(); }
  void Read(int64_t row, std::span<float> out) const override { file_.Read(row, out); }
  const RouteRecord* routes() const override { return routes_.layers().empty() ? nullptr : &routes_; }
  int64_t first_routed() const override { return 0; }

 private:
  LogprobFile file_;
  RouteRecord routes_;  // routes of all rows
};

/// Runs a model over each window just before the scored model. Holds the log-probabilities of one window:
/// window x vocabulary x 4 bytes.
class LockstepRows : public ReferenceRows {
 public:
  /// All are borrowed.
  LockstepRows(engine::Engine& engine, runtime::ThreadPool& threads, const ScoredText& text)
      : engine_(engine), threads_(threads), text_(text) {}

  Status Prepare(const Window& window, int64_t first_row) override;
  void Read(int64_t row, std::span<float> out) const override;
  const RouteRecord* routes() const override { return &routes_; }
  int64_t first_routed() const override { return first_row_; }

 private:
  engine::Engine& engine_;
  runtime::ThreadPool& threads_;
  const ScoredText& text_;
  int64_t first_row_ = 0;
  std::vector<float> rows_;  // [scored rows of the window, vocab]
  RouteRecord routes_;       // routes of the same rows
};

}  // namespace moesaic::app
