#include "app/reference_rows.h"

#include <algorithm>

namespace moesaic::app {

Status LockstepRows::Prepare(const Window& window, int64_t first_row) {
  first_row_ = first_row;
  rows_.clear();
  routes_.Clear();
  models::RouteTap tap;
  const int64_t vocab = text_.vocab;
  const auto take = [&](int64_t first, std::span<const float> logits) {
    const int64_t count = std::ssize(logits) / vocab, skip = SkippedRows(window, first, count);
    const size_t before = rows_.size();
    rows_.resize(before + static_cast<size_t>((count - skip) * vocab));
    threads_.Run(count - skip, [&](int64_t i, int) {
      LogSoftmax(logits.subspan(static_cast<size_t>((skip + i) * vocab), static_cast<size_t>(vocab)),
                 {rows_.data() + before + i * vocab, static_cast<size_t>(vocab)});
    });
    routes_.Append(tap, skip);
    return OkStatus();
  };
  return engine_.Score(TokensOf(text_, window), take, &tap);
}

void LockstepRows::Read(int64_t row, std::span<float> out) const {
  std::copy_n(rows_.data() + (row - first_row_) * text_.vocab, text_.vocab, out.data());
}

}  // namespace moesaic::app
