// Compares the card's kernels, compiled as C++ (test_accelerator.h), with ref/, and compiles them with NVRTC
// if it is installed. quantizer/gptq/accelerated_gptq_test.cc tests their combination.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kernels/cuda/accelerator_check.h"
#include "kernels/cuda/compile.h"
#include "kernels/cuda/libraries.h"
#include "kernels/cuda/test_accelerator.h"
#include "kernels/ref/rounding.h"

namespace moesaic::kernels {
namespace {

using cuda::kBlockColumns;
using testing::HasSubstr;

std::vector<float> Normals(size_t count, float size, int seed) {
  std::mt19937 rng(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& value : values) value = normal(rng);
  return values;
}

// Both compute the same f32 steps in the same order without contraction: results must be bit-identical.
TEST(DeviceKernels, RoundBlocksLikeRefBitForBit) {
  TestAccelerator device;
  const int k = 200, begin = 40, group = 16;
  for (const int rows : {1, 63, 64, 65, 130}) {
    for (const int columns : {1, 17, 128}) {
      const int padded = (rows + 63) / 64 * 64;
      const auto at = static_cast<size_t>(padded);
      const std::vector<float> values = Normals(at * k, 1, rows),
                               corrections = Normals(at * kBlockColumns, 0.2F, 2);
      std::vector<float> factor = Normals(size_t{kBlockColumns} * kBlockColumns, 0.3F, 3);
      for (int c = 0; c < kBlockColumns; ++c)
        factor[c * kBlockColumns + c] = 1 + 0.01F * static_cast<float>(c);
      std::vector<int> order(k);
      for (int i = 0; i < k; ++i) order[i] = i * 77 % k;  // a permutation
      for (int g = 0; g < kNumberGrids; ++g) {
        // Scales are large and small for the grid, so that ends, denormal numbers and zeros occur.
        const float step = g == 0 ? 0.02F : g == 1 ? 0.3F : g == 2 ? 0.4F : 0.004F;
        std::vector<float> scales = Normals(at * (k / group + 1), step, 4);
        for (float& scale : scales) scale = std::copysign(std::fabs(scale) + 0.3F * step, g == 1 ? scale : 1);
        std::vector<uint16_t> errors(at * k, 0xabcd);
        std::vector<uint8_t> codes(static_cast<size_t>(rows) * k, 0xee);
        std::vector<float> losses(at, 0.5F);
        const cuda::RoundBlockArgs args = {.values = values.data(),
                                           .corrections = corrections.data(),
                                           .scales = scales.data(),
                                           .order = order.data(),
                                           .factor = factor.data(),
                                           .errors = errors.data(),
                                           .codes = codes.data(),
                                           .losses = losses.data(),
                                           .begin = begin,
                                           .columns = columns,
                                           .rows = rows,
                                           .rows_padded = padded,
                                           .k = k,
                                           .group = group};
        const auto kernel = static_cast<DeviceKernel>(static_cast<int>(DeviceKernel::kRoundInt8) + g);
        ASSERT_TRUE(device.Launch(kernel, padded / 64, cuda::kBlockRows, &args).ok());
        for (int first = 0; first < rows; first += kRoundBlockRows) {
          std::vector<float> tile(size_t{kBlockColumns} * kRoundBlockRows), feedback(tile), expected(tile);
          std::vector<uint8_t> expected_codes(tile.size());
          std::vector<float> expected_losses(kRoundBlockRows, 0.5F);
          const float* scales_of[kBlockColumns];
          for (int c = 0; c < columns; ++c) {
            std::copy_n(&values[(begin + c) * at + first], kRoundBlockRows, &tile[c * kRoundBlockRows]);
            std::copy_n(&corrections[c * at + first], kRoundBlockRows, &feedback[c * kRoundBlockRows]);
            scales_of[c] = &scales[order[begin + c] / group * at + first];
          }
          ref::kRounding[g].block({.columns = columns,
                                   .values = tile.data(),
                                   .feedback = feedback.data(),
                                   .scales = scales_of,
                                   .factor = factor.data(),
                                   .factor_stride = kBlockColumns,
                                   .errors = expected.data(),
                                   .codes = expected_codes.data(),
                                   .losses = expected_losses.data()});
          for (int r = first; r < std::min(rows, first + kRoundBlockRows); ++r) {
            ASSERT_EQ(losses[r], expected_losses[r - first]) << g << " " << rows << " " << columns;
            for (int c = 0; c < columns; ++c) {
              const size_t of = size_t(c) * kRoundBlockRows + (r - first);
              ASSERT_EQ(codes[size_t(r) * k + order[begin + c]], expected_codes[of])
                  << g << " " << r << " " << c;
              ASSERT_EQ(errors[(begin + c) * at + r], tensor::ToBF16(expected[of]).bits) << g << " " << r;
            }
          }
        }
        // Nothing else is written.
        for (int r = 0; r < rows; ++r) {
          for (int p = 0; p < k; ++p) {
            if (p >= begin && p < begin + columns) continue;
            ASSERT_EQ(codes[size_t(r) * k + order[p]], 0xee);
          }
        }
      }
    }
  }
}

TEST(DeviceKernels, CompileForCards) {
  const StatusOr<cuda::Nvrtc> nvrtc = cuda::OpenNvrtc();
  if (!nvrtc.ok()) GTEST_SKIP() << nvrtc.status();
  for (const int arch : {80, 90}) {
    const StatusOr<std::string> image = cuda::CompileGptq(*nvrtc, arch);
    ASSERT_TRUE(image.ok()) << image.status();
    EXPECT_THAT(image->substr(0, 4),
                "\x7f"
                "ELF");
    for (const char* name : {"OrderMatrix", "ReverseFactor", "CopyDiagonal", "GatherWeights", "RoundInt8",
                             "RoundInt4", "RoundE2M1", "RoundE4M3"}) {
      EXPECT_THAT(*image, HasSubstr(std::string(".text.") + name)) << arch;
    }
  }
  // For a card that NVRTC does not know, it compiles for the nearest older capability, and the driver
  // compiles the rest.
  const StatusOr<std::string> newer = cuda::CompileGptq(*nvrtc, 999);
  ASSERT_TRUE(newer.ok()) << newer.status();
  EXPECT_THAT(*newer, HasSubstr(".visible .entry RoundE4M3"));
  // Bit-identical results require that nothing is contracted and that divisions are exact.
  EXPECT_THAT(*newer, testing::Not(HasSubstr("fma.rn")));
  EXPECT_THAT(*newer, testing::AllOf(HasSubstr("div.rn.f32"), testing::Not(HasSubstr(".ftz"))));
  EXPECT_THAT(Message(cuda::CompileGptq(*nvrtc, 10).status()), HasSubstr("compute capability 1.0"));
}

TEST(DeviceLibraries, HaveEveryCalledFunction) {
  const StatusOr<cuda::Libraries> libraries = cuda::OpenLibraries(99);
  if (!libraries.ok() && libraries.status().code() == StatusCode::kNotFound &&
      Message(libraries.status()).find("cannot open shared object file") != std::string::npos) {
    GTEST_SKIP() << libraries.status();
  }
  ASSERT_TRUE(libraries.ok()) << libraries.status();
  int version = 0;
  EXPECT_EQ(libraries->solver.GetVersion(&version), 0);
  EXPECT_GE(version, 11000);
}

TEST(DeviceLibraries, AreNotNewerThanTheDriver) {
  const Status status = cuda::OpenLibraries(11).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_THAT(Message(status), HasSubstr("CUDA 11"));
}

// A test double with one fault.
class WrongAccelerator final : public TestAccelerator {
 public:
  enum class Fault {
    kNone,
    kIgnoresTranspose,
    kIgnoresAccumulate,
    kSumsInBF16,
    kOtherTriangle,
    kAlwaysPositive,
    kNeverPositive,
    kOtherGrid
  };
  explicit WrongAccelerator(Fault fault) : TestAccelerator("wrong device"), fault_(fault) {}

