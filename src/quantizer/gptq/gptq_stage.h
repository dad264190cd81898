// Interface of GPTQ's heavy stage: second moments of inputs, their factor, and rounding by it.
#pragma once

#include <memory>
#include <vector>

#include "kernels/exec_context.h"
#include "kernels/gptq_accelerator.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "quantizer/gptq/gptq.h"

namespace moesaic::quantizer {

class GptqStage {
 public:
  virtual ~GptqStage() = default;
  /// Adds all of a layer's inputs to a Hessian.
  virtual Status Gather(const kernels::ExecContext& ctx, const InputSource& inputs, Hessian* hessian) = 0;
  /// See Factorizer::Factor. A factor is valid until the next one is made or Release is called.
  virtual StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                                const FactorOptions& options) = 0;
  virtual StatusOr<Factorizer::FromInputs> Factor(const kernels::ExecContext& ctx, int k,
                                                  const InputSource& inputs,
                                                  const FactorOptions& options) = 0;
  /// See RoundByGptq. `factor` must be the last one.
  virtual StatusOr<QuantizedMatrix> Round(const kernels::ExecContext& ctx, const Grid& grid,
                                          const float* rows, int n, int k, const HessianFactor& factor,
                                          const ScaleSearch& search, GptqReport* report) = 0;
  /// Releases the host memory of the factor.
  virtual void Release() = 0;
};

/// Creates a stage on the CPU if `device` is null, else on the device. Allocates at once all device memory
/// that rounding `items` to any of `roundings` needs. Fails with the needed size if there is less. `device`
/// must outlive the stage.
StatusOr<std::unique_ptr<GptqStage>> MakeGptqStage(kernels::GptqAccelerator* device,
                                                   const models::DecoderSpec& spec,
                                                   const std::vector<ModelItem>& items,
                                                   std::span<const Precision> roundings,
                                                   const CalibrationLimits& limits);

}  // namespace moesaic::quantizer
