#include "science/edge_attention.h"

namespace moesaic::graph {
namespace {

int64_t OwnersOf(const Graph& graph, Target target) {
  return target == Target::kEdge ? graph.num_edges() : graph.num_src();
}

Status CheckAttention(const Graph& graph, const EdgeAttentionParams& p) {
  if (p.k_target == Target::kDestination || p.v_target == Target::kDestination) {
    return InvalidArgument("keys and values must belong to sources or edges");
  }
  RETURN_IF_ERROR(CheckFeatures(p.q, "q", graph.num_dst()));
  RETURN_IF_ERROR(CheckFeatures(p.k, "k", OwnersOf(graph, p.k_target), p.q.cols));
  RETURN_IF_ERROR(CheckFeatures(p.v, "v", OwnersOf(graph, p.v_target)));
  RETURN_IF_ERROR(CheckSameType(p.q, "q", p.k, "k"));
  RETURN_IF_ERROR(CheckSameType(p.q, "q", p.v, "v"));
  if (p.heads < 1 || p.q.cols % p.heads != 0 || p.v.cols % p.heads != 0) {
    return InvalidArgument("the columns of q and v, {} and {}, must be divisible by heads = {}", p.q.cols,
                           p.v.cols, p.heads);
  }
  if (p.q.cols / p.heads > kMaxHeadDim || p.v.cols / p.heads > kMaxHeadDim) {
    return InvalidArgument("a head must have at most {} columns, but q and v have {} and {}", kMaxHeadDim,
                           p.q.cols / p.heads, p.v.cols / p.heads);
  }
  if (!p.bias.empty()) {
    RETURN_IF_ERROR(CheckFeatures(p.bias, "bias", graph.num_edges(), p.heads));
    RETURN_IF_ERROR(CheckSameType(p.q, "q", p.bias, "bias"));
  }
  return OkStatus();
}

const int32_t* RowsFor(const Adjacency& csc, Target target) {
  return target == Target::kEdge ? csc.edge_rows() : csc.neighbor.data();
}

}  // namespace

Status EdgeAttention(const Context& ctx, const Graph& graph, const EdgeAttentionParams& p) {
  RETURN_IF_ERROR(CheckAttention(graph, p));
  RETURN_IF_ERROR(CheckFeatures(p.out, "out", graph.num_dst(), p.v.cols));
  RETURN_IF_ERROR(CheckSameType(p.q, "q", p.out, "out"));
  if (!p.log_sum.empty() && static_cast<int64_t>(p.log_sum.size()) != int64_t{graph.num_dst()} * p.heads) {
    return InvalidArgument("log_sum must have {} elements, but has {}", int64_t{graph.num_dst()} * p.heads,
                           p.log_sum.size());
  }
  const Adjacency& csc = graph.by_destination();
  const EdgeAttentionTask task = {.ptr = csc.ptr.data(),
                                  .first = 0,
                                  .last = 0,
                                  .k_rows = RowsFor(csc, p.k_target),
                                  .v_rows = RowsFor(csc, p.v_target),
                                  .e_rows = csc.edge_rows(),
                                  .q = p.q.data,
                                  .k = p.k.data,
                                  .v = p.v.data,
                                  .bias = p.bias.data,
                                  .q_stride = p.q.stride,
                                  .k_stride = p.k.stride,
                                  .v_stride = p.v.stride,
                                  .bias_stride = p.bias.stride,
                                  .dtype = p.q.dtype,
                                  .heads = p.heads,
                                  .dim = static_cast<int>(p.q.cols / p.heads),
                                  .v_dim = static_cast<int>(p.v.cols / p.heads),
                                  .scale = p.scale,
                                  .out = p.out.data,
                                  .out_stride = p.out.stride,
                                  .log_sum = p.log_sum.empty() ? nullptr : p.log_sum.data()};
  std::vector<SegmentRange> ranges = DivideByEdges(csc, ctx.exec.pool->size());
  for (const int32_t hub : csc.hubs) ranges.push_back({hub, hub + 1});
  ctx.exec.pool->Run(static_cast<int64_t>(ranges.size()), [&](int64_t i, int) {
    EdgeAttentionTask part = task;
    part.first = ranges[i].first;
    part.last = ranges[i].last;
    ctx.graph->edge_attention(part);
  });
  return OkStatus();
}

Status EdgeAttentionBackward(const Context& ctx, const Graph& graph, const EdgeAttentionParams& p,
                             const EdgeAttentionGradients& g) {
  RETURN_IF_ERROR(CheckAttention(graph, p));
  RETURN_IF_ERROR(CheckFeatures(g.out_grad, "out_grad", graph.num_dst(), p.v.cols));
  if (!g.bias_grad.empty()) {
    RETURN_IF_ERROR(CheckFeatures(g.bias_grad, "bias_grad", graph.num_edges(), p.heads));
    RETURN_IF_ERROR(CheckSameType(g.bias_grad, "bias_grad", p.q, "q"));
  }
  ScratchScope scope(ctx);
  // Weights softmax(scale q k + bias) and their gradients are f32. They are rounded to the type of the inputs
  // only as factors of the sums over edges.
  const int64_t edges = graph.num_edges();
  const Output weights = scope.Matrix(tensor::DType::kF32, edges, p.heads),
               weight_grad = scope.Matrix(tensor::DType::kF32, edges, p.heads);
  // With f32, factor() scales x in place. x is read afterwards only where alpha is 1.
  auto factor = [&](const Output& x, float alpha) {
    const bool f32 = p.q.dtype == tensor::DType::kF32;
    const Output rounded = f32 ? x : scope.Matrix(p.q.dtype, edges, p.heads);
    if (!f32 || alpha != 1) RoundInto(ctx, x, alpha, 0, rounded);
    return rounded;
  };
  auto dots = [](const Features& destination, const Features& other, Target target, const Output& out) {
    return GsddmmParams{.op = EdgeOp::kDot,
                        .lhs = destination,
                        .rhs = other,
                        .lhs_target = Target::kDestination,
                        .rhs_target = target,
                        .out = out};
  };
  const GsddmmParams scores = dots(p.q, p.k, p.k_target, weights);
  RETURN_IF_ERROR(Gsddmm(ctx, graph, scores));
  RoundInto(ctx, weights, p.scale, 0, weights);
  if (!p.bias.empty()) RoundInto(ctx, p.bias, 1, 1, weights);
  RETURN_IF_ERROR(SegmentSoftmax(ctx, graph.by_destination(), weights, weights));
  const GsddmmParams dot = dots(g.out_grad, p.v, p.v_target, weight_grad);
  RETURN_IF_ERROR(Gsddmm(ctx, graph, dot));
  // The gradient of v is that of the weighted sum: per edge or per source.
  if (!g.v_grad.empty()) {
    RETURN_IF_ERROR(GsddmmBackward(ctx, graph, dot, {.out_grad = factor(weights, 1), .rhs_grad = g.v_grad}));
  }
  RETURN_IF_ERROR(SegmentSoftmaxBackward(ctx, graph.by_destination(), weights, weight_grad, weight_grad));
  if (!g.bias_grad.empty()) RoundInto(ctx, weight_grad, 1, 0, g.bias_grad);
  return GsddmmBackward(
      ctx, graph, scores,
      {.out_grad = factor(weight_grad, p.scale), .lhs_grad = g.q_grad, .rhs_grad = g.k_grad});
}

}  // namespace moesaic::graph
