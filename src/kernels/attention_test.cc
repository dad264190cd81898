// Tests KvWrite and Attention of every implementation that this processor can run. Results are compared with
// a softmax in double, and bit for bit with other batches, chunks and numbers of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "base/round.h"
#include "kernels/impl_list.h"
#include "kernels/kv_layer.h"
#include "kernels/test_context.h"

namespace moesaic::kernels {

static void PrintTo(const Impl<AttentionTileFn>& impl, std::ostream* out) { *out << impl.name; }

namespace {

using tensor::DType;

struct Shape {
  const char* name;
  int heads, kv_heads, key_dim, value_dim;
  bool shared;
};

constexpr Shape kShapes[] = {
    {"mha16", 3, 3, 16, 16, false},          {"gqa64", 9, 3, 64, 64, false},
    {"gqa128", 32, 4, 128, 128, false},      {"gqa96", 5, 1, 96, 96, false},
    {"mqa_odd", 7, 1, 40, 24, false},        {"pair", 4, 2, 32, 32, false},
    {"mla_expanded", 4, 4, 192, 128, false}, {"mla_tiny", 4, 1, 48, 32, true},
    {"mla", 20, 1, 576, 512, true},          {"mla_many", 65, 1, 128, 96, true},
};

// Keys and values of some sequences in a pool of blocks in random order. Memory that was never written holds
// NaN.
class Cache {
 public:
  Cache(const ExecContext& ctx, const Shape& shape, DType dtype, const std::vector<int>& contexts,
        std::mt19937* rng) {
    size_t blocks = 0;
    for (int context : contexts) blocks += base::CeilDiv(context, kKvBlockTokens);
    layer_ = LayOutKv(dtype, shape.kv_heads, shape.key_dim, shape.value_dim, shape.shared);
    layer_.block_stride += 64;
    memory_.assign(blocks * layer_.block_stride, std::byte{0xff});
    layer_.base = memory_.data();
    std::vector<int32_t> free(blocks);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), *rng);
    std::vector<SequenceSlice> slices;
    int row = 0;
    tables_.resize(contexts.size());
    for (size_t i = 0; i < contexts.size(); ++i) {
      for (int t = 0; t < contexts[i]; t += kKvBlockTokens) {
        tables_[i].push_back(free.back());
        free.pop_back();
      }
      slices.push_back({tables_[i].data(), 0, contexts[i], row});
      first_row_.push_back(row);
      row += contexts[i];
    }
    const int key_stride = shape.kv_heads * shape.key_dim + 3,
              value_stride = shape.kv_heads * shape.value_dim + 5;
    keys_ = RandomValues(rng, size_t(row) * key_stride, 1);
    values_ = RandomValues(rng, size_t(row) * value_stride, 1);
    KvWrite(ctx, {layer_, keys_.data(), shape.shared ? nullptr : values_.data(), key_stride, value_stride,
                  slices});
    key_stride_ = key_stride;
    value_stride_ = value_stride;
    const int split = shape.shared ? shape.value_dim : shape.key_dim;
    for (int r = 0; r < row; ++r) {
      for (int head = 0; head < shape.kv_heads; ++head) {
        float* key = &keys_[int64_t{r} * key_stride + int64_t{head} * shape.key_dim];
        RoundAsStored(key, split);
        RoundAsStored(key + split, shape.key_dim - split);
        RoundAsStored(&values_[int64_t{r} * value_stride + int64_t{head} * shape.value_dim], shape.value_dim);
      }
    }
  }

  const KvLayer& layer() const { return layer_; }
  const int32_t* table(int sequence) const { return tables_[sequence].data(); }

  // Returns the stored value.
  double Key(int sequence, int token, int head, int d) const {
    const int64_t row = first_row_[sequence] + token;
    return keys_[row * key_stride_ + int64_t{head} * layer_.key_dim + d];
  }
  double Value(int sequence, int token, int head, int d) const {
    if (layer_.shared) return Key(sequence, token, head, d);
    const int64_t row = first_row_[sequence] + token;
    return values_[row * value_stride_ + int64_t{head} * layer_.value_dim + d];
  }

