#include "science/graph_kernels.h"

#include <algorithm>

#include "base/round.h"
#include "science/cpu/graph.h"
#include "science/ref/graph.h"

namespace moesaic::graph {

GraphKernels SelectGraphKernels(const runtime::CpuFeatures& cpu) {
  if (cpu.Prefers(runtime::Isa::kAvx512)) {
    // Processors with AVX-512 have L2 caches of 512 KiB (some Ice Lake) to 2 MiB.
    return {cpu::ReduceAvx512,          cpu::EdgeMapAvx512,      cpu::SoftmaxAvx512,
            cpu::EdgeAttentionAvx512,   cpu::RowKernelsAvx512(), "avx512",
            /*cached_bytes=*/640 << 10,
            /*order_edges=*/false};
  }
  if (cpu.Prefers(runtime::Isa::kAvx2)) {
    return {cpu::ReduceAvx2,        cpu::EdgeMapAvx2,      cpu::SoftmaxAvx2,
            cpu::EdgeAttentionAvx2, cpu::RowKernelsAvx2(), "avx2"};
  }
  return {ref::Reduce, ref::EdgeMap, ref::Softmax, ref::EdgeAttention, ref::Rows(), "ref"};
}

void ForRows(const Context& ctx, int64_t rows, int64_t rows_per_task,
             const std::function<void(int64_t, int64_t)>& body) {
  rows_per_task = std::max<int64_t>(1, rows_per_task);
  ctx.exec.pool->Run(base::CeilDiv(rows, rows_per_task), [&](int64_t task, int) {
    body(task * rows_per_task, std::min(rows, (task + 1) * rows_per_task));
  });
}

StatusOr<std::unique_ptr<Workspace>> Workspace::Create(int threads, const runtime::CpuFeatures& cpu) {
  auto workspace = std::unique_ptr<Workspace>(new Workspace);
  workspace->graph_ = SelectGraphKernels(cpu);
  workspace->kernels_ = kernels::SelectKernels(cpu);
  ASSIGN_OR_RETURN(workspace->pool_, runtime::ThreadPool::Create({.threads = threads, .pin = false}));
  return workspace;
}

}  // namespace moesaic::graph
