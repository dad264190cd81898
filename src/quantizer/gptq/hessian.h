// Second moments of a linear layer's inputs. They weigh weight errors: an output whose weights have errors e
// [k] has a mean squared error of e H e^T over tokens, with H = mean of x^T x.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/exec_context.h"
#include "quantizer/gptq/input_products.h"
#include "runtime/memory.h"

namespace moesaic::quantizer {

/// Sums of products over tokens. Stores the lower triangle in blocks of 512 rows with one stride.
class Hessian {
 public:
  /// Creates zeros in Bytes(k) of memory.
  static StatusOr<Hessian> Create(int k);
  static int64_t Bytes(int k);

  /// Adds tokens, using scratch memory of AddProductsBytes. AddProducts states the reproducibility of bits.
  void Add(const kernels::ExecContext& ctx, const TokenRows& tokens);
  /// Adds the sums of another Hessian of the same k. A layer's Hessian is the sum of its experts'.
  void Merge(const kernels::ExecContext& ctx, const Hessian& other);
  /// Adds sums that were gathered elsewhere: rows [first, first + count) of [count][stride], where row i has
  /// columns j <= i. Call AddTokens once with their number.
  void AddSums(const kernels::ExecContext& ctx, int first, int count, const float* sums, int64_t stride);
  void AddTokens(int64_t count) { tokens_ += count; }
  void Clear(const kernels::ExecContext& ctx);
  /// Resets to zeros of size k and reuses the memory if it is large enough.
  Status Restart(const kernels::ExecContext& ctx, int k);

  int k() const { return k_; }
  int64_t tokens() const { return tokens_; }
  /// H[i][j] = sums(i)[j] / tokens() for j <= i. Requires k() > 0 and tokens() > 0.
  const float* sums(int i) const { return memory_.as<float>() + Offset(i); }  // [i + 1]
  /// True if any input is not 0 in some token. Else errors have no weight.
  bool any() const;

 private:
  friend double ShrinkTowards(const kernels::ExecContext& ctx, const Hessian& layer, Hessian* own);
  static constexpr int kBlockRows = 512;
  int64_t Stride(int i) const;  // floats between the rows of i's block
  int64_t Offset(int i) const;
  float* mutable_sums(int i) { return memory_.as<float>() + Offset(i); }

  int k_ = 0;
  runtime::Buffer memory_;
  int64_t tokens_ = 0;
};

/// Mixes a rare expert's Hessian with its layer's: own = (1 - share) own + share * layer (scaled to own's
/// size). Returns the share. It is Ledoit and Wolf's estimate for normal inputs after each input is divided
/// by its size in the layer. The share is the part of the distance between own and layer that sampling noise
/// of own's tokens explains: 1 for an expert without tokens, 0 for one with many. An expert
/// without tokens counts as one token afterwards.
double ShrinkTowards(const kernels::ExecContext& ctx, const Hessian& layer, Hessian* own);

}  // namespace moesaic::quantizer