 private:
  // Rounds a row whose elements share a scale. The product of an int8 and its scale is rounded here once
  // more, within the units that Check allows for scales.
  void RoundAsStored(float* row, int dim) const {
    float amax = 0;
    for (int i = 0; i < dim; ++i) amax = std::max(amax, std::abs(row[i]));
    for (int i = 0; i < dim; ++i) {
      if (layer_.dtype == DType::kBF16) row[i] = tensor::ToFloat(tensor::ToBF16(row[i]));
      if (layer_.dtype == DType::kI8) row[i] = amax / 127 * std::nearbyintf(row[i] * (127 / amax));
    }
  }

  KvLayer layer_;
  std::vector<std::byte> memory_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<int> first_row_;
  std::vector<float> keys_, values_;
  int64_t key_stride_ = 0, value_stride_ = 0;
};

// A slice of a batch: tokens start .. start + count of one sequence of the cache.
struct SequenceRange {
  int sequence, start, count;
};

class AttentionTest : public testing::TestWithParam<Impl<AttentionTileFn>> {
 protected:
  // Returns the outputs of all parts, one part's rows after another's. A token's query depends only on the
  // token.
  std::vector<float> Attend(const Shape& shape, const Cache& cache, const std::vector<SequenceRange>& parts,
                            int threads) {
    const int q_stride = shape.heads * shape.key_dim + 7, out_stride = shape.heads * shape.value_dim + 9;
    std::vector<SequenceSlice> slices;
    std::vector<float> q;
    int row = 0;
    for (const SequenceRange& part : parts) {
      slices.push_back({cache.table(part.sequence), part.start, part.count, row});
      row += part.count;
      for (int t = 0; t < part.count; ++t) {
        const std::vector<float> token = Query(shape, part.sequence, part.start + t);
        q.insert(q.end(), token.begin(), token.end());
        q.resize(size_t(slices.back().row + t + 1) * q_stride, 77);
      }
    }
    std::vector<float> padded(size_t(row) * out_stride, 5);
    TestContext test(GetParam().needs, threads);
    Attention(test.context(), {cache.layer(), q.data(), q_stride, padded.data(), out_stride, shape.heads,
                               Scale(shape), slices});
    EXPECT_EQ(test.scratch_mark(), 0U);
    std::vector<float> out;
    for (int r = 0; r < row; ++r) {
      const auto begin = padded.begin() + int64_t{r} * out_stride;
      out.insert(out.end(), begin, begin + shape.heads * shape.value_dim);
      for (int i = shape.heads * shape.value_dim; i < out_stride; ++i) EXPECT_EQ(*(begin + i), 5);
    }
    return out;
  }

  static std::vector<float> Query(const Shape& shape, int sequence, int position) {
    std::mt19937 rng(sequence * 10007 + position);
    return RandomValues(&rng, size_t(shape.heads) * shape.key_dim, 2);
  }
  static float Scale(const Shape& shape) { return 1 / std::sqrt(static_cast<float>(shape.key_dim)); }

