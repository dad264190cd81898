// What every layer of one step is given.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"

namespace moesaic::layers {

/// The experts that routers chose, for whoever asks a forward pass to tell.
struct RouteTap {
  struct Layer {
    int layer = 0;  // of the decoder
    int top_k = 0;
    std::vector<int32_t> ids;  // [rows, top_k]
  };
  std::vector<Layer> layers;  // those that route, in order
};

/// Fetches KV blocks of which only key summaries are in memory.
class KvFetcher {
 public:
  virtual ~KvFetcher() = default;
  /// Returns when the blocks of the layer that `slices` read, up to their last row's, are in memory. After a
  /// failure, which the fetcher reports to its owner, the results of the step must be dropped.
  virtual void Fetch(const kernels::KvLayer& kv, std::span<const kernels::SequenceSlice> slices) = 0;
};

/// One ragged batch on its way through the layers. Borrowed by all; constant during the step.
struct Step {
  const kernels::ExecContext& ctx;
  std::span<const kernels::SequenceSlice> sequences;
  std::span<const int32_t> positions;  // [rows]
  int64_t* experts_read = nullptr;     // += routed experts that any row goes to; or null
  RouteTap* routes = nullptr;          // each MoE layer adds an entry; or null

  KvFetcher* fetcher = nullptr;  // null: all blocks are in memory

  int rows() const { return static_cast<int>(positions.size()); }
  void Fetch(const kernels::KvLayer& kv, std::span<const kernels::SequenceSlice> slices) const {
    if (fetcher != nullptr) fetcher->Fetch(kv, slices);
  }
};

/// Takes back all scratch memory that was handed out during its life.
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
