#include "science/evoformer.h"

#include <algorithm>
#include <tuple>

#include "base/round.h"
#include "science/axial_attention.h"
#include "science/outer_product.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kRowTile = 96;  // rows of a fused projection: 96 x 128 f32 are 48 KiB

float* TakeFloats(const graph::Context& ctx, int64_t count) {
  return ctx.exec.scratch->Take<float>(count).data();
}

// Runs body(first, count, worker) over tiles of rows.
template <typename Body>
void ForTiles(const graph::Context& ctx, int64_t rows, int64_t tile, const Body& body) {
  ctx.exec.pool->Run(base::CeilDiv(rows, tile), [&](int64_t task, int worker) {
    body(task * tile, std::min(tile, rows - task * tile), worker);
  });
}

// Projections of normalized rows of x, tile by tile: buffers of one worker.
struct ProjectionTile {
  TileDense dense;
  float *normal, *a, *b;
  static std::vector<ProjectionTile> PerWorker(const graph::Context& ctx, int64_t rows, int inputs,
                                               int outputs) {
    std::vector<ProjectionTile> tiles;
    for (int w = 0; w < ctx.exec.pool->size(); ++w) {
      tiles.push_back(
          {TileDense(ctx, tensor::PackedFormat::kF32, static_cast<int>(rows), std::max(inputs, outputs)),
           TakeFloats(ctx, rows * inputs), TakeFloats(ctx, rows * outputs), TakeFloats(ctx, rows * outputs)});
    }
    return tiles;
  }
};

void RunAxial(const graph::Context& ctx, const AxialAttention& p, float* x) {
  const graph::ScratchScope scope(ctx);
  const int c = p.c(), width = p.width();
  const int64_t rows = p.rows();
  float* q = TakeFloats(ctx, rows * width);
  float* k = TakeFloats(ctx, rows * width);
  float* v = TakeFloats(ctx, rows * width);
  const std::vector<ProjectionTile> tiles = ProjectionTile::PerWorker(ctx, kRowTile, c, std::max(width, c));
  ForTiles(ctx, rows, kRowTile, [&](int64_t first, int64_t count, int worker) {
    const ProjectionTile& tile = tiles[worker];
    const int n = static_cast<int>(count);
    NormalizeRows(ctx, p.norm, x + first * c, count, tile.normal);
    tile.dense.Run(p.mha.q, tile.normal, c, n, q + first * width, width);
    tile.dense.Run(p.mha.k, tile.normal, c, n, k + first * width, width);
    tile.dense.Run(p.mha.v, tile.normal, c, n, v + first * width, width);
  });
  // Queries of a tile are read before their result is written, so that the result may replace them.
  PairAttention(ctx, p.Params(q, k, v, q));
  ForTiles(ctx, rows, kRowTile, [&](int64_t first, int64_t count, int worker) {
    const ProjectionTile& tile = tiles[worker];
    const int n = static_cast<int>(count);
    NormalizeRows(ctx, p.norm, x + first * c, count, tile.normal);
    tile.dense.Run(p.mha.gate, tile.normal, c, n, tile.a, width);
    ctx.graph->rows.gate(q + first * width, tile.a, n * width, tile.a);
    tile.dense.Run(p.mha.out, tile.a, width, n, tile.b, c);
    ctx.exec.kernels->axpy(1, tile.b, n * c, x + first * c);
  });
}

// Writes rows [first, first + count) of values [rows, c], times the mask, as out [c][total].
void StoreChannels(const graph::Context& ctx, const float* mask, int64_t total, int64_t first, int64_t count,
                   int c, const float* values, float* out) {
  ctx.graph->rows.transpose(values, c, count, c, out + first, total);
  if (mask == nullptr) return;
  for (int channel = 0; channel < c; ++channel) {
    float* to = out + channel * total + first;
    for (int64_t r = 0; r < count; ++r) to[r] *= mask[first + r];
  }
}

}  // namespace

