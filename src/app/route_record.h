// Records the experts that routers choose for a text's tokens, and how often two models' routers differ.
#pragma once

#include <cstdint>
#include <vector>

#include "models/model.h"

namespace moesaic::app {

/// Chosen experts by layer, in 2 bytes per token, layer and expert of the top k.
class RouteRecord {
 public:
  /// Adds the rows of a forward pass, except the first `skip`.
  void Append(const models::RouteTap& tap, int64_t skip);
  void Clear() { layers_.clear(); }

  struct Layer {
    int layer = 0, top_k = 0;
    std::vector<uint16_t> ids;  // [rows, top_k], ascending in each row
    std::span<const uint16_t> Row(int64_t row) const {
      return std::span(ids).subspan(static_cast<size_t>(row * top_k), static_cast<size_t>(top_k));
    }
  };
  const std::vector<Layer>& layers() const { return layers_; }

 private:
  std::vector<Layer> layers_;
};

/// Counts the tokens for which two models' routers chose different sets of experts.
class RouterFlips {
 public:
  struct Layer {
    int layer = 0;
    int64_t tokens = 0, flipped = 0;
  };
  /// Counts all rows of `model` against the rows of `reference` from `first` on. Layers that only one model
  /// has, or that choose another number of experts, are skipped.
  void Count(const RouteRecord& reference, int64_t first, const RouteRecord& model);
  const std::vector<Layer>& layers() const { return layers_; }
  /// Returns the share over all layers and tokens; 0 without tokens.
  double share() const;

 private:
  std::vector<Layer> layers_;
};

}  // namespace moesaic::app
