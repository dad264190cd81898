#include "kernels/cuda/accelerator_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cuda/gptq_args.h"
#include "kernels/ref/rounding.h"
#include "tensor/dtype.h"

namespace moesaic::kernels::cuda {
namespace {

Status Wrong(GptqAccelerator& device, const std::string& what) {
  return DataLoss("{} computes wrong results: {}; run without --device", device.info().identity, what);
}

// Generates the same numbers in every run.
class Numbers {
 public:
  // Returns a number in [-1, 1).
  float Next() {
    state_ = state_ * 1664525U + 1013904223U;
    return static_cast<float>(state_ >> 8) * 0x1p-23F - 1;
  }

 private:
  uint32_t state_ = 1;
};

template <typename T>
int64_t BytesOf(const std::vector<T>& values) {
  return std::ssize(values) * int64_t{sizeof(T)};
}

template <typename T>
StatusOr<DeviceBuffer> Put(GptqAccelerator& device, const std::vector<T>& values) {
  ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(device, BytesOf(values)));
  RETURN_IF_ERROR(device.Upload(buffer.as<void>(), values.data(), BytesOf(values)));
  return buffer;
}

template <typename T>
Status Get(GptqAccelerator& device, const DeviceBuffer& buffer, std::vector<T>* values) {
  return device.Download(values->data(), buffer.as<void>(), BytesOf(*values));
}

// Multiplies integers up to 15. Each sum is at most 192 x 225: exact in f32 in any order, but not with fewer
// bits. The gaps between rows hold NaN.
Status CheckGemm(GptqAccelerator& device, bool transposed) {
  constexpr int kM = 64, kN = 128, kDepth = 192, kGap = 64;
  const uint16_t no_number = 0x7fc0;
  const int a_rows = transposed ? kDepth : kM, a_columns = transposed ? kM : kDepth;
  const auto a_of = [](int i, int d) { return (i * 7 + d * 3 + i * d % 5) % 16; };
  const auto b_of = [](int d, int j) { return (d * 5 + j * 11 + d * j % 7) % 16; };
  const auto bits = [](int value) { return tensor::ToBF16(static_cast<float>(value)).bits; };
  std::vector<uint16_t> a(static_cast<size_t>(a_rows) * (a_columns + kGap), no_number);
  std::vector<uint16_t> b(static_cast<size_t>(kDepth) * (kN + kGap), no_number);
  for (int i = 0; i < kM; ++i) {
    for (int d = 0; d < kDepth; ++d) {
      const int row = transposed ? d : i, column = transposed ? i : d;
      a[row * (a_columns + kGap) + column] = bits(a_of(i, d));
    }
  }
  for (int d = 0; d < kDepth; ++d) {
    for (int j = 0; j < kN; ++j) b[d * (kN + kGap) + j] = bits(b_of(d, j));
  }
  // The first product must not read the contents of c.
  std::vector<float> c(static_cast<size_t>(kM) * (kN + kGap), std::numeric_limits<float>::quiet_NaN());
  ASSIGN_OR_RETURN(const DeviceBuffer on_a, Put(device, a));
  ASSIGN_OR_RETURN(const DeviceBuffer on_b, Put(device, b));
  ASSIGN_OR_RETURN(const DeviceBuffer on_c, Put(device, c));
  for (const bool accumulate : {false, true}) {
    RETURN_IF_ERROR(device.Gemm({.transpose_a = transposed,
                                 .m = kM,
                                 .n = kN,
                                 .depth = kDepth,
                                 .a = on_a.as<uint16_t>(),
                                 .b = on_b.as<uint16_t>(),
                                 .c = on_c.as<float>(),
                                 .a_stride = a_columns + kGap,
                                 .b_stride = kN + kGap,
                                 .c_stride = kN + kGap,
                                 .accumulate = accumulate}));
  }
  RETURN_IF_ERROR(Get(device, on_c, &c));
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN + kGap; ++j) {
      const float got = c[i * (kN + kGap) + j];
      int sum = 0;
      for (int d = 0; d < kDepth && j < kN; ++d) sum += a_of(i, d) * b_of(d, j);
      const bool right = j < kN ? got == static_cast<float>(2 * sum) : std::isnan(got);
      if (!right)
        return Wrong(device, fmt::format("a product{}", transposed ? " of a transposed matrix" : ""));
    }
  }
  return OkStatus();
}