PairAttentionParams AxialAttention::Params(const float* q, const float* k, const float* v, float* out) const {
  const int64_t batch_stride = along_outer ? width() : inner * width(),
                stride = along_outer ? inner * width() : width();
  return {.batch = along_outer ? inner : outer,
          .queries = along_outer ? outer : inner,
          .keys = along_outer ? outer : inner,
          .heads = mha.heads,
          .dim = mha.dim,
          .v_dim = mha.dim,
          .scale = 1 / __builtin_sqrtf(static_cast<float>(mha.dim)),
          .q = {q, batch_stride, stride},
          .k = {k, batch_stride, stride},
          .v = {v, batch_stride, stride},
          .bias = bias,
          .mask = mask,
          .mask_batch_stride = along_outer ? 1 : inner,
          .mask_stride = along_outer ? inner : 1,
          .out = out,
          .out_batch_stride = batch_stride,
          .out_stride = stride};
}

void ComputeBias(const graph::Context& ctx, const Norm& norm, const Dense& linear, const float* x,
                 int64_t rows, float* out) {
  const graph::ScratchScope scope(ctx);
  const int c = linear.k(), heads = linear.n();
  const std::vector<ProjectionTile> tiles = ProjectionTile::PerWorker(ctx, kRowTile, c, std::max(heads, 16));
  ForTiles(ctx, rows, kRowTile, [&](int64_t first, int64_t count, int worker) {
    const ProjectionTile& tile = tiles[worker];
    NormalizeRows(ctx, norm, x + first * c, count, tile.normal);
    tile.dense.Run(linear, tile.normal, c, static_cast<int>(count), tile.a, heads);
    for (int64_t r = 0; r < count; ++r) {
      for (int h = 0; h < heads; ++h) out[h * rows + first + r] = tile.a[r * heads + h];
    }
  });
}

StatusOr<GatedHeads> GatedHeads::Load(const WeightScope& weights, int heads) {
  GatedHeads mha;
  mha.heads = heads;
  ASSIGN_OR_RETURN(mha.q, weights.Linear("linear_q"));
  if (heads < 1 || mha.q.n() % heads != 0) {
    return InvalidArgument("{} outputs of linear_q must be divisible by {} heads", mha.q.n(), heads);
  }
  mha.dim = mha.q.n() / heads;
  ASSIGN_OR_RETURN(mha.k, weights.Linear("linear_k", mha.q.n(), mha.q.k()));
  ASSIGN_OR_RETURN(mha.v, weights.Linear("linear_v", mha.q.n(), mha.q.k()));
  ASSIGN_OR_RETURN(mha.gate, weights.Linear("linear_g", mha.q.n(), mha.q.k()));
  ASSIGN_OR_RETURN(mha.out, weights.Linear("linear_o", mha.q.k(), mha.q.n()));
  return mha;
}

StatusOr<TriangleMultiplication> TriangleMultiplication::Load(const WeightScope& weights, bool incoming) {
  TriangleMultiplication layer;
  layer.incoming_ = incoming;
  ASSIGN_OR_RETURN(layer.a_, weights.Linear("linear_a_p"));
  const int hidden = layer.a_.n(), c = layer.a_.k();
  ASSIGN_OR_RETURN(layer.a_gate_, weights.Linear("linear_a_g", hidden, c));
  ASSIGN_OR_RETURN(layer.b_, weights.Linear("linear_b_p", hidden, c));
  ASSIGN_OR_RETURN(layer.b_gate_, weights.Linear("linear_b_g", hidden, c));
  ASSIGN_OR_RETURN(layer.gate_, weights.Linear("linear_g", c, c));
  ASSIGN_OR_RETURN(layer.out_, weights.Linear("linear_z", c, hidden));
  ASSIGN_OR_RETURN(layer.norm_in_, weights.LayerNorm("layer_norm_in", c));
  ASSIGN_OR_RETURN(layer.norm_out_, weights.LayerNorm("layer_norm_out", hidden));
  return layer;
}

