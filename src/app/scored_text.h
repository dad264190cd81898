// A text that models are scored on, and another model's predictions for it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "app/route_record.h"
#include "base/status.h"

namespace moesaic::app {

/// Text and scoring parameters. Two runs are comparable if these are equal.
struct ScoredText {
  std::vector<int32_t> tokens;
  int window = 0, stride = 0;
  int64_t rows = 0;  // scored tokens
  int vocab = 0;
};

/// Tokens [begin, end) pass through the model together; those from first_scored on are scored.
struct Window {
  int64_t begin, end, first_scored;
};

/// Returns windows of `window` tokens that begin every `stride` tokens. Each token is scored once: in the
/// first window that contains it after another token. With stride == window the first token of each window is
/// not scored.
std::vector<Window> WindowsOf(int64_t tokens, int window, int stride);

/// Another model's predictions of the same text, by scored row.
class ReferenceRows {
 public:
  virtual ~ReferenceRows() = default;
  /// Called before a window is scored; its first scored token is row `first_row`.
  virtual Status Prepare(const Window& window, int64_t first_row) = 0;
  /// Returns log-probabilities [vocab] of a row of that window. Thread-safe.
  virtual void Read(int64_t row, std::span<float> out) const = 0;
  /// Returns the routers' choices for rows from first_routed() on, including those of the window; null:
  /// unknown.
  virtual const RouteRecord* routes() const = 0;
  virtual int64_t first_routed() const = 0;
};

}  // namespace moesaic::app
