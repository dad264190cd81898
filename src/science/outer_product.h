// Values of one pass of the outer product mean, shared by its forward and backward passes.
#pragma once

#include "science/evoformer.h"

namespace moesaic::science {

// Residues whose outer products with another one exist at a time.
inline constexpr int64_t kOuterTile = 32;

struct OuterProductMean::Operands {
  int64_t sequences, residues;
  int c;
  const float* mask;
  float *a, *b;  // [residue, c, sequence], whose rows are operands of products, and [sequence, residue, c]

  // rows[j][c][c] = sum over sequences of a_i outer b_j, for j in [first, first + count). `products` is a
  // buffer of the same size.
  void Products(const graph::Context& ctx, int64_t i, int64_t first, int64_t count, float* products,
                float* rows) const;
  // 1 / (sequences in which both residues are present + 1e-3).
  float Weight(int64_t i, int64_t j) const;
};

}  // namespace moesaic::science
