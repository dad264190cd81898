// Compares every GEMM micro-kernel that this processor can run with sums in double over its inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "kernels/impl_list.h"
#include "kernels/ref/gemm.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"
#include "tensor/fp8_format.h"
#include "tensor/group_format.h"
#include "tensor/print_formats.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;
using tensor::PackedLayout;
using tensor::StaticScale;
using Gemm = KernelTable::Gemm;

struct Case {
  PackedFormat format;
  Impl<Gemm> impl;
};
void PrintTo(const Case& each, std::ostream* out) {
  *out << tensor::PackedFormatName(each.format) << " by " << each.impl.name;
}

std::vector<Case> HostCases(std::initializer_list<PackedFormat> formats) {
  const runtime::CpuFeatures host = runtime::DetectCpu();
  std::vector<Case> cases;
  for (PackedFormat format : formats) {
    for (const Impl<Gemm>& impl : GemmImpls(format)) {
      if (host.Has(impl.needs)) cases.push_back({format, impl});
    }
  }
  return cases;
}

constexpr auto kAllFormats = {PackedFormat::kF32,    PackedFormat::kBF16,  PackedFormat::kI8,
                              PackedFormat::kF8G128, PackedFormat::kI8G32, PackedFormat::kI4G32,
                              PackedFormat::kMxfp4,  PackedFormat::kNvfp4, PackedFormat::kQ4K,
                              PackedFormat::kQ6K};
constexpr auto kPlain = {PackedFormat::kF32, PackedFormat::kBF16, PackedFormat::kI8};
constexpr auto kGroupScaled = {PackedFormat::kI8G32, PackedFormat::kI4G32, PackedFormat::kMxfp4,
                               PackedFormat::kNvfp4, PackedFormat::kQ4K,   PackedFormat::kQ6K};

std::string NameOf(const testing::TestParamInfo<Case>& info) { return info.param.impl.name; }

constexpr double kLargestSuper = 0x1p-11;

// Returns arbitrary codes and scales; those of f16 and f16 times integers are below 63 kLargestSuper.
tensor::GroupRows RandomGroups(std::mt19937* rng, PackedFormat format, int n, int k) {
  tensor::GroupRows rows;
  rows.Resize(format, n, k);
  const unsigned codes = 1U << tensor::GroupFormatOf(format).code_bits;
  for (uint8_t& code : rows.codes) code = static_cast<uint8_t>((*rng)() % codes);
  const bool is_signed = format == PackedFormat::kQ6K;
  for (uint16_t& scale : rows.scales) {
    const unsigned bits = (*rng)();
    // including denormals
    scale = static_cast<uint16_t>(format == PackedFormat::kNvfp4             ? bits % 0x7f
                                  : !tensor::GroupFormatOf(format).has_super ? 0x2400 + bits % 1024
                                  : is_signed                                ? bits % 256
                                                                             : bits % 64);
  }
  for (uint8_t& minimum : rows.minima) minimum = static_cast<uint8_t>((*rng)() % 64);
  for (uint16_t& super : rows.supers) super = static_cast<uint16_t>(0x0c00 + (*rng)() % 1024);
  return rows;
}

class GemmTest : public testing::TestWithParam<Case> {
 protected:
  float Uniform(float bound) { return std::uniform_real_distribution<float>(-bound, bound)(rng_); }

  // Creates random weights [n, k] and activations [m, k], packed and prepared for the kernel under test.
  void Make(int m, int n, int k, float static_scale) {
    m_ = m;
    x_.resize(size_t(m) * k);
    for (float& v : x_) v = Uniform(2);
    weights_.layout = PackedLayout::Of(GetParam().format, n, k);
    buffer_ = *runtime::Buffer::Allocate(weights_.layout.total_bytes, false);
    if (tensor::CanQuantize(GetParam().format)) {
      std::vector<float> w(size_t(n) * k);
      for (float& v : w) v = Uniform(1);
      tensor::PackRows(weights_.layout, 0, n, w.data(), buffer_.data());
    } else {
      tensor::PackGroupRows(weights_.layout, 0, RandomGroups(&rng_, GetParam().format, n, k), buffer_.data());
    }
    weights_.data = buffer_.data();
    Prepare(static_scale);
  }

