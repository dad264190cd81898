#include "quantizer/gptq/hessian.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::quantizer {
namespace {

double Sum(const std::vector<double>& parts) { return std::accumulate(parts.begin(), parts.end(), 0.0); }

}  // namespace

int64_t Hessian::Stride(int i) const {
  const int end = std::min(i / kBlockRows * kBlockRows + kBlockRows, k_);
  return base::RoundUp(end, 16) + 16;  // an odd number of cache lines, mostly
}

// Blocks before the last are complete.
int64_t Hessian::Offset(int i) const {
  const int64_t block = i / kBlockRows;
  return kBlockRows * (kBlockRows * (block * (block + 1) / 2) + 16 * block) + i % kBlockRows * Stride(i);
}

bool Hessian::any() const {
  for (int i = 0; i < k_; ++i) {
    if (sums(i)[i] != 0) return true;  // also if it is not a number
  }
  return false;
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
  AddProducts(ctx, tokens, {},
              {.k = k_,
               .region = ProductSums::Region::kLower,
               .row = [this](int i) { return mutable_sums(i); },
               .stride = [this](int i) { return Stride(i); }});
  tokens_ += tokens.count;
}

void Hessian::Merge(const kernels::ExecContext& ctx, const Hessian& other) {
  MOESAIC_CHECK_EQ(k_, other.k_);
  ctx.pool->Run(k_, [&](int64_t i, int) {
    float* to = mutable_sums(static_cast<int>(i));
    const float* from = other.sums(static_cast<int>(i));
    for (int64_t j = 0; j <= i; ++j) to[j] += from[j];
  });
  tokens_ += other.tokens_;
}

void Hessian::AddSums(const kernels::ExecContext& ctx, int first, int count, const float* sums,
                      int64_t stride) {
  MOESAIC_CHECK_LE(first + count, k_);
  ctx.pool->Run(count, [&](int64_t row, int) {
    const int i = first + static_cast<int>(row);
    float* to = mutable_sums(i);
    const float* from = sums + row * stride;
    for (int j = 0; j <= i; ++j) to[j] += from[j];
  });
}

void Hessian::Clear(const kernels::ExecContext& ctx) {
  ctx.pool->Run(k_, [&](int64_t row, int) {
    const auto i = static_cast<int>(row);
    std::fill_n(mutable_sums(i), i + 1, 0.0F);
  });
  tokens_ = 0;
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
  MOESAIC_CHECK(layer.tokens_ > 0);
  const int k = layer.k_;
  std::vector<double> inverse(k);  // reciprocal of each input's size in the layer; 0 if it has none
  double trace = 0;                // trace of own, with inputs divided by their sizes
  int live = 0;
  const auto own_tokens = static_cast<double>(std::max<int64_t>(own->tokens_, 1));
  const auto layer_tokens = static_cast<double>(layer.tokens_);
  for (int i = 0; i < k; ++i) {
    const double square = layer.sums(i)[i] / layer_tokens;
    if (!(square > 0)) continue;
    inverse[i] = 1 / std::sqrt(square);
    trace += own->sums(i)[i] / own_tokens / square;
    ++live;
  }
  const bool empty = own->tokens_ == 0 || !(trace > 0);
  const double size = empty ? 1 : trace / live;
  double share = 1;
  if (!empty) {
    std::vector<double> squares(k), distances(k);
    ctx.pool->Run(k, [&](int64_t row, int) {
      const int i = static_cast<int>(row);
      const float *a = own->sums(i), *b = layer.sums(i);
      double square = 0, distance = 0;
      for (int j = 0; j <= i; ++j) {
        const double mine = a[j] / own_tokens * inverse[i] * inverse[j];
        const double theirs = b[j] / layer_tokens * inverse[i] * inverse[j] * size;
        const double twice = i == j ? 1 : 2;
        square += twice * mine * mine;
        distance += twice * (mine - theirs) * (mine - theirs);
      }
      squares[i] = square;
      distances[i] = distance;
    });
    const auto n = static_cast<double>(own->tokens_);
    // (trace^2 + norm^2) / n of own's squared norm is noise; the squared distance contains the same noise.
    const double norm = std::max(0.0, (Sum(squares) - trace * trace / n) / (1 + 1 / n));
    const double noise = (trace * trace + norm) / n, distance = Sum(distances);
    share = distance > noise ? noise / distance : 1;
  }
  const auto mine = static_cast<float>(empty ? 0 : 1 - share);
  const auto theirs = static_cast<float>(share * size * own_tokens / layer_tokens);
  ctx.pool->Run(k, [&](int64_t row, int) {
    const int i = static_cast<int>(row);
    float* to = own->mutable_sums(i);
    const float* from = layer.sums(i);
    for (int j = 0; j <= i; ++j) to[j] = mine * to[j] + theirs * from[j];
  });
  own->tokens_ = std::max<int64_t>(own->tokens_, 1);
  return share;
}

}  // namespace moesaic::quantizer