  Status Gemm(const DeviceGemm& gemm) override {
    DeviceGemm made = gemm;
    if (fault_ == Fault::kIgnoresAccumulate) made.accumulate = false;
    if (fault_ == Fault::kIgnoresTranspose && gemm.transpose_a) {  // within the same memory
      made.transpose_a = false;
      made.depth = gemm.m;
    }
    RETURN_IF_ERROR(TestAccelerator::Gemm(made));
    for (int64_t i = 0; i < gemm.m && fault_ == Fault::kSumsInBF16; ++i) {
      for (int64_t j = 0; j < gemm.n; ++j) {
        float& sum = gemm.c[i * gemm.c_stride + j];
        sum = tensor::ToFloat(tensor::ToBF16(sum));
      }
    }
    return OkStatus();
  }
  StatusOr<bool> Cholesky(float* matrix, int k, void* work) override {
    ASSIGN_OR_RETURN(const bool positive, TestAccelerator::Cholesky(matrix, k, work));
    for (int64_t c = 0; c < k && fault_ == Fault::kOtherTriangle; ++c) {
      for (int64_t r = 0; r < c; ++r) std::swap(matrix[c * k + r], matrix[r * k + c]);
    }
    if (fault_ == Fault::kAlwaysPositive) return true;
    return positive && fault_ != Fault::kNeverPositive;
  }
  Status Launch(DeviceKernel kernel, int64_t blocks, int threads, const void* arguments) override {
    const bool other = fault_ == Fault::kOtherGrid && kernel == DeviceKernel::kRoundInt4;
    return TestAccelerator::Launch(other ? DeviceKernel::kRoundInt8 : kernel, blocks, threads, arguments);
  }

