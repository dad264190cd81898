#include "quantizer/hessian.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {
namespace {

using tensor::kPanelRows;
using tensor::PackedFormat;

// Tokens multiplied at once: what a task reads of both operands, 128 and 256 inputs of so many tokens, takes
// 768 KiB in bf16 and stays in the L2 cache, and sums are read and written once for so many products.
constexpr int kChunk = 1024;
constexpr int kTaskRows = 128, kTaskPanels = 16;

int64_t StrideOf(int k) { return (k + 15) / 16 * 16 + 16; }  // an odd number of cache lines, mostly

// What one pass multiplies: tokens in pairs, inputs in panels of 16.
struct Operands {
  int tokens = 0;              // padded to 64
  int64_t row_bytes = 0;       // between rows of left
  std::span<std::byte> left;   // [panels * 16][row_bytes]: rows of inputs
  std::span<std::byte> right;  // [panels][tokens / 2][16] words, as tensor/packed.h lays out bf16 weights
};

// Tokens [first, first + count) as bf16 [x.tokens][row_inputs], times their gates; those past count are 0.
void RoundTokens(const kernels::ExecContext& ctx, const TokenRows& tokens, int first, int count, int k,
                 int row_inputs, std::span<uint16_t> to) {
  const auto prepare = ctx.kernels->gemm[static_cast<int>(PackedFormat::kBF16)].prepare;
  ctx.pool->Run(std::ssize(to) / row_inputs, [&](int64_t t, int) {
    uint16_t* row = to.data() + t * row_inputs;
    if (t >= count) {
      std::fill_n(row, row_inputs, uint16_t{0});
      return;
    }
    const int64_t at = (first + t) * tokens.stride;
    const float gate = tokens.gates.empty() ? 1 : tokens.gates[first + t];
    if (tokens.bf16 != nullptr && gate == 1) {
      for (int i = 0; i < k; ++i) row[i] = tokens.bf16[at + i].bits;
      std::fill(row + k, row + row_inputs, uint16_t{0});
      return;
    }
    std::vector<float> scaled;
    const float* values = tokens.f32 != nullptr ? tokens.f32 + at : nullptr;
    if (values == nullptr || gate != 1) {
      scaled.resize(k);
      for (int i = 0; i < k; ++i) {
        scaled[i] = gate * (values != nullptr ? values[i] : tensor::ToFloat(tokens.bf16[at + i]));
      }
      values = scaled.data();
    }
    prepare(values, k, row_inputs, 0, reinterpret_cast<std::byte*>(row));
  });
}

// Lays out 16 inputs of all tokens for both sides of the product.
void PackPanel(const uint16_t* rounded, int row_inputs, int panel, const Operands& to) {
  const int input = panel * kPanelRows, pairs = to.tokens / 2;
  auto* right = reinterpret_cast<uint32_t*>(to.right.data()) + int64_t{panel} * pairs * kPanelRows;
  std::byte* left = to.left.data() + input * to.row_bytes;
  for (int q = 0; q < pairs; q += kPanelRows) {
    uint32_t* square = right + q * kPanelRows;
    for (int p = 0; p < kPanelRows; ++p) {
      const uint16_t* low = rounded + int64_t{2} * (q + p) * row_inputs + input;
      const uint16_t* high = low + row_inputs;
      for (int c = 0; c < kPanelRows; ++c) {
        square[p * kPanelRows + c] = low[c] | static_cast<uint32_t>(high[c]) << 16;
      }
    }
    // The same words turned: a square of 16 lines of the cache to 16 others.
    for (int c = 0; c < kPanelRows; ++c) {
      auto* line = reinterpret_cast<uint32_t*>(left + c * to.row_bytes) + q;
      for (int p = 0; p < kPanelRows; ++p) line[p] = square[p * kPanelRows + c];
    }
  }
}

// A pass over the triangle of pairs of inputs (i, j), j <= i.
void Accumulate(const kernels::ExecContext& ctx, const Operands& x, int k, int64_t stride, float* sums) {
  struct Task {
    int row, panel;
  };
  std::vector<Task> tasks;
  for (int row = 0; row < k; row += kTaskRows) {
    for (int panel = 0; panel * kPanelRows < std::min(row + kTaskRows, k); panel += kTaskPanels) {
      tasks.push_back({row, panel});
    }
  }
  const int64_t panel_bytes = int64_t{x.tokens} * kPanelRows * 2;
  ctx.pool->Run(std::ssize(tasks), [&](int64_t i, int) {
    const Task& task = tasks[i];
    const int rows = std::min(kTaskRows, k - task.row), end = std::min(task.row + rows, k);
    const int first = task.panel * kPanelRows, columns = std::min(kTaskPanels * kPanelRows, end - first);
    kernels::GemmTile tile{};
    tile.a = x.left.data() + task.row * x.row_bytes;
    tile.a_stride = x.row_bytes;
    tile.w = x.right.data() + task.panel * panel_bytes;
    tile.panel_bytes = panel_bytes;
    tile.c = sums + task.row * stride + first;
    tile.c_stride = stride;
    tile.m = rows;
    tile.k_padded = x.tokens;
    tile.panels = (columns + kPanelRows - 1) / kPanelRows;
    tile.columns = columns;
    tile.accumulate = true;
    ctx.kernels->gemm[static_cast<int>(PackedFormat::kBF16)].tile(tile);
  });
}

double Sum(const std::vector<double>& parts) { return std::accumulate(parts.begin(), parts.end(), 0.0); }

}  // namespace

int64_t Hessian::Bytes(int k) { return k * StrideOf(k) * int64_t{sizeof(float)}; }

