#include "quantizer/gptq/gptq_stage.h"

#include "kernels/exec_context.h"
#include "quantizer/gptq/accelerated_gptq.h"
#include "quantizer/io/work_plan.h"

namespace moesaic::quantizer {
namespace {

class HostGptq final : public GptqStage {
 public:
  Status Gather(const kernels::ExecContext& ctx, const InputSource& inputs, Hessian* hessian) override {
    return inputs([&](const TokenRows& tokens) { hessian->Add(ctx, tokens); });
  }
  StatusOr<const HessianFactor*> Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                        const FactorOptions& options) override {
    return factorizer_.Factor(ctx, hessian, options);
  }
  StatusOr<Factorizer::FromInputs> Factor(const kernels::ExecContext& ctx, int k, const InputSource& inputs,
                                          const FactorOptions& options) override {
    return factorizer_.Factor(ctx, k, inputs, options);
  }
  StatusOr<QuantizedMatrix> Round(const kernels::ExecContext& ctx, const Grid& grid, const float* rows, int n,
                                  int k, const HessianFactor& factor, const ScaleSearch& search,
                                  GptqReport* report) override {
    return RoundByGptq(ctx, grid, rows, n, k, factor, search, report);
  }
  void Release() override { factorizer_ = {}; }

 private:
  Factorizer factorizer_;
};

}  // namespace

StatusOr<std::unique_ptr<GptqStage>> MakeGptqStage(kernels::GptqAccelerator* device,
                                                   const models::DecoderSpec& spec,
                                                   const std::vector<ModelItem>& items,
                                                   std::span<const Precision> roundings,
                                                   const CalibrationLimits& limits) {
  if (device == nullptr) return std::make_unique<HostGptq>();
  std::vector<AcceleratedGptq::Shape> shapes;
  for (const ModelItem& item : items) {
    if (!item.roundable || !IsWalked(item, spec)) continue;
    const int64_t rows = std::min(SlabRows(item, limits.slab_values), item.shape[0]);
    for (const Precision& precision : roundings) {
      shapes.push_back({precision.grid(), static_cast<int>(rows), static_cast<int>(item.shape[1])});
    }
  }
  return AcceleratedGptq::Create(*device, shapes);
}

}  // namespace moesaic::quantizer