  // Compares out [heads, value_dim] of one token with softmax in double.
  void Check(const Shape& shape, const Cache& cache, int sequence, int position, const float* out) {
    const std::vector<float> q = Query(shape, sequence, position);
    const int keys = position + 1, group = shape.heads / shape.kv_heads;
    std::vector<double> score(keys);
    for (int head = 0; head < shape.heads; ++head) {
      const float* row = &q[size_t(head) * shape.key_dim];
      double max = -std::numeric_limits<double>::infinity(), sum = 0, products = 0;
      for (int j = 0; j < keys; ++j) {
        double dot = 0, absolute = 0;
        for (int d = 0; d < shape.key_dim; ++d) {
          const double product = double{row[d]} * Scale(shape) * cache.Key(sequence, j, head / group, d);
          dot += product;
          absolute += std::abs(product);
        }
        score[j] = dot;
        max = std::max(max, dot);
        products = std::max(products, absolute);
      }
      for (double& s : score) sum += s = std::exp(s - max);
      // Roundings in units of 2^-24. A score sums key_dim products (in 8 or 16 lanes, or sequentially in
      // ref). Its query is rounded once by the scale, and it is at most `products`. score - max is rounded
      // once more and exp twice. These are errors of the exponent, so of the weight, and count once in the
      // numerator and once in the denominator. Each weight is then added and multiplied, at most once per key
      // of its run, and merged: a rescaling (two for exp, one for the product) every 64 keys. A run has 256
      // keys, or 1,024 where a key has 64 query heads.
      const bool ref = GetParam().needs == runtime::Isa::kRef;
      // Tiles represent queries as two bfloat16, with an error of 2^-18, 64 units. Weights are rounded to 8
      // bits, 2^-8; their sum is of the rounded or of the unrounded ones.
      const bool tiles = GetParam().needs == runtime::Isa::kAmx && cache.layer().dtype != DType::kF32 &&
                         shape.key_dim % 32 == 0 && shape.value_dim % 16 == 0;
      const double split = tiles ? 64 : 0, rounded = tiles ? 0x1p16 : 0;
      const double additions = ref ? shape.key_dim : shape.key_dim / 8.0 + 4;
      // Scales of int8 multiply scores, in one or two parts, and weights.
      const double scales = cache.layer().dtype == DType::kI8 ? 3 : 0;
      const double weight = (additions + 1 + split + scales) * products + 2 * products + 2;
      const double steps =
          std::min(keys, group >= 64 ? 1024 : 256) + 4 * (keys / 64.0 + 1) + 4 + rounded + scales;
      for (int d = 0; d < shape.value_dim; ++d) {
        double expected = 0, absolute = 0;
        for (int j = 0; j < keys; ++j) {
          const double term = score[j] / sum * cache.Value(sequence, j, head / group, d);
          expected += term;
          absolute += std::abs(term);
        }
        ASSERT_NEAR(out[head * shape.value_dim + d], expected, absolute * (2 * weight + 2 * steps) * 0x1p-24)
            << shape.name << " keys " << keys << " head " << head << " dimension " << d;
      }
    }
  }
};

// Contexts around every boundary: one key, a block, a split, several splits; new and cached tokens mixed.
TEST_P(AttentionTest, MatchesSoftmaxInDouble) {
  std::mt19937 rng(1);
  const std::vector<int> contexts = {1, 2, 63, 64, 65, 127, 130, 256, 257, 300, 600, 1100};
  const std::vector<SequenceRange> parts = {{0, 0, 1},   {1, 0, 2},   {2, 0, 63},    {3, 63, 1},
                                            {4, 60, 5},  {5, 126, 1}, {6, 64, 66},   {7, 255, 1},
                                            {8, 250, 7}, {9, 299, 1}, {10, 570, 30}, {11, 1099, 1}};
  for (const Shape& shape : kShapes) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      TestContext test(GetParam().needs, 2);
      const Cache cache(test.context(), shape, dtype, contexts, &rng);
      const std::vector<float> out = Attend(shape, cache, parts, 2);
      int row = 0;
      for (const SequenceRange& part : parts) {
        for (int t = 0; t < part.count; ++t, ++row) {
          // The double softmax is slow: it checks the ends of a part and some rows between.
          if (t > 1 && t + 2 < part.count && t % 13 != 0) continue;
          Check(shape, cache, part.sequence, part.start + t,
                &out[size_t(row) * shape.heads * shape.value_dim]);
        }
      }
    }
  }
}

