#include "science/message_ops.h"

#include <algorithm>

#include "science/elements.h"

namespace moesaic::graph {
namespace {

// Returns the rows of a task that converts elements one by one: some 8192 elements.
int64_t RowsPerTask(int64_t cols) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, cols)); }

// Features with the row that each position of an adjacency reads.
struct Operand {
  Features x;
  const int32_t* rows;
};

int64_t Owners(const Graph& graph, Target target) {
  if (target == Target::kEdge) return graph.num_edges();
  return target == Target::kSource ? graph.num_src() : graph.num_dst();
}

const int32_t* RowsByDestination(const Graph& graph, Target target) {
  const Adjacency& csc = graph.by_destination();
  if (target == Target::kEdge) return csc.edge_rows();
  return target == Target::kSource ? csc.neighbor.data() : csc.own().data();
}

const int32_t* RowsBySource(const Graph& graph, Target target) {
  const Adjacency& csr = graph.by_source();
  if (target == Target::kEdge) return csr.edge_rows();
  return target == Target::kSource ? csr.own().data() : csr.neighbor.data();
}

// out[s] = reduce of u op e, with u's and e's rows as given.
void ReduceInto(const Context& ctx, const Adjacency& adjacency, Op op, Reduce reduce, const Operand& u,
                const Operand& e, int64_t e_group, const Output& out, const ReduceOptions& options,
                const int32_t* mask = nullptr) {
  int32_t* arg =
      options.arg.empty() ? const_cast<int32_t*>(mask) : options.arg.data();  // a mask is only read
  RunReduce(ctx, adjacency,
            {.u_rows = u.rows,
             .e_rows = e.rows,
             .u = u.x.data,
             .e = e.x.data,
             .u_stride = u.x.stride,
             .e_stride = e.x.stride,
             .dtype = out.dtype,
             .cols = out.cols,
             .e_group = e_group,
             .op = op,
             .reduce = reduce,
             .alpha = options.alpha,
             .beta = options.beta,
             .out = out.data,
             .out_stride = out.stride,
             .arg = arg,
             .arg_empty = adjacency.edges()},
            u.x.rows);
}

// Per-edge map in the order by destination.
struct MapSpec {
  Op op = Op::kCopyU;
  Operand lhs, rhs;
  int64_t rhs_group = 1, sum_group = 0;
  float alpha = 1;
  const int32_t* mask = nullptr;
};

void MapInto(const Context& ctx, const Graph& graph, const MapSpec& spec, const Output& out) {
  if (spec.lhs.x.cols == 0) return FillZeros(out);  // sums of no products
  RunEdgeMap(ctx, graph.num_edges(),
             {.lhs_rows = spec.lhs.rows,
              .rhs_rows = spec.rhs.rows,
              .out_rows = graph.by_destination().edge_rows(),
              .lhs = spec.lhs.x.data,
              .rhs = spec.rhs.x.data,
              .lhs_stride = spec.lhs.x.stride,
              .rhs_stride = spec.rhs.x.stride,
              .dtype = spec.lhs.x.dtype,
              .cols = spec.lhs.x.cols,
              .rhs_group = spec.rhs_group,
              .sum_group = spec.sum_group,
              .op = spec.op,
              .alpha = spec.alpha,
              .mask = spec.mask,
              .out = out.data,
              .out_stride = out.stride,
              .out_f32 = out.dtype == tensor::DType::kF32});
}

// Divides f32 x, whose rows are edges, twice by the divisor: -u / e^2 of a quotient's gradient is rounded
// once. out may be x.
void DivideTwice(const Context& ctx, const Graph& graph, const Features& x, const Operand& divisor,
                 const Output& out) {
  if (divisor.x.dtype == tensor::DType::kF32) {
    const int32_t* edges = graph.by_destination().edge_rows();
    MapInto(ctx, graph, {.op = Op::kDiv, .lhs = {x, edges}, .rhs = divisor}, out);
    return MapInto(ctx, graph, {.op = Op::kDiv, .lhs = {out, edges}, .rhs = divisor}, out);
  }
  const Adjacency& csc = graph.by_destination();
  ForRows(ctx, graph.num_edges(), RowsPerTask(out.cols), [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const int64_t edge = csc.EdgeAt(p), row = divisor.rows != nullptr ? divisor.rows[p] : p;
      for (int64_t c = 0; c < out.cols; ++c) {
        const float by = LoadElement(divisor.x.data, divisor.x.dtype, row * divisor.x.stride + c);
        const float value = LoadElement(x.data, x.dtype, edge * x.stride + c);
        StoreElement(out.data, out.dtype, edge * out.stride + c, value / by / by);
      }
    }
  });
}

