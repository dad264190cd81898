#include "quantizer/hessian.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {
namespace {

using tensor::kPanelRows;
using tensor::PackedFormat;

// Tokens multiplied at once: sums are read and written once for so many products.
constexpr int kChunk = 2048;
// Of them, what one call of the kernel takes: 32 inputs of so many tokens, 32 KiB in bf16, stay in the L1
// cache while those of a task's rows pass by from the L2 cache.
constexpr int kPiece = 512;
constexpr int kRoundedTokens = 256;  // rounded at once
constexpr int kLargeTask = 512, kSmallTask = 256;
constexpr int kDiagonalRows = 128;  // of a task on the diagonal, whose upper half is left out

static_assert(kChunk % kRoundedTokens == 0 && kRoundedTokens % (2 * kPanelRows) == 0);

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
    std::vector<float> scaled;
    const float* values = nullptr;
    if (tokens.bf16 != nullptr) {
      scaled.resize(k);
      for (int i = 0; i < k; ++i) scaled[i] = tensor::ToFloat(tokens.bf16[at + i]) * gate;
      values = scaled.data();
    } else if (gate != 1) {
      scaled.assign(tokens.f32 + at, tokens.f32 + at + k);
      for (float& value : scaled) value *= gate;
      values = scaled.data();
    } else {
      values = tokens.f32 + at;
    }
    prepare(values, k, row_inputs, 0, reinterpret_cast<std::byte*>(row));
  });
}

double Sum(const std::vector<double>& parts) { return std::accumulate(parts.begin(), parts.end(), 0.0); }

}  // namespace

// What one pass multiplies: tokens in pairs, inputs in panels of 16.
struct Hessian::Operands {
  int tokens = 0, panels = 0;  // tokens padded to 64
  int64_t row_bytes = 0;       // between rows of left
  std::span<std::byte> left;   // [panels * 16][row_bytes]: rows of inputs
  // [tokens / kPiece][panels][kPiece / 2][16] words, as tensor/packed.h lays out bf16 weights; the last piece
  // may be shorter.
  std::span<std::byte> right;

  int PieceTokens(int piece) const { return std::min(kPiece, tokens - piece); }
  int64_t PanelBytes(int piece) const { return int64_t{PieceTokens(piece)} * kPanelRows * 2; }
  std::byte* Panel(int piece, int panel) const {
    return right.data() + int64_t{piece} * panels * kPanelRows * 2 + panel * PanelBytes(piece);
  }
  void Pack(const uint16_t* rounded, int row_inputs, int first, int count, int panel) const;
};

// Lays out 16 inputs of tokens [first, first + count), all in one piece, for both sides of the product.
void Hessian::Operands::Pack(const uint16_t* rounded, int row_inputs, int first, int count, int panel) const {
  const int input = panel * kPanelRows, piece = first / kPiece * kPiece;
  auto* right_words = reinterpret_cast<uint32_t*>(Panel(piece, panel)) + (first - piece) / 2 * kPanelRows;
  std::byte* left_rows = left.data() + input * row_bytes;
  for (int q = 0; q < count / 2; q += kPanelRows) {
    uint32_t* square = right_words + q * kPanelRows;
    for (int p = 0; p < kPanelRows; ++p) {
      const uint16_t* low = rounded + int64_t{2} * (q + p) * row_inputs + input;
      const uint16_t* high = low + row_inputs;
      for (int c = 0; c < kPanelRows; ++c) {
        square[p * kPanelRows + c] = low[c] | static_cast<uint32_t>(high[c]) << 16;
      }
    }
    // The same words turned: a square of 16 lines of the cache to 16 others.
    for (int c = 0; c < kPanelRows; ++c) {
      auto* line = reinterpret_cast<uint32_t*>(left_rows + c * row_bytes) + first / 2 + q;
      for (int p = 0; p < kPanelRows; ++p) line[p] = square[p * kPanelRows + c];
    }
  }
}

