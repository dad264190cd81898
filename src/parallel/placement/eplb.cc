#include "parallel/placement/eplb.h"

#include <algorithm>
#include <span>

#include "parallel/placement/torch_order.h"

namespace moesaic::parallel {
namespace {

struct Packing {
  std::vector<int> pack;          // [items]
  std::vector<int> rank_in_pack;  // [items]
};

// Places items on packs of equal size: the heaviest item first, each on the lightest pack that has room.
Packing BalancedPacking(std::span<const float> weights, int packs) {
  const int items = static_cast<int>(weights.size()), room = items / packs;
  Packing packing{std::vector<int>(items), std::vector<int>(items, 0)};
  if (room == 1) {
    for (int i = 0; i < items; ++i) packing.pack[i] = i;
    return packing;
  }
  std::vector<float> load(packs, 0);
  std::vector<int> filled(packs, 0);
  for (const int item : TorchSortDescending(weights)) {
    int lightest = -1;
    for (int pack = 0; pack < packs; ++pack) {
      if (filled[pack] < room && (lightest < 0 || load[pack] < load[lightest])) lightest = pack;
    }
    packing.pack[item] = lightest;
    packing.rank_in_pack[item] = filled[lightest]++;
    load[lightest] += weights[item];
  }
  return packing;
}

struct Replication {
  std::vector<int> expert;   // [replicas]
  std::vector<int> ordinal;  // [replicas] number of the copy
  std::vector<int> copies;   // [experts]
};

// Gives each further replica to the expert with the largest load per copy.
Replication Replicate(std::span<const float> weights, int replicas) {
  const int experts = static_cast<int>(weights.size());
  Replication result{std::vector<int>(replicas), std::vector<int>(replicas, 0), std::vector<int>(experts, 1)};
  for (int i = 0; i < experts; ++i) result.expert[i] = i;
  std::vector<float> per_copy(weights.begin(), weights.end());
  for (int i = experts; i < replicas; ++i) {
    const int hottest =
        static_cast<int>(std::max_element(per_copy.begin(), per_copy.end()) - per_copy.begin());
    result.expert[i] = hottest;
    result.ordinal[i] = result.copies[hottest]++;
    per_copy[hottest] = weights[hottest] / static_cast<float>(result.copies[hottest]);
  }
  return result;
}

struct LayerPlan {
  std::vector<int> expert, ordinal;  // [replicas] by slot
  std::vector<int> copies;           // [experts]
};

LayerPlan PlanLayer(std::span<const float> weights, const EplbSizes& sizes) {
  const int experts = static_cast<int>(weights.size());
  const int group_size = experts / sizes.groups, groups_per_node = sizes.groups / sizes.nodes;
  std::vector<float> group_load(sizes.groups);
  for (int group = 0; group < sizes.groups; ++group)
    group_load[group] = TorchSum(weights.subspan(static_cast<size_t>(group) * group_size, group_size));
  const Packing groups = BalancedPacking(group_load, sizes.nodes);
  std::vector<int> expert_at(experts);  // in the order of nodes
  for (int expert = 0; expert < experts; ++expert) {
    const int group = expert / group_size;
    const int place = groups.pack[group] * groups_per_node + groups.rank_in_pack[group];
    expert_at[place * group_size + expert % group_size] = expert;
  }
  const int node_experts = experts / sizes.nodes, node_replicas = sizes.replicas / sizes.nodes;
  const int node_gpus = sizes.gpus / sizes.nodes, gpu_slots = sizes.replicas / sizes.gpus;
  LayerPlan plan{std::vector<int>(sizes.replicas), std::vector<int>(sizes.replicas),
                 std::vector<int>(experts)};
  std::vector<float> node_weights(node_experts), replica_weights(node_replicas);
  for (int node = 0; node < sizes.nodes; ++node) {
    const int* local = expert_at.data() + static_cast<size_t>(node) * node_experts;
    for (int i = 0; i < node_experts; ++i) node_weights[i] = weights[local[i]];
    const Replication replicas = Replicate(node_weights, node_replicas);
    for (int i = 0; i < node_replicas; ++i) {
      const int expert = replicas.expert[i];
      replica_weights[i] = node_weights[expert] / static_cast<float>(replicas.copies[expert]);
    }
    const Packing gpus = BalancedPacking(replica_weights, node_gpus);
    for (int i = 0; i < node_replicas; ++i) {
      const int slot = node * node_replicas + gpus.pack[i] * gpu_slots + gpus.rank_in_pack[i];
      plan.expert[slot] = local[replicas.expert[i]];
      plan.ordinal[slot] = replicas.ordinal[i];
    }
    for (int i = 0; i < node_experts; ++i) plan.copies[local[i]] = replicas.copies[i];
  }
  return plan;
}

Status CheckSizes(const LoadMatrix& load, const EplbSizes& sizes) {
  if (sizes.gpus < 1 || sizes.gpus > kMaxRanks)
    return InvalidArgument("GPUs must be from 1 to {}, found {}", kMaxRanks, sizes.gpus);
  if (sizes.groups < 1) return InvalidArgument("groups must be positive, found {}", sizes.groups);
  if (sizes.nodes < 1) return InvalidArgument("nodes must be positive, found {}", sizes.nodes);
  if (sizes.replicas % sizes.gpus != 0)
    return InvalidArgument("replicas must be a multiple of the {} GPUs, found {}", sizes.gpus,
                           sizes.replicas);
  if (sizes.replicas < load.experts) {
    return InvalidArgument("replicas must be at least the {} experts, found {}", load.experts,
                           sizes.replicas);
  }
  if (int64_t{sizes.replicas} * load.layers > kMaxLoadValues) {
    return InvalidArgument("replicas of all {} layers must be at most {}, found {} per layer", load.layers,
                           kMaxLoadValues, sizes.replicas);
  }
  if (sizes.groups % sizes.nodes != 0) return OkStatus();  // global: one group, one node
  if (load.experts % sizes.groups != 0)
    return InvalidArgument("groups must divide the {} experts, found {}", load.experts, sizes.groups);
  if (sizes.gpus % sizes.nodes != 0)
    return InvalidArgument("nodes must divide the {} GPUs, found {}", sizes.gpus, sizes.nodes);
  return OkStatus();
}

}  // namespace

Status CheckLogicalToPhysical(const EplbPlan& plan) {
  const int64_t rows = int64_t{plan.layers} * plan.experts;
  if (rows * plan.max_copies <= kMaxLoadValues) return OkStatus();
  return InvalidArgument(
      "log2phy of {} layers, {} experts and {} copies of an expert must have at most {} values", plan.layers,
      plan.experts, plan.max_copies, kMaxLoadValues);
}

StatusOr<EplbPlan> PlanEplb(const LoadMatrix& load, const EplbSizes& asked) {
  RETURN_IF_ERROR(CheckSizes(load, asked));
  EplbSizes sizes = asked;
  if (sizes.groups % sizes.nodes != 0) sizes.groups = sizes.nodes = 1;
  std::vector<LayerPlan> layers;
  EplbPlan plan{.layers = load.layers, .experts = load.experts, .replicas = sizes.replicas};
  std::vector<float> weights(load.experts);
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::span<const double> tokens = load.layer(layer);
    std::transform(tokens.begin(), tokens.end(), weights.begin(),
                   [](double v) { return static_cast<float>(v); });
    layers.push_back(PlanLayer(weights, sizes));
    const std::vector<int>& copies = layers.back().copies;
    plan.max_copies = std::max(plan.max_copies, *std::max_element(copies.begin(), copies.end()));
    plan.phy2log.insert(plan.phy2log.end(), layers.back().expert.begin(), layers.back().expert.end());
    plan.logcnt.insert(plan.logcnt.end(), copies.begin(), copies.end());
  }
  RETURN_IF_ERROR(CheckLogicalToPhysical(plan));
  plan.log2phy.assign(static_cast<size_t>(load.layers) * load.experts * plan.max_copies, -1);
  for (int layer = 0; layer < load.layers; ++layer) {
    for (int slot = 0; slot < sizes.replicas; ++slot) {
      const size_t expert = static_cast<size_t>(layer) * load.experts + layers[layer].expert[slot];
      plan.log2phy[expert * plan.max_copies + layers[layer].ordinal[slot]] = slot;
    }
  }
  return plan;
}

}  // namespace moesaic::parallel
