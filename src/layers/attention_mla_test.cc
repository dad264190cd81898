// Compares MLA's two algorithms on random weights. They must agree up to rounding at every position and for
// every number of heads expanded together.
#include "layers/attention_mla.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "kernels/test_context.h"
#include "tensor/print_formats.h"

namespace moesaic::layers {
namespace {

using kernels::RandomMatrix;
using kernels::RandomValues;
using kernels::SequenceSlice;
using kernels::TestMatrix;
using tensor::PackedFormat;

constexpr int kHidden = 40;

// The latent dimension is 20 (padded in the cache) and the value dimension 12 (padded when expanded).
class MlaTest : public testing::TestWithParam<PackedFormat> {
 protected:
  MlaTest() : rope_(*RopeTable::Create({.dim = 8, .interleaved = true}, 512)) {
    std::mt19937 rng(1);
    auto matrix = [&](PackedFormat format, int n, int k) {
      matrices_.push_back(RandomMatrix(&rng, format, n, k));
      return matrices_.back().matrix;
    };
    mla_.heads = 3, mla_.latent_dim = 20, mla_.nope_dim = 16, mla_.rope_dim = 8, mla_.v_dim = 12;
    mla_.q.weight = matrix(GetParam(), 3 * 24, kHidden);
    mla_.kv_a.weight = matrix(GetParam(), 28, kHidden);
    mla_.o.weight = matrix(GetParam(), kHidden, 3 * 12);
    for (int h = 0; h < 3; ++h) {
      mla_.uk.push_back(matrix(GetParam(), 16, 20));
      mla_.uv.push_back(matrix(GetParam(), 12, 20));
      std::vector<float> transposed(16 * 20);
      const std::vector<float>& uk = matrices_[matrices_.size() - 2].values;
      for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 20; ++j) transposed[j * 16 + i] = uk[i * 20 + j];
      }
      mla_.uk_t.push_back(matrix(GetParam(), 20, 16));
      tensor::PackRows(mla_.uk_t.back().layout, 0, 20, transposed.data(), matrices_.back().buffer.data());
    }
    norm_ = RandomValues(&rng, 20, 2);
    mla_.kv_a_norm = norm_.data();
    mla_.norm_eps = 1e-6F;
    mla_.scale = 0.02F;  // scores stay below 5, so that rounding does not change the largest one
    mla_.rope = &rope_;
    x_ = RandomValues(&rng, size_t{300} * kHidden, 1);
  }

  // Runs tokens [start, start + count) of one sequence; earlier tokens must have been run before.
  std::vector<float> Run(MlaPath path, int64_t bytes, int start, int count) {
    mla_.path = path;
    mla_.expansion_bytes = bytes;
    rope_.Reserve(*test_.context().pool, 300);
    std::vector<int32_t> positions(static_cast<size_t>(count));
    std::iota(positions.begin(), positions.end(), start);
    const SequenceSlice slice{.block_table = table_, .start = start, .count = count, .row = 0};
    const kernels::ExecContext ctx = test_.context();
    const Step step{.ctx = ctx, .sequences = {&slice, 1}, .positions = positions};
    kernels::KvLayer kv = {{.heads = 1, .key_dim = 32, .value_dim = 24, .shared = true, .dtype = dtype_}};
    kv.base = reinterpret_cast<std::byte*>(cache_.data());
    kv.block_stride = 64 * 32 * sizeof(float);  // int8 leaves room for its scales
    std::vector<float> out(static_cast<size_t>(count) * kHidden);
    const size_t mark = test_.scratch_mark();
    mla_.Forward(step, x_.data() + start * kHidden, kv, out.data(), /*accumulate=*/false);
    EXPECT_EQ(test_.scratch_mark(), mark);
    return out;
  }

  kernels::TestContext test_{runtime::HostIsas(runtime::DetectCpu()).back(), 2};
  RopeTable rope_;
  std::vector<TestMatrix> matrices_;
  std::vector<float> norm_, x_;
  std::vector<float> cache_ = std::vector<float>(5 * 64 * 32);
  const int32_t table_[5] = {3, 0, 4, 1, 2};
  MlaAttention mla_;
  tensor::DType dtype_ = tensor::DType::kF32;
};

constexpr int64_t kRoom = 1 << 20;

TEST_P(MlaTest, AbsorbedEqualsExpanded) {
  // Outputs are sums of 36 products of weights below 1 and values below 10. The two algorithms round queries,
  // latents and outputs to bf16 at different points: about ten errors of 2^-9 of a value each, in a root sum
  // of 36.
  const float tolerance = GetParam() == PackedFormat::kF32 ? 1e-4F : 0.3F;
  for (const tensor::DType dtype : {tensor::DType::kF32, tensor::DType::kI8}) {
    dtype_ = dtype;
    for (const auto& [start, count] : {std::pair{0, 1}, {1, 62}, {63, 3}, {66, 200}, {266, 1}}) {
      const std::vector<float> absorbed = Run(MlaPath::kAbsorbed, kRoom, start, count);
      const std::vector<float> expanded = Run(MlaPath::kExpanded, kRoom, start, count);
      for (size_t i = 0; i < absorbed.size(); ++i) {
        ASSERT_NEAR(absorbed[i], expanded[i], tolerance) << start << "+" << count << ", value " << i;
      }
    }
  }
}

TEST_P(MlaTest, ExpansionSizeDoesNotChangeResults) {
  Run(MlaPath::kExpanded, kRoom, 0, 150);
  const std::vector<float> all = Run(MlaPath::kExpanded, kRoom, 150, 100);
  EXPECT_EQ(Run(MlaPath::kExpanded, 1, 150, 100), all);                    // one head
  EXPECT_EQ(Run(MlaPath::kExpanded, 2 * 4 * 64 * 40 * 4, 150, 100), all);  // two, then one
}

TEST_P(MlaTest, ChoosesCheaperAlgorithm) {
  mla_.path = MlaPath::kAuto;
  mla_.latent_dim = 512, mla_.nope_dim = 128, mla_.rope_dim = 64, mla_.v_dim = 128;  // DeepSeek-V3
  auto expands = [&](int start, int count) {
    return mla_.Expands({.block_table = nullptr, .start = start, .count = count, .row = 0});
  };
  EXPECT_FALSE(expands(5000, 1));
  EXPECT_FALSE(expands(100000, 160));
  EXPECT_TRUE(expands(100000, 180));
  EXPECT_TRUE(expands(0, 2));
}

INSTANTIATE_TEST_SUITE_P(Formats, MlaTest, testing::Values(PackedFormat::kF32, PackedFormat::kBF16),
                         [](const auto& info) { return tensor::PackedFormatName(info.param); });

}  // namespace
}  // namespace moesaic::layers
