// Audits: compares the softmax mass of chosen blocks with that of all blocks.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/sparse_rows.h"

namespace moesaic::kernels {

void AuditRows(const SparseRows& s, const float* lse) {
  std::vector<const SparseRow*> audited;
  for (const SparseRow& row : s.rows) {
    if (row.audited >= 0) audited.push_back(&row);
  }
  const auto count = static_cast<int64_t>(audited.size());
  if (count == 0) return;
  // Queries are copied, so that outputs, which are dropped, take memory for audited rows only.
  auto* queries = s.Take<float>(count * s.p.q_stride);
  auto* slices = s.Take<SequenceSlice>(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t width = int64_t{s.p.heads} * s.p.cache.key_dim;
    std::copy_n(s.p.q + audited[i]->batch_row * s.p.q_stride, width, queries + i * s.p.q_stride);
    slices[i] = s.AuditOf(*audited[i]);
    slices[i].row = static_cast<int>(i);
  }
  AttentionParams dense = s.p;
  dense.q = queries;
  dense.out_stride = int64_t{s.p.heads} * s.p.cache.value_dim;
  dense.out = s.Take<float>(count * dense.out_stride);
  dense.lse = s.Take<float>(count * s.p.heads);
  dense.sequences = {slices, audited.size()};
  Attention(s.ctx, dense);
  for (int64_t i = 0; i < count; ++i) {
    const SparseRow& row = *audited[i];
    for (int g = 0; g < s.group; ++g) {
      const int head = row.audited * s.group + g;
      const double chosen =
          std::exp(double{lse[row.batch_row * s.p.heads + head]} - dense.lse[i * s.p.heads + head]);
      row.sparsity().counters->missed.Add(std::max(0.0, 1 - chosen));
    }
  }
}

}  // namespace moesaic::kernels
