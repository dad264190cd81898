#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/linear.h"
#include "kernels/moe.h"
#include "kernels/test_context.h"
#include "runtime/test_topology.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;
using tensor::PackedMatrix;
using tensor::StaticScale;

constexpr PackedFormat kMoeFormats[] = {PackedFormat::kF32,   PackedFormat::kBF16,  PackedFormat::kI8,
                                        PackedFormat::kI4G32, PackedFormat::kNvfp4, PackedFormat::kF8G128};

struct Shape {
  int hidden, intermediate, experts, top_k, shared_intermediate;
};

// A layer with random weights, inputs and routes.
struct Layer {
  Layer(std::mt19937* rng, PackedFormat format, PackedFormat shared_format, const Shape& s, int rows,
        bool static_scales)
      : shape(s), rows(rows), shared_gate_up_down{} {
    gate = RandomMatrix(rng, format, s.intermediate, s.hidden, s.experts);
    up = RandomMatrix(rng, format, s.intermediate, s.hidden, s.experts);
    down = RandomMatrix(rng, format, s.hidden, s.intermediate, s.experts);
    x = RandomValues(rng, size_t(rows) * s.hidden, 1);
    if (s.shared_intermediate > 0) {
      shared_gate_up_down[0] = RandomMatrix(rng, shared_format, s.shared_intermediate, s.hidden);
      shared_gate_up_down[1] = RandomMatrix(rng, shared_format, s.shared_intermediate, s.hidden);
      shared_gate_up_down[2] = RandomMatrix(rng, shared_format, s.hidden, s.shared_intermediate);
    }
    if (static_scales) {
      for (const float v : RandomValues(rng, 2 * s.experts, 0.01F)) {
        input_scales.push_back(StaticScale::Of(std::fabs(v) + 0.01F));
      }
    }
    weights = RandomValues(rng, size_t(rows) * s.top_k, 1);
    std::vector<int32_t> all(s.experts);
    std::iota(all.begin(), all.end(), 0);
    for (int t = 0; t < rows; ++t) {
      std::shuffle(all.begin(), all.end(), *rng);
      ids.insert(ids.end(), all.begin(), all.begin() + s.top_k);
    }
  }

  // gate, up and down are separate with three strides, but MoeParams has one, so this lays them out as one
  // block.
  MoeParams Params(float* out, int64_t out_stride) {
    const int64_t gate_bytes = gate.matrix.layout.total_bytes, down_bytes = down.matrix.layout.total_bytes;
    const int64_t stride = 2 * gate_bytes + down_bytes;
    block = *runtime::Buffer::Allocate(stride * shape.experts, false);
    for (int e = 0; e < shape.experts; ++e) {
      std::byte* to = block.data() + e * stride;
      std::memcpy(to, gate.buffer.data() + e * gate_bytes, gate_bytes);
      std::memcpy(to + gate_bytes, up.buffer.data() + e * gate_bytes, gate_bytes);
      std::memcpy(to + 2 * gate_bytes, down.buffer.data() + e * down_bytes, down_bytes);
    }
    ExpertWeights experts{.gate = gate.matrix,
                          .up = up.matrix,
                          .down = down.matrix,
                          .stride = stride,
                          .count = shape.experts,
                          .input_scales = input_scales.empty() ? nullptr : input_scales.data()};
    experts.gate.data = block.data();
    experts.up.data = block.data() + gate_bytes;
    experts.down.data = block.data() + 2 * gate_bytes;
    return {.x = x.data(),
            .x_stride = shape.hidden,
            .rows = rows,
            .hidden = shape.hidden,
            .intermediate = shape.intermediate,
            .experts = experts,
            .ids = ids.data(),
            .weights = weights.data(),
            .top_k = shape.top_k,
            .shared_gate = shared_gate_up_down[0].matrix,
            .shared_up = shared_gate_up_down[1].matrix,
            .shared_down = shared_gate_up_down[2].matrix,
            .shared_intermediate = shape.shared_intermediate,
            .out = out,
            .out_stride = out_stride};
  }

