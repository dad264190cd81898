// The selected micro-kernels of graph operators, and the context in which the operators run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "runtime/cpu_features.h"
#include "science/micro_kernels.h"
#include "science/row_kernels.h"

namespace moesaic::graph {

struct GraphKernels {
  ReduceFn reduce = nullptr;
  EdgeMapFn edge_map = nullptr;
  SoftmaxFn softmax = nullptr;
  EdgeAttentionFn edge_attention = nullptr;
  RowKernels rows;
  std::string name;  ///< "avx512", "avx2" or "ref"
  /// Bytes of rows that are read in random order from a core's L2 cache without many misses.
  int64_t cached_bytes = 256 << 10;  // half of a small L2 cache
  /// Whether a sum copies the edges' operand in the order of the plan first. Processors with few loads in
  /// flight then wait less; with AVX-512, random loads overlap with those of rows (Zen 5: B of
  /// docs/science.md takes 3.4 ms, with a copy 4.6).
  bool order_edges = true;
};

/// Selects the best implementation that the processor can run. It cannot fail: ref/ is always usable.
GraphKernels SelectGraphKernels(const runtime::CpuFeatures& cpu);

/// Resources of every graph operator; borrowed. Operators use the whole thread pool and rewind the scratch
/// memory. Results are bitwise identical for any number of threads.
struct Context {
  const GraphKernels* graph;
  kernels::ExecContext exec;
};

/// Calls body(first, last) on the pool for ranges that cover all rows, with several rows per task.
void ForRows(const Context& ctx, int64_t rows, int64_t rows_per_task,
             const std::function<void(int64_t first, int64_t last)>& body);

/// Owns the resources of a Context. Used by one thread at a time.
class Workspace {
 public:
  /// `threads` is the number of threads; 0: one per core.
  static StatusOr<std::unique_ptr<Workspace>> Create(int threads, const runtime::CpuFeatures& cpu);
  Context context() {
    return {.graph = &graph_, .exec = {.kernels = &kernels_, .pool = pool_.get(), .scratch = &scratch_}};
  }
  int threads() const { return pool_->size(); }

 private:
  Workspace() = default;
  GraphKernels graph_;
  kernels::KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> pool_;
  runtime::Arena scratch_;
};

}  // namespace moesaic::graph