Status TriangleMultiplication::Run(const graph::Context& ctx, int64_t n, const float* mask, float* z) const {
  const graph::ScratchScope scope(ctx);
  const int hidden = a_.n(), c = a_.k();
  const int64_t square = n * n;
  float* a = TakeFloats(ctx, hidden * square);
  float* b = TakeFloats(ctx, hidden * square);
  const std::vector<ProjectionTile> tiles =
      ProjectionTile::PerWorker(ctx, kRowTile, std::max(c, hidden), std::max(hidden, c));
  ForTiles(ctx, square, kRowTile, [&](int64_t first, int64_t count, int worker) {
    const ProjectionTile& tile = tiles[worker];
    const int rows = static_cast<int>(count);
    NormalizeRows(ctx, norm_in_, z + first * c, count, tile.normal);
    for (const bool second : {false, true}) {
      tile.dense.Run(second ? b_ : a_, tile.normal, c, rows, tile.a, hidden);
      tile.dense.Run(second ? b_gate_ : a_gate_, tile.normal, c, rows, tile.b, hidden);
      ctx.graph->rows.gate(tile.a, tile.b, rows * hidden, tile.a);
      StoreChannels(ctx, mask, square, first, count, hidden, tile.a, second ? b : a);
    }
  });
  // Per channel, sum_k a_ik b_jk is a b^T, and sum_k a_ki b_kj is a^T b. The product replaces a.
  std::vector<float*> copies;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) copies.push_back(TakeFloats(ctx, square));
  ctx.exec.pool->Run(hidden, [&](int64_t channel, int worker) {
    float* product = a + channel * square;
    if (incoming_) {
      ctx.graph->rows.transpose(product, n, n, n, copies[worker], n);
    } else {
      std::copy_n(product, square, copies[worker]);
    }
    ctx.graph->rows.matmul({.a = copies[worker],
                            .b = b + channel * square,
                            .c = product,
                            .a_stride = n,
                            .b_stride = n,
                            .c_stride = n,
                            .m = n,
                            .n = n,
                            .k = n,
                            .b_transposed = !incoming_});
  });
  ForTiles(ctx, square, kRowTile, [&](int64_t first, int64_t count, int worker) {
    const ProjectionTile& tile = tiles[worker];
    const int rows = static_cast<int>(count);
    ctx.graph->rows.transpose(a + first, square, hidden, count, tile.a, hidden);
    NormalizeRows(ctx, norm_out_, tile.a, count, tile.a);
    tile.dense.Run(out_, tile.a, hidden, rows, tile.b, c);
    NormalizeRows(ctx, norm_in_, z + first * c, count, tile.normal);
    tile.dense.Run(gate_, tile.normal, c, rows, tile.a, c);
    ctx.graph->rows.gate(tile.b, tile.a, rows * c, tile.b);
    ctx.exec.kernels->axpy(1, tile.b, rows * c, z + first * c);
  });
  return OkStatus();
}

StatusOr<TriangleAttention> TriangleAttention::Load(const WeightScope& weights, int heads, bool ending) {
  TriangleAttention layer;
  layer.ending_ = ending;
  ASSIGN_OR_RETURN(layer.mha_, GatedHeads::Load(weights.Under("mha"), heads));
  ASSIGN_OR_RETURN(layer.bias_, weights.Linear("linear", heads, layer.mha_.q.k()));
  ASSIGN_OR_RETURN(layer.norm_, weights.LayerNorm("layer_norm", layer.mha_.q.k()));
  return layer;
}

void TransposeSquares(const graph::Context& ctx, int64_t count, int64_t n, float* x) {
  ctx.exec.pool->Run(count, [&](int64_t h, int) {
    float* square = x + h * n * n;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) std::swap(square[i * n + j], square[j * n + i]);
    }
  });
}