// Factors L L^T for an L of integers: 0, 1 and -1 below a diagonal of 64 to 68, so that L is well conditioned
// and its product with itself exact. An element is computed in at most 256 steps, each with an error of 2^-24
// of at most 68^2 + 256, and divided by 64: 0.0012 in total, and a little more from earlier elements. A
// tolerance of a hundredth distinguishes this from wrong results.
Status CheckCholesky(GptqAccelerator& device) {
  constexpr int kSize = 256;
  constexpr float kTolerance = 0.01F;
  std::vector<float> factor(static_cast<size_t>(kSize) * kSize), matrix(factor.size());  // [column][row]
  for (int c = 0; c < kSize; ++c) {
    for (int r = c; r < kSize; ++r) {
      factor[c * kSize + r] = static_cast<float>(r == c ? 64 + c % 5 : (r * 5 + c * 3 + r * c % 11) % 3 - 1);
    }
  }
  for (int c = 0; c < kSize; ++c) {
    for (int r = 0; r < kSize; ++r) {
      float sum = 0;
      for (int d = 0; d <= std::min(r, c); ++d) sum += factor[d * kSize + r] * factor[d * kSize + c];
      matrix[c * kSize + r] = sum;
    }
  }
  ASSIGN_OR_RETURN(const int64_t bytes, device.CholeskyBytes(kSize));
  ASSIGN_OR_RETURN(const DeviceBuffer work, DeviceBuffer::Allocate(device, bytes));
  std::vector<float> got(matrix.size());
  {
    ASSIGN_OR_RETURN(const DeviceBuffer on_device, Put(device, matrix));
    ASSIGN_OR_RETURN(const bool positive, device.Cholesky(on_device.as<float>(), kSize, work.as<void>()));
    if (!positive) return Wrong(device, "a positive definite matrix has no Cholesky factor");
    RETURN_IF_ERROR(Get(device, on_device, &got));
  }
  for (int c = 0; c < kSize; ++c) {
    for (int r = c; r < kSize; ++r) {
      if (!(std::fabs(got[c * kSize + r] - factor[c * kSize + r]) <= kTolerance)) {
        return Wrong(device, "a Cholesky factor");
      }
    }
  }
  matrix[200 * kSize + 200] = -1;
  ASSIGN_OR_RETURN(const DeviceBuffer on_device, Put(device, matrix));
  ASSIGN_OR_RETURN(const bool positive, device.Cholesky(on_device.as<float>(), kSize, work.as<void>()));
  if (positive) return Wrong(device, "a matrix that is not positive definite has a Cholesky factor");
  return OkStatus();
}

