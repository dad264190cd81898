// A text that models are scored on, and another model's predictions for it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "app/route_record.h"
#include "base/status.h"

namespace moesaic::app {

/// What is scored, and how: two runs are comparable when these are equal.
struct ScoredText {
  std::vector<int32_t> tokens;
  int window = 0, stride = 0;
  int64_t rows = 0;  // scored tokens
  int vocab = 0;
};

/// Tokens [begin, end) go through the model together; those from first_scored on count.
struct Window {
  int64_t begin, end, first_scored;
};

/// Windows of `window` tokens that begin every `stride` tokens. Each token counts once: in the first window
/// that holds it behind another one. stride == window: the first token of each window counts nowhere.
std::vector<Window> WindowsOf(int64_t tokens, int window, int stride);

/// Another model's predictions of the same text, row by scored row.
class ReferenceRows {
 public:
  virtual ~ReferenceRows() = default;
  /// Is called before a window is scored, whose first scored token is row `first_row`.
  virtual Status Prepare(const Window& window, int64_t first_row) = 0;
  /// Log-probabilities [vocab] of a row of that window. Any thread.
  virtual void Read(int64_t row, std::span<float> out) const = 0;
  /// What its routers chose for rows from first_routed() on, those of the window among them; null: unknown.
  virtual const RouteRecord* routes() const = 0;
  virtual int64_t first_routed() const = 0;
};

}  // namespace moesaic::app
