// Which experts routers chose for the tokens of a text, and how often two models' routers differ.
#pragma once

#include <cstdint>
#include <vector>

#include "models/model.h"

namespace moesaic::app {

/// Chosen experts by layer. 2 bytes for each token, layer and expert of the top k.
class RouteRecord {
 public:
  /// Adds the rows of a forward pass, without its first `skip`.
  void Append(const models::RouteTap& tap, int64_t skip);
  void Clear() { layers_.clear(); }

  struct Layer {
    int layer = 0, top_k = 0;
    std::vector<uint16_t> ids;  // [rows, top_k], each row's in rising order
    std::span<const uint16_t> Row(int64_t row) const {
      return std::span(ids).subspan(static_cast<size_t>(row * top_k), static_cast<size_t>(top_k));
    }
  };
  const std::vector<Layer>& layers() const { return layers_; }

 private:
  std::vector<Layer> layers_;
};

/// For how many tokens the routers of two models chose different sets of experts.
class RouterFlips {
 public:
  struct Layer {
    int layer = 0;
    int64_t tokens = 0, flipped = 0;
  };
  /// Counts all rows of `model` against those of `reference` from `first` on. Layers that only one of them
  /// has, or that choose another number of experts, are left out.
  void Count(const RouteRecord& reference, int64_t first, const RouteRecord& model);
  const std::vector<Layer>& layers() const { return layers_; }
  /// Of all layers and tokens; 0 without any.
  double share() const;

 private:
  std::vector<Layer> layers_;
};

}  // namespace moesaic::app