// Compares one block of columns and rows with ref/.
Status CheckRounding(GptqAccelerator& device, int grid) {
  static_assert(kBlockRows == kRoundBlockRows);
  constexpr const char* kNames[kNumberGrids] = {"int8", "int4", "fp4", "fp8"};
  constexpr int kGroup = 16, kTile = kBlockColumns * kBlockRows;
  Numbers numbers;
  const float step = grid == 0   ? 0.02F
                     : grid == 3 ? 0.004F
                                 : 0.4F;  // some values are clipped, some are small
  std::vector<float> values(kTile), corrections(kTile), losses(kBlockRows, 0.5F);
  std::vector<float> scales(size_t{kBlockColumns / kGroup} * kBlockRows);
  std::vector<float> factor(size_t{kBlockColumns} * kBlockColumns);
  std::vector<int> order(kBlockColumns);
  for (float& value : values) value = 2 * numbers.Next();
  for (float& value : corrections) value = 0.3F * numbers.Next();
  for (float& scale : scales) scale = step * (1.1F + numbers.Next());
  for (float& value : factor) value = 0.3F * numbers.Next();
  for (int c = 0; c < kBlockColumns; ++c) {
    factor[c * kBlockColumns + c] = 1 + 0.01F * static_cast<float>(c);
    order[c] = c * 77 % kBlockColumns;  // a permutation
  }
  std::vector<uint16_t> errors(kTile);
  std::vector<uint8_t> codes(kTile);
  ASSIGN_OR_RETURN(const DeviceBuffer on_values, Put(device, values));
  ASSIGN_OR_RETURN(const DeviceBuffer on_corrections, Put(device, corrections));
  ASSIGN_OR_RETURN(const DeviceBuffer on_scales, Put(device, scales));
  ASSIGN_OR_RETURN(const DeviceBuffer on_order, Put(device, order));
  ASSIGN_OR_RETURN(const DeviceBuffer on_factor, Put(device, factor));
  ASSIGN_OR_RETURN(const DeviceBuffer on_errors, Put(device, errors));
  ASSIGN_OR_RETURN(const DeviceBuffer on_codes, Put(device, codes));
  ASSIGN_OR_RETURN(const DeviceBuffer on_losses, Put(device, losses));
  const RoundBlockArgs args = {.values = on_values.as<float>(),
                               .corrections = on_corrections.as<float>(),
                               .scales = on_scales.as<float>(),
                               .order = on_order.as<int>(),
                               .factor = on_factor.as<float>(),
                               .errors = on_errors.as<unsigned short>(),
                               .codes = on_codes.as<unsigned char>(),
                               .losses = on_losses.as<float>(),
                               .begin = 0,
                               .columns = kBlockColumns,
                               .rows = kBlockRows,
                               .rows_padded = kBlockRows,
                               .k = kBlockColumns,
                               .group = kGroup};
  const auto kernel = static_cast<DeviceKernel>(static_cast<int>(DeviceKernel::kRoundInt8) + grid);
  RETURN_IF_ERROR(device.Launch(kernel, 1, kBlockRows, &args));

  std::vector<float> expected(kTile), expected_losses(losses);
  std::vector<uint8_t> expected_codes(kTile);
  const float* scales_of[kBlockColumns];
  for (int c = 0; c < kBlockColumns; ++c) scales_of[c] = &scales[order[c] / kGroup * kBlockRows];
  ref::kRounding[grid].block({.columns = kBlockColumns,
                              .values = values.data(),
                              .feedback = corrections.data(),
                              .scales = scales_of,
                              .factor = factor.data(),
                              .factor_stride = kBlockColumns,
                              .errors = expected.data(),
                              .codes = expected_codes.data(),
                              .losses = expected_losses.data()});
  RETURN_IF_ERROR(Get(device, on_errors, &errors));
  RETURN_IF_ERROR(Get(device, on_codes, &codes));
  RETURN_IF_ERROR(Get(device, on_losses, &losses));
  bool right = losses == expected_losses;
  for (int c = 0; c < kBlockColumns; ++c) {
    for (int r = 0; r < kBlockRows; ++r) {
      const int at = c * kBlockRows + r;
      right &= codes[r * kBlockColumns + order[c]] == expected_codes[at] &&
               errors[at] == tensor::ToBF16(expected[at]).bits;
    }
  }
  return right ? OkStatus() : Wrong(device, fmt::format("rounding to {}", kNames[grid]));
}

}  // namespace

Status CheckAccelerator(GptqAccelerator& device) {
  for (const bool transposed : {false, true}) RETURN_IF_ERROR(CheckGemm(device, transposed));
  RETURN_IF_ERROR(CheckCholesky(device));
  for (int grid = 0; grid < kNumberGrids; ++grid) RETURN_IF_ERROR(CheckRounding(device, grid));
  return OkStatus();
}

}  // namespace moesaic::kernels::cuda