  void Prepare(float static_scale) {
    const int k = weights_.k();
    stride_ = int64_t{weights_.layout.k_padded} / 64 * GetParam().impl.fn.unit_bytes;
    a_.assign(m_ * stride_, std::byte{0x55});
    a_scales_.resize(m_);
    for (int row = 0; row < m_; ++row) {
      a_scales_[row] = GetParam().impl.fn.prepare(&x_[size_t(row) * k], k, weights_.layout.k_padded,
                                                  StaticScale::Of(static_scale), &a_[row * stride_]);
    }
  }

  GemmTile Tile(int row, int rows, float* c, int64_t c_stride) const {
    return {.a = &a_[row * stride_],
            .a_stride = stride_,
            .a_scales = &a_scales_[row],
            .w = weights_.panel(0),
            .panel_bytes = weights_.layout.panel_bytes,
            .w_scales = weights_.has_scales() ? weights_.scales() : nullptr,
            .w_sums = weights_.has_sums() ? weights_.sums() : nullptr,
            .bias = nullptr,
            .c = c,
            .c_stride = c_stride,
            .m = rows,
            .k_padded = weights_.layout.k_padded,
            .panels = weights_.layout.panels(),
            .columns = weights_.n(),
            .accumulate = false};
  }

  // Returns the activation that the kernel multiplies, by the definition in micro_kernels.h.
  double Activation(int row, int i, float static_scale) const {
    const float x = x_[size_t(row) * weights_.k() + i];
    switch (GetParam().format) {
      case PackedFormat::kF32:
        return x;
      case PackedFormat::kBF16:
      case PackedFormat::kF8G128:
        return tensor::ToFloat(tensor::ToBF16(x));
      case PackedFormat::kI8: {
        float amax = 0;
        for (int j = 0; j < weights_.k(); ++j)
          amax = std::max(amax, std::fabs(x_[size_t(row) * weights_.k() + j]));
        const float scale = static_scale > 0 ? static_scale : amax / 127;
        if (scale == 0) return 0;
        const float q = static_scale > 0 ? x * (1 / scale) : x / scale;
        return double{scale} * std::max(-127.0F, std::min(127.0F, std::nearbyint(q)));
      }
      default: {  // like kI8, per 32 inputs
        float amax = 0;
        for (int j = i / 32 * 32; j < std::min(i / 32 * 32 + 32, weights_.k()); ++j)
          amax = std::max(amax, std::fabs(x_[size_t(row) * weights_.k() + j]));
        const float scale = amax / 127;
        return scale == 0 ? 0 : double{scale} * std::nearbyint(x / scale);
      }
    }
    return 0;
  }

  // Compares C [m, n] with exact sums plus `base` (bias or the previous C). A sum of k terms in f32, in any
  // order and tree shape, has an error of at most about k u sum|a_i w_i| with u = 2^-24 (Higham, Accuracy and
  // Stability, 4.2). Fused multiply-adds only reduce it; vdpbf16ps and the tiles flush terms below 2^-126,
  // which is negligible. An int8 dot is exact: the conversion to f32 (k 127^2 may exceed 2^24), two
  // multiplications and the scale's product leave 4 u of the value. Bias and accumulation add one u of the
  // result each. Group-scaled: dots of at most 32 inputs are exact; scaling one and adding it rounds twice,
  // and later sums propagate the error: a chain of at most k / 16 + 5 terms.
  void Check(const std::vector<float>& c, int64_t c_stride, float static_scale,
             const std::vector<float>& base) {
    const int n = weights_.n(), k = weights_.k();
    std::vector<float> w(k);
    std::vector<double> a(size_t(m_) * k);
    for (int row = 0; row < m_; ++row) {
      for (int i = 0; i < k; ++i) a[size_t(row) * k + i] = Activation(row, i, static_scale);
    }
    // A weight of kQ4K is the difference of a product and a minimum: both are summed separately.
    const double largest_minimum = GetParam().format == PackedFormat::kQ4K ? 63 * kLargestSuper : 0;
    for (int j = 0; j < n; ++j) {
      tensor::UnpackRow(weights_, j, w);
      for (int row = 0; row < m_; ++row) {
        double sum = 0, magnitude = 0;
        for (int i = 0; i < k; ++i) {
          const double term = a[size_t(row) * k + i] * w[i];
          sum += term;
          magnitude += std::fabs(term) + 2 * largest_minimum * std::fabs(a[size_t(row) * k + i]);
        }
        const double expected = sum + base[row * c_stride + j];
        // UnpackRow rounds q * scale to f32, once per term: one more u of each term for int8.
        const double terms = GetParam().format == PackedFormat::kI8     ? 5
                             : tensor::IsGroupScaled(GetParam().format) ? k / 16.0 + 8
                                                                        : k;
        const double bound = 0x1p-24 * (terms * magnitude + 2 * std::fabs(expected) + std::fabs(sum));
        ASSERT_NEAR(c[row * c_stride + j], expected, bound) << "row " << row << " output " << j;
      }
    }
  }