void TriangleAttention::SquareBias(const graph::Context& ctx, int64_t n, const float* z, float* bias) const {
  ComputeBias(ctx, norm_, bias_, z, n * n, bias);
  if (ending_) TransposeSquares(ctx, mha_.heads, n, bias);  // z is transposed, and its bias with it
}

Status TriangleAttention::Run(const graph::Context& ctx, int64_t n, const float* mask, float* z) const {
  const graph::ScratchScope scope(ctx);
  float* bias = TakeFloats(ctx, mha_.heads * n * n);
  SquareBias(ctx, n, z, bias);
  RunAxial(ctx, {mha_, norm_, n, n, ending_, bias, mask}, z);
  return OkStatus();
}

StatusOr<MsaAttention> MsaAttention::Load(const WeightScope& weights, int heads) {
  MsaAttention layer;
  ASSIGN_OR_RETURN(layer.mha_, GatedHeads::Load(weights.Under("mha"), heads));
  ASSIGN_OR_RETURN(layer.norm_, weights.LayerNorm("layer_norm_m", layer.mha_.q.k()));
  if (weights.Has("linear_z.weight")) {
    ASSIGN_OR_RETURN(layer.bias_, weights.Linear("linear_z", heads));
    ASSIGN_OR_RETURN(layer.norm_z_, weights.LayerNorm("layer_norm_z", layer.bias_.k()));
  }
  return layer;
}

Status MsaAttention::Run(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* mask,
                         const float* z, float* m) const {
  const graph::ScratchScope scope(ctx);
  float* bias = nullptr;
  if (!bias_.empty()) {
    if (z == nullptr && residues > 0) return InvalidArgument("row attention needs pair features");
    bias = TakeFloats(ctx, mha_.heads * residues * residues);
    ComputeBias(ctx, norm_z_, bias_, z, residues * residues, bias);
  }
  RunAxial(ctx, {mha_, norm_, sequences, residues, bias_.empty(), bias, mask}, m);
  return OkStatus();
}

StatusOr<OuterProductMean> OuterProductMean::Load(const WeightScope& weights) {
  OuterProductMean layer;
  ASSIGN_OR_RETURN(layer.a_, weights.Linear("linear_1"));
  const int c = layer.a_.n();
  ASSIGN_OR_RETURN(layer.b_, weights.Linear("linear_2", c, layer.a_.k()));
  ASSIGN_OR_RETURN(layer.out_, weights.Linear("linear_out", -1, int64_t{c} * c));
  ASSIGN_OR_RETURN(layer.norm_, weights.LayerNorm("layer_norm", layer.a_.k()));
  return layer;
}

OuterProductMean::Operands OuterProductMean::Project(const graph::Context& ctx, int64_t sequences,
                                                     int64_t residues, const float* mask,
                                                     const float* m) const {
  const int c = a_.n(), c_m = a_.k();
  const int64_t rows = sequences * residues;
  const Operands operands = {
      sequences, residues, c, mask, TakeFloats(ctx, rows * c), TakeFloats(ctx, rows * c)};
  const graph::ScratchScope scope(ctx);
  float *a = operands.a, *b = operands.b;
  const std::vector<ProjectionTile> tiles = ProjectionTile::PerWorker(ctx, kRowTile, c_m, c);
  ForTiles(ctx, rows, kRowTile, [&](int64_t first, int64_t count, int worker) {
    const ProjectionTile& tile = tiles[worker];
    const int n = static_cast<int>(count);
    NormalizeRows(ctx, norm_, m + first * c_m, count, tile.normal);
    tile.dense.Run(a_, tile.normal, c_m, n, tile.a, c);
    tile.dense.Run(b_, tile.normal, c_m, n, b + first * c, c);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = first + r, s = row / residues, i = row % residues;
      const float weight = mask == nullptr ? 1 : mask[row];
      for (int channel = 0; channel < c; ++channel) {
        a[(i * c + channel) * sequences + s] = weight * tile.a[r * c + channel];
        b[row * c + channel] *= weight;
      }
    }
  });
  return operands;
}