// The bits must not depend on how a prompt is split into chunks, on the batch, or on the number of threads.
TEST_P(AttentionTest, RowBitsDoNotDependOnBatchChunksOrThreads) {
  std::mt19937 rng(2);
  const int context = 531;
  for (const Shape& shape : kShapes) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      // These combinations test nothing new, but are slow.
      if (shape.key_dim > 128 && (dtype == DType::kF32 || GetParam().needs == runtime::Isa::kRef)) continue;
      SCOPED_TRACE(testing::Message() << shape.name << " " << tensor::DTypeName(dtype));
      TestContext test(GetParam().needs, 2);
      const Cache cache(test.context(), shape, dtype, {context, 77, 1500}, &rng);
      const size_t row = size_t(shape.heads) * shape.value_dim;
      const std::vector<float> whole = Attend(shape, cache, {{0, 0, context}}, 2);
      auto expect_same = [&](const float* rows, int position, int count, const char* what) {
        ASSERT_EQ(std::memcmp(rows, &whole[position * row], count * row * sizeof(float)), 0)
            << what << " at " << position << " + " << count;
      };
      // Chunks of every kind of length, in a batch with a long decode and a short prefill, and alone.
      for (int position = 0, step = 0; position < context; ++step) {
        const int lengths[] = {1, 64, 3, 130, 65, 2, 200};
        const int count = std::min(lengths[step % 7], context - position);
        const int threads = 1 + step % 3;
        const std::vector<float> alone = Attend(shape, cache, {{0, position, count}}, threads);
        expect_same(alone.data(), position, count, "alone");
        const std::vector<float> batch =
            Attend(shape, cache, {{2, 1499, 1}, {0, position, count}, {1, 40, 37}}, threads + 1);
        expect_same(&batch[row], position, count, "in a batch");
        position += count;
      }
      for (int position : {0, 63, 64, 255, 256, 511, 512, 530}) {
        expect_same(Attend(shape, cache, {{0, position, 1}}, 1).data(), position, 1, "decode");
      }
      // Positions around the first 1,024 keys, which are a split where a key has many query heads.
      const int begin = 1010;
      const std::vector<float> around = Attend(shape, cache, {{2, begin, 30}}, 2);
      for (const SequenceRange& part : {SequenceRange{2, 1023, 1}, SequenceRange{2, 1024, 1},
                                        SequenceRange{2, 1039, 1}, SequenceRange{2, 1020, 9}}) {
        const std::vector<float> alone = Attend(shape, cache, {part}, 3);
        ASSERT_EQ(
            std::memcmp(alone.data(), &around[(part.start - begin) * row], alone.size() * sizeof(float)), 0)
            << "at " << part.start << " + " << part.count;
      }
    }
  }
}

// A key or value that is not finite must not read as a number; a row of zeros stays zero.
TEST(KvWriteTest, Int8KeepsZerosAndMarksNaN) {
  constexpr int kDim = 8;
  TestContext test(runtime::Isa::kRef, 1);
  std::vector<float> keys(4 * kDim, 0.0F), values(4 * kDim, 1e-40F);
  keys[kDim + 3] = std::numeric_limits<float>::infinity();
  keys[2 * kDim + 7] = std::numeric_limits<float>::quiet_NaN();
  for (int d = 0; d < kDim; ++d) keys[3 * kDim + d] = static_cast<float>(d - 4) * 0.25F;
  std::vector<std::byte> memory(kKvBlockTokens * (2 * kDim + 8), std::byte{0x55});
  const int32_t table = 0;
  const SequenceSlice slice{&table, 0, 4, 0};
  KvLayer layer = {{.heads = 1, .key_dim = kDim, .value_dim = kDim, .dtype = DType::kI8}};
  layer.base = memory.data();
  layer.block_stride = static_cast<int64_t>(memory.size());
  KvWrite(test.context(), {layer, keys.data(), values.data(), kDim, kDim, {&slice, 1}});
  const auto* scales = reinterpret_cast<const float*>(memory.data() + layer.scale_offset());
  EXPECT_EQ(scales[0], 0);
  EXPECT_TRUE(std::isnan(scales[1]));
  EXPECT_TRUE(std::isnan(scales[2]));
  EXPECT_EQ(scales[3], 1.0F / 127);
  const int8_t expected[] = {-127, -95, -64, -32, 0, 32, 64, 95};  // rounds halves to even: -63.5, 63.5
  EXPECT_EQ(std::memcmp(memory.data() + 3 * kDim, expected, kDim), 0);
  for (int t = 0; t < 4; ++t) EXPECT_EQ(scales[kKvBlockTokens + t], 0) << "a tiny row is stored as zeros";
  EXPECT_EQ(memory[4 * kDim], std::byte{0x55});
}

