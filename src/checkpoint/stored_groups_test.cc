// Weights stored in groups are read code by code: after packing and unpacking they equal the plain reader's
// values.
#include "checkpoint/stored_groups.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "base/round.h"
#include "runtime/memory.h"

namespace moesaic::checkpoint {
namespace {

using tensor::DType;
using tensor::PackedFormat;

class Bytes {
 public:
  explicit Bytes(size_t count) : bytes_(count) {
    std::mt19937 rng(static_cast<unsigned>(count));
    for (std::byte& b : bytes_) b = static_cast<std::byte>(rng());
  }
  void Put16(size_t at, uint16_t value) { std::memcpy(&bytes_[at], &value, 2); }
  std::byte& operator[](size_t at) { return bytes_[at]; }
  TensorEntry Entry(DType dtype, std::vector<int64_t> shape) const {
    return {.name = "m.weight", .dtype = dtype, .shape = std::move(shape), .bytes = bytes_, .file = "a file"};
  }

 private:
  std::vector<std::byte> bytes_;
};

// Packs rows [first, first + count) of the source, unpacks them and returns them, [count, in].
std::vector<float> Roundtrip(const LinearSource& source, int64_t first, int64_t count) {
  const auto format = StoredFormat(source);
  EXPECT_TRUE(format.has_value());
  tensor::PackedMatrix matrix{
      .layout = tensor::PackedLayout::Of(*format, static_cast<int>(count), static_cast<int>(source.in))};
  auto buffer = *runtime::Buffer::Allocate(matrix.layout.total_bytes, false);
  if (format == PackedFormat::kF8G128) {
    tensor::Fp8Rows rows;
    EXPECT_TRUE(ReadFp8Rows(source, first, count, rows).ok());
    tensor::PackFp8Rows(matrix.layout, 0, rows, buffer.data());
  } else {
    tensor::GroupRows rows;
    EXPECT_TRUE(ReadGroupRows(source, first, count, rows).ok());
    tensor::PackGroupRows(matrix.layout, 0, rows, buffer.data());
  }
  matrix.data = buffer.data();
  std::vector<float> values(static_cast<size_t>(count * source.in));
  for (int r = 0; r < count; ++r) {
    tensor::UnpackRow(matrix, r, std::span(values).subspan(r * source.in, source.in));
  }
  return values;
}

std::vector<float> Plain(const LinearSource& source, int64_t first, int64_t count) {
  const std::string config = "{}";
  std::vector<float> values(static_cast<size_t>(count * source.in));
  const std::string empty("\x02\0\0\0\0\0\0\0{}", 10);
  const auto checkpoint = *Checkpoint::FromMemory(config, std::as_bytes(std::span(empty)));
  EXPECT_TRUE(checkpoint->ReadLinearRows(source, first, count, values).ok());
  return values;
}

constexpr int kOut = 11, kIn = 96;

LinearSource Ggml(const TensorEntry& weight) {
  return {.module = "m", .scheme = WeightScheme::kPlain, .out = kOut, .in = kIn, .weight = &weight};
}

TEST(StoredGroups, ReadsGgmlBlocksOfBothTypes) {
  for (const DType dtype : {DType::kQ8_0, DType::kQ4_0}) {
    const int bytes = tensor::BlockOf(dtype).bytes;
    Bytes stored(static_cast<size_t>(kOut) * kIn / 32 * bytes);
    for (int b = 0; b < kOut * kIn / 32; ++b) stored.Put16(b * bytes, static_cast<uint16_t>(0x2c00 + 97 * b));
    const TensorEntry weight = stored.Entry(dtype, {kOut, kIn});
    const LinearSource source = Ggml(weight);
    EXPECT_EQ(Roundtrip(source, 0, kOut), Plain(source, 0, kOut));
    EXPECT_EQ(Roundtrip(source, 3, 5), Plain(source, 3, 5));
  }
}

// Scales span the range that f16 covers with a power of two per output, at several positions of e8m0's range.
TEST(StoredGroups, ReadsMxfp4) {
  for (const int largest : {39, 127, 140, 240}) {
    Bytes stored(static_cast<size_t>(kOut) * kIn / 32 * 17);
    for (int b = 0; b < kOut * kIn / 32; ++b) stored[17 * b] = static_cast<std::byte>(largest - 7 * b % 40);
    stored[0] = static_cast<std::byte>(255);  // a block of zeros: its scale is ignored
    for (int i = 0; i < 16; ++i) stored[1 + i] = std::byte{0x80};
    const TensorEntry weight = stored.Entry(DType::kMxfp4, {kOut, kIn});
    const LinearSource source = Ggml(weight);
    EXPECT_EQ(StoredFormat(source), PackedFormat::kMxfp4);
    const std::vector<float> plain = Plain(source, 0, kOut), packed = Roundtrip(source, 0, kOut);
    for (size_t i = 32; i < plain.size(); ++i) ASSERT_EQ(packed[i], plain[i]) << largest << " element " << i;
    for (size_t i = 0; i < 32; ++i) EXPECT_EQ(packed[i], 0);
  }
}

// 2^-39 of an output's largest scale is the smallest that is kept.
TEST(StoredGroups, ReadsMxfp4DownToSmallestScale) {
  Bytes stored(static_cast<size_t>(kOut) * kIn / 32 * 17);
  for (int row = 0; row < kOut; ++row) {
    const int largest = 60 + 10 * row, exponents[] = {largest, largest - 39, largest - 40};
    for (int b = 0; b < 3; ++b) stored[17 * (3 * row + b)] = static_cast<std::byte>(exponents[b]);
  }
  const TensorEntry weight = stored.Entry(DType::kMxfp4, {kOut, kIn});
  const LinearSource source = Ggml(weight);
  const std::vector<float> plain = Plain(source, 0, kOut), packed = Roundtrip(source, 0, kOut);
  for (size_t i = 0; i < plain.size(); ++i) {
    ASSERT_EQ(packed[i], i % kIn < 64 ? plain[i] : 0) << "element " << i;
  }
}

TEST(StoredGroups, RejectsMxfp4NaN) {
  Bytes stored(static_cast<size_t>(kOut) * kIn / 32 * 17);
  for (int b = 0; b < kOut * kIn / 32; ++b) stored[17 * b] = std::byte{127};
  stored[17 * 4] = std::byte{255};
  const TensorEntry weight = stored.Entry(DType::kMxfp4, {kOut, kIn});
  tensor::GroupRows rows;
  EXPECT_EQ(ReadGroupRows(Ggml(weight), 0, kOut, rows).message(),
            "a file: the scales of m must be finite; those of row 1 are not");
}

TEST(StoredGroups, ReadsKBlocksOfBothTypes) {
  constexpr int kRows = 5, kColumns = 768;
  for (const DType dtype : {DType::kQ4K, DType::kQ6K}) {
    const int bytes = tensor::BlockOf(dtype).bytes;
    Bytes stored(static_cast<size_t>(kRows) * kColumns / 256 * bytes);
    for (int b = 0; b < kRows * kColumns / 256; ++b) {
      const int at = b * bytes + (dtype == DType::kQ4K ? 0 : 208);
      stored.Put16(at, static_cast<uint16_t>(0x2c00 + 97 * b));
      if (dtype == DType::kQ4K) stored.Put16(at + 2, static_cast<uint16_t>(0x2b00 + 51 * b));
    }
    const TensorEntry weight = stored.Entry(dtype, {kRows, kColumns});
    LinearSource source = Ggml(weight);
    source.out = kRows;
    source.in = kColumns;
    EXPECT_EQ(Roundtrip(source, 0, kRows), Plain(source, 0, kRows)) << tensor::DTypeName(dtype);
  }
}

// Rows stored in another order are found at their position.
class Reversed : public RowReader {
 public:
  void Read(int64_t, int64_t, float*) const override { FAIL(); }
  int64_t FileRow(int64_t row) const override { return kOut - 1 - row; }
};
class PutTogether : public RowReader {
 public:
  void Read(int64_t, int64_t, float*) const override { FAIL(); }
};

TEST(StoredGroups, ReadsReorderedRows) {
  Bytes stored(static_cast<size_t>(kOut) * kIn / 32 * 18);
  for (int b = 0; b < kOut * kIn / 32; ++b) stored.Put16(b * 18, 0x3000);
  const TensorEntry weight = stored.Entry(DType::kQ4_0, {kOut, kIn});
  TensorEntry reversed = weight;
  reversed.rows = std::make_shared<Reversed>();
  const std::vector<float> backwards = Roundtrip(Ggml(reversed), 0, kOut);
  const std::vector<float> plain = Plain(Ggml(weight), 0, kOut);
  for (int r = 0; r < kOut; ++r) {
    EXPECT_TRUE(std::equal(&plain[r * kIn], &plain[r * kIn] + kIn, &backwards[(kOut - 1 - r) * kIn]));
  }
  reversed.rows = std::make_shared<PutTogether>();
  EXPECT_EQ(StoredFormat(Ggml(reversed)), std::nullopt);
}

LinearSource Packed(int bits, const TensorEntry& weight, const TensorEntry& scale, int64_t group) {
  return {.module = "m",
          .scheme = WeightScheme::kIntPacked,
          .out = kOut,
          .in = kIn,
          .bits = bits,
          .weight = &weight,
          .scale = &scale,
          .block_cols = group};
}

LinearSource Nvfp4(const TensorEntry& weight, const TensorEntry& scale) {
  return {.module = "m",
          .scheme = WeightScheme::kNvfp4,
          .out = kOut,
          .in = kIn,
          .weight = &weight,
          .scale = &scale,
          .block_cols = 16};
}

// Returns scales for all groups of all outputs within 2^-12 of each other, including small and negative ones.
Bytes Scales(DType dtype, int64_t count) {
  Bytes scales(static_cast<size_t>(tensor::BytesOf(dtype, count)));
  std::mt19937 rng(5);
  for (int64_t i = 0; i < count; ++i) {
    float scale = std::ldexp(1.0F + static_cast<float>(rng() % 128) / 128, -9 - static_cast<int>(rng() % 12));
    if (dtype == DType::kF32) scale *= 1 + static_cast<float>(rng() % 65536) * 0x1p-23F;
    if (rng() % 4 == 0) scale = -scale;
    if (dtype == DType::kF32) {
      std::memcpy(&scales[static_cast<size_t>(4 * i)], &scale, 4);
    } else {
      scales.Put16(static_cast<size_t>(2 * i),
                   dtype == DType::kBF16 ? tensor::ToBF16(scale).bits : tensor::FloatToHalf(scale));
    }
  }
  return scales;
}

// Codes are arbitrary, including -128 and -8. Only f32 scales of several groups are rounded, with a relative
// error of at most 2^-11; code times scale has the same error.
TEST(StoredGroups, ReadsPackedCodesInGroupsOf32) {
  for (const int bits : {4, 8}) {
    const Bytes stored(static_cast<size_t>(kOut) * kIn * bits / 8);
    const TensorEntry weight = stored.Entry(DType::kI32, {kOut, kIn * bits / 32});
    for (const int64_t group : {32, 64, 96}) {  // 96: one per output
      for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
        const int64_t groups = base::CeilDiv(kIn, group);
        const Bytes scales = Scales(dtype, kOut * groups);
        const TensorEntry scale = scales.Entry(dtype, {kOut, groups});
        const LinearSource source = Packed(bits, weight, scale, group);
        EXPECT_EQ(StoredFormat(source), bits == 8 ? PackedFormat::kI8G32 : PackedFormat::kI4G32);
        const std::vector<float> packed = Roundtrip(source, 0, kOut), plain = Plain(source, 0, kOut);
        if (dtype != DType::kF32 || groups == 1) {
          EXPECT_EQ(packed, plain) << bits << " " << group;
          continue;
        }
        for (size_t i = 0; i < plain.size(); ++i) {
          ASSERT_NEAR(packed[i], plain[i], std::fabs(plain[i]) * (0x1p-11F + 0x1p-22F)) << bits << " " << i;
        }
      }
    }
  }
}

// 2^-24 of an output's largest f32 scale is the smallest that is kept.
TEST(StoredGroups, ReadsPackedCodesDownToSmallestScale) {
  for (const int bits : {4, 8}) {
    const Bytes stored(static_cast<size_t>(kOut) * kIn * bits / 8);
    const TensorEntry weight = stored.Entry(DType::kI32, {kOut, kIn * bits / 32});
    Bytes scales(static_cast<size_t>(kOut) * 3 * 4);
    for (int row = 0; row < kOut; ++row) {
      const float each[] = {1, 0x1p-24F, 0x1p-26F};
      std::memcpy(&scales[static_cast<size_t>(12 * row)], each, sizeof each);
    }
    const TensorEntry scale = scales.Entry(DType::kF32, {kOut, 3});
    const LinearSource source = Packed(bits, weight, scale, 32);
    const std::vector<float> plain = Plain(source, 0, kOut), packed = Roundtrip(source, 0, kOut);
    for (size_t i = 0; i < plain.size(); ++i) {
      ASSERT_EQ(packed[i], i % kIn < 64 ? plain[i] : 0) << bits << " bits, element " << i;
    }
  }
}

// The input count is not a multiple of 32; each output has one scale.
TEST(StoredGroups, ReadsRaggedChannels) {
  constexpr int kRagged = 83;
  for (const int bits : {4, 8}) {
    const int64_t words = base::CeilDiv(kRagged, 32 / bits);
    const Bytes stored(static_cast<size_t>(kOut * words * 4)), scales = Scales(DType::kF32, kOut);
    const TensorEntry weight = stored.Entry(DType::kI32, {kOut, words});
    const TensorEntry scale = scales.Entry(DType::kF32, {kOut, 1});
    LinearSource source = Packed(bits, weight, scale, kRagged);
    source.in = kRagged;
    EXPECT_EQ(Roundtrip(source, 0, kOut), Plain(source, 0, kOut)) << bits;
  }
}

TEST(StoredGroups, HasNoFormatForUnsupportedLayouts) {
  const Bytes stored(kOut * kIn * 4), scales(4 * kOut * kIn);
  for (const int bits : {4, 8}) {
    const TensorEntry weight = stored.Entry(DType::kI32, {kOut, kIn * bits / 32});
    const TensorEntry half = scales.Entry(DType::kF16, {kOut, 4});
    EXPECT_EQ(StoredFormat(Packed(bits, weight, half, 24)), std::nullopt);  // these groups cross ours
    LinearSource asymmetric = Packed(bits, weight, half, 32);
    asymmetric.zero_point = &weight;
    EXPECT_EQ(StoredFormat(asymmetric), std::nullopt);
  }
  const TensorEntry bf16 = stored.Entry(DType::kBF16, {kOut, kIn});
  EXPECT_EQ(StoredFormat(Ggml(bf16)), std::nullopt);
}

TEST(StoredGroups, ReadsNvfp4) {
  const Bytes stored(kOut * kIn / 2);
  Bytes scales(kOut * kIn / 16);
  for (int i = 0; i < kOut * kIn / 16; ++i) scales[i] = static_cast<std::byte>(i % 0x7f);
  const TensorEntry weight = stored.Entry(DType::kU8, {kOut, kIn / 2});
  const TensorEntry scale = scales.Entry(DType::kF8E4M3, {kOut, kIn / 16});
  LinearSource source = Nvfp4(weight, scale);
  for (const float global : {1.0F, 1024.0F, 937.5F}) {
    source.global_scale = global;
    const std::vector<float> packed = Roundtrip(source, 0, kOut), plain = Plain(source, 0, kOut);
    for (size_t i = 0; i < plain.size(); ++i) {
      // The plain reader divides the scale, the packed one multiplies the product: each rounds twice.
      ASSERT_NEAR(packed[i], plain[i], std::fabs(plain[i]) * 0x1p-22F) << i;
    }
  }
}

LinearSource Fp8(const TensorEntry& weight, const TensorEntry& scale, int64_t out, int64_t in,
                 int64_t block_rows, int64_t block_cols) {
  return {.module = "m",
          .scheme = WeightScheme::kFp8Block,
          .out = out,
          .in = in,
          .weight = &weight,
          .scale = &scale,
          .block_rows = block_rows,
          .block_cols = block_cols};
}

TEST(StoredGroups, ReadsFp8BlocksAndChannels) {
  const int64_t out = 200, in = 300;  // blocks at the edges are ragged
  Bytes stored(out * in);
  for (int64_t i = 0; i < out * in; ++i) {
    if ((static_cast<int>(stored[i]) & 0x7f) == 0x7f) stored[i] = std::byte{1};
  }
  const TensorEntry weight = stored.Entry(DType::kF8E4M3, {out, in});
  for (const auto& [rows, cols] : {std::pair{128, 128}, {1, 300}, {200, 300}, {64, 256}, {1, 128}}) {
    const int64_t down = base::CeilDiv(out, rows), across = base::CeilDiv(in, cols);
    Bytes scales(4 * down * across);
    for (int64_t i = 0; i < down * across; ++i) {
      const float scale = 0.001F * static_cast<float>(i + 1);
      std::memcpy(&scales[4 * i], &scale, 4);
    }
    const TensorEntry scale = scales.Entry(DType::kF32, {down, across});
    const LinearSource source = Fp8(weight, scale, out, in, rows, cols);
    EXPECT_EQ(StoredFormat(source), PackedFormat::kF8G128);
    EXPECT_EQ(Roundtrip(source, 0, out), Plain(source, 0, out)) << rows << " x " << cols;
    EXPECT_EQ(Roundtrip(source, 130, 40), Plain(source, 130, 40));
  }
}

TEST(StoredGroups, RejectsNonFiniteFp8) {
  Bytes stored(4 * 128), scales(4);
  const float one = 1, bad = std::nanf("");
  for (int i = 0; i < 4 * 128; ++i) stored[i] = i == 2 * 128 + 5 ? std::byte{0xff} : std::byte{0x30};
  std::memcpy(&scales[0], &one, 4);
  const TensorEntry weight = stored.Entry(DType::kF8E4M3, {4, 128}),
                    scale = scales.Entry(DType::kF32, {1, 1});
  tensor::Fp8Rows rows;
  const LinearSource source = Fp8(weight, scale, 4, 128, 128, 128);
  EXPECT_TRUE(ReadFp8Rows(source, 0, 2, rows).ok());
  EXPECT_EQ(Message(ReadFp8Rows(source, 0, 4, rows)),
            "a file: the weights of m must be finite; those of row 2 are not");
  std::memcpy(&scales[0], &bad, 4);
  EXPECT_EQ(Message(ReadFp8Rows(source, 0, 1, rows)),
            "a file: the scales of m must be finite; those of row 0 are not");
  EXPECT_EQ(StoredFormat(Fp8(weight, scale, 4, 128, 128, 64)), std::nullopt);  // these blocks cross ours
}

TEST(StoredGroups, RejectsNonFiniteScales) {
  Bytes stored(static_cast<size_t>(kOut) * kIn / 32 * 34);
  for (int b = 0; b < kOut * kIn / 32; ++b) stored.Put16(b * 34, b == 7 ? 0x7c00 : 0x3000);
  const TensorEntry weight = stored.Entry(DType::kQ8_0, {kOut, kIn});
  tensor::GroupRows rows;
  EXPECT_TRUE(ReadGroupRows(Ggml(weight), 0, 2, rows).ok());
  const Status status = ReadGroupRows(Ggml(weight), 0, kOut, rows);
  EXPECT_EQ(Message(status), "a file: the scales of m must be finite; those of row 2 are not");
  EXPECT_FALSE(ReadGroupRows(Ggml(weight), 5, kOut, rows).ok());
}

TEST(StoredGroups, RejectsGlobalScaleWithInfiniteWeights) {
  const Bytes stored(kOut * kIn / 2);
  Bytes scales(kOut * kIn / 16);
  for (int i = 0; i < kOut * kIn / 16; ++i) scales[i] = std::byte{0x38};
  const TensorEntry weight = stored.Entry(DType::kU8, {kOut, kIn / 2});
  const TensorEntry scale = scales.Entry(DType::kF8E4M3, {kOut, kIn / 16});
  LinearSource source = Nvfp4(weight, scale);
  tensor::GroupRows rows;
  for (const float global : {1e-40F, 1e-37F}) {
    source.global_scale = global;
    EXPECT_FALSE(ReadGroupRows(source, 0, kOut, rows).ok()) << global;
  }
  source.global_scale = 1e-20F;
  EXPECT_TRUE(ReadGroupRows(source, 0, kOut, rows).ok());
}

}  // namespace
}  // namespace moesaic::checkpoint