Op ElementOp(Message message) {
  switch (message) {
    case Message::kUAddE:
      return Op::kAdd;
    case Message::kUSubE:
      return Op::kSub;
    case Message::kUMulE:
    case Message::kUDotE:
      return Op::kMul;
    case Message::kUDivE:
      return Op::kDiv;
    default:
      return Op::kCopyU;
  }
}

// Checks u and e, and returns the columns of u that share an element of e (1 without e).
StatusOr<int64_t> CheckMessage(const Graph& graph, const GspmmParams& p) {
  if (p.message != Message::kCopyE) RETURN_IF_ERROR(CheckFeatures(p.u, "u", graph.num_src()));
  if (p.message == Message::kCopyU) return 1;
  RETURN_IF_ERROR(CheckFeatures(p.e, "e", graph.num_edges()));
  if (p.message == Message::kCopyE) return 1;
  RETURN_IF_ERROR(CheckSameType(p.u, "u", p.e, "e"));
  if (p.message == Message::kUDotE) {
    RETURN_IF_ERROR(CheckFeatures(p.e, "e", graph.num_edges(), p.u.cols));
    return 1;
  }
  return BroadcastGroup(p.u, "u", p.e, "e");
}

StatusOr<int64_t> HeadWidth(int64_t cols, int64_t heads) {
  if (heads < 1 || cols % heads != 0) {
    return InvalidArgument("the columns of out must divide the {} columns of a dot product, but are {}", cols,
                           heads);
  }
  return cols / heads;
}

// Returns a copy of x in f32.
Features Widened(const Context& ctx, ScratchScope* scope, const Features& x) {
  const Output wide = scope->Matrix(tensor::DType::kF32, x.rows, x.cols);
  RoundInto(ctx, x, 1, 0, wide);
  return wide;
}

Status GspmmDot(const Context& ctx, const Graph& graph, const GspmmParams& p) {
  ASSIGN_OR_RETURN(const int64_t width, HeadWidth(p.u.cols, p.out.cols));
  ScratchScope scope(ctx);
  const Output dots = scope.Matrix(tensor::DType::kF32, graph.num_edges(), p.out.cols);
  MapInto(ctx, graph,
          {.op = Op::kMul,
           .lhs = {p.u, RowsByDestination(graph, Target::kSource)},
           .rhs = {p.e, RowsByDestination(graph, Target::kEdge)},
           .sum_group = width},
          dots);
  if (p.out.dtype == tensor::DType::kF32)
    return Segment(ctx, p.reduce, graph.by_destination(), dots, p.out, p.options);
  const Output sums = scope.Matrix(tensor::DType::kF32, p.out.rows, p.out.cols);
  ReduceOptions options = p.options;
  options.beta = 0;
  RETURN_IF_ERROR(Segment(ctx, p.reduce, graph.by_destination(), dots, sums, options));
  RoundInto(ctx, sums, 1, p.options.beta, p.out);
  return OkStatus();
}

}  // namespace

void RoundInto(const Context& ctx, const Features& x, float alpha, float beta, const Output& out) {
  ForRows(ctx, x.rows, RowsPerTask(x.cols), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const int64_t at = r * out.stride + c;
        float value = alpha * LoadElement(x.data, x.dtype, r * x.stride + c);
        if (beta != 0) value += beta * LoadElement(out.data, out.dtype, at);
        StoreElement(out.data, out.dtype, at, value);
      }
    }
  });
}

Status Gspmm(const Context& ctx, const Graph& graph, const GspmmParams& p) {
  ASSIGN_OR_RETURN(const int64_t group, CheckMessage(graph, p));
  const Features& main = p.message == Message::kCopyE ? p.e : p.u;
  RETURN_IF_ERROR(
      CheckFeatures(p.out, "out", graph.num_dst(), p.message == Message::kUDotE ? -1 : main.cols));
  RETURN_IF_ERROR(CheckSameType(main, p.message == Message::kCopyE ? "e" : "u", p.out, "out"));
  RETURN_IF_ERROR(CheckOptions(p.options, p.reduce, p.out));
  if (p.message == Message::kUDotE) return GspmmDot(ctx, graph, p);
  const int32_t* edges = RowsByDestination(graph, Target::kEdge);
  const Operand lhs = {main,
                       p.message == Message::kCopyE ? edges : RowsByDestination(graph, Target::kSource)};
  ReduceInto(ctx, graph.by_destination(), ElementOp(p.message), p.reduce, lhs, {p.e, edges}, group, p.out,
             p.options);
  return OkStatus();
}