TEST_P(AttentionTest, AcceptsEmptyBatchesAndSlices) {
  std::mt19937 rng(3);
  const Shape& shape = kShapes[1];
  TestContext test(GetParam().needs, 2);
  const Cache cache(test.context(), shape, DType::kF32, {10, 10}, &rng);
  EXPECT_TRUE(Attend(shape, cache, {}, 2).empty());
  const std::vector<float> one = Attend(shape, cache, {{1, 9, 1}}, 1);
  EXPECT_EQ(Attend(shape, cache, {{0, 5, 0}, {1, 9, 1}, {0, 10, 0}}, 2), one);
}

// Scores far apart must neither overflow nor lose the largest: softmax then gives the value of one key.
TEST_P(AttentionTest, LargeScoresDoNotOverflow) {
  const int dim = 32, keys = 64;
  std::vector<float> q(8 * dim), k(keys * dim), v(keys * dim), acc(dim), max(1), sum(1);
  for (int j = 0; j < keys; ++j) {
    for (int d = 0; d < dim; ++d) k[j * dim + d] = (j == 40 ? 100.0F : -100.0F) + static_cast<float>(j % 3);
    for (int d = 0; d < dim; ++d) v[j * dim + d] = static_cast<float>(j + d);
  }
  std::fill_n(q.begin(), dim, 50.0F);
  const int visible = keys;
  AttentionTile tile{};
  tile.q = q.data();
  tile.q_stride = dim;
  tile.runs[0] = reinterpret_cast<const std::byte*>(k.data());
  tile.value_offset = reinterpret_cast<const std::byte*>(v.data()) - tile.runs[0];
  tile.key_stride = tile.value_stride = dim * sizeof(float);
  tile.kv_dtype = DType::kF32;
  tile.rows = 1;
  tile.key_dim = tile.value_dim = dim;
  tile.visible = &visible;
  tile.max = max.data();
  tile.sum = sum.data();
  tile.acc = acc.data();
  tile.acc_stride = dim;
  GetParam().fn(tile);
  EXPECT_EQ(sum[0], 1.0F);
  for (int d = 0; d < dim; ++d) EXPECT_EQ(acc[d], static_cast<float>(40 + d));
}

// Rows without visible keys add nothing and need no keys or values.
TEST_P(AttentionTest, RowsWithoutVisibleKeysAddNothing) {
  constexpr int kRows = 3, kDim = 64;
  std::vector<float> q(16 * kDim, 1.0F), acc(kRows * kDim, 7.0F), max(kRows, 7.0F), sum(kRows, 7.0F);
  const int visible[kRows] = {};
  AttentionTile tile{};
  tile.q = q.data();
  tile.q_stride = tile.acc_stride = tile.key_dim = tile.value_dim = tile.key_split = kDim;
  tile.key_stride = tile.value_stride = kDim * 2;
  tile.value_offset = 64 * kDim * 2;
  tile.kv_dtype = DType::kBF16;
  tile.rows = kRows;
  tile.visible = visible;
  tile.max = max.data();
  tile.sum = sum.data();
  tile.acc = acc.data();
  GetParam().fn(tile);
  EXPECT_EQ(max, std::vector<float>(kRows, -std::numeric_limits<float>::infinity()));
  EXPECT_EQ(sum, std::vector<float>(kRows, 0.0F));
  EXPECT_EQ(acc, std::vector<float>(kRows * kDim, 0.0F));
}

