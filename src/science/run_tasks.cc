#include "science/run_tasks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/round.h"
#include "science/elements.h"

namespace moesaic::graph {
namespace {

// A part of a hub: positions bounds[0] to bounds[1].
struct HubPart {
  int32_t bounds[2];
};

// Combines the parts [parts, cols] of one hub in order.
void CombineParts(const ReduceTask& t, int32_t hub, int32_t edges, int64_t parts, const float* values,
                  const int32_t* args) {
  const float sign = t.reduce == Reduce::kMin ? -1.0F : 1.0F;
  for (int64_t col = 0; col < t.cols; ++col) {
    float total = values[col];
    int64_t chosen = 0;
    for (int64_t i = 1; i < parts; ++i) {
      const float x = values[i * t.cols + col];
      if (!IsExtreme(t.reduce)) {
        total += x;
      } else if (sign * x > sign * total || (std::isnan(x) && !std::isnan(total))) {
        total = x;
        chosen = i;
      }
    }
    const int64_t at = hub * t.out_stride + col;
    if (IsExtreme(t.reduce)) {
      if (t.arg != nullptr) t.arg[hub * t.cols + col] = args[chosen * t.cols + col];
    } else {
      if (t.reduce == Reduce::kMean) total /= static_cast<float>(edges);
      total *= t.alpha;
      if (t.beta != 0) total += t.beta * LoadElement(t.out, t.dtype, at);
    }
    StoreElement(t.out, t.dtype, at, total);
  }
}

void ReduceHubs(const Context& ctx, const Segments& segments, const ReduceTask& task) {
  std::vector<HubPart> parts;
  std::vector<size_t> begins;
  for (const int32_t hub : segments.hubs) {
    begins.push_back(parts.size());
    for (int32_t p = segments.ptr[hub]; p < segments.ptr[hub + 1];
         p += std::min(kHubEdges, segments.ptr[hub + 1] - p))
      parts.push_back({{p, p + std::min(kHubEdges, segments.ptr[hub + 1] - p)}});
  }
  begins.push_back(parts.size());
  const bool args = IsExtreme(task.reduce) && task.arg != nullptr;
  float* values = ctx.exec.scratch->Take<float>(parts.size() * task.cols).data();
  int32_t* chosen = args ? ctx.exec.scratch->Take<int32_t>(parts.size() * task.cols).data() : nullptr;
  ctx.exec.pool->Run(static_cast<int64_t>(parts.size()), [&](int64_t i, int) {
    ReduceTask part = task;
    part.ptr = parts[i].bounds;
    part.first = 0;
    part.last = 1;
    part.out = values + i * task.cols;
    part.out_stride = task.cols;
    part.out_f32 = true;
    if (args) part.arg = chosen + i * task.cols;
    ctx.graph->reduce(part);
  });
  for (size_t h = 0; h < segments.hubs.size(); ++h) {
    const int32_t hub = segments.hubs[h];
    const int64_t first = static_cast<int64_t>(begins[h]) * task.cols;
    CombineParts(task, hub, segments.ptr[hub + 1] - segments.ptr[hub], begins[h + 1] - begins[h],
                 values + first, args ? chosen + first : nullptr);
  }
}

// Copies rows[p] of x [.., stride] to row p of out [last, cols] for p in [first, last).
template <typename T>
void CopyRows(const void* x, int64_t stride, const int32_t* rows, int64_t first, int64_t last, int64_t cols,
              void* out) {
  const auto* from = static_cast<const T*>(x);
  auto* to = static_cast<T*>(out);
  if (cols == 1) {
    for (int64_t p = first; p < last; ++p) to[p] = from[rows[p] * stride];
    return;
  }
  for (int64_t p = first; p < last; ++p) std::copy_n(from + rows[p] * stride, cols, to + p * cols);
}

// Copies the edges' operand in the order of the positions. A sum then reads it in order; its loads of rows of
// u would hide few of the cache misses of a random order, while those of a copy hide one another.
void OrderEdges(const Context& ctx, int64_t edges, ReduceTask& task) {
  constexpr int64_t kEdges = 1 << 14;
  const int64_t cols = task.cols / task.e_group;
  void* ordered = ctx.exec.scratch->TakeBytes(tensor::BytesOf(task.dtype, edges * cols) + 64);
  ctx.exec.pool->Run(base::CeilDiv(edges, kEdges), [&](int64_t i, int) {
    const int64_t first = i * kEdges, last = std::min(edges, first + kEdges);
    const auto copy = task.dtype == tensor::DType::kF32 ? CopyRows<float> : CopyRows<uint16_t>;
    copy(task.e, task.e_stride, task.e_rows, first, last, cols, ordered);
  });
  task.e = ordered;
  task.e_stride = cols;
  task.e_rows = nullptr;
}

// Divides a sum into tasks of one block of columns each, whose columns of u are copied to adjacent rows: such
// a block needs few entries of the TLB. Returns the task itself if it cannot be divided.
std::vector<ReduceTask> ColumnBlocks(const Context& ctx, int64_t u_rows, int64_t columns,
                                     const ReduceTask& task) {
  if (!task.by_columns || (task.op != Op::kCopyU && task.e_group % columns != 0)) return {task};
  std::vector<ReduceTask> blocks;
  for (int64_t first = 0; first < task.cols; first += columns) {
    ReduceTask block = task;
    block.cols = std::min(columns, task.cols - first);
    block.by_columns = false;
    const auto at = [&](const void* x, int64_t column) {
      return static_cast<const std::byte*>(x) + tensor::BytesOf(task.dtype, column);
    };
    if (task.op != Op::kCopyU) {
      block.e = at(task.e, first / task.e_group);
      block.e_group = block.cols;
    }
    block.out = const_cast<std::byte*>(at(task.out, first));
    auto* copy = static_cast<std::byte*>(
        ctx.exec.scratch->TakeBytes(tensor::BytesOf(task.dtype, u_rows * block.cols) + 64));
    for (int64_t r = 0; r < u_rows; ++r) {
      std::memcpy(copy + tensor::BytesOf(task.dtype, r * block.cols), at(task.u, r * task.u_stride + first),
                  tensor::BytesOf(task.dtype, block.cols));
    }
    block.u = copy;
    block.u_stride = block.cols;
    blocks.push_back(block);
  }
  return blocks;
}

}  // namespace

Status CheckFeatures(const Features& x, const char* name, int64_t rows, int64_t cols) {
  if (!IsFeatureType(x.dtype)) {
    return InvalidArgument("{} must be f32, bf16 or f16, not {}", name, tensor::DTypeName(x.dtype));
  }
  if (x.rows != rows) return InvalidArgument("{} must have {} rows, but has {}", name, rows, x.rows);
  if (cols >= 0 && x.cols != cols)
    return InvalidArgument("{} must have {} columns, but has {}", name, cols, x.cols);
  if (x.data == nullptr && x.rows > 0 && x.cols > 0) return InvalidArgument("{} has no data", name);
  if (x.rows > 1 && x.stride < x.cols) {
    return InvalidArgument("rows of {} must not overlap: {} columns need a stride of {} or more, not {}",
                           name, x.cols, x.cols, x.stride);
  }
  return OkStatus();
}

Status CheckSameType(const Features& a, const char* a_name, const Features& b, const char* b_name) {
  if (a.dtype == b.dtype) return OkStatus();
  return InvalidArgument("{} and {} must have one type, but are {} and {}", a_name, b_name,
                         tensor::DTypeName(a.dtype), tensor::DTypeName(b.dtype));
}

StatusOr<int64_t> BroadcastGroup(const Features& u, const char* u_name, const Features& e,
                                 const char* e_name) {
  if (e.cols == u.cols) return 1;
  if (e.cols < 1 || u.cols % e.cols != 0) {
    return InvalidArgument("the columns of {} must divide the {} columns of {}, but are {}", e_name, u.cols,
                           u_name, e.cols);
  }
  return u.cols / e.cols;
}

Status CheckArg(std::span<const int32_t> arg, int64_t rows, int64_t cols) {
  if (static_cast<int64_t>(arg.size()) == rows * cols) return OkStatus();
  return InvalidArgument("arg must have {} elements, but has {}", rows * cols, arg.size());
}

void FillZeros(const Output& out) {
  const size_t bytes = tensor::BytesOf(out.dtype, out.cols);
  for (int64_t r = 0; r < out.rows && bytes > 0; ++r)
    std::memset(static_cast<std::byte*>(out.data) + tensor::BytesOf(out.dtype, r * out.stride), 0, bytes);
}

void RunReduce(const Context& ctx, const Segments& segments, ReduceTask task, int64_t u_rows) {
  constexpr int64_t kBlockColumns = 64;  // the block of AVX2's micro-kernel
  if (task.cols == 0) return;
  const ScratchScope scope(ctx);
  if (task.u_rows != nullptr) {
    const int64_t cached = ctx.graph->cached_bytes;
    const auto bytes = [&](int64_t columns) {
      return u_rows * static_cast<int64_t>(tensor::BytesOf(task.dtype, columns));
    };
    task.by_columns = bytes(task.cols) > cached && bytes(std::min(kBlockColumns, task.cols)) <= cached;
    task.prefetch = bytes(task.cols) > cached && !task.by_columns;
  }
  // Orders of operands are of no use to a maximum, which needs the numbers of edges, and to few edges.
  constexpr int64_t kWorthACopy = 4;  // edges per row of u, or columns per element of e
  const bool sum = !IsExtreme(task.reduce) && task.arg == nullptr;
  if (ctx.graph->order_edges && sum && task.op != Op::kCopyU && task.e_rows != nullptr &&
      task.e_group >= kWorthACopy)
    OrderEdges(ctx, segments.edges(), task);
  if (task.e == nullptr) task.e = task.u;  // micro-kernels compute the address in any case
  task.out_f32 = false;
  constexpr int64_t kStreamedElements = 2 << 20;  // 8 MiB of f32
  task.stream = sum && task.beta == 0 && segments.count() * task.cols >= kStreamedElements;
  const bool divide = sum && u_rows * kWorthACopy <= segments.edges();
  const std::vector<ReduceTask> blocks =
      divide ? ColumnBlocks(ctx, u_rows, kBlockColumns, task) : std::vector<ReduceTask>{task};
  const std::vector<SegmentRange> ranges = DivideByEdges(segments, ctx.exec.pool->size());
  for (const ReduceTask& block : blocks) {
    if (!segments.hubs.empty()) ReduceHubs(ctx, segments, block);
  }
  const auto count = static_cast<int64_t>(ranges.size());
  ctx.exec.pool->Run(count * static_cast<int64_t>(blocks.size()), [&](int64_t i, int) {
    ReduceTask part = blocks[i / count];
    part.ptr = segments.ptr.data();
    part.first = ranges[i % count].first;
    part.last = ranges[i % count].last;
    ctx.graph->reduce(part);
  });
}

void RunEdgeMap(const Context& ctx, int32_t edges, const EdgeMapTask& task) {
  if (task.cols == 0) return;
  const std::vector<SegmentRange> ranges =
      DivideEvenly(edges, ctx.exec.pool->size(), std::max<int64_t>(64, (1 << 15) / task.cols));
  ctx.exec.pool->Run(static_cast<int64_t>(ranges.size()), [&](int64_t i, int) {
    EdgeMapTask part = task;
    if (part.rhs == nullptr) part.rhs = part.lhs;
    part.first = ranges[i].first;
    part.last = ranges[i].last;
    ctx.graph->edge_map(part);
  });
}

void RunSoftmax(const Context& ctx, const Segments& segments, SoftmaxTask task) {
  task.ptr = segments.ptr.data();
  // A softmax of a hub is not divided: its three passes are a small part of a model.
  std::vector<SegmentRange> ranges = DivideByEdges(segments, ctx.exec.pool->size());
  for (const int32_t hub : segments.hubs) ranges.push_back({hub, hub + 1});
  ctx.exec.pool->Run(static_cast<int64_t>(ranges.size()), [&](int64_t i, int) {
    SoftmaxTask part = task;
    part.first = ranges[i].first;
    part.last = ranges[i].last;
    ctx.graph->softmax(part);
  });
}

Output ScratchScope::Matrix(tensor::DType dtype, int64_t rows, int64_t cols) {
  return {arena_->TakeBytes(tensor::BytesOf(dtype, rows * cols) + 64), dtype, rows, cols, cols};
}

}  // namespace moesaic::graph
