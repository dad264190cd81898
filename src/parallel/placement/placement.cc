#include "parallel/placement/placement.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace moesaic::parallel {

int Placement::max_slots() const {
  size_t most = 0;
  for (const LayerPlacement& layer : layers) {
    for (const std::vector<int>& rank : layer) most = std::max(most, rank.size());
  }
  return static_cast<int>(most);
}

int Placement::replicas(int layer) const {
  size_t sum = 0;
  for (const std::vector<int>& rank : layers[layer]) sum += rank.size();
  return static_cast<int>(sum);
}

std::vector<int> CopiesOf(const LayerPlacement& layer, int experts) {
  std::vector<int> copies(experts, 0);
  for (const std::vector<int>& rank : layer) {
    for (const int expert : rank) ++copies[expert];
  }
  return copies;
}

LayerPlacement LivingPart(LayerPlacement layer, const std::vector<bool>& dead) {
  for (size_t rank = 0; rank < dead.size(); ++rank) {
    if (dead[rank]) layer[rank].clear();
  }
  return layer;
}

int DuplicateSlots(const LayerPlacement& layer) {
  int duplicates = 0;
  for (std::vector<int> rank : layer) {
    std::sort(rank.begin(), rank.end());
    duplicates += static_cast<int>(rank.end() - std::unique(rank.begin(), rank.end()));
  }
  return duplicates;
}

Status CheckPlacement(const Placement& placement, const std::string& source, bool distinct) {
  for (size_t index = 0; index < placement.layers.size(); ++index) {
    const LayerPlacement& layer = placement.layers[index];
    if (static_cast<int>(layer.size()) != placement.ranks()) {
      return InvalidArgument("{}: layer {} must have {} ranks as layer 0, found {}", source, index,
                             placement.ranks(), layer.size());
    }
    for (const std::vector<int>& rank : layer) {
      for (const int expert : rank) {
        if (expert >= 0 && expert < placement.experts) continue;
        return InvalidArgument("{}: layer {}: experts must be from 0 to {}, found {}", source, index,
                               placement.experts - 1, expert);
      }
    }
    const std::vector<int> copies = CopiesOf(layer, placement.experts);
    const auto missing = std::find(copies.begin(), copies.end(), 0);
    if (missing != copies.end()) {
      return InvalidArgument("{}: layer {}: every expert needs a replica, found none of expert {}", source,
                             index, missing - copies.begin());
    }
    if (distinct && DuplicateSlots(layer) > 0) {
      return InvalidArgument("{}: layer {}: ranks must hold distinct experts, found {} repeated", source,
                             index, DuplicateSlots(layer));
    }
  }
  return OkStatus();
}

Placement FromEplb(const EplbPlan& plan, int ranks) {
  Placement placement{.experts = plan.experts, .layers = std::vector<LayerPlacement>(plan.layers)};
  const int slots = plan.replicas / ranks;
  const int64_t* next = plan.phy2log.data();
  for (LayerPlacement& layer : placement.layers) {
    layer.resize(ranks);
    for (std::vector<int>& rank : layer) {
      for (int slot = 0; slot < slots; ++slot) rank.push_back(static_cast<int>(*next++));
    }
  }
  return placement;
}

Status CheckEqualSlots(const Placement& placement) {
  for (size_t layer = 0; layer < placement.layers.size(); ++layer) {
    for (const std::vector<int>& rank : placement.layers[layer]) {
      if (static_cast<int>(rank.size()) == placement.max_slots()) continue;
      return InvalidArgument("layer {}: this format needs {} slots on every rank, found {}", layer,
                             placement.max_slots(), rank.size());
    }
  }
  return OkStatus();
}

StatusOr<EplbPlan> ToEplb(const Placement& placement) {
  RETURN_IF_ERROR(CheckEqualSlots(placement));
  EplbPlan plan{.layers = static_cast<int>(placement.layers.size()),
                .experts = placement.experts,
                .replicas = placement.max_slots() * placement.ranks()};
  std::vector<int> ordinals;
  for (size_t index = 0; index < placement.layers.size(); ++index) {
    std::vector<int> copies(placement.experts, 0);
    for (const std::vector<int>& rank : placement.layers[index]) {
      for (const int expert : rank) {
        plan.phy2log.push_back(expert);
        ordinals.push_back(copies[expert]++);
      }
    }
    plan.logcnt.insert(plan.logcnt.end(), copies.begin(), copies.end());
    plan.max_copies = std::max(plan.max_copies, *std::max_element(copies.begin(), copies.end()));
  }
  RETURN_IF_ERROR(CheckLogicalToPhysical(plan));
  plan.log2phy.assign(plan.logcnt.size() * plan.max_copies, -1);
  for (size_t i = 0; i < plan.phy2log.size(); ++i) {
    const size_t layer = i / plan.replicas;
    const size_t expert = layer * plan.experts + plan.phy2log[i];
    plan.log2phy[expert * plan.max_copies + ordinals[i]] = static_cast<int64_t>(i % plan.replicas);
  }
  return plan;
}

int FillSlots(const LoadMatrix& loads, std::span<const int> slots, Placement* placement) {
  int most = 0;
  std::vector<int> others;  // experts that the rank does not hold
  for (size_t index = 0; index < placement->layers.size(); ++index) {
    LayerPlacement& layer = placement->layers[index];
    const std::span<const double> tokens = loads.layer(static_cast<int>(index));
    std::vector<int> copies = CopiesOf(layer, placement->experts);
    int added = 0;
    for (size_t rank = 0; rank < layer.size(); ++rank) {
      if (static_cast<int>(layer[rank].size()) >= slots[rank]) continue;
      others.resize(placement->experts);
      std::iota(others.begin(), others.end(), 0);
      std::vector<bool> held(placement->experts, false);
      for (const int expert : layer[rank]) held[expert] = true;
      std::erase_if(others, [&](int expert) { return held[expert]; });
      const auto load = [&](int expert) { return tokens[expert] / std::max(1, copies[expert]); };
      std::ranges::stable_sort(others, std::greater(), load);
      others.resize(std::min(others.size(), static_cast<size_t>(slots[rank]) - layer[rank].size()));
      for (const int expert : others) ++copies[expert];
      layer[rank].insert(layer[rank].end(), others.begin(), others.end());
      added += static_cast<int>(others.size());
    }
    most = std::max(most, added);
  }
  return most;
}

LayerPlacement InOrder(int experts, int ranks) {
  LayerPlacement layer(ranks);
  for (int expert = 0; expert < experts; ++expert)
    layer[static_cast<int64_t>(expert) * ranks / experts].push_back(expert);
  return layer;
}

}  // namespace moesaic::parallel
