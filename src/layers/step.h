// Inputs of every layer in one step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "parallel/rank_groups.h"

namespace moesaic::layers {

/// Records the experts chosen by the routers, if the caller of a forward pass requests them.
struct RouteTap {
  struct Layer {
    int layer = 0;  // index of the decoder layer
    int top_k = 0;
    std::vector<int32_t> ids;  // [rows, top_k]
  };
  std::vector<Layer> layers;  // layers with a router, in order
};

/// Fetches KV blocks of which only key summaries are in memory.
class KvFetcher {
 public:
  virtual ~KvFetcher() = default;
  /// Returns when the blocks of the layer that `slices` read, up to their last row's, are in memory. After a
  /// failure, which the fetcher reports to its owner, the results of the step must be dropped.
  virtual void Fetch(const kernels::KvLayer& kv, std::span<const kernels::SequenceSlice> slices) = 0;
};

/// One ragged batch passed through the layers. All members are borrowed and constant during the step.
struct Step {
  const kernels::ExecContext& ctx;
  std::span<const kernels::SequenceSlice> sequences;
  std::span<const int32_t> positions;  // [rows]
  // incremented by the number of distinct routed experts that the rows use; or null
  int64_t* experts_read = nullptr;
  RouteTap* routes = nullptr;      // each MoE layer adds an entry; or null
  int64_t* expert_load = nullptr;  // [MoE layers of the rank, experts]: choices are added; or null

  KvFetcher* fetcher = nullptr;            // null: all blocks are in memory
  parallel::RankGroups* groups = nullptr;  // null: one rank has the whole model

  int rows() const { return static_cast<int>(positions.size()); }
  /// Returns whether outputs of attention and feed-forward networks are partial sums, which Sum() completes.
  bool has_shards() const { return groups != nullptr && groups->has_shards(); }
  void Sum(float* values, int64_t count) const {
    if (has_shards()) groups->Sum({values, static_cast<size_t>(count)});
  }
  /// Advances messages between stages while this one computes.
  void Progress() const {
    if (groups != nullptr) groups->Progress();
  }
  void Fetch(const kernels::KvLayer& kv, std::span<const kernels::SequenceSlice> slices) const {
    if (fetcher != nullptr) fetcher->Fetch(kv, slices);
  }
};

/// Releases all scratch memory allocated during its lifetime.
class ScratchScope {
 public:
  explicit ScratchScope(const kernels::ExecContext& ctx) : arena_(*ctx.scratch), mark_(arena_.Mark()) {}
  ~ScratchScope() { arena_.Rewind(mark_); }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

  template <typename T>
  T* Take(int64_t count) {
    return arena_.Take<T>(static_cast<size_t>(count)).data();
  }

 private:
  runtime::Arena& arena_;
  size_t mark_;
};

}  // namespace moesaic::layers