  // Returns the same experts in two slices; the shared one stays whole.
  MoeParams SlicedParams(float* out, int64_t out_stride) {
    MoeParams params = Params(out, out_stride);
    const ExpertWeights whole = params.experts;
    const auto half = [](const PackedMatrix& m) {
      const int panels = base::CeilDiv(m.layout.panels(), 2);
      return tensor::PackedLayout::Of(m.layout.format, panels * tensor::kPanelRows, m.k());
    };
    const tensor::PackedLayout gate_half = half(whole.gate), down_half = half(whole.down);
    ExpertWeights& sliced = params.experts;
    sliced.stride = 2 * gate_half.total_bytes + down_half.total_bytes;
    const int64_t image = sliced.stride * shape.experts;
    images = *runtime::Buffer::Allocate(2 * image, false);
    int64_t at = 0;
    for (auto part : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
      const tensor::PackedLayout& layout = part == &ExpertWeights::down ? down_half : gate_half;
      for (int e = 0; e < shape.experts; ++e) {
        CopySlices(whole.Of(whole.*part, e), layout, images.data() + at + e * sliced.stride, image);
      }
      PackedMatrix& m = sliced.*part;
      const int n = m.layout.n, n_padded = m.layout.n_padded;
      m.layout = layout;
      m.layout.n = n;
      m.layout.n_padded = n_padded;
      m.data = images.data() + at;
      m.images = 2;
      m.slice_panels = layout.panels();
      m.image_stride = image;
      at += layout.total_bytes;
    }
    return params;
  }

  // Returns the same experts mirrored; the shared one is stored once.
  MoeParams MirroredParams(float* out, int64_t out_stride) {
    MoeParams params = Params(out, out_stride);
    const int64_t image = params.experts.stride * shape.experts;
    images = *runtime::Buffer::Allocate(2 * image, false);
    std::memcpy(images.data(), block.data(), image);
    std::memcpy(images.data() + image, block.data(), image);
    for (auto part : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down}) {
      PackedMatrix& m = params.experts.*part;
      m.data = images.data() + (m.data - block.data());
      m.images = 2;
      m.image_stride = image;
    }
    return params;
  }

  Shape shape;
  int rows;
  runtime::Buffer images;
  TestMatrix gate, up, down;
  TestMatrix shared_gate_up_down[3];
  runtime::Buffer block;
  std::vector<float> x, weights;
  std::vector<StaticScale> input_scales;
  std::vector<int32_t> ids;
};

// Computes one FFN for one row with operators that have their own tests.
std::vector<float> PlainFfn(const ExecContext& ctx, const float* x, const PackedMatrix& gate,
                            const PackedMatrix& up, const PackedMatrix& down, StaticScale up_scale,
                            StaticScale down_scale) {
  const size_t mark = ctx.scratch->Mark();
  std::vector<float> g(gate.n()), u(gate.n()), h(gate.n()), y(down.n());
  const QuantizedActivations a = QuantizeActivations(ctx, gate.layout.format, x, 0, 1, gate.k(), up_scale);
  Linear(ctx, {.a = &a, .w = &gate, .c = g.data(), .c_stride = gate.n()});
  Linear(ctx, {.a = &a, .w = &up, .c = u.data(), .c_stride = gate.n()});
  ctx.kernels->silu_mul(g.data(), u.data(), gate.n(), h.data());
  const QuantizedActivations b =
      QuantizeActivations(ctx, down.layout.format, h.data(), 0, 1, down.k(), down_scale);
  Linear(ctx, {.a = &b, .w = &down, .c = y.data(), .c_stride = down.n()});
  ctx.scratch->Rewind(mark);
  return y;
}

