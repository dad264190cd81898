#include "app/text_score.h"

#include <algorithm>
#include <cmath>

namespace moesaic::app {
namespace {

int32_t ArgMax(std::span<const float> values) {
  return static_cast<int32_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

// Turns logits into log-probabilities.
void LogSoftmax(std::span<const float> logits, std::span<float> out) {
  const float greatest = logits[ArgMax(logits)];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - greatest);
  const double normalizer = greatest + std::log(sum);
  for (size_t i = 0; i < logits.size(); ++i) out[i] = static_cast<float>(logits[i] - normalizer);
}

double Divergence(std::span<const float> from, std::span<const float> to) {
  double sum = 0;
  for (size_t i = 0; i < from.size(); ++i) sum += std::exp(from[i]) * (static_cast<double>(from[i]) - to[i]);
  return std::max(0.0, sum);  // rounding
}

// One run over a text; rows of a chunk are worked on in parallel.
class Scorer {
 public:
  Scorer(runtime::ThreadPool& threads, const ScoredText& text, const ScoreSinks& sinks)
      : threads_(threads), text_(text), sinks_(sinks), scratch_(threads.size()) {}

  // Takes rows [vocab] that predict tokens first, first + 1, ...
  Status Take(int64_t first, std::span<const float> rows) {
    const int64_t count = static_cast<int64_t>(rows.size()) / text_.vocab;
    const size_t done = score_.nll.size();
    score_.nll.resize(done + count);
    if (sinks_.base != nullptr) {
      for (auto* values : {&score_.base_nll, &score_.kl, &score_.same_top}) values->resize(done + count);
    }
    const int64_t row_bytes = sinks_.save == nullptr ? 0 : sinks_.save->row_bytes();
    encoded_.resize(count * row_bytes);
    threads_.Run(count, [&](int64_t i, int worker) {
      Scratch& scratch = scratch_[worker];
      scratch.own.resize(text_.vocab);
      LogSoftmax(rows.subspan(i * text_.vocab, text_.vocab), scratch.own);
      const int32_t token = text_.tokens[first + i];
      score_.nll[done + i] = -scratch.own[token];
      if (sinks_.save != nullptr) sinks_.save->Encode(scratch.own, encoded_.data() + i * row_bytes);
      if (sinks_.base != nullptr) Compare(static_cast<int64_t>(done) + i, token, scratch);
    });
    for (int64_t i = 0; i < count; ++i) {
      if (!std::isfinite(score_.nll[done + i])) {
        return absl::InternalError(fmt::format("the model's logits for token {} are not finite", first + i));
      }
    }
    return sinks_.save == nullptr ? OkStatus() : sinks_.save->Append(encoded_);
  }

  TextScore& score() { return score_; }

 private:
  struct Scratch {
    std::vector<float> own, base;
  };

  void Compare(int64_t row, int32_t token, Scratch& scratch) {
    scratch.base.resize(text_.vocab);
    sinks_.base->Read(row, scratch.base);
    score_.base_nll[row] = -scratch.base[token];
    score_.kl[row] = Divergence(scratch.base, scratch.own);
    score_.same_top[row] = ArgMax(scratch.base) == ArgMax(scratch.own) ? 1 : 0;
  }

  runtime::ThreadPool& threads_;
  const ScoredText& text_;
  const ScoreSinks sinks_;
  std::vector<Scratch> scratch_;  // one a worker
  std::vector<std::byte> encoded_;
  TextScore score_;
};

}  // namespace

std::vector<Window> WindowsOf(int64_t tokens, int window, int stride) {
  std::vector<Window> windows;
  int64_t scored = 0;  // tokens before this one have counted, or can't
  for (int64_t begin = 0; begin + 1 < tokens; begin += stride) {
    const int64_t end = std::min(tokens, begin + window);
    const int64_t first = std::max(scored, begin + 1);
    if (first < end) windows.push_back({begin, end, first});
    scored = end;
    if (end == tokens) break;
  }
  return windows;
}

Average Average::Of(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  if (values.empty()) return {};
  double sum = 0;
  for (const double value : values) sum += value;
  const double mean = sum / count;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return {mean, count > 1 ? std::sqrt(squares / (count - 1) / count) : 0};
}

StatusOr<TextScore> ScoreText(engine::Engine& engine, runtime::ThreadPool& threads, const ScoredText& text,
                              const ScoreSinks& sinks,
                              const std::function<Status(const TextScore&)>& progress) {
  Scorer scorer(threads, text, sinks);
  for (const Window& window : WindowsOf(static_cast<int64_t>(text.tokens.size()), text.window, text.stride)) {
    // The last token predicts nothing that is in the text.
    const auto ids = std::span(text.tokens).subspan(window.begin, window.end - window.begin - 1);
    RETURN_IF_ERROR(engine.Score(ids, [&](int64_t first_row, std::span<const float> rows) {
      int64_t predicted = window.begin + first_row + 1;
      const int64_t skip = std::clamp<int64_t>(window.first_scored - predicted, 0,
                                               static_cast<int64_t>(rows.size()) / text.vocab);
      RETURN_IF_ERROR(scorer.Take(predicted + skip, rows.subspan(skip * text.vocab)));
      return progress(scorer.score());
    }));
  }
  return std::move(scorer.score());
}

}  // namespace moesaic::app
