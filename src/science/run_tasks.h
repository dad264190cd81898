// Checks of arguments, and parallel runs of micro-kernels, shared by graph operators.
#pragma once

#include <span>

#include "base/status.h"
#include "science/features.h"
#include "science/graph_kernels.h"
#include "science/segments.h"

namespace moesaic::graph {

/// Checks that a matrix has `rows` rows, `cols` columns (-1: any) and a usable type and stride.
Status CheckFeatures(const Features& x, const char* name, int64_t rows, int64_t cols = -1);
/// Checks that both matrices have one type.
Status CheckSameType(const Features& a, const char* a_name, const Features& b, const char* b_name);
/// Checks that e's columns divide those of u, and returns the columns of u that share one of e.
StatusOr<int64_t> BroadcastGroup(const Features& u, const char* u_name, const Features& e,
                                 const char* e_name);

/// Returns true for maximum and minimum, whose result is the value of one edge (`arg` names it).
inline bool IsExtreme(Reduce reduce) { return reduce == Reduce::kMax || reduce == Reduce::kMin; }
/// Checks that `arg` has one element per element of a result [rows, cols].
Status CheckArg(std::span<const int32_t> arg, int64_t rows, int64_t cols);

/// Sets all elements of `out` to 0.
void FillZeros(const Output& out);

/// Reduces all segments. The caller sets all fields but ptr, first, last, by_columns, prefetch, stream and
/// out_f32; u_rows is the number of rows of u. Segments with many edges are reduced in parts of kHubEdges,
/// whose results are combined in order.
void RunReduce(const Context& ctx, const Segments& segments, ReduceTask task, int64_t u_rows);

/// Maps edges [0, edges). The caller sets all fields but first and last.
void RunEdgeMap(const Context& ctx, int32_t edges, const EdgeMapTask& task);

/// Runs a softmax over all segments. The caller sets all fields but ptr, first and last.
void RunSoftmax(const Context& ctx, const Segments& segments, SoftmaxTask task);

/// Rewinds the scratch memory at the end of its scope.
class ScratchScope {
 public:
  explicit ScratchScope(const Context& ctx) : arena_(ctx.exec.scratch), mark_(arena_->Mark()) {}
  ~ScratchScope() { arena_->Rewind(mark_); }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;
  /// Returns an uninitialized matrix that is valid in this scope.
  Output Matrix(tensor::DType dtype, int64_t rows, int64_t cols);

 private:
  runtime::Arena* arena_;
  size_t mark_;
};

}  // namespace moesaic::graph
