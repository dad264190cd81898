#include "science/segment_ops.h"

#include <algorithm>

#include "science/elements.h"

namespace moesaic::graph {

Status CheckOptions(const ReduceOptions& options, Reduce reduce, const Output& out) {
  if (!IsExtreme(reduce)) {
    if (!options.arg.empty()) return InvalidArgument("arg is defined for max and min only");
    return OkStatus();
  }
  if (options.alpha != 1 || options.beta != 0) {
    return InvalidArgument("max and min need alpha 1 and beta 0, not {} and {}", options.alpha, options.beta);
  }
  return options.arg.empty() ? OkStatus() : CheckArg(options.arg, out.rows, out.cols);
}

Status Segment(const Context& ctx, Reduce reduce, const Segments& segments, const Features& src,
               const Output& out, const ReduceOptions& options) {
  RETURN_IF_ERROR(CheckFeatures(src, "src", segments.edges()));
  RETURN_IF_ERROR(CheckFeatures(out, "out", segments.count(), src.cols));
  RETURN_IF_ERROR(CheckSameType(src, "src", out, "out"));
  RETURN_IF_ERROR(CheckOptions(options, reduce, out));
  RunReduce(ctx, segments,
            {.u_rows = segments.edge_rows(),
             .e_rows = segments.edge_rows(),
             .u = src.data,
             .e = src.data,
             .u_stride = src.stride,
             .e_stride = 0,
             .dtype = src.dtype,
             .cols = src.cols,
             .e_group = 1,
             .op = Op::kCopyU,
             .reduce = reduce,
             .alpha = options.alpha,
             .beta = options.beta,
             .out = out.data,
             .out_stride = out.stride,
             .arg = options.arg.empty() ? nullptr : options.arg.data(),
             .arg_empty = segments.edges()},
            src.rows);
  return OkStatus();
}

Status Scatter(const Context& ctx, Reduce reduce, const Features& src, Indices index, const Output& out,
               const ReduceOptions& options) {
  if (index.size != src.rows) {
    return InvalidArgument("index must have one element per row of src, {}, but has {}", src.rows,
                           index.size);
  }
  ASSIGN_OR_RETURN(const Segments segments, GroupByIndex(index, out.rows, "index", ctx.exec.pool));
  return Segment(ctx, reduce, segments, src, out, options);
}

Status IndexAdd(const Context& ctx, const Output& out, Indices index, const Features& src, float alpha) {
  return Scatter(ctx, Reduce::kSum, src, index, out, {.alpha = alpha, .beta = 1});
}

Status Gather(const Context& ctx, const Segments& segments, const Features& src, const Output& out) {
  RETURN_IF_ERROR(CheckFeatures(src, "src", segments.count()));
  RETURN_IF_ERROR(CheckFeatures(out, "out", segments.edges(), src.cols));
  RETURN_IF_ERROR(CheckSameType(src, "src", out, "out"));
  return SegmentBackward(ctx, Reduce::kSum, segments, src, {}, out);
}

void DivideByCount(const Context& ctx, const Segments& segments, const Features& x, const Output& out) {
  const std::vector<SegmentRange> ranges = DivideEvenly(
      segments.count(), ctx.exec.pool->size(), std::max<int64_t>(1, 8192 / std::max<int64_t>(1, x.cols)));
  ctx.exec.pool->Run(static_cast<int64_t>(ranges.size()), [&](int64_t i, int) {
    for (int64_t s = ranges[i].first; s < ranges[i].last; ++s) {
      const auto count = static_cast<float>(std::max(1, segments.ptr[s + 1] - segments.ptr[s]));
      for (int64_t c = 0; c < x.cols; ++c) {
        StoreElement(out.data, out.dtype, s * out.stride + c,
                     LoadElement(x.data, x.dtype, s * x.stride + c) / count);
      }
    }
  });
}

Status SegmentBackward(const Context& ctx, Reduce reduce, const Segments& segments, const Features& out_grad,
                       std::span<const int32_t> arg, const Output& src_grad) {
  RETURN_IF_ERROR(CheckFeatures(out_grad, "out_grad", segments.count()));
  RETURN_IF_ERROR(CheckFeatures(src_grad, "src_grad", segments.edges(), out_grad.cols));
  RETURN_IF_ERROR(CheckSameType(out_grad, "out_grad", src_grad, "src_grad"));
  if (IsExtreme(reduce)) RETURN_IF_ERROR(CheckArg(arg, out_grad.rows, out_grad.cols));
  ScratchScope scope(ctx);
  Features grad = out_grad;
  if (reduce == Reduce::kMean) {
    const Output divided = scope.Matrix(grad.dtype, grad.rows, grad.cols);
    DivideByCount(ctx, segments, grad, divided);
    grad = divided;
  }
  EdgeVector own(segments.edges());
  for (int32_t s = 0; s < segments.count(); ++s)
    std::fill(own.begin() + segments.ptr[s], own.begin() + segments.ptr[s + 1], s);
  RunEdgeMap(ctx, segments.edges(),
             {.lhs_rows = own.data(),
              .rhs_rows = own.data(),
              .out_rows = segments.edge_rows(),
              .lhs = grad.data,
              .rhs = grad.data,
              .lhs_stride = grad.stride,
              .rhs_stride = 0,
              .dtype = grad.dtype,
              .cols = grad.cols,
              .rhs_group = 1,
              .sum_group = 0,
              .op = Op::kCopyU,
              .alpha = 1,
              .mask = IsExtreme(reduce) ? arg.data() : nullptr,
              .out = src_grad.data,
              .out_stride = src_grad.stride});
  return OkStatus();
}

Status SegmentSoftmax(const Context& ctx, const Segments& segments, const Features& x, const Output& out) {
  RETURN_IF_ERROR(CheckFeatures(x, "x", segments.edges()));
  RETURN_IF_ERROR(CheckFeatures(out, "out", segments.edges(), x.cols));
  RETURN_IF_ERROR(CheckSameType(x, "x", out, "out"));
  RunSoftmax(ctx, segments,
             {.rows = segments.edge_rows(),
              .x = x.data,
              .grad = nullptr,
              .out = out.data,
              .x_stride = x.stride,
              .grad_stride = 0,
              .out_stride = out.stride,
              .dtype = x.dtype,
              .cols = x.cols});
  return OkStatus();
}

Status SegmentSoftmaxBackward(const Context& ctx, const Segments& segments, const Features& y,
                              const Features& y_grad, const Output& x_grad) {
  RETURN_IF_ERROR(CheckFeatures(y, "y", segments.edges()));
  RETURN_IF_ERROR(CheckFeatures(y_grad, "y_grad", segments.edges(), y.cols));
  RETURN_IF_ERROR(CheckFeatures(x_grad, "x_grad", segments.edges(), y.cols));
  RETURN_IF_ERROR(CheckSameType(y, "y", y_grad, "y_grad"));
  RETURN_IF_ERROR(CheckSameType(y, "y", x_grad, "x_grad"));
  RunSoftmax(ctx, segments,
             {.rows = segments.edge_rows(),
              .x = y.data,
              .grad = y_grad.data,
              .out = x_grad.data,
              .x_stride = y.stride,
              .grad_stride = y_grad.stride,
              .out_stride = x_grad.stride,
              .dtype = y.dtype,
              .cols = y.cols});
  return OkStatus();
}

}  // namespace moesaic::graph
