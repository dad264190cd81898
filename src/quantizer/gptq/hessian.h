// Second moments of a linear layer's inputs. They say what errors of its weights cost: an output whose
// weights are off by e [k] is off by e H e^T in the mean square over tokens, H = mean of x^T x.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"
#include "quantizer/gptq/input_products.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {

/// Sums of products over tokens: the lower triangle, in blocks of 512 rows that have one stride.
class Hessian {
 public:
  /// Zeros; takes Bytes(k).
  static StatusOr<Hessian> Create(int k);
  static int64_t Bytes(int k);

  /// Adds tokens, in scratch memory of AddProductsBytes: bits are as AddProducts says.
  void Add(const kernels::ExecContext& ctx, const TokenRows& tokens);
  /// Adds what another one of the same k has gathered: a layer's is the sum of its experts'.
  void Merge(const kernels::ExecContext& ctx, const Hessian& other);
  /// Adds sums that were gathered elsewhere: rows [first, first + count) of [count][stride], of which row i
  /// has columns j <= i; and, once, the tokens that they are of.
  void AddSums(const kernels::ExecContext& ctx, int first, int count, const float* sums, int64_t stride);
  void AddSeen(const TokenWeight& seen) { seen_.Add(seen); }
  void Clear(const kernels::ExecContext& ctx);
  /// Zeros of another size, in the same memory where that is enough.
  Status Restart(const kernels::ExecContext& ctx, int k);

  int k() const { return k_; }
  int64_t tokens() const { return seen_.tokens; }
  double effective_tokens() const { return seen_.effective_tokens(); }
  /// H[i][j] = sum(i, j) / weight(), for j <= i; k() > 0 and tokens() > 0.
  double weight() const { return seen_.weight; }
  const float* sums(int i) const { return memory_.as<float>() + Offset(i); }  // [i + 1]
  /// Whether any input was not 0 in every token: else there is nothing to weigh errors by.
  bool any() const;

 private:
  friend double ShrinkTowards(const kernels::ExecContext& ctx, const Hessian& layer, Hessian* own);
  static constexpr int kBlockRows = 512;
  int64_t Stride(int i) const;  // floats between rows of i's block
  int64_t Offset(int i) const;
  float* mutable_sums(int i) { return memory_.as<float>() + Offset(i); }

  int k_ = 0;
  runtime::Buffer memory_;
  TokenWeight seen_;
};

/// Mixes a rare expert's Hessian with its layer's, own = (1 - share) own + share * layer (brought to own's
/// size), and returns the share. Ledoit and Wolf's estimate for normal inputs, after each input is divided by
/// its size in the layer: the share is how much of own's distance to the layer is what `effective_tokens` of
/// noise would make. 1 for an expert without tokens, 0 where there are many.
double ShrinkTowards(const kernels::ExecContext& ctx, const Hessian& layer, Hessian* own);

}  // namespace moesaic::quantizer