// Calls that resume each other equal one call over all keys, whether the largest score is first, last or in
// between, and for any distance to the others.
TEST_P(AttentionTest, ResumedCallsEqualOneCall) {
  constexpr int kDim = 64, kParts = 3;
  std::mt19937 rng(4);
  for (int rows : {1, 8, 11, 16, 37}) {
    for (const double slope : {-30.0, 0.0, 1.5, 30.0}) {
      const int padded = base::RoundUp(rows, 16);
      std::vector<float> q = RandomValues(&rng, size_t(padded) * kDim, 1);
      for (int r = 0; r < padded; ++r) q[r * kDim] = 1;
      std::vector<tensor::BF16> kv(size_t(kParts) * 256 * kDim);
      for (size_t i = 0; i < kv.size(); ++i) kv[i] = tensor::ToBF16(RandomValues(&rng, 1, 1)[0]);
      for (int j = 0; j < kParts * 256; ++j) {
        kv[j * kDim] = tensor::ToBF16(static_cast<float>(slope * (j / 64)));  // raises all of a run's scores
      }
      std::vector<float> max(rows), sum(rows), acc(size_t(rows) * kDim);
      AttentionTile tile{};
      tile.q = q.data();
      tile.q_stride = tile.acc_stride = tile.key_dim = tile.value_dim = tile.key_split = kDim;
      tile.key_stride = tile.value_stride = kDim * 2;
      tile.kv_dtype = DType::kBF16;
      tile.rows = rows;
      tile.max = max.data();
      tile.sum = sum.data();
      tile.acc = acc.data();
      std::vector<int> context(rows), visible(rows);
      for (int r = 0; r < rows; ++r) context[r] = r % 3 == 2 ? 200 + r : kParts * 256 - 7 * r;
      for (int part = 0; part < kParts; ++part) {
        for (int r = 0; r < rows; ++r) visible[r] = std::clamp(context[r] - part * 256, 0, 256);
        for (int run = 0; run < kAttentionRuns; ++run) {
          tile.runs[run] = reinterpret_cast<const std::byte*>(&kv[size_t(part * 256 + run * 64) * kDim]);
        }
        tile.visible = visible.data();
        tile.resume = part > 0;
        GetParam().fn(tile);
      }
      for (int r = 0; r < rows; ++r) {
        std::vector<double> score(context[r]);
        double most = -1e300, total = 0, products = 0;
        for (int j = 0; j < context[r]; ++j) {
          double absolute = 0;
          for (int d = 0; d < kDim; ++d) {
            const double product = double{q[r * kDim + d]} * tensor::ToFloat(kv[j * kDim + d]);
            score[j] += product;
            absolute += std::abs(product);
          }
          most = std::max(most, score[j]);
          products = std::max(products, absolute);
        }
        for (double& s : score) total += s = std::exp(s - most);
        ASSERT_GE(max[r], most - products * 0x1p-16) << "weights are relative to the largest";
        ASSERT_LE(max[r], most + 0.6932 + products * 0x1p-16);
        // As in Check, for tiles: scores have an error of (64 + kDim + 3) units of `products`, weights of
        // 2^-8, both in numerator and denominator; other implementations have less.
        const double relative = 2 * ((kDim + 67) * products * 0x1p-24 + 0x1p-8) + 1e-4;
        for (int d = 0; d < kDim; ++d) {
          double expected = 0, absolute = 0;
          for (int j = 0; j < context[r]; ++j) {
            const double term = score[j] / total * tensor::ToFloat(kv[j * kDim + d]);
            expected += term;
            absolute += std::abs(term);
          }
          ASSERT_NEAR(acc[r * kDim + d] / sum[r], expected, absolute * relative)
              << rows << " rows, slope " << slope << ", row " << r << ", dimension " << d;
        }
      }
    }
  }
}

std::vector<Impl<AttentionTileFn>> OnHost() {
  const runtime::CpuFeatures host = runtime::DetectCpu();
  std::vector<Impl<AttentionTileFn>> found;
  for (const auto& impl : AttentionImpls(tensor::DType::kBF16)) {
    if (host.Has(impl.needs)) found.push_back(impl);
  }
  return found;
}

INSTANTIATE_TEST_SUITE_P(Host, AttentionTest, testing::ValuesIn(OnHost()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moesaic::kernels
