#include "app/text_score.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moesaic::app {
namespace {

int32_t ArgMax(std::span<const float> values) {
  return static_cast<int32_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

double Divergence(std::span<const float> from, std::span<const float> to) {
  double sum = 0;
  for (size_t i = 0; i < from.size(); ++i) sum += std::exp(from[i]) * (static_cast<double>(from[i]) - to[i]);
  return std::max(0.0, sum);  // guards against rounding
}

// One run over a text. Rows of a chunk are processed in parallel.
class Scorer {
 public:
  Scorer(runtime::ThreadPool& threads, const ScoredText& text, const ScoreSinks& sinks)
      : threads_(threads), text_(text), sinks_(sinks), scratch_(threads.size()) {}

  int64_t rows() const { return static_cast<int64_t>(score_.nll.size()); }

  // Records the routers' choices for a chunk's rows after the first `skip`; the first is row `row`.
  void TakeRoutes(int64_t row, const models::RouteTap& tap, int64_t skip) {
    if (sinks_.save_routes != nullptr) sinks_.save_routes->Append(tap, skip);
    if (sinks_.base == nullptr || sinks_.base->routes() == nullptr) return;
    routes_.Clear();
    routes_.Append(tap, skip);
    score_.flips.Count(*sinks_.base->routes(), row - sinks_.base->first_routed(), routes_);
  }

  // Scores rows [vocab] that predict tokens first, first + 1, ...
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
  std::vector<Scratch> scratch_;  // one per worker
  std::vector<std::byte> encoded_;
  RouteRecord routes_;  // routes of a chunk
  TextScore score_;
};

}  // namespace

void LogSoftmax(std::span<const float> logits, std::span<float> out) {
  const float greatest = logits[ArgMax(logits)];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - greatest);
  const double normalizer = greatest + std::log(sum);
  for (size_t i = 0; i < logits.size(); ++i) out[i] = static_cast<float>(logits[i] - normalizer);
}

std::vector<Window> WindowsOf(int64_t tokens, int window, int stride) {
  std::vector<Window> windows;
  int64_t scored = 0;  // tokens before this one are done
  for (int64_t begin = 0; begin + 1 < tokens; begin += stride) {
    const int64_t end = std::min(tokens, begin + window);
    const int64_t first = std::max(scored, begin + 1);
    if (first < end) windows.push_back({begin, end, first});
    scored = end;
    if (end == tokens) break;
  }
  return windows;
}

std::span<const int32_t> TokensOf(const ScoredText& text, const Window& window) {
  return std::span(text.tokens).subspan(window.begin, window.end - window.begin - 1);
}

int64_t SkippedRows(const Window& window, int64_t first_row, int64_t count) {
  return std::clamp<int64_t>(window.first_scored - (window.begin + first_row + 1), 0, count);
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

Average Average::OfRuns(const std::vector<double>& values, const std::vector<int64_t>& sizes) {
  const auto count = static_cast<double>(values.size()), runs = static_cast<double>(sizes.size());
  if (values.empty()) return {};
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double squares = 0;
  auto value = values.begin();
  for (const int64_t size : sizes) {
    const double sum = std::accumulate(value, value + size, 0.0);
    value += size;
    const double off = sum - static_cast<double>(size) * mean;
    squares += off * off;
  }
  if (sizes.size() < 2) return {mean, std::nan("")};
  return {mean, std::sqrt(squares * runs / (runs - 1)) / count};
}

double StudentT975(int64_t freedom) {
  static constexpr double kFirst[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306};
  if (freedom <= std::ssize(kFirst)) return kFirst[freedom - 1];
  // Cornish-Fisher expansion around the normal quantile z.
  constexpr double z = 1.959964;
  const auto n = static_cast<double>(freedom);
  return z + (z * z * z + z) / (4 * n) + (5 * std::pow(z, 5) + 16 * z * z * z + 3 * z) / (96 * n * n);
}

StatusOr<TextScore> ScoreText(engine::Engine& engine, runtime::ThreadPool& threads, const ScoredText& text,
                              const ScoreSinks& sinks,
                              const std::function<Status(const TextScore&)>& progress) {
  Scorer scorer(threads, text, sinks);
  models::RouteTap tap;
  const bool tapped =
      sinks.save_routes != nullptr || (sinks.base != nullptr && sinks.base->routes() != nullptr);
  for (const Window& window : WindowsOf(static_cast<int64_t>(text.tokens.size()), text.window, text.stride)) {
    if (sinks.base != nullptr) RETURN_IF_ERROR(sinks.base->Prepare(window, scorer.rows()));
    const auto take = [&](int64_t first_row, std::span<const float> rows) -> Status {
      const int64_t predicted = window.begin + first_row + 1, before = scorer.rows();
      const int64_t skip = SkippedRows(window, first_row, static_cast<int64_t>(rows.size()) / text.vocab);
      RETURN_IF_ERROR(scorer.Take(predicted + skip, rows.subspan(skip * text.vocab)));
      if (tapped) scorer.TakeRoutes(before, tap, skip);
      return progress(scorer.score());
    };
    scorer.score().windows.push_back(window.end - window.first_scored);
    RETURN_IF_ERROR(engine.Score(TokensOf(text, window), take, tapped ? &tap : nullptr));
  }
  return std::move(scorer.score());
}

}  // namespace moesaic::app