  std::mt19937 rng_{3};
  int m_ = 0;
  std::vector<float> x_;
  runtime::Buffer buffer_;
  tensor::PackedMatrix weights_;
  int64_t stride_ = 0;
  std::vector<std::byte> a_;
  std::vector<float> a_scales_;
};

constexpr float kUntouched = 12345;

TEST_P(GemmTest, SupportsOddShapes) {
  for (int n : {1, 15, 16, 17, 64, 100}) {
    for (int k : {1, 63, 64, 65, 100, 256}) {
      for (int m : {1, 2, 3, 5, 13}) {
        Make(m, n, k, 0);
        const int64_t c_stride = n + 3;
        std::vector<float> c(m * c_stride, kUntouched);
        GetParam().impl.fn.tile(Tile(0, m, c.data(), c_stride));
        Check(c, c_stride, 0, std::vector<float>(c.size(), 0.0F));
        if (HasFatalFailure()) FAIL() << "m " << m << " n " << n << " k " << k;
        for (int row = 0; row < m; ++row) {
          for (int j = n; j < c_stride; ++j) ASSERT_EQ(c[row * c_stride + j], kUntouched);
        }
      }
    }
  }
}

TEST_P(GemmTest, SupportsEveryNumberOfRows) {
  const int n = 83, k = 130;
  for (int m = 1; m <= 70; ++m) {
    Make(m, n, k, 0);
    std::vector<float> c(m * n, kUntouched);
    GetParam().impl.fn.tile(Tile(0, m, c.data(), n));
    Check(c, n, 0, std::vector<float>(c.size(), 0.0F));
    if (HasFatalFailure()) FAIL() << "m " << m;
  }
}

// A row must give the same bits alone and in any batch, at any position.
TEST_P(GemmTest, RowDoesNotDependOnItsBatch) {
  const int n = 150,
            k = 1100;  // more outputs and inputs than a tile kernel multiplies at once, in all formats
  for (int m : {2, 3, 4, 5, 7, 12, 13, 16, 17, 31, 33, 35, 36, 50, 64, 70, 96, 150}) {
    Make(m, n, k, 0);
    std::vector<float> together(m * n), alone(n);
    GetParam().impl.fn.tile(Tile(0, m, together.data(), n));
    for (int row = 0; row < m; ++row) {
      GetParam().impl.fn.tile(Tile(row, 1, alone.data(), n));
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), &together[row * n])) << "row " << row << " of " << m;
    }
  }
}

TEST_P(GemmTest, AddsBiasAndAccumulates) {
  const int n = 45, k = 77;
  for (int m : {1, 6, 20, 40}) {
    for (bool with_bias : {false, true}) {
      for (bool accumulate : {false, true}) {
        Make(m, n, k, 0);
        std::vector<float> bias(n), c(m * n), base(m * n, 0.0F);
        for (float& v : bias) v = Uniform(3);
        for (float& v : c) v = Uniform(3);
        for (int i = 0; i < m * n; ++i) base[i] = (with_bias ? bias[i % n] : 0) + (accumulate ? c[i] : 0);
        GemmTile tile = Tile(0, m, c.data(), n);
        tile.bias = with_bias ? bias.data() : nullptr;
        tile.accumulate = accumulate;
        GetParam().impl.fn.tile(tile);
        Check(c, n, 0, base);
      }
    }
  }
}

TEST_P(GemmTest, ZeroRowsGiveZero) {
  const int m = 6, n = 33, k = 90;
  Make(m, n, k, 0);
  for (int i = 0; i < k; ++i) x_[2 * k + i] = x_[4 * k + i] = 0;
  Prepare(0);
  std::vector<float> c(m * n, kUntouched);
  GetParam().impl.fn.tile(Tile(0, m, c.data(), n));
  for (int j = 0; j < n; ++j) EXPECT_EQ(c[2 * n + j], 0);
  for (int j = 0; j < n; ++j) EXPECT_EQ(c[4 * n + j], 0);
  Check(c, n, 0, std::vector<float>(c.size(), 0.0F));
}