// A pass over the triangle of pairs of inputs (i, j), j <= i.
void Hessian::Accumulate(const kernels::ExecContext& ctx, const Operands& x) {
  struct Task {
    int row, first;
  };
  const int side = k_ >= 8 * kSmallTask * ctx.pool->size() ? kLargeTask : kSmallTask;
  std::vector<Task> tasks;
  for (int row = 0; row < k_; row += side) {
    for (int first = 0; first <= row; first += side) tasks.push_back({row, first});
  }
  const auto multiply = ctx.kernels->gemm[static_cast<int>(PackedFormat::kBF16)].tile;
  ctx.pool->Run(std::ssize(tasks), [&](int64_t i, int) {
    const Task& task = tasks[i];
    const int step = task.first == task.row ? kDiagonalRows : side;
    for (int row = task.row; row < std::min(task.row + side, k_); row += step) {
      const int rows = std::min(step, k_ - row), end = std::min(task.first + side, row + rows);
      for (int piece = 0; piece < x.tokens; piece += kPiece) {
        kernels::GemmTile tile{};
        tile.a = x.left.data() + row * x.row_bytes + int64_t{2} * piece;
        tile.a_stride = x.row_bytes;
        tile.w = x.Panel(piece, task.first / kPanelRows);
        tile.panel_bytes = x.PanelBytes(piece);
        tile.c = mutable_sums(row) + task.first;
        tile.c_stride = Stride(row);
        tile.m = rows;
        tile.k_padded = x.PieceTokens(piece);
        tile.columns = end - task.first;
        tile.panels = base::CeilDiv(tile.columns, kPanelRows);
        tile.accumulate = true;
        multiply(tile);
      }
    }
  });
}

int64_t Hessian::Stride(int i) const {
  const int end = std::min(i / kBlockRows * kBlockRows + kBlockRows, k_);
  return base::RoundUp(end, 16) + 16;  // an odd number of cache lines, mostly
}

// Blocks before the last are whole.
int64_t Hessian::Offset(int i) const {
  const int64_t block = i / kBlockRows;
  return kBlockRows * (kBlockRows * (block * (block + 1) / 2) + 16 * block) + i % kBlockRows * Stride(i);
}

int64_t Hessian::Bytes(int k) {
  Hessian shape;
  shape.k_ = k;
  return (shape.Offset(k - 1) + shape.Stride(k - 1)) * int64_t{sizeof(float)};
}

StatusOr<Hessian> Hessian::Create(int k) {
  MOESAIC_CHECK_GE(k, 1);
  Hessian hessian;
  hessian.k_ = k;
  ASSIGN_OR_RETURN(hessian.memory_, runtime::Buffer::Allocate(static_cast<size_t>(Bytes(k)), /*huge=*/true));
  return hessian;
}

void Hessian::Add(const kernels::ExecContext& ctx, const TokenRows& tokens) {
  MOESAIC_CHECK((tokens.f32 != nullptr) != (tokens.bf16 != nullptr) || tokens.count == 0);
  MOESAIC_CHECK(tokens.gates.empty() || std::ssize(tokens.gates) == tokens.count);
  const int row_inputs = base::RoundUp(k_, tensor::kPackedKUnit);
  for (int first = 0; first < tokens.count; first += kChunk) {
    const int count = std::min(kChunk, tokens.count - first);
    const size_t mark = ctx.scratch->Mark();
    Operands x;
    x.tokens = base::RoundUp(count, tensor::kPackedKUnit);
    x.panels = base::RoundUp(k_, kPanelRows) / kPanelRows;
    x.row_bytes = int64_t{x.tokens} * 2 | 64;
    x.left = ctx.scratch->Take<std::byte>(x.panels * kPanelRows * x.row_bytes);
    x.right = ctx.scratch->Take<std::byte>(size_t(x.panels) * kPanelRows * x.tokens * 2);
    const auto rounded = ctx.scratch->Take<uint16_t>(size_t(kRoundedTokens) * row_inputs);
    for (int at = 0; at < x.tokens; at += kRoundedTokens) {
      const int padded = std::min(kRoundedTokens, x.tokens - at);
      RoundTokens(ctx, tokens, first + at, std::min(padded, count - at), k_, row_inputs,
                  rounded.first(size_t(padded) * row_inputs));
      ctx.pool->Run(x.panels, [&](int64_t panel, int) {
        x.Pack(rounded.data(), row_inputs, at, padded, static_cast<int>(panel));
      });
    }
    Accumulate(ctx, x);
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
  ctx.pool->Run(k_, [&](int64_t row, int) {
    const auto i = static_cast<int>(row);
    std::fill_n(mutable_sums(i), i + 1, 0.0F);
  });
  tokens_ = 0;
  weight_ = fourth_ = 0;
}

Status Hessian::Restart(const kernels::ExecContext& ctx, int k) {
  MOESAIC_CHECK_GE(k, 1);
  RETURN_IF_ERROR(memory_.Reserve(static_cast<size_t>(Bytes(k)), /*huge=*/true));
  k_ = k;
  Clear(ctx);
  return OkStatus();
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
