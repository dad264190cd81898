// Tests key summaries of every implementation that this processor can run, against ref and against the keys
// themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/impl_list.h"
#include "kernels/ref/key_summary.h"
#include "kernels/test_context.h"
#include "kernels/test_keys.h"

namespace moesaic::kernels {
namespace {

using tensor::DType;

struct SummaryShape {
  int key_dim, key_split;
};
// One part and two; dimensions of whole registers, of halves, and of DeepSeek's latents.
constexpr SummaryShape kSummaryShapes[] = {{8, 8},   {24, 24}, {40, 32},   {64, 64},
                                           {96, 96}, {104, 8}, {128, 128}, {576, 512}};

// Some dimensions are far larger than the others, and far from zero.
struct Keys : TestKeys {
  Keys(std::mt19937* rng, DType dtype, const SummaryShape& shape)
      : TestKeys(dtype, shape.key_dim, shape.key_split) {
    const std::vector<float> values = RandomValues(rng, size_t(kBlockKeys) * key_dim, 1);
    scales = RandomValues(rng, 2 * kBlockKeys, 0.1F);
    for (float& scale : scales) scale = std::abs(scale) + 1e-3F;
    for (int j = 0; j < kBlockKeys; ++j) {
      for (int d = 0; d < key_dim; ++d) {
        const float x = values[size_t(j) * key_dim + d] * (d % 7 == 3 ? 20.0F : 1.0F) + (d % 5 == 1 ? 9 : 0);
        Put(j, d, dtype == DType::kI8 ? x * 4 : x);
      }
    }
  }
  std::vector<std::byte> Summarize(KeySummaryFn fn) const {
    std::vector<std::byte> summary(BoxBytes(key_dim) + 16, std::byte{0x5a});
    fn(Task(summary.data()));
    return summary;
  }
};

struct View {  // of a summary
  explicit View(const std::vector<std::byte>& summary, const SummaryShape& shape)
      : shape_(shape), at_(summary.data()) {}
  const KeySummaryHeader& header() const { return *reinterpret_cast<const KeySummaryHeader*>(at_); }
  int part(int d) const { return d < shape_.key_split ? 0 : 1; }
  double center(int d) const {
    const auto* centers = reinterpret_cast<const int8_t*>(&header() + 1);
    return double{header().center_scale[part(d)]} * centers[d];
  }
  double radius(int d) const {
    const auto* radii = reinterpret_cast<const uint8_t*>(&header() + 1) + shape_.key_dim;
    return double{header().radius_scale[part(d)]} * radii[d];
  }

 private:
  SummaryShape shape_;
  const std::byte* at_;
};

class KeySummaryTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  KernelTable kernels_ = SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), GetParam()));
};

// The bound must hold exactly: a radius rounded down is no bound.
TEST_P(KeySummaryTest, BoundsEveryKey) {
  std::mt19937 rng(1);
  for (const SummaryShape& shape : kSummaryShapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      const Keys keys(&rng, dtype, shape);
      const std::vector<std::byte> summary = keys.Summarize(kernels_.key_summary);
      const View view(summary, shape);
      double widest[2] = {0, 0};
      for (int j = 0; j < kBlockKeys; ++j) {
        double squares[2] = {0, 0};
        for (int d = 0; d < shape.key_dim; ++d) {
          const double off = std::abs(keys.At(j, d) - view.center(d));
          ASSERT_LE(off, view.radius(d)) << shape.key_dim << " " << tensor::DTypeName(dtype) << " " << d;
          squares[view.part(d)] += off * off;
        }
        for (int part = 0; part < 2; ++part) {
          ASSERT_LE(std::sqrt(squares[part]), view.header().ball[part]);
          widest[part] = std::max(widest[part], std::sqrt(squares[part]));
        }
      }
      // The bound must be as tight as documented: a step of 1/255 of the largest radius, half a step of the
      // centers'.
      for (int part = 0; part < 2; ++part)
        EXPECT_NEAR(view.header().ball[part], widest[part], widest[part] * 1e-3);
      for (int d = 0; d < shape.key_dim; ++d) {
        double low = keys.At(0, d), high = low;
        for (int j = 1; j < kBlockKeys; ++j)
          low = std::min(low, keys.At(j, d)), high = std::max(high, keys.At(j, d));
        const KeySummaryHeader& header = view.header();
        EXPECT_LE(view.radius(d), (high - low) / 2 + 0.51 * header.center_scale[view.part(d)] +
                                      1.01 * header.radius_scale[view.part(d)]);
      }
      EXPECT_EQ(summary[summary.size() - 16], std::byte{0x5a});
    }
  }
}

TEST_P(KeySummaryTest, EqualsRefBitForBit) {
  std::mt19937 rng(2);
  for (const SummaryShape& shape : kSummaryShapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      const Keys keys(&rng, dtype, shape);
      std::vector<std::byte> ours = keys.Summarize(kernels_.key_summary),
                             ref = keys.Summarize(ref::KeySummary);
      // Sums of squares are added in another order.
      for (auto* summary : {&ours, &ref})
        std::memset(reinterpret_cast<KeySummaryHeader*>(summary->data())->ball, 0, 8);
      EXPECT_EQ(ours, ref) << shape.key_dim << " " << tensor::DTypeName(dtype);
    }
  }
}

TEST_P(KeySummaryTest, MarksKeysThatAreNotFinite) {
  std::mt19937 rng(3);
  for (const float wrong : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
    for (const int d : {0, 23, 39}) {
      const SummaryShape shape = {40, 24};
      Keys keys(&rng, DType::kF32, shape);
      keys.Put(17, d, wrong);
      const std::vector<std::byte> summary = keys.Summarize(kernels_.key_summary);
      EXPECT_TRUE(std::isnan(View(summary, shape).header().center_scale[0]));
    }
  }
}

TEST_P(KeySummaryTest, SupportsZeroAndTinyKeys) {
  std::mt19937 rng(4);
  for (const float size : {0.0F, 1e-42F, 1e-31F}) {
    const SummaryShape shape = {24, 24};
    Keys keys(&rng, DType::kF32, shape);
    for (int j = 0; j < kBlockKeys; ++j) {
      for (int d = 0; d < 24; ++d) keys.Put(j, d, j % 2 ? size : -size);
    }
    const std::vector<std::byte> summary = keys.Summarize(kernels_.key_summary);
    for (int d = 0; d < 24; ++d) {
      EXPECT_LE(std::abs(keys.At(1, d) - View(summary, shape).center(d)), View(summary, shape).radius(d));
      EXPECT_LE(View(summary, shape).radius(d), 2e-30);
    }
  }
}

std::vector<runtime::Isa> SummaryIsas() {
  std::vector<runtime::Isa> found;
  for (const auto& impl : KeySummaryImpls()) {
    if (runtime::DetectCpu().Has(impl.needs)) found.push_back(impl.needs);
  }
  return found;
}
INSTANTIATE_TEST_SUITE_P(Host, KeySummaryTest, testing::ValuesIn(SummaryIsas()), IsaTestName);

}  // namespace
}  // namespace moesaic::kernels