// A row that is not finite has no finite products, and does not change other rows.
TEST_P(GemmTest, RowsThatAreNotFiniteHaveNoFiniteProducts) {
  const int n = 20, k = 128;
  for (int m : {3, 40}) {
    for (const float wrong :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const bool whole : {false, true}) {
        for (const float static_scale : {0.0F, 0.0157F}) {
          if (static_scale > 0 && GetParam().format != PackedFormat::kI8) continue;
          Make(m, n, k, static_scale);
          std::fill_n(x_.begin() + k + (whole ? 0 : 37), whole ? k : 1, wrong);
          Prepare(static_scale);
          std::vector<float> c(m * n);
          GetParam().impl.fn.tile(Tile(0, m, c.data(), n));
          for (int row = 0; row < m; ++row) {
            for (int j = 0; j < n; ++j)
              ASSERT_EQ(std::isfinite(c[row * n + j]), row != 1) << "row " << row << " output " << j;
          }
        }
      }
    }
  }
}

class GemmPlainTest : public GemmTest {};

// A static scale that is too small saturates at 127; one that is too large loses bits. Both follow the
// definition.
TEST_P(GemmPlainTest, AppliesStaticScales) {
  for (float scale : {0.001F, 0.0157F, 0.5F}) {
    Make(5, 20, 100, scale);
    std::vector<float> c(5 * 20);
    GetParam().impl.fn.tile(Tile(0, 5, c.data(), 20));
    Check(c, 20, scale, std::vector<float>(c.size(), 0.0F));
  }
}

// The largest dots of int8 values, including -128 among the weights, for a k where f32 cannot represent all
// integers.
class GemmI8Test : public GemmTest {};

TEST_P(GemmI8Test, ExtremeIntegersAreExact) {
  const int n = 18, k = 65536;
  for (int weight : {-128, 127}) {
    for (float sign : {1.0F, -1.0F}) {
      weights_.layout = PackedLayout::Of(PackedFormat::kI8, n, k);
      buffer_ = *runtime::Buffer::Allocate(weights_.layout.total_bytes, false);
      weights_.data = buffer_.data();
      const std::vector<int8_t> w(size_t(n) * k, static_cast<int8_t>(weight));
      const std::vector<float> scales(n, 1.0F);
      tensor::PackRowsI8(weights_.layout, 0, n, w.data(), scales.data(), buffer_.data());
      m_ = 5;
      x_.assign(size_t(m_) * k, sign * 127);
      Prepare(1);
      std::vector<float> c(m_ * n);
      GetParam().impl.fn.tile(Tile(0, m_, c.data(), n));
      for (float v : c) EXPECT_EQ(v, sign * 127.0F * static_cast<float>(weight) * k);
    }
  }
}

// Preparation has one definition for every instruction set: the same bytes (except for the bias of u8) and
// scale.
TEST_P(GemmPlainTest, QuantizesActivationsLikeReference) {
  const auto reference = GetParam().format == PackedFormat::kF32    ? ref::PrepareF32
                         : GetParam().format == PackedFormat::kBF16 ? ref::PrepareBF16
                                                                    : ref::PrepareS8;
  const Gemm& gemm = GetParam().impl.fn;
  for (int k = 1; k <= 200; k += k < 70 ? 1 : 13) {
    for (float magnitude : {1e-44F, 1e-39F, 1.0F, 1e30F}) {
      const int k_padded = (k + 63) / 64 * 64;
      std::vector<float> x(k);
      for (float& v : x) v = Uniform(1) * magnitude;
      if (k > 5) x[3] = 0, x[5] = -magnitude;
      if (k > 100 && k % 2 == 1) x[70] = std::nanf("");
      for (float scale_of_tensor : {0.0F, StaticScale::WithInverse(magnitude / 90), StaticScale::kMin}) {
        const StaticScale static_scale = StaticScale::Of(scale_of_tensor);
        std::vector<std::byte> expected(size_t(k_padded) / 64 * gemm.unit_bytes, std::byte{9}),
            got = expected;
        const float scale = reference(x.data(), k, k_padded, static_scale, expected.data());
        const float own_scale = gemm.prepare(x.data(), k, k_padded, static_scale, got.data());
        ASSERT_EQ(std::bit_cast<uint32_t>(own_scale), std::bit_cast<uint32_t>(scale))
            << k << " " << magnitude;
        const int bias = static_cast<int>(got.back()) == 128 && k < k_padded ? 128 : 0;
        if (GetParam().format == PackedFormat::kI8 && k == k_padded)
          continue;  // the tail reveals the variant
        for (std::byte& b : got) b = static_cast<std::byte>(static_cast<int>(b) - bias);
        ASSERT_EQ(got, expected) << k << " " << magnitude;
      }
    }
  }
}

