#include "quantizer/format/grid.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "base/check.h"
#include "kernels/kernel_table.h"
#include "kernels/rounding.h"
#include "tensor/dtype.h"
#include "tensor/group_format.h"

namespace moesaic::quantizer {
namespace {

using kernels::Rounding;

constexpr float kMinScale = 0x1p-126F;  // smallest normal bf16; denormal scales lose bits
constexpr float kMinE4M3 = 0x1p-9F;
constexpr int kRefinements = 4;

// A block of rows and columns that share a scale.
struct Block {
  const float* values;
  const float* importance;  // weights of its columns, or null
  int rows, columns;
  int64_t stride;
};

float ErrorOf(const Rounding& rounding, const Block& block, float scale) {
  float sum = 0;
  for (int r = 0; r < block.rows; ++r) {
    sum += rounding.error(block.values + r * block.stride, block.importance, block.columns, scale);
  }
  return sum;
}

float LargestOf(const Rounding& rounding, const Block& block) {
  uint32_t largest = 0;
  for (int r = 0; r < block.rows; ++r) {
    largest = std::max(largest, rounding.largest_bits(block.values + r * block.stride, block.columns));
  }
  return std::bit_cast<float>(largest);
}

// Returns the number that a block's largest magnitude is mapped to. For int4 it is halfway between the ends
// -8 and 7, as in compressed-tensors.
float EndOf(GridKind kind) {
  static constexpr float kEnds[kernels::kNumberGrids] = {127, 7.5F, 6, 448};
  return kEnds[static_cast<int>(NumbersOf(kind))];
}

// Returns the nearest scale that can be stored.
float StoredScale(GridKind kind, float scale) {
  if (kind == GridKind::kNvfp4) {
    return std::max(tensor::F8E4M3ToFloat(tensor::FloatToF8E4M3(scale)), kMinE4M3);
  }
  const float stored = tensor::ToFloat(tensor::ToBF16(scale));
  return std::copysign(std::max(std::fabs(stored), kMinScale), stored);
}

// Candidate scales for a block whose minmax scale is `plain`, which is among them. For NVFP4 these are all
// scales that map the largest value to 3 up to 11.
using Scales = std::array<float, 2 * kernels::kRoundScales>;
int CandidateScales(GridKind kind, float plain, Scales* scales) {
  const auto code = static_cast<int>(tensor::FloatToF8E4M3(plain));
  for (int i = 0; i < kernels::kRoundScales; ++i) {
    const auto step = static_cast<float>(i);
    float& scale = (*scales)[i];
    switch (kind) {
      case GridKind::kInt8Channel:
      case GridKind::kInt8Group:  // down to a clipping of 0.6
        scale = StoredScale(kind, plain * (1 - 0.025F * step));
        break;
      case GridKind::kInt4Group:  // from a largest value of 7 down to a clipping of 0.5, and mirrored
        scale = StoredScale(kind, plain * (1 - 0.04F * (step - 2)));
        (*scales)[kernels::kRoundScales + i] = -scale;
        break;
      case GridKind::kNvfp4:
        scale = tensor::F8E4M3ToFloat(static_cast<uint8_t>(std::clamp(code - 7 + i, 1, 0x7e)));
        break;
      default:  // FP8 repeats at every power of two; larger scales only change the smallest numbers
        scale = StoredScale(kind, plain * (1 + 0.0625F * step));
    }
  }
  return kind == GridKind::kInt4Group ? 2 * kernels::kRoundScales : kernels::kRoundScales;
}

// Returns the stored scale of least error. `unit` is its divisor: the global scale for NVFP4, else 1.
float SearchScale(GridKind kind, const Rounding& rounding, const Block& block, float plain, float unit) {
  Scales scales, effective;
  const int count = CandidateScales(kind, plain, &scales);
  std::array<float, 2 * kernels::kRoundScales> errors{};
  for (int i = 0; i < count; ++i) effective[i] = scales[i] / unit;
  for (int r = 0; r < block.rows; ++r) {
    for (int i = 0; i < count; i += kernels::kRoundScales) {
      float row_errors[kernels::kRoundScales];
      rounding.scale_errors(block.values + r * block.stride, block.importance, block.columns, &effective[i],
                            row_errors);
      for (int l = 0; l < kernels::kRoundScales; ++l) errors[i + l] += row_errors[l];
    }
  }
  const auto least = std::min_element(errors.begin(), errors.begin() + count);
  float best = scales[least - errors.begin()], error = *least;
  if (kind == GridKind::kNvfp4) return best;  // all candidate scales were tried
  // Alternates between codes for the scale and the scale for the codes (SSZ) while the error falls.
  for (int i = 0; i < kRefinements; ++i) {
    float product = 0, square = 0;
    for (int r = 0; r < block.rows; ++r) {
      float sums[2];
      rounding.scale_sums(block.values + r * block.stride, block.importance, block.columns, best, sums);
      product += sums[0];
      square += sums[1];
    }
    if (!(square > 0)) break;
    const float scale = StoredScale(kind, product / square);
    if (scale == best || !std::isfinite(scale)) break;
    const float refined = ErrorOf(rounding, block, scale);
    if (!(refined < error)) break;
    error = refined;
    best = scale;
  }
  return best;
}

float ScaleOfBlock(const Grid& grid, const Rounding& rounding, const Block& block, bool by_error,
                   float unit) {
  const float plain = LargestOf(rounding, block) / EndOf(grid.kind) * unit;
  if (plain == 0 || !by_error) return StoredScale(grid.kind, plain);
  return SearchScale(grid.kind, rounding, block, plain, unit);
}

const Rounding& RoundingOf(const kernels::ExecContext& ctx, const Grid& grid) {
  return ctx.kernels->rounding[static_cast<int>(grid.numbers())];
}

using CodeValues = std::array<std::array<float, 256>, kernels::kNumberGrids>;
const std::array<float, 256>& ValuesOfCodes(GridKind kind) {
  static const CodeValues kValues = [] {
    CodeValues values{};
    for (int i = 0; i < 256; ++i) {
      const auto code = static_cast<uint8_t>(i);
      values[0][i] = values[1][i] = static_cast<int8_t>(code);
      values[2][i] = tensor::kE2M1[code & 15];
      values[3][i] = tensor::F8E4M3ToFloat(code);
    }
    return values;
  }();
  return kValues[static_cast<int>(NumbersOf(kind))];
}

Status NotFinite(const float* rows, int n, int k) {
  for (int64_t i = 0; i < int64_t{n} * k; ++i) {
    if (!(std::fabs(rows[i]) < kTooLarge)) {
      return DataLoss("the weight of output {}, input {} must be a finite number below 2^96 and is {}", i / k,
                      i % k, rows[i]);
    }
  }
  return OkStatus();
}

}  // namespace

Status CheckGrid(const Grid& grid, int k) {
  const auto fits = [&](bool group, const char* groups, bool divides) -> Status {
    if (!group) {
      return InvalidArgument("groups of this grid must have {} inputs, found {}", groups, grid.group);
    }
    if (divides && k % grid.group != 0) {
      return InvalidArgument("{} inputs are not a multiple of the group size {}", k, grid.group);
    }
    return OkStatus();
  };
  switch (grid.kind) {
    case GridKind::kInt8Channel:
      return OkStatus();
    case GridKind::kInt8Group:
      if (grid.group == 0) return OkStatus();
      [[fallthrough]];
    case GridKind::kInt4Group:
      return fits(grid.group == 32 || grid.group == 64 || grid.group == 128, "32, 64 or 128", true);
    case GridKind::kNvfp4:
      return fits(grid.group == 16, "16", true);
    default:
      return fits(grid.group == 128, "128", false);
  }
}

float CodeValue(GridKind kind, uint8_t code) { return ValuesOfCodes(kind)[code]; }

float Nvfp4GlobalScale(float amax, bool by_error) {
  const float largest = std::max(amax, 0x1p-96F);  // keeps the result finite
  // A block's scale is at most 256 before the search, and 256 x 1.5 if its largest value is mapped to 4
  // instead of 6.
  return (by_error ? 256.0F : 448.0F) * 6 / largest;
}

uint32_t LargestBits(const kernels::ExecContext& ctx, const float* rows, int n, int k, int64_t stride) {
  std::vector<uint32_t> largest(n);
  const Rounding& rounding = ctx.kernels->rounding[0];
  ctx.pool->Run(n, [&](int64_t r, int) { largest[r] = rounding.largest_bits(rows + r * stride, k); });
  return n > 0 ? *std::ranges::max_element(largest) : 0;
}

StatusOr<float> LargestMagnitude(const kernels::ExecContext& ctx, const float* rows, int n, int k) {
  const uint32_t bits = LargestBits(ctx, rows, n, k, k);
  if (bits >= std::bit_cast<uint32_t>(kTooLarge)) return NotFinite(rows, n, k);
  return std::bit_cast<float>(bits);
}

StatusOr<QuantizedMatrix> ChooseScales(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                       int n, int k, const ScaleSearch& search) {
  MOESAIC_CHECK(search.importance.empty() || std::ssize(search.importance) == k);
  RETURN_IF_ERROR(CheckGrid(grid, k));
  ASSIGN_OR_RETURN(const float amax, LargestMagnitude(ctx, rows, n, k));
  QuantizedMatrix result{.grid = grid, .n = n, .k = k, .codes = {}, .scales = {}};
  if (grid.kind == GridKind::kNvfp4) {
    result.global_scale =
        search.global_scale != 0 ? search.global_scale : Nvfp4GlobalScale(amax, search.by_error);
  }
  const int columns = grid.scale_columns(k), inputs = grid.group_inputs(k), outputs = grid.group_outputs();
  result.scales.resize(static_cast<size_t>(grid.scale_rows(n)) * columns);
  const Rounding& rounding = RoundingOf(ctx, grid);
  ctx.pool->Run(grid.scale_rows(n), [&](int64_t row, int) {
    const auto first = static_cast<int>(row) * outputs;
    for (int column = 0; column < columns; ++column) {
      const int begin = column * inputs;
      const Block block{
          .values = rows + int64_t{first} * k + begin,
          .importance = search.importance.empty() ? nullptr : search.importance.data() + begin,
          .rows = std::min(outputs, n - first),
          .columns = std::min(inputs, k - begin),
          .stride = k,
      };
      result.scales[row * columns + column] =
          ScaleOfBlock(grid, rounding, block, search.by_error, result.global_scale);
    }
  });
  return result;
}

StatusOr<QuantizedMatrix> RoundToNearest(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                         int n, int k, const ScaleSearch& search) {
  ASSIGN_OR_RETURN(QuantizedMatrix result, ChooseScales(ctx, grid, rows, n, k, search));
  result.codes.resize(static_cast<size_t>(n) * k);
  const int inputs = grid.group_inputs(k);
  const Rounding& rounding = RoundingOf(ctx, grid);
  ctx.pool->Run(n, [&](int64_t r, int) {
    for (int c = 0; c < k; c += inputs) {
      const int64_t at = r * k + c;
      rounding.encode(rows + at, std::min(inputs, k - c), result.Scale(static_cast<int>(r), c),
                      result.codes.data() + at);
    }
  });
  return result;
}

void Dequantize(const QuantizedMatrix& matrix, int first, int count, float* out) {
  MOESAIC_CHECK_GE(first, 0);
  MOESAIC_CHECK_LE(first + count, matrix.n);
  const int inputs = matrix.grid.group_inputs(matrix.k);
  const std::array<float, 256>& values = ValuesOfCodes(matrix.grid.kind);
  for (int r = first; r < first + count; ++r) {
    const uint8_t* codes = matrix.codes.data() + int64_t{r} * matrix.k;
    for (int c = 0; c < matrix.k; c += inputs) {
      const float scale = matrix.Scale(r, c);
      for (int i = c; i < std::min(c + inputs, matrix.k); ++i) *out++ = values[codes[i]] * scale;
    }
  }
}

}  // namespace moesaic::quantizer