// Computes the layer by its definition: token by token, expert by expert.
std::vector<float> PlainMoe(const ExecContext& ctx, const MoeParams& p) {
  std::vector<float> out(size_t(p.rows) * p.hidden, 0.0F);
  for (int t = 0; t < p.rows; ++t) {
    float* to = &out[size_t(t) * p.hidden];
    const float* x = p.x + t * p.x_stride;
    std::vector<int> slots(p.top_k);  // sums are by ascending expert
    std::iota(slots.begin(), slots.end(), 0);
    const int32_t* ids = p.ids + t * p.top_k;
    std::stable_sort(slots.begin(), slots.end(), [ids](int a, int b) { return ids[a] < ids[b]; });
    for (const int j : slots) {
      const int e = ids[j];
      if (e < 0) continue;
      const ExpertWeights& w = p.experts;
      const StaticScale* scales = w.input_scales;
      const auto y =
          PlainFfn(ctx, x, w.Of(w.gate, e), w.Of(w.up, e), w.Of(w.down, e),
                   scales ? scales[2 * e] : StaticScale{}, scales ? scales[2 * e + 1] : StaticScale{});
      ctx.kernels->axpy(p.weights[t * p.top_k + j], y.data(), p.hidden, to);
    }
    if (p.shared_gate.empty()) continue;
    const auto y = PlainFfn(ctx, x, p.shared_gate, p.shared_up, p.shared_down, {}, {});
    ctx.kernels->axpy(1, y.data(), p.hidden, to);
  }
  return out;
}

class MoeTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  // A row's bits depend neither on its neighbours nor on the tiling, so the two must be equal.
  void ExpectEqualsPlain(const ExecContext& ctx, MoeParams params) {
    const size_t mark = ctx.scratch->Mark();
    Moe(ctx, params);
    EXPECT_EQ(ctx.scratch->Mark(), mark);
    const auto expected = PlainMoe(ctx, params);
    for (int t = 0; t < params.rows; ++t) {
      ASSERT_EQ(std::memcmp(params.out + t * params.out_stride, &expected[size_t(t) * params.hidden],
                            params.hidden * sizeof(float)),
                0)
          << "token " << t;
    }
  }

  std::mt19937 rng_{17};
};

TEST_P(MoeTest, EqualsPlainLoops) {
  const Shape shapes[] = {{100, 40, 6, 2, 0}, {65, 17, 9, 3, 70}, {640, 96, 4, 4, 33}, {64, 16, 1, 1, 16}};
  for (int threads : {1, 3}) {
    TestContext test(GetParam(), threads);
    for (PackedFormat format : kMoeFormats) {
      for (const Shape& shape : shapes) {
        for (int rows : {1, 2, 21, 70}) {
          Layer layer(&rng_, format, PackedFormat::kBF16, shape, rows, /*static_scales=*/false);
          std::vector<float> out(size_t(rows) * (shape.hidden + 2), 99.0F);
          ExpectEqualsPlain(test.context(), layer.Params(out.data(), shape.hidden + 2));
          EXPECT_EQ(out.back(), 99);
        }
      }
    }
  }
}

// Experts in two slices, on two or more simulated nodes, must give the same bits as whole ones.
TEST_P(MoeTest, SlicesDoNotChangeResults) {
  TestContext plain(GetParam(), 1);
  for (int nodes : {2, 3}) {
    const runtime::Topology topology = runtime::SimulatedNodes(nodes, 1);
    TestContext test(GetParam(), topology);
    for (PackedFormat format : kMoeFormats) {
      for (const Shape& shape :
           {Shape{100, 40, 6, 2, 0}, Shape{640, 96, 4, 4, 33}, Shape{770, 17, 5, 4, 33}}) {
        // with the most rows, outputs are added up by columns, some across slices
        for (int rows : {1, 21, 260}) {
          Layer layer(&rng_, format, PackedFormat::kBF16, shape, rows, /*static_scales=*/false);
          std::vector<float> expected(size_t(rows) * shape.hidden), out(expected.size(), 99.0F);
          Moe(plain.context(), layer.Params(expected.data(), shape.hidden));
          Moe(test.context(), layer.SlicedParams(out.data(), shape.hidden));
          ASSERT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0)
              << PackedFormatName(format) << ", " << rows << " rows, " << nodes << " nodes";
        }
      }
    }
  }
}