void OuterProductMean::Operands::Products(const graph::Context& ctx, int64_t i, int64_t first, int64_t count,
                                          float* products, float* rows) const {
  ctx.graph->rows.matmul({.a = a + i * c * sequences,
                          .b = b + first * c,
                          .c = products,
                          .a_stride = sequences,
                          .b_stride = residues * c,
                          .c_stride = count * c,
                          .m = c,
                          .n = count * c,
                          .k = sequences});
  for (int64_t j = 0; j < count; ++j) {
    for (int channel = 0; channel < c; ++channel)
      std::copy_n(products + channel * count * c + j * c, c, rows + (j * c + channel) * c);
  }
}

float OuterProductMean::Operands::Weight(int64_t i, int64_t j) const {
  constexpr float kCountEps = 1e-3F;
  float pairs = kCountEps + (mask == nullptr ? static_cast<float>(sequences) : 0);
  for (int64_t s = 0; s < sequences && mask != nullptr; ++s)
    pairs += mask[s * residues + i] * mask[s * residues + j];
  return 1 / pairs;
}

Status OuterProductMean::Run(const graph::Context& ctx, int64_t sequences, int64_t residues,
                             const float* mask, const float* m, float* z) const {
  const graph::ScratchScope scope(ctx);
  const int c = a_.n(), c_z = out_.n();
  const Operands operands = Project(ctx, sequences, residues, mask, m);
  struct OuterTile {
    TileDense dense;
    float *products, *rows, *update;
  };
  std::vector<OuterTile> outer;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    outer.push_back({TileDense(ctx, tensor::PackedFormat::kF32, kOuterTile, c * c),
                     TakeFloats(ctx, c * kOuterTile * c), TakeFloats(ctx, kOuterTile * c * c),
                     TakeFloats(ctx, kOuterTile * c_z)});
  }
  ctx.exec.pool->Run(residues, [&](int64_t i, int worker) {
    const OuterTile& tile = outer[worker];
    for (int64_t first = 0; first < residues; first += kOuterTile) {
      const int64_t count = std::min(kOuterTile, residues - first);
      operands.Products(ctx, i, first, count, tile.products, tile.rows);
      tile.dense.Run(out_, tile.rows, int64_t{c} * c, static_cast<int>(count), tile.update, c_z);
      for (int64_t j = 0; j < count; ++j) {
        ctx.exec.kernels->axpy(operands.Weight(i, first + j), tile.update + j * c_z, c_z,
                               z + (i * residues + first + j) * c_z);
      }
    }
  });
  return OkStatus();
}

StatusOr<Transition> Transition::Load(const WeightScope& weights) {
  Transition layer;
  ASSIGN_OR_RETURN(layer.in_, weights.Linear("linear_1"));
  ASSIGN_OR_RETURN(layer.out_, weights.Linear("linear_2", layer.in_.k(), layer.in_.n()));
  ASSIGN_OR_RETURN(layer.norm_, weights.LayerNorm("layer_norm", layer.in_.k()));
  return layer;
}

Status Transition::Run(const graph::Context& ctx, int64_t rows, float* x) const {
  const graph::ScratchScope scope(ctx);
  const int c = in_.k(), hidden = in_.n();
  const std::vector<ProjectionTile> tiles = ProjectionTile::PerWorker(ctx, kRowTile, c, hidden);
  ForTiles(ctx, rows, kRowTile, [&](int64_t first, int64_t count, int worker) {
    const ProjectionTile& tile = tiles[worker];
    const int n = static_cast<int>(count);
    NormalizeRows(ctx, norm_, x + first * c, count, tile.normal);
    tile.dense.Run(in_, tile.normal, c, n, tile.a, hidden);
    const float* row = tile.a;
    ctx.graph->rows.activate(&row, 1, nullptr, 0, n * hidden, graph::Activation::kRelu, tile.a);
    tile.dense.Run(out_, tile.a, hidden, n, tile.b, c);
    ctx.exec.kernels->axpy(1, tile.b, n * c, x + first * c);
  });
  return OkStatus();
}

