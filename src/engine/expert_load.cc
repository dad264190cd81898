#include "engine/expert_load.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <span>
#include <utility>

namespace moesaic::engine {

double ExpertLoadStats::Skew(size_t layer) const {
  const auto first = recent.begin() + static_cast<ptrdiff_t>(layer * static_cast<size_t>(experts));
  const double sum = std::accumulate(first, first + experts, 0.0);
  return sum > 0 ? *std::max_element(first, first + experts) * experts / sum : 0;
}

bool ExpertLoadRecorder::Due(Clock::time_point now) const {
  return options_.window_s > 0 && now - begin_ >= std::chrono::duration<double>(options_.window_s);
}

void ExpertLoadRecorder::Add(const models::ExpertLoad& totals, Clock::time_point now) {
  const std::chrono::duration<double> length = now - std::exchange(begin_, now);
  auto next = std::make_shared<ExpertLoadStats>();
  if (stats_ != nullptr && stats_->total.size() == totals.tokens.size()) *next = *stats_;
  next->layers = totals.layers;
  next->experts = totals.experts;
  next->total.resize(totals.tokens.size());
  next->recent.resize(totals.tokens.size());
  auto window = std::make_shared<std::vector<int64_t>>(totals.tokens.size());
  const double decay = std::exp2(-length / std::chrono::duration<double>(kExpertLoadHalfLife));
  int64_t tokens = 0;
  for (size_t i = 0; i < totals.tokens.size(); ++i) {
    (*window)[i] = totals.tokens[i] - next->total[i];
    next->recent[i] = next->recent[i] * decay + static_cast<double>((*window)[i]);
    tokens += (*window)[i];
  }
  if (tokens == 0) return;
  next->total = totals.tokens;
  ++next->all_windows;
  next->windows.push_back(std::move(window));
  if (std::ssize(next->windows) > kExpertLoadWindows) next->windows.erase(next->windows.begin());
  stats_ = std::move(next);
  if (options_.sink) options_.sink(stats_);
}

std::string ToJson(const ExpertLoadStats& stats) {
  std::vector<int64_t> first = stats.total;  // without the later windows
  for (size_t w = 1; w < stats.windows.size(); ++w) {
    for (size_t i = 0; i < first.size(); ++i) first[i] -= (*stats.windows[w])[i];
  }
  std::string json = fmt::format("{{\"layers\":[{}],\"logical_count\":[", fmt::join(stats.layers, ","));
  const auto experts = static_cast<size_t>(stats.experts);
  for (size_t w = 0; w < stats.windows.size(); ++w) {
    const std::span<const int64_t> window = w == 0 ? std::span<const int64_t>(first) : *stats.windows[w];
    json += w == 0 ? "[" : ",[";
    for (size_t layer = 0; layer < stats.layers.size(); ++layer) {
      fmt::format_to(std::back_inserter(json), "{}[{}]", layer == 0 ? "" : ",",
                     fmt::join(window.subspan(layer * experts, experts), ","));
    }
    json += "]";
  }
  fmt::format_to(std::back_inserter(json), "],\"half_life_s\":{},\"recent\":[", kExpertLoadHalfLife.count());
  for (size_t layer = 0; layer < stats.layers.size(); ++layer) {
    const std::span<const double> recent(stats.recent.data() + layer * experts, experts);
    fmt::format_to(std::back_inserter(json), "{}[{:.6g}]", layer == 0 ? "" : ",", fmt::join(recent, ","));
  }
  return json + "]}\n";
}

Status AddExpertLoad(const models::ExpertLoad& part, models::ExpertLoad* sum) {
  const auto experts = static_cast<size_t>(part.experts);
  if (part.tokens.size() != part.layers.size() * experts) {
    return InvalidArgument("loads of {} layers of {} experts have {} values", part.layers.size(), experts,
                           part.tokens.size());
  }
  if (part.layers.empty()) return OkStatus();
  if (sum->layers.empty()) {
    *sum = part;
    return OkStatus();
  }
  if (sum->experts != part.experts) {
    return InvalidArgument("ranks must have {} experts in a layer, found {}", sum->experts, part.experts);
  }
  for (size_t i = 0; i < part.layers.size(); ++i) {
    const auto at = std::ranges::lower_bound(sum->layers, part.layers[i]);
    const auto row = static_cast<ptrdiff_t>(at - sum->layers.begin()) * part.experts;
    if (at == sum->layers.end() || *at != part.layers[i]) {
      sum->layers.insert(at, part.layers[i]);
      sum->tokens.insert(sum->tokens.begin() + row, experts, 0);
    }
    for (size_t expert = 0; expert < experts; ++expert) {
      sum->tokens[row + expert] += part.tokens[i * experts + expert];
    }
  }
  return OkStatus();
}

}  // namespace moesaic::engine