StatusOr<Hessian> Hessian::Create(int k) {
  MOESAIC_CHECK_GE(k, 1);
  Hessian hessian;
  hessian.k_ = k;
  hessian.stride_ = StrideOf(k);
  ASSIGN_OR_RETURN(hessian.memory_, runtime::Buffer::Allocate(static_cast<size_t>(Bytes(k)), /*huge=*/true));
  return hessian;
}

void Hessian::Add(const kernels::ExecContext& ctx, const TokenRows& tokens) {
  MOESAIC_CHECK((tokens.f32 != nullptr) != (tokens.bf16 != nullptr) || tokens.count == 0);
  MOESAIC_CHECK(tokens.gates.empty() || std::ssize(tokens.gates) == tokens.count);
  const int panels = (k_ + kPanelRows - 1) / kPanelRows;
  for (int first = 0; first < tokens.count; first += kChunk) {
    const int count = std::min(kChunk, tokens.count - first);
    const size_t mark = ctx.scratch->Mark();
    Operands x;
    x.tokens = (count + tensor::kPackedKUnit - 1) / tensor::kPackedKUnit * tensor::kPackedKUnit;
    x.row_bytes = int64_t{x.tokens} * 2 | 64;
    x.left = ctx.scratch->Take<std::byte>(panels * kPanelRows * x.row_bytes);
    x.right = ctx.scratch->Take<std::byte>(size_t(panels) * kPanelRows * x.tokens * 2);
    const int row_inputs = (k_ + tensor::kPackedKUnit - 1) / tensor::kPackedKUnit * tensor::kPackedKUnit;
    const auto rounded = ctx.scratch->Take<uint16_t>(size_t(x.tokens) * row_inputs);
    RoundTokens(ctx, tokens, first, count, k_, row_inputs, rounded);
    ctx.pool->Run(panels, [&](int64_t panel, int) {
      PackPanel(rounded.data(), row_inputs, static_cast<int>(panel), x);
    });
    Accumulate(ctx, x, k_, stride_, mutable_sums(0));
    ctx.scratch->Rewind(mark);
  }
  tokens_ += tokens.count;
  for (int t = 0; t < tokens.count; ++t) {
    const double square = tokens.gates.empty() ? 1 : double{tokens.gates[t]} * tokens.gates[t];
    weight_ += square;
    fourth_ += square * square;
  }
}

void Hessian::Merge(const kernels::ExecContext& ctx, const Hessian& other) {
  MOESAIC_CHECK_EQ(k_, other.k_);
  ctx.pool->Run(k_, [&](int64_t i, int) {
    float* to = mutable_sums(static_cast<int>(i));
    const float* from = other.sums(static_cast<int>(i));
    for (int64_t j = 0; j <= i; ++j) to[j] += from[j];
  });
  tokens_ += other.tokens_;
  weight_ += other.weight_;
  fourth_ += other.fourth_;
}

void Hessian::Clear(const kernels::ExecContext& ctx) {
  ctx.pool->Run(k_, [&](int64_t i, int) { std::fill_n(mutable_sums(static_cast<int>(i)), stride_, 0.0F); });
  tokens_ = 0;
  weight_ = fourth_ = 0;
}

double ShrinkTowards(const kernels::ExecContext& ctx, const Hessian& layer, Hessian* own) {
  MOESAIC_CHECK_EQ(layer.k_, own->k_);
  MOESAIC_CHECK(layer.weight_ > 0);
  const int k = layer.k_;
  std::vector<double> inverse(k);  // of each input's size in the layer; 0 where it has none
  double trace = 0;                // of own, inputs divided by their sizes
  int live = 0;
  const double own_weight = own->weight_ > 0 ? own->weight_ : 1;
  for (int i = 0; i < k; ++i) {
    const double square = layer.sums(i)[i] / layer.weight_;
    if (!(square > 0)) continue;
    inverse[i] = 1 / std::sqrt(square);
    trace += own->sums(i)[i] / own_weight / square;
    ++live;
  }
  const bool empty = own->weight_ <= 0 || !(trace > 0);
  const double size = empty ? 1 : trace / live;
  double share = 1;
  if (!empty) {
    std::vector<double> squares(k), distances(k);
    ctx.pool->Run(k, [&](int64_t row, int) {
      const int i = static_cast<int>(row);
      const float *a = own->sums(i), *b = layer.sums(i);
      double square = 0, distance = 0;
      for (int j = 0; j <= i; ++j) {
        const double mine = a[j] / own_weight * inverse[i] * inverse[j];
        const double theirs = b[j] / layer.weight_ * inverse[i] * inverse[j] * size;
        const double twice = i == j ? 1 : 2;
        square += twice * mine * mine;
        distance += twice * (mine - theirs) * (mine - theirs);
      }
      squares[i] = square;
      distances[i] = distance;
    });
    const double n = own->effective_tokens();
    // Of the square of own's norm, (trace^2 + norm^2) / n is noise; so much noise is in the distance, too.
    const double norm = std::max(0.0, (Sum(squares) - trace * trace / n) / (1 + 1 / n));
    const double noise = (trace * trace + norm) / n, distance = Sum(distances);
    share = distance > noise ? noise / distance : 1;
  }
  const auto mine = static_cast<float>(empty ? 0 : 1 - share);
  const auto theirs = static_cast<float>(share * size * own_weight / layer.weight_);
  ctx.pool->Run(k, [&](int64_t row, int) {
    const int i = static_cast<int>(row);
    float* to = own->mutable_sums(i);
    const float* from = layer.sums(i);
    for (int j = 0; j <= i; ++j) to[j] = mine * to[j] + theirs * from[j];
  });
  own->weight_ = own_weight;
  return share;
}

}  // namespace moesaic::quantizer