class GemmFp8Test : public GemmTest {};

// Row c of the activations selects input c, so that C contains every code's value, including denormals and
// both zeros, times the scale of its 128 inputs: exactly, because nothing is rounded.
TEST_P(GemmFp8Test, EveryCodeIsExact) {
  const int k = 300, n = 20;
  tensor::Fp8Rows rows;
  rows.Resize(n, k);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < k; ++i) {
      const int code = (i + 37 * j) % 256;
      rows.codes[j * k + i] = static_cast<uint8_t>((code & 0x7f) == 0x7f ? 0 : code);
    }
    for (int g = 0; g < rows.groups(); ++g)
      rows.scales[j * rows.groups() + g] = 0.37F * static_cast<float>(g + 1);
  }
  weights_.layout = PackedLayout::Of(PackedFormat::kF8G128, n, k);
  buffer_ = *runtime::Buffer::Allocate(weights_.layout.total_bytes, false);
  weights_.data = buffer_.data();
  tensor::PackFp8Rows(weights_.layout, 0, rows, buffer_.data());
  for (const int m : {1, 16, 64}) {
    m_ = m;
    for (int first = 0; first < k; first += m) {
      x_.assign(size_t(m) * k, 0.0F);
      for (int row = 0; row < m && first + row < k; ++row) x_[size_t(row) * k + first + row] = 2;
      Prepare(0);
      std::vector<float> c(m * n);
      GetParam().impl.fn.tile(Tile(0, m, c.data(), n));
      for (int row = 0; row < m && first + row < k; ++row) {
        const int i = first + row;
        for (int j = 0; j < n; ++j) {
          const float scale = rows.scales[j * rows.groups() + i / tensor::kFp8Inputs];
          ASSERT_EQ(c[row * n + j], 2 * tensor::F8E4M3ToFloat(rows.codes[j * k + i]) * scale)
              << i << " " << j;
        }
      }
    }
  }
}

class GemmGroupTest : public GemmTest {};

// All instruction sets must produce the same bytes: codes, scales, corrections, and zeros beyond k.
TEST_P(GemmGroupTest, QuantizesActivationsLikeReference) {
  const Gemm& gemm = GetParam().impl.fn;
  const Gemm& reference = GemmImpls(GetParam().format).back().fn;
  ASSERT_EQ(gemm.unit_bytes, reference.unit_bytes);
  for (int k = 1; k <= 200; k += k < 70 ? 1 : 13) {
    for (float magnitude : {1e-44F, 1e-39F, 1.0F, 1e30F}) {
      const int k_padded = (k + 63) / 64 * 64;
      std::vector<float> x(k);
      for (float& v : x) v = Uniform(1) * magnitude;
      if (k > 5) x[3] = 0, x[5] = -magnitude, x[4] = std::nanf("");
      if (k > 64) std::fill_n(x.begin() + 32, 32, 0.0F);
      std::vector<std::byte> expected(k_padded / 64 * gemm.unit_bytes, std::byte{9}), got = expected;
      reference.prepare(x.data(), k, k_padded, {}, expected.data());
      gemm.prepare(x.data(), k, k_padded, {}, got.data());
      ASSERT_EQ(got, expected) << k << " " << magnitude;
    }
  }
}