// Parts of the columns are complete when they are reported, in ascending order, and have the bits of the
// whole.
TEST_P(MoeTest, PartsOfColumnsDoNotChangeResults) {
  TestContext plain(GetParam(), 1);
  const runtime::Topology topology = runtime::SimulatedNodes(2, 1);
  TestContext test(GetParam(), topology);
  for (const Shape& shape : {Shape{650, 40, 6, 4, 33}, Shape{100, 17, 5, 2, 0}}) {
    for (const int rows : {1, 21, 210}) {  // the most rows are added up by columns
      Layer layer(&rng_, PackedFormat::kI8, PackedFormat::kBF16, shape, rows, /*static_scales=*/false);
      std::vector<float> expected(size_t(rows) * shape.hidden);
      Moe(plain.context(), layer.Params(expected.data(), shape.hidden));
      for (const int parts : {2, 3, 50}) {
        for (const auto make : {&Layer::Params, &Layer::SlicedParams}) {
          std::vector<float> out(expected.size(), 99.0F);
          MoeParams params = (layer.*make)(out.data(), shape.hidden);
          int done = 0;
          params.parts = {.count = parts, .done = [&](int first, int count) {
                            ASSERT_EQ(first, done);
                            ASSERT_GT(count, 0);
                            for (int t = 0; t < rows; ++t) {
                              const size_t at = size_t(t) * shape.hidden + first;
                              ASSERT_EQ(std::memcmp(&out[at], &expected[at], count * sizeof(float)), 0);
                            }
                            done = first + count;
                          }};
          Moe(test.context(), params);
          ASSERT_EQ(done, shape.hidden);
        }
      }
    }
  }
}

// One worker gathers several row tiles of one expert, each with several tasks, repeatedly as it continues
// with another slice.
TEST_P(MoeTest, GathersRowTilesOfOneExpertRepeatedly) {
  TestContext plain(GetParam(), 1), two(GetParam(), 2);
  const runtime::Topology topology = runtime::SimulatedNodes(3, 1);
  TestContext three(GetParam(), topology);
  const Shape shape{200, 100, 3, 2, 33};
  const int rows = 300;  // 200 rows of an expert: tiles of 96, 96 and 8
  const TileSizes small = {.panel_bytes = 16 << 10, .row_bytes = 16 << 10, .tasks_per_thread = 16};
  for (PackedFormat format : {PackedFormat::kBF16, PackedFormat::kI8, PackedFormat::kI4G32}) {
    for (const bool static_scales : {false, true}) {
      Layer layer(&rng_, format, PackedFormat::kBF16, shape, rows, static_scales);
      std::vector<float> expected(size_t(rows) * shape.hidden);
      Moe(plain.context(), layer.Params(expected.data(), shape.hidden));
      for (TestContext* test : {&two, &three}) {
        KernelTable table = *test->context().kernels;
        table.tile_sizes = small;
        ExecContext ctx = test->context();
        ctx.kernels = &table;
        for (const auto params : {&Layer::Params, &Layer::SlicedParams, &Layer::MirroredParams}) {
          std::vector<float> out(expected.size(), 99.0F);
          Moe(ctx, (layer.*params)(out.data(), shape.hidden));
          ASSERT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0)
              << PackedFormatName(format) << ", static scales " << static_scales << ", " << ctx.pool->size()
              << " threads";
        }
      }
    }
  }
}

// Outputs larger than the caches are added up by columns; the last task ends beyond the last column.
TEST_P(MoeTest, ManyRowsEqualPlainLoops) {
  for (int threads : {1, 2}) {
    TestContext test(GetParam(), threads);
    for (PackedFormat format : kMoeFormats) {
      for (const Shape& shape : {Shape{650, 17, 5, 4, 33}, Shape{520, 40, 8, 6, 0}}) {
        const int rows = 210;  // more than 96 rows of an expert
        Layer layer(&rng_, format, PackedFormat::kBF16, shape, rows, /*static_scales=*/false);
        layer.ids[5] = -1;
        std::vector<float> out(size_t(rows) * (shape.hidden + 2), 99.0F);
        ExpectEqualsPlain(test.context(), layer.Params(out.data(), shape.hidden + 2));
        EXPECT_EQ(out.back(), 99);
      }
    }
  }
}

TEST_P(MoeTest, AppliesStaticScalesPerExpert) {
  TestContext test(GetParam(), 2);
  for (int rows : {1, 30}) {
    Layer layer(&rng_, PackedFormat::kI8, PackedFormat::kI8, {80, 48, 5, 2, 32}, rows,
                /*static_scales=*/true);
    std::vector<float> out(size_t(rows) * 80);
    ExpectEqualsPlain(test.context(), layer.Params(out.data(), 80));
  }
}

