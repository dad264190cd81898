// Where GPTQ's heavy stage runs: second moments of inputs, their factor, and rounding by it.
#pragma once

#include <memory>
#include <vector>

#include "kernels/device.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "quantizer/gptq/gptq.h"

namespace moesaic::quantizer {

class GptqStage {
 public:
  virtual ~GptqStage() = default;
  /// Adds all of a layer's inputs to a Hessian.
  virtual Status Gather(const kernels::ExecContext& ctx, const InputSource& inputs, Hessian* hessian) = 0;
  /// As Factorizer::Factor. A factor is there until the next one is made, or Release.
  virtual StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                                const FactorOptions& options) = 0;
  virtual StatusOr<Factorizer::FromInputs> Factor(const kernels::ExecContext& ctx, int k,
                                                  const InputSource& inputs,
                                                  const FactorOptions& options) = 0;
  /// As RoundByGptq, by the last factor.
  virtual StatusOr<QuantizedMatrix> Round(const kernels::ExecContext& ctx, const Grid& grid,
                                          const float* rows, int n, int k, const HessianFactor& factor,
                                          const ScaleSearch& search, GptqReport* report) = 0;
  /// Gives the factor's memory of the process back.
  virtual void Release() = 0;
};

/// Runs on the processor where `device` is null, else there. Takes all of the device's memory that rounding
/// `items` in one of these ways will need at once; too little is refused with how much that is. `device` must
/// outlive it.
StatusOr<std::unique_ptr<GptqStage>> MakeGptqStage(kernels::Device* device, const models::DecoderSpec& spec,
                                                   const std::vector<ModelItem>& items,
                                                   std::span<const Precision> roundings,
                                                   const CalibrationLimits& limits);

}  // namespace moesaic::quantizer
