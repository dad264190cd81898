#include "layers/shard_sum.h"

#include <algorithm>

namespace moesaic::layers {
namespace {

// A part takes about this time at 1 Gbit/s: 2 ms. Smaller parts would wait for their first byte instead.
constexpr int64_t kPartValues = 64 << 10;
constexpr int kMaxParts = 4;

}  // namespace

ShardSum::ShardSum(const Step& step, ScratchScope& scratch, float* out, int columns)
    : step_(step), out_(out), columns_(columns) {
  if (!step.has_shards()) return;
  const int64_t values = int64_t{step.rows()} * columns;
  parts_.count = static_cast<int>(std::clamp<int64_t>(values / kPartValues, 1, kMaxParts));
  if (parts_.count == 1) return;
  sums_ = scratch.Take<float>(values);
  parts_.done = [this](int first, int count) { Start(first, count); };
  step.ctx.pool->SetPoll([groups = step.groups] { groups->Progress(); });
}

ShardSum::~ShardSum() {
  if (sums_ != nullptr) step_.ctx.pool->SetPoll(nullptr);
}

void ShardSum::CopyPart(kernels::ColumnParts::Range part, bool to_output) {
  const int64_t rows = step_.rows();
  float* sums = sums_ + rows * part.first;
  for (int64_t row = 0; row < rows; ++row, sums += part.count) {
    float* out = out_ + row * columns_ + part.first;
    std::copy_n(to_output ? sums : out, part.count, to_output ? out : sums);
  }
}

void ShardSum::Start(int first, int count) {
  CopyPart({first, count}, /*to_output=*/false);
  const int64_t rows = step_.rows();
  step_.groups->StartSum({sums_ + rows * first, static_cast<size_t>(rows * count)});
}

void ShardSum::Wait() {
  if (sums_ == nullptr) return step_.Sum(out_, int64_t{step_.rows()} * columns_);
  step_.groups->FinishSums();
  for (int part = 0; part < parts_.count; ++part) CopyPart(parts_.Of(columns_, part), /*to_output=*/true);
}

}  // namespace moesaic::layers