Status GspmmBackward(const Context& ctx, const Graph& graph, const GspmmParams& p, const GspmmGradients& g) {
  ASSIGN_OR_RETURN(const int64_t group, CheckMessage(graph, p));
  const bool dot = p.message == Message::kUDotE, masked = IsExtreme(p.reduce);
  const Features& main = p.message == Message::kCopyE ? p.e : p.u;
  RETURN_IF_ERROR(CheckFeatures(g.out_grad, "out_grad", graph.num_dst(), dot ? -1 : main.cols));
  RETURN_IF_ERROR(CheckSameType(g.out_grad, "out_grad", main, "the input"));
  if (!g.u_grad.empty()) {
    RETURN_IF_ERROR(CheckFeatures(g.u_grad, "u_grad", graph.num_src(), p.u.cols));
    RETURN_IF_ERROR(CheckSameType(g.u_grad, "u_grad", main, "the input"));
  }
  if (!g.e_grad.empty()) {
    RETURN_IF_ERROR(CheckFeatures(g.e_grad, "e_grad", graph.num_edges(), p.e.cols));
    RETURN_IF_ERROR(CheckSameType(g.e_grad, "e_grad", main, "the input"));
  }
  int64_t width = 1;
  if (dot) {
    ASSIGN_OR_RETURN(width, HeadWidth(p.u.cols, g.out_grad.cols));
  }
  if (masked) RETURN_IF_ERROR(CheckArg(g.arg, g.out_grad.rows, g.out_grad.cols));
  ScratchScope scope(ctx);
  constexpr tensor::DType kF32 = tensor::DType::kF32;
  const bool f32 = main.dtype == kF32, mean = p.reduce == Reduce::kMean,
             product = p.message == Message::kUMulE || p.message == Message::kUDivE;
  // Gradients of a 16-bit mean, divided by the number of edges, are summed or multiplied in f32: results are
  // rounded once. Those of copied edges are only divided.
  const bool widens = mean && !f32 && p.message != Message::kCopyE;
  Features grad = g.out_grad, u = p.u, e = p.e;
  if (mean) {
    const Output divided = scope.Matrix(widens ? kF32 : grad.dtype, grad.rows, grad.cols);
    DivideByCount(ctx, graph.by_destination(), grad, divided);
    grad = divided;
  }
  if (widens && (product || dot)) {
    if (!g.e_grad.empty()) u = Widened(ctx, &scope, u);
    if (!g.u_grad.empty()) e = Widened(ctx, &scope, e);
  }
  const int32_t* mask = masked ? g.arg.data() : nullptr;
  Target grad_target = Target::kDestination;
  if (dot && masked) {  // only the chosen edges' dot products pass a gradient on
    const Output chosen = scope.Matrix(grad.dtype, graph.num_edges(), grad.cols);
    const Operand at_dst = {grad, RowsByDestination(graph, Target::kDestination)};
    MapInto(ctx, graph, {.op = Op::kCopyU, .lhs = at_dst, .rhs = at_dst, .mask = mask}, chosen);
    grad = chosen;
    grad_target = Target::kEdge;
  }
  if (!g.u_grad.empty() && p.message == Message::kCopyE) FillZeros(g.u_grad);
  if (!g.e_grad.empty() && p.message == Message::kCopyU) FillZeros(g.e_grad);
  if (!g.u_grad.empty() && p.message != Message::kCopyE) {
    const Operand out_grad = {grad, RowsBySource(graph, grad_target)};
    const Operand at_edge = {e, RowsBySource(graph, Target::kEdge)};
    const Output sums = widens ? scope.Matrix(kF32, g.u_grad.rows, g.u_grad.cols) : g.u_grad;
    if (dot) {
      ReduceInto(ctx, graph.by_source(), Op::kMul, Reduce::kSum, at_edge, out_grad, width, sums, {});
    } else {
      ReduceInto(ctx, graph.by_source(), product ? ElementOp(p.message) : Op::kCopyU, Reduce::kSum, out_grad,
                 at_edge, product ? group : 1, sums, {}, mask);
    }
    if (widens) RoundInto(ctx, sums, 1, 0, g.u_grad);
  }
  if (g.e_grad.empty() || p.message == Message::kCopyU) return OkStatus();
  const Operand out_grad = {grad, RowsByDestination(graph, grad_target)};
  const Operand at_src = {u, RowsByDestination(graph, Target::kSource)};
  const bool quotient = p.message == Message::kUDivE;
  const Output e_grad =
      widens || (quotient && !f32) ? scope.Matrix(kF32, g.e_grad.rows, g.e_grad.cols) : g.e_grad;
  if (dot) {
    MapInto(ctx, graph, {.op = Op::kMul, .lhs = at_src, .rhs = out_grad, .rhs_group = width}, e_grad);
    if (widens) RoundInto(ctx, e_grad, 1, 0, g.e_grad);
    return OkStatus();
  }
  MapInto(ctx, graph,
          {.op = product ? Op::kMul : Op::kCopyU,
           .lhs = out_grad,
           .rhs = product ? at_src : out_grad,
           .sum_group = group == 1 ? 0 : group,
           .alpha = p.message == Message::kUSubE || p.message == Message::kUDivE ? -1.0F : 1.0F,
           .mask = mask},
          e_grad);
  if (quotient) {
    DivideTwice(ctx, graph, e_grad, {p.e, RowsByDestination(graph, Target::kEdge)}, g.e_grad);
  } else if (widens) {
    RoundInto(ctx, e_grad, 1, 0, g.e_grad);
  }
  return OkStatus();
}

