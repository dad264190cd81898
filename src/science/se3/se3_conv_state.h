// Values of one pass of a tensor field convolution, shared by its forward and backward passes.
#pragma once

#include <algorithm>

#include "science/se3/se3_layers.h"

namespace moesaic::science {

inline int Dim(int degree) { return 2 * degree + 1; }

/// Checks degrees and numbers of channels.
Status CheckFiber(const Fiber& fiber, const char* name);

/// Checks that features have all degrees of the fiber and the right sizes.
Status CheckNodeFeatures(const Fiber& fiber, int64_t rows, const FiberFeatures& x);

/// y [rows, n, dim] = weight [n, k] x [rows, k, dim], as one product with rows of channels.
std::vector<float> MultiplyChannels(const graph::Context& ctx, const WeightTensor& weight, int64_t rows,
                                    int dim, const std::vector<float>& x);

/// Adds the gradients of MultiplyChannels() for y_grad; x_grad [rows, k, dim] and weight_grad [n, k] may be
/// null.
void MultiplyChannelsBackward(const graph::Context& ctx, const WeightTensor& weight, int64_t rows, int dim,
                              const float* x, const float* y_grad, float* x_grad, float* weight_grad);

// Edges of a tile. At 128 hidden units of all pairs together, its four arrays take 128 KiB.
inline constexpr int kConvTile = 64;

// Buffers of one worker.
struct Se3Conv::Tile {
  float *inputs, *harmonics, *basis;  // [kConvTile, ...]
  float *before_first, *first;        // [kConvTile, hidden_]: linear layer, and its activation
  float *before_second, *second;      // the same of the second layer
  std::vector<float*> kernels;        // per pair, of one source: [2 in + 1][hidden][frequencies][c_out]
  float* channels;                    // [2 in + 1, c_in]: transposed features of a source
  std::vector<float*> products;       // per output: [kConvTile, terms, channels]
  float* result;                      // [2 out + 1, channels] of one edge
};

// One pass over the edges, in the order by source.
struct Se3Conv::EdgeRun {
  const Se3Conv& conv;
  const graph::Context& ctx;
  const Se3Graph& edges;
  const FiberFeatures& nodes;
  const float* edge;

  Tile TakeTile() const;
  // Position by destination of the p-th edge by source.
  int64_t PositionOf(int64_t p) const { return edges.by_source().EdgeAt(p); }
  // The caller's number of the edge at a position.
  int64_t EdgeAt(int64_t position) const { return edges.graph().by_destination().EdgeAt(position); }
  // Radial perceptrons and bases of edges [p, p + rows) by source.
  void Radial(int64_t p, int rows, const Tile& tile) const;
  // The last layer of the perceptrons on the features of a source.
  void SourceKernels(int64_t source, const Tile& tile) const;
  // Products of rows [first, first + rows) of the tile, which have this source.
  void Products(int first, int rows, const Tile& tile) const;
  // Computes edges of the sources in tiles. Calls run_body(source, first, rows) for rows of the tile with one
  // source, after their products, while the source's kernels exist; and body(p, rows) for edges [p, p +
  // rows).
  template <typename RunBody, typename Body>
  void ForTiles(const graph::SegmentRange& range, const Tile& tile, const RunBody& run_body,
                const Body& body) const {
    const std::vector<int32_t>& ptr = edges.by_source().ptr;
    int32_t source = range.first, computed = -1;
    for (int32_t p = ptr[range.first]; p < ptr[range.last]; p += kConvTile) {
      const int32_t end = std::min(p + kConvTile, ptr[range.last]);
      Radial(p, end - p, tile);
      for (int32_t at = p; at < end;) {
        while (ptr[source + 1] <= at) ++source;
        const int32_t last = std::min(end, ptr[source + 1]);
        if (computed != source) SourceKernels(source, tile);
        computed = source;
        Products(at - p, last - at, tile);
        run_body(source, at - p, last - at);
        at = last;
      }
      body(p, end - p);
    }
  }
  // Calls body(pair, kernel, product, stride, columns) with the matrices of every component of the features:
  // kernel [hidden, columns] and product [rows, columns], whose rows are `stride` apart.
  template <typename Body>
  void ForComponents(const std::vector<float*>& kernels, const std::vector<float*>& products,
                     const Body& body) const {
    for (size_t i = 0; i < conv.pairs_.size(); ++i) {
      const Pair& pair = conv.pairs_[i];
      const int columns = pair.frequencies * pair.c_out;
      size_t output = 0;
      while (conv.outputs_[output].degree != pair.out_degree) ++output;
      for (int m = 0; m < Dim(pair.in_degree); ++m)
        body(pair, kernels[i] + int64_t{m} * pair.hidden * columns,
             products[output] + (pair.term_offset + m * pair.frequencies) * pair.c_out,
             int64_t{conv.outputs_[output].terms} * pair.c_out, columns);
    }
  }
};

}  // namespace moesaic::science
