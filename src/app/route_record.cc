#include "app/route_record.h"

#include <algorithm>

namespace moesaic::app {

void RouteRecord::Append(const models::RouteTap& tap, int64_t skip) {
  if (layers_.empty()) {
    for (const models::RouteTap::Layer& layer : tap.layers) layers_.push_back({layer.layer, layer.top_k, {}});
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    const std::vector<int32_t>& from = tap.layers[l].ids;
    const int top_k = layers_[l].top_k;
    std::vector<uint16_t>& ids = layers_[l].ids;
    const size_t before = ids.size();
    for (auto i = static_cast<size_t>(skip * top_k); i < from.size(); ++i) {
      ids.push_back(static_cast<uint16_t>(from[i]));
    }
    for (auto row = ids.begin() + static_cast<int64_t>(before); row != ids.end(); row += top_k) {
      std::sort(row, row + top_k);
    }
  }
}

void RouterFlips::Count(const RouteRecord& reference, int64_t first, const RouteRecord& model) {
  for (const RouteRecord::Layer& layer : model.layers()) {
    const auto other = std::ranges::find(reference.layers(), layer.layer, &RouteRecord::Layer::layer);
    if (other == reference.layers().end() || other->top_k != layer.top_k) continue;
    auto counted = std::ranges::find(layers_, layer.layer, &Layer::layer);
    if (counted == layers_.end()) counted = layers_.insert(counted, {.layer = layer.layer});
    const auto rows = static_cast<int64_t>(layer.ids.size()) / layer.top_k;
    counted->tokens += rows;
    for (int64_t row = 0; row < rows; ++row) {
      counted->flipped += std::ranges::equal(layer.Row(row), other->Row(first + row)) ? 0 : 1;
    }
  }
}

double RouterFlips::share() const {
  double tokens = 0, flipped = 0;
  for (const Layer& layer : layers_) {
    tokens += static_cast<double>(layer.tokens);
    flipped += static_cast<double>(layer.flipped);
  }
  return tokens > 0 ? flipped / tokens : 0;
}

}  // namespace moesaic::app