namespace {

Op ElementOp(EdgeOp op) {
  switch (op) {
    case EdgeOp::kCopy:
      return Op::kCopyU;
    case EdgeOp::kAdd:
      return Op::kAdd;
    case EdgeOp::kSub:
      return Op::kSub;
    case EdgeOp::kMul:
    case EdgeOp::kDot:
      return Op::kMul;
    case EdgeOp::kDiv:
      return Op::kDiv;
  }
  return Op::kCopyU;
}

// Columns of lhs that share an element of rhs.
StatusOr<int64_t> CheckOperands(const Graph& graph, const GsddmmParams& p) {
  RETURN_IF_ERROR(CheckFeatures(p.lhs, "lhs", Owners(graph, p.lhs_target)));
  if (p.op == EdgeOp::kCopy) return 1;
  RETURN_IF_ERROR(
      CheckFeatures(p.rhs, "rhs", Owners(graph, p.rhs_target), p.op == EdgeOp::kDot ? p.lhs.cols : -1));
  RETURN_IF_ERROR(CheckSameType(p.lhs, "lhs", p.rhs, "rhs"));
  return BroadcastGroup(p.lhs, "lhs", p.rhs, "rhs");
}

// The gradient of one side: a per-edge map if edges own it, otherwise a reduction over the node's edges of
// (u op e), where u and e are given by their targets.
struct SideGradient {
  Target target;
  Op op;
  Features u, e;
  Target u_target, e_target;
  int64_t e_group;
};

void ComputeSide(const Context& ctx, const Graph& graph, const SideGradient& s, const Output& out) {
  if (s.target == Target::kEdge) {
    MapInto(ctx, graph,
            {.op = s.op,
             .lhs = {s.u, RowsByDestination(graph, s.u_target)},
             .rhs = {s.e, RowsByDestination(graph, s.e_target)},
             .rhs_group = s.e_group},
            out);
    return;
  }
  const bool by_source = s.target == Target::kSource;
  auto rows = [&](Target t) { return by_source ? RowsBySource(graph, t) : RowsByDestination(graph, t); };
  ReduceInto(ctx, by_source ? graph.by_source() : graph.by_destination(), s.op, Reduce::kSum,
             {s.u, rows(s.u_target)}, {s.e, rows(s.e_target)}, s.e_group, out, {});
}

// The gradient of rhs for all operations but the dot product: computed per edge, then reduced if nodes own
// it.
void ComputeRhs(const Context& ctx, const Graph& graph, const GsddmmParams& p, const Features& grad,
                int64_t group, const Output& out) {
  ScratchScope scope(ctx);
  const bool per_edge = p.rhs_target == Target::kEdge;
  const bool divided = p.op == EdgeOp::kDiv, f32 = out.dtype == tensor::DType::kF32;
  // Gradients of edges are rounded to the type after their sum.
  const Output edges =
      per_edge && (f32 || !divided) ? out : scope.Matrix(tensor::DType::kF32, graph.num_edges(), p.rhs.cols);
  const int32_t* order = RowsByDestination(graph, Target::kEdge);
  const bool product = p.op == EdgeOp::kMul || p.op == EdgeOp::kDiv;
  MapInto(ctx, graph,
          {.op = product ? Op::kMul : Op::kCopyU,
           .lhs = {grad, order},
           .rhs = {product ? p.lhs : grad, product ? RowsByDestination(graph, p.lhs_target) : order},
           .sum_group = group == 1 ? 0 : group,
           .alpha = p.op == EdgeOp::kSub || p.op == EdgeOp::kDiv ? -1.0F : 1.0F},
          edges);
  if (divided)
    DivideTwice(ctx, graph, edges, {p.rhs, RowsByDestination(graph, p.rhs_target)}, per_edge ? out : edges);
  if (per_edge) return;
  const Output sums = f32 ? out : scope.Matrix(tensor::DType::kF32, out.rows, out.cols);
  ComputeSide(ctx, graph, {p.rhs_target, Op::kCopyU, edges, edges, Target::kEdge, Target::kEdge, 1}, sums);
  if (!f32) RoundInto(ctx, sums, 1, 0, out);
}

}  // namespace

