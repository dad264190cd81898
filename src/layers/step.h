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

/// One ragged batch on its way through the layers. Borrowed by all; constant during the step.
struct Step {
  const kernels::ExecContext& ctx;
  std::span<const kernels::SequenceSlice> sequences;
  std::span<const int32_t> positions;  // [rows]
  int64_t* experts_read = nullptr;     // += routed experts that any row goes to; or null
  RouteTap* routes = nullptr;          // each MoE layer adds an entry; or null

  int rows() const { return static_cast<int>(positions.size()); }
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