StatusOr<EvoformerBlock> EvoformerBlock::Load(const WeightScope& weights, int msa_heads, int pair_heads) {
  EvoformerBlock block;
  ASSIGN_OR_RETURN(block.row_, MsaAttention::Load(weights.Under("msa_att_row"), msa_heads));
  ASSIGN_OR_RETURN(block.column_, MsaAttention::Load(weights.Under("msa_att_col"), msa_heads));
  ASSIGN_OR_RETURN(block.msa_transition_, Transition::Load(weights.Under("msa_transition")));
  ASSIGN_OR_RETURN(block.outer_, OuterProductMean::Load(weights.Under("outer_product_mean")));
  ASSIGN_OR_RETURN(block.outgoing_, TriangleMultiplication::Load(weights.Under("tri_mul_out"), false));
  ASSIGN_OR_RETURN(block.incoming_, TriangleMultiplication::Load(weights.Under("tri_mul_in"), true));
  ASSIGN_OR_RETURN(block.starting_,
                   TriangleAttention::Load(weights.Under("tri_att_start"), pair_heads, false));
  ASSIGN_OR_RETURN(block.ending_, TriangleAttention::Load(weights.Under("tri_att_end"), pair_heads, true));
  ASSIGN_OR_RETURN(block.pair_transition_, Transition::Load(weights.Under("pair_transition")));
  const std::tuple<const char*, const char*, int> widths[] = {
      {"msa_att_col", "m", block.column_.c_m()},           {"msa_transition", "m", block.msa_transition_.c()},
      {"outer_product_mean", "m", block.outer_.c_m()},     {"msa_att_row", "z", block.row_.c_z()},
      {"outer_product_mean", "z", block.outer_.c_z()},     {"tri_mul_in", "z", block.incoming_.c()},
      {"tri_att_start", "z", block.starting_.c()},         {"tri_att_end", "z", block.ending_.c()},
      {"pair_transition", "z", block.pair_transition_.c()}};
  for (const auto& [layer, name, channels] : widths) {
    const bool is_msa = *name == 'm';
    const int expected = is_msa ? block.c_m() : block.c_z();
    if (channels != expected) {
      return InvalidArgument("{} has {} channels of {}, but {} has {}", layer, channels, name,
                             is_msa ? "msa_att_row" : "tri_mul_out", expected);
    }
  }
  return block;
}

Status EvoformerBlock::Run(const graph::Context& ctx, int64_t sequences, int64_t residues,
                           const float* msa_mask, const float* pair_mask, float* m, float* z) const {
  RETURN_IF_ERROR(row_.Run(ctx, sequences, residues, msa_mask, z, m));
  RETURN_IF_ERROR(column_.Run(ctx, sequences, residues, msa_mask, nullptr, m));
  RETURN_IF_ERROR(msa_transition_.Run(ctx, sequences * residues, m));
  RETURN_IF_ERROR(outer_.Run(ctx, sequences, residues, msa_mask, m, z));
  RETURN_IF_ERROR(outgoing_.Run(ctx, residues, pair_mask, z));
  RETURN_IF_ERROR(incoming_.Run(ctx, residues, pair_mask, z));
  RETURN_IF_ERROR(starting_.Run(ctx, residues, pair_mask, z));
  RETURN_IF_ERROR(ending_.Run(ctx, residues, pair_mask, z));
  return pair_transition_.Run(ctx, residues * residues, z);
}

}  // namespace moesaic::science