Status Gsddmm(const Context& ctx, const Graph& graph, const GsddmmParams& p) {
  ASSIGN_OR_RETURN(const int64_t group, CheckOperands(graph, p));
  RETURN_IF_ERROR(CheckFeatures(p.out, "out", graph.num_edges(), p.op == EdgeOp::kDot ? -1 : p.lhs.cols));
  if (p.out.dtype != tensor::DType::kF32) RETURN_IF_ERROR(CheckSameType(p.lhs, "lhs", p.out, "out"));
  MapSpec spec = {.op = ElementOp(p.op),
                  .lhs = {p.lhs, RowsByDestination(graph, p.lhs_target)},
                  .rhs = {p.rhs, RowsByDestination(graph, p.rhs_target)},
                  .rhs_group = group};
  if (p.op == EdgeOp::kDot) {
    ASSIGN_OR_RETURN(spec.sum_group, HeadWidth(p.lhs.cols, p.out.cols));
  }
  MapInto(ctx, graph, spec, p.out);
  return OkStatus();
}

Status GsddmmBackward(const Context& ctx, const Graph& graph, const GsddmmParams& p,
                      const GsddmmGradients& g) {
  ASSIGN_OR_RETURN(const int64_t group, CheckOperands(graph, p));
  const bool dot = p.op == EdgeOp::kDot;
  RETURN_IF_ERROR(CheckFeatures(g.out_grad, "out_grad", graph.num_edges(), dot ? -1 : p.lhs.cols));
  RETURN_IF_ERROR(CheckSameType(p.lhs, "lhs", g.out_grad, "out_grad"));
  int64_t width = 1;
  if (dot) {
    ASSIGN_OR_RETURN(width, HeadWidth(p.lhs.cols, g.out_grad.cols));
  }
  if (!g.lhs_grad.empty()) {
    RETURN_IF_ERROR(CheckFeatures(g.lhs_grad, "lhs_grad", p.lhs.rows, p.lhs.cols));
    RETURN_IF_ERROR(CheckSameType(g.lhs_grad, "lhs_grad", p.lhs, "lhs"));
    const bool scaled = p.op == EdgeOp::kMul || p.op == EdgeOp::kDiv;
    if (dot) {
      ComputeSide(ctx, graph, {p.lhs_target, Op::kMul, p.rhs, g.out_grad, p.rhs_target, Target::kEdge, width},
                  g.lhs_grad);
    } else {
      ComputeSide(
          ctx, graph,
          {p.lhs_target, scaled ? ElementOp(p.op) : Op::kCopyU, g.out_grad, scaled ? p.rhs : g.out_grad,
           Target::kEdge, scaled ? p.rhs_target : Target::kEdge, scaled ? group : 1},
          g.lhs_grad);
    }
  }
  if (g.rhs_grad.empty()) return OkStatus();
  RETURN_IF_ERROR(CheckFeatures(g.rhs_grad, "rhs_grad", p.rhs.rows, p.rhs.cols));
  RETURN_IF_ERROR(CheckSameType(g.rhs_grad, "rhs_grad", p.lhs, "lhs"));
  if (p.op == EdgeOp::kCopy) {
    FillZeros(g.rhs_grad);
    return OkStatus();
  }
  if (dot) {
    ComputeSide(ctx, graph, {p.rhs_target, Op::kMul, p.lhs, g.out_grad, p.lhs_target, Target::kEdge, width},
                g.rhs_grad);
  } else {
    ComputeRhs(ctx, graph, p, g.out_grad, group, g.rhs_grad);
  }
  return OkStatus();
}

}  // namespace moesaic::graph