 private:
  Fault fault_;
};

TEST(DeviceCheck, RejectsFaultyAccelerator) {
  using Fault = WrongAccelerator::Fault;
  WrongAccelerator right(Fault::kNone);
  EXPECT_EQ(cuda::CheckAccelerator(right), OkStatus());
  for (const auto& [fault, what] : {std::pair(Fault::kIgnoresTranspose, "a product of a transposed matrix"),
                                    {Fault::kIgnoresAccumulate, "a product"},
                                    {Fault::kSumsInBF16, "a product"},
                                    {Fault::kOtherTriangle, "a Cholesky factor"},
                                    {Fault::kAlwaysPositive, "not positive definite"},
                                    {Fault::kNeverPositive, "has no Cholesky factor"},
                                    {Fault::kOtherGrid, "rounding to int4"}}) {
    WrongAccelerator device(fault);
    const Status refused = cuda::CheckAccelerator(device);
    EXPECT_EQ(refused.code(), StatusCode::kDataLoss) << what;
    EXPECT_THAT(Message(refused),
                testing::AllOf(HasSubstr("wrong device computes wrong results"), HasSubstr(what)));
  }
}

TEST(Devices, ErrorNamesMissingComponent) {
  for (const char* wrong : {"gpu", "cuda:", "cuda:x", "cuda:1x", "cuda:-1", "cuda0", ""}) {
    const Status status = OpenGptqAccelerator(wrong).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << wrong;
    EXPECT_THAT(Message(status), HasSubstr(fmt::format("\"{}\"", wrong)));
  }
  if (!cuda::OpenDriver().ok()) {
    const Status status = OpenGptqAccelerator("cuda:0").status();
    EXPECT_EQ(status.code(), StatusCode::kNotFound);
    EXPECT_THAT(Message(status), testing::StartsWith("libcuda.so.1: "));
    EXPECT_THAT(Message(status), HasSubstr("driver"));
    return;
  }
  EXPECT_FALSE(OpenGptqAccelerator("cuda:1000").ok());
}

// Compares each operation on a real card with the test double.
TEST(Devices, CardComputesLikeTestAccelerator) {
  const StatusOr<std::unique_ptr<GptqAccelerator>> card = OpenGptqAccelerator("cuda");
  if (!card.ok()) GTEST_SKIP() << "no CUDA device: " << card.status();
  TestAccelerator stand_in;
  const int m = 128, n = 192, depth = 256, k = 384;
  const auto in_bf16 = [](size_t count, int seed) {
    std::vector<uint16_t> bits;
    for (const float value : Normals(count, 1, seed)) bits.push_back(tensor::ToBF16(value).bits);
    return bits;
  };
  const std::vector<uint16_t> a = in_bf16(size_t{m} * depth, 5), b = in_bf16(size_t{depth} * n, 6);
  // A positive definite matrix: ones next to a large diagonal.
  std::vector<float> matrix(size_t{k} * k, 1.0F);
  for (int i = 0; i < k; ++i) matrix[size_t(i) * k + i] = 3 + static_cast<float>(i % 7);
  const auto run = [&](GptqAccelerator& device, bool transposed, std::vector<float>* c,
                       std::vector<float>* l) -> Status {
    ASSIGN_OR_RETURN(const DeviceBuffer on_a, DeviceBuffer::Allocate(device, int64_t{m} * depth * 2));
    ASSIGN_OR_RETURN(const DeviceBuffer on_b, DeviceBuffer::Allocate(device, int64_t{depth} * n * 2));
    ASSIGN_OR_RETURN(const DeviceBuffer on_c, DeviceBuffer::Allocate(device, int64_t{m} * n * 4));
    ASSIGN_OR_RETURN(const DeviceBuffer on_l, DeviceBuffer::Allocate(device, int64_t{k} * k * 4));
    ASSIGN_OR_RETURN(const int64_t bytes, device.CholeskyBytes(k));
    ASSIGN_OR_RETURN(const DeviceBuffer work, DeviceBuffer::Allocate(device, bytes));
    RETURN_IF_ERROR(device.Upload(on_a.as<void>(), a.data(), int64_t{m} * depth * 2));
    RETURN_IF_ERROR(device.Upload(on_b.as<void>(), b.data(), int64_t{depth} * n * 2));
    RETURN_IF_ERROR(device.Zero(on_c.as<void>(), int64_t{m} * n * 4));
    for (int twice = 0; twice < 2; ++twice) {
      RETURN_IF_ERROR(device.Gemm({.transpose_a = transposed,
                                   .m = m,
                                   .n = n,
                                   .depth = depth,
                                   .a = on_a.as<uint16_t>(),
                                   .b = on_b.as<uint16_t>(),
                                   .c = on_c.as<float>(),
                                   .a_stride = transposed ? m : depth,
                                   .b_stride = n,
                                   .c_stride = n,
                                   .accumulate = true}));
    }
    c->resize(size_t{m} * n);
    RETURN_IF_ERROR(device.Download(c->data(), on_c.as<void>(), int64_t{m} * n * 4));
    RETURN_IF_ERROR(device.Upload(on_l.as<void>(), matrix.data(), int64_t{k} * k * 4));
    ASSIGN_OR_RETURN(const bool positive, device.Cholesky(on_l.as<float>(), k, work.as<void>()));
    if (!positive) return Cancelled("not positive definite");
    l->resize(size_t{k} * k);
    return device.Download(l->data(), on_l.as<void>(), int64_t{k} * k * 4);
  };
  for (const bool transposed : {false, true}) {
    std::vector<float> c, l, expected_c, expected_l;
    ASSERT_TRUE(run(stand_in, transposed, &expected_c, &expected_l).ok());
    const Status ran = run(**card, transposed, &c, &l);
    ASSERT_TRUE(ran.ok()) << ran;
    // Sums of 512 products of about 1 in f32: each step has an error of 2^-24 of at most about 23.
    for (size_t i = 0; i < c.size(); ++i) ASSERT_NEAR(c[i], expected_c[i], 512 * 0x1p-24 * 64);
    for (int col = 0; col < k; ++col) {
      for (int row = col; row < k; ++row) {
        const size_t at = size_t(col) * k + row;
        ASSERT_NEAR(l[at], expected_l[at], k * 0x1p-24 * 16) << row << " " << col;
      }
    }
  }
  matrix[0] = -1;
  std::vector<float> c, l;
  EXPECT_EQ(run(**card, false, &c, &l).code(), StatusCode::kCancelled);
}

}  // namespace
}  // namespace moesaic::kernels
