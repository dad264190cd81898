// GPTQ's heavy stage on an accelerator (kernels/gptq_accelerator.h). Products are bf16 with f32 sums, as on
// the CPU. The Cholesky factor is f32. The rounding kernels perform exactly the steps of the CPU's. This code
// has not run on a card yet.
#pragma once

#include <array>

#include "kernels/exec_context.h"
#include "kernels/gptq_accelerator.h"
#include "quantizer/gptq/gptq_stage.h"

namespace moesaic::quantizer {

class AcceleratedGptq final : public GptqStage {
 public:
  /// Shape of the rows that are rounded at once.
  struct Shape {
    Grid grid;
    int n = 0, k = 0;
  };

  /// Allocates the device memory that matrices of these shapes need.
  static StatusOr<std::unique_ptr<GptqStage>> Create(kernels::GptqAccelerator& device,
                                                     std::span<const Shape> shapes);

  Status Gather(const kernels::ExecContext& ctx, const InputSource& inputs, Hessian* hessian) override;
  StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                        const FactorOptions& options) override;
  StatusOr<Factorizer::FromInputs> Factor(const kernels::ExecContext& ctx, int k, const InputSource& inputs,
                                          const FactorOptions& options) override;
  StatusOr<QuantizedMatrix> Round(const kernels::ExecContext& ctx, const Grid& grid, const float* rows, int n,
                                  int k, const HessianFactor& factor, const ScaleSearch& search,
                                  GptqReport* report) override;
  void Release() override {}  // host memory is not used

 private:
  // Contents of a buffer, for k inputs padded to K and n rows padded to N.
  enum BufferKind {
    kSums,      // f32 [K][K]: sums of products of inputs, j <= i
    kMatrix,    // f32 [K][K]: H in reverse order, then its factor
    kWork,      // workspace of the factorization
    kInputs,    // bf16 [tokens][K]
    kOrder,     // int [k]
    kPanels,    // bf16 [K][K]: transposed factor, [c][i] is R[i][c]
    kBlocks,    // f32 [K / 128][128][128]: diagonal blocks of R, transposed
    kDiagonal,  // f32 [K]
    kWeights,   // f32 [n][k]
    kValues,    // f32 [k][N]: weights in order
    kScales,    // f32 [groups][N]
    kErrors,    // bf16 [K][N]
    kAsked,     // f32 [128][N] corrections; [K][128] while losses are computed
    kCodes,     // u8 [n][k]
    kLosses,    // f32 [N]
    kBufferKinds,
  };
  using Sizes = std::array<int64_t, kBufferKinds>;

  explicit AcceleratedGptq(kernels::GptqAccelerator& device) : device_(device) {}
  static StatusOr<Sizes> SizesOf(kernels::GptqAccelerator& device, const Shape& shape);
  // Fails for shapes that need more memory than Create allocated.
  Status CheckFits(const Shape& shape) const;

  template <typename T>
  T* at(BufferKind kind) const {
    return memory_[kind].as<T>();
  }
  Status Upload(BufferKind kind, const void* from, int64_t bytes) {
    return device_.Upload(at<void>(kind), from, bytes);
  }
  // Sums products of the inputs into kSums.
  Status SumUp(const kernels::ExecContext& ctx, int k, const InputSource& inputs, int64_t* seen);
  Status AddTokens(const kernels::ExecContext& ctx, int k, const TokenRows& tokens);
  // Factors kSums.
  Status FactorSums(int64_t tokens, float mean, const FactorOptions& options);
  StatusOr<bool> Attempt(int64_t tokens, float added, const FactorOptions& options);
  StatusOr<std::vector<double>> RowLosses(const kernels::ExecContext& ctx, const float* errors, int count);

  kernels::GptqAccelerator& device_;
  Sizes bytes_ = {};
  std::array<kernels::DeviceBuffer, kBufferKinds> memory_;
  HessianFactor factor_;  // host kind of the factor, without its device memory
};

}  // namespace moesaic::quantizer