// The largest dots of codes and activations, of either sign.
TEST_P(GemmGroupTest, ExtremeCodesDoNotOverflow) {
  const int n = 18, k = 128, m = 20;
  for (const bool largest : {false, true}) {
    for (float sign : {1.0F, -1.0F}) {
      tensor::GroupRows rows;
      rows.Resize(GetParam().format, n, k);
      const auto& format = tensor::GroupFormatOf(GetParam().format);
      const bool e2m1 = format.zero == 12;
      const int code = e2m1 ? (largest ? 7 : 15) : (largest ? (1 << format.code_bits) - 1 : 0);
      const float value = e2m1 ? tensor::kE2M1[code] : static_cast<float>(code - format.zero);
      std::fill(rows.codes.begin(), rows.codes.end(), static_cast<uint8_t>(code));
      const uint16_t one = format.has_super ? 1 : format.group == 16 ? 0x38 : 0x3c00;
      std::fill(rows.scales.begin(), rows.scales.end(), one);
      std::fill(rows.supers.begin(), rows.supers.end(), uint16_t{0x3c00});
      weights_.layout = PackedLayout::Of(GetParam().format, n, k);
      buffer_ = *runtime::Buffer::Allocate(weights_.layout.total_bytes, false);
      weights_.data = buffer_.data();
      tensor::PackGroupRows(weights_.layout, 0, rows, buffer_.data());
      m_ = m;
      x_.assign(size_t(m) * k, sign * 127);
      Prepare(0);
      std::vector<float> c(m * n);
      GetParam().impl.fn.tile(Tile(0, m, c.data(), n));
      for (float v : c) EXPECT_EQ(v, sign * 127 * value * k);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Host, GemmTest, testing::ValuesIn(HostCases(kAllFormats)), NameOf);
// Codes and scales that quantizing values would never produce.
TEST_P(GemmGroupTest, AcceptsAnyCodesAndScales) {
  for (int m : {1, 5, 40}) {
    Make(m, 35, 256, 0);
    const runtime::Buffer fresh = *runtime::Buffer::Allocate(weights_.layout.total_bytes, false);
    tensor::PackGroupRows(weights_.layout, 0, RandomGroups(&rng_, GetParam().format, 35, 256), fresh.data());
    weights_.data = fresh.data();
    std::vector<float> c(m * 35);
    GetParam().impl.fn.tile(Tile(0, m, c.data(), 35));
    Check(c, 35, 0, std::vector<float>(c.size(), 0.0F));
    if (HasFatalFailure()) FAIL() << "m " << m;
  }
}

INSTANTIATE_TEST_SUITE_P(Host, GemmPlainTest, testing::ValuesIn(HostCases(kPlain)), NameOf);
INSTANTIATE_TEST_SUITE_P(Host, GemmGroupTest, testing::ValuesIn(HostCases(kGroupScaled)), NameOf);
INSTANTIATE_TEST_SUITE_P(Host, GemmFp8Test, testing::ValuesIn(HostCases({PackedFormat::kF8G128})), NameOf);
INSTANTIATE_TEST_SUITE_P(Host, GemmI8Test, testing::ValuesIn(HostCases({PackedFormat::kI8})), NameOf);

// With one summation order, f32 and bf16 results are bit-identical between the instruction sets that share
// it, for few rows and for many.
TEST(GemmAcrossIsas, SharedSummationOrderGivesSameBits) {
  const std::vector<Case> cases = HostCases(kAllFormats);
  const int most = 37, n = 50, k = 700;
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  for (PackedFormat format : kAllFormats) {
    std::vector<float> w(n * k), x(most * k);
    for (float& v : w) v = normal(rng);
    for (float& v : x) v = normal(rng);
    const PackedLayout layout = PackedLayout::Of(format, n, k);
    auto buffer = *runtime::Buffer::Allocate(layout.total_bytes, false);
    if (tensor::CanQuantize(format)) {
      tensor::PackRows(layout, 0, n, w.data(), buffer.data());
    } else {
      tensor::PackGroupRows(layout, 0, RandomGroups(&rng, format, n, k), buffer.data());
    }
    const tensor::PackedMatrix weights{.layout = layout, .data = buffer.data()};
    std::map<int, std::vector<float>> first;  // by rows
    for (const Case& c : cases) {
      const std::string name = c.impl.name;
      const bool own_order =
          (format < PackedFormat::kI8G32 && format != PackedFormat::kI8 && name.ends_with("_ref")) ||
          name.ends_with("_avx512bf16");
      if (c.format != format || own_order) continue;
      const int64_t stride = int64_t{layout.k_padded} / 64 * c.impl.fn.unit_bytes;
      std::vector<std::byte> a(most * stride);
      std::vector<float> scales(most);
      for (int row = 0; row < most; ++row) {
        scales[row] = c.impl.fn.prepare(&x[row * k], k, layout.k_padded, {}, &a[row * stride]);
      }
      for (const int m : {1, 2, 16, most}) {
        std::vector<float> out(m * n);
        c.impl.fn.tile({a.data(), stride, scales.data(), weights.panel(0), layout.panel_bytes,
                        weights.has_scales() ? weights.scales() : nullptr,
                        weights.has_sums() ? weights.sums() : nullptr, nullptr, out.data(), n, m,
                        layout.k_padded, layout.panels(), n, false});
        const std::vector<float>& expected = first.try_emplace(m, out).first->second;
        EXPECT_EQ(std::memcmp(expected.data(), out.data(), out.size() * sizeof(float)), 0)
            << name << ", " << m << " rows";
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
