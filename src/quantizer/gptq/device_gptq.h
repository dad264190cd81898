// GPTQ's heavy stage on a device (kernels/device.h): products of bf16 with sums in f32 as on the processor, a
// Cholesky factor in f32, and rounding by kernels that take the very steps of the processor's.
#pragma once

#include <array>

#include "quantizer/gptq/gptq_stage.h"

namespace moesaic::quantizer {

class DeviceGptq final : public GptqStage {
 public:
  /// Rows that are rounded at once.
  struct Shape {
    Grid grid;
    int n = 0, k = 0;
  };

  /// Takes all memory that matrices of these shapes need.
  static StatusOr<std::unique_ptr<GptqStage>> Create(kernels::Device& device, std::span<const Shape> shapes);

  Status Gather(const kernels::ExecContext& ctx, const InputSource& inputs, Hessian* hessian) override;
  StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                        const FactorOptions& options) override;
  StatusOr<Factorizer::FromInputs> Factor(const kernels::ExecContext& ctx, int k, const InputSource& inputs,
                                          const FactorOptions& options) override;
  StatusOr<QuantizedMatrix> Round(const kernels::ExecContext& ctx, const Grid& grid, const float* rows, int n,
                                  int k, const HessianFactor& factor, const ScaleSearch& search,
                                  GptqReport* report) override;
  void Release() override {}  // the process has none of it

 private:
  // What a buffer holds, for k inputs padded to K and n rows padded to N.
  enum Part {
    kSums,      // f32 [K][K]: of products of inputs, j <= i
    kMatrix,    // f32 [K][K]: H in order from behind, then its factor
    kWork,      // of the factorization
    kInputs,    // bf16 [tokens][K]
    kOrder,     // int [k]
    kPanels,    // bf16 [K][K]: [c][i] is R[i][c]
    kBlocks,    // f32 [K / 128][128][128]: those of R on its diagonal, likewise
    kDiagonal,  // f32 [K]
    kWeights,   // f32 [n][k]
    kValues,    // f32 [k][N]: weights in order
    kScales,    // f32 [groups][N]
    kErrors,    // bf16 [K][N]
    kAsked,     // f32 [128][N], or [K][128] while losses are told
    kCodes,     // u8 [n][k]
    kLosses,    // f32 [N]
    kParts,
  };
  using Sizes = std::array<int64_t, kParts>;

  explicit DeviceGptq(kernels::Device& device) : device_(device) {}
  static StatusOr<Sizes> SizesOf(kernels::Device& device, const Shape& shape);
  // Fails where there is less memory: Create was not told of such a shape.
  Status CheckFits(const Shape& shape) const;

  template <typename T>
  T* at(Part part) const {
    return memory_[part].as<T>();
  }
  Status Upload(Part part, const void* from, int64_t bytes) {
    return device_.Upload(at<void>(part), from, bytes);
  }
  // Sums of products of the inputs, in kSums.
  Status SumUp(const kernels::ExecContext& ctx, int k, const InputSource& inputs, TokenWeight* seen);
  Status AddTokens(const kernels::ExecContext& ctx, int k, const TokenRows& tokens);
  // Turns kSums into the factor.
  Status FactorSums(double weight, float mean, const FactorOptions& options);
  StatusOr<bool> Attempt(double weight, float added, const FactorOptions& options);
  StatusOr<std::vector<double>> RowLosses(const kernels::ExecContext& ctx, const float* errors, int count);

  kernels::Device& device_;
  Sizes bytes_ = {};
  std::array<kernels::DeviceBuffer, kParts> memory_;
  HessianFactor factor_;  // without what stands on the device
};

}  // namespace moesaic::quantizer