TEST_P(MoeTest, SupportsSkippedSlotsAndUnevenExperts) {
  TestContext test(GetParam(), 2);
  const int rows = 40;
  Layer layer(&rng_, PackedFormat::kI8, PackedFormat::kI8, {70, 33, 8, 2, 20}, rows, false);
  std::vector<float> out(rows * 70);
  for (size_t i = 0; i < layer.ids.size(); ++i)
    layer.ids[i] = i % 3 == 0 ? -1 : 5;  // a token may choose expert 5 twice
  ExpectEqualsPlain(test.context(), layer.Params(out.data(), 70));
  std::fill(layer.ids.begin(), layer.ids.end(), -1);
  ExpectEqualsPlain(test.context(), layer.Params(out.data(), 70));  // only the shared expert
}

TEST_P(MoeTest, SkippedSlotsGiveZeroAndNoRowsWriteNothing) {
  TestContext test(GetParam(), 2);
  Layer layer(&rng_, PackedFormat::kF32, PackedFormat::kF32, {64, 16, 2, 1, 0}, 3, false);
  std::fill(layer.ids.begin(), layer.ids.end(), -1);
  std::vector<float> out(3 * 64, 5.0F);
  MoeParams params = layer.Params(out.data(), 64);
  Moe(test.context(), params);
  for (float v : out) EXPECT_EQ(v, 0);
  params.rows = 0;
  params.out = nullptr;
  Moe(test.context(), params);
}

INSTANTIATE_TEST_SUITE_P(Host, MoeTest, testing::ValuesIn(runtime::HostIsas(runtime::DetectCpu())),
                         IsaTestName);

// Compares with double, in f32. Nothing is rounded to few bits, so the error is that of three sums of at most
// k = 100 terms (k u each, relative to the sum of magnitudes) and of silu (a few u): 4 k u of magnitudes that
// are themselves at most |x|_1 |h|_1-like products. It is bounded here by the same sums over absolute values.
TEST(Moe, MatchesDouble) {
  std::mt19937 rng(23);
  const Shape s{100, 40, 6, 2, 30};
  const int rows = 9;
  Layer layer(&rng, PackedFormat::kF32, PackedFormat::kF32, s, rows, false);
  TestContext test(runtime::HostIsas(runtime::DetectCpu()).back(), 2);
  std::vector<float> out(rows * s.hidden);
  const MoeParams params = layer.Params(out.data(), s.hidden);
  Moe(test.context(), params);

  std::vector<double> expected(out.size(), 0.0), magnitude(out.size(), 0.0);
  auto add = [&](int t, const float* gate, const float* up, const float* down, int width, double weight) {
    for (int i = 0; i < width; ++i) {
      double g = 0, u = 0, g_abs = 0, u_abs = 0;
      for (int k = 0; k < s.hidden; ++k) {
        const double x = layer.x[t * s.hidden + k];
        g += x * gate[i * s.hidden + k];
        u += x * up[i * s.hidden + k];
        g_abs += std::fabs(x * gate[i * s.hidden + k]);
        u_abs += std::fabs(x * up[i * s.hidden + k]);
      }
      for (int j = 0; j < s.hidden; ++j) {
        expected[t * s.hidden + j] += weight * g / (1 + std::exp(-g)) * u * down[j * width + i];
        magnitude[t * s.hidden + j] += std::fabs(weight * g_abs * u_abs * down[j * width + i]);
      }
    }
  };
  for (int t = 0; t < rows; ++t) {
    for (int j = 0; j < s.top_k; ++j) {
      const int e = layer.ids[t * s.top_k + j];
      const size_t at = size_t(e) * s.hidden * s.intermediate;
      add(t, &layer.gate.values[at], &layer.up.values[at], &layer.down.values[at], s.intermediate,
          layer.weights[t * s.top_k + j]);
    }
    add(t, layer.shared_gate_up_down[0].values.data(), layer.shared_gate_up_down[1].values.data(),
        layer.shared_gate_up_down[2].values.data(), s.shared_intermediate, 1);
  }
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[i], 0x1p-24 * 4 * 100 * magnitude[i]);
}

}  // namespace
}  // namespace moesaic::kernels
