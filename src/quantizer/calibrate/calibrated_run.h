// Calibrated rounding, layer by layer. GPTQ rounds each linear on the inputs that the already rounded layers
// before it produce. Weights are read once, in waves. Only the tokens' hidden states are kept in memory.
#pragma once

#include <map>
#include <optional>

#include "kernels/exec_context.h"
#include "quantizer/calibrate/calibration_report.h"
#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/gptq/gptq_stage.h"
#include "quantizer/io/unit_rounder.h"
#include "quantizer/io/unit_stream.h"

namespace moesaic::quantizer {

/// Tokens per input above which a layer's Hessian cannot improve an expert's own.
inline constexpr int kPlenty = 4;

class CalibratedRun : private LayerVisitor {
 public:
  /// The arguments must outlive the object.
  CalibratedRun(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                const QuantizePlan& plan, const QuantizeOptions& options, const std::string& folder,
                Journal& journal, UnitStream& units, UnitRounder& rounder, GptqStage& stage);

  /// Processes all units; resumes from the saved state of this run.
  Status Go();
  const CalibrationReport& report() const { return report_; }

 private:
  StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) override;
  int64_t ScratchBytes(int layer) const override;
  Status OnRouting(int layer, std::span<const int64_t> tokens_of_expert) override;

  /// Returns null if linears must be rounded to the nearest because all their inputs are 0. Otherwise the
  /// factor is valid until the next call.
  StatusOr<const HessianFactor*> Factor(const LinearGroup& group, LinearFinding* finding);
  StatusOr<const HessianFactor*> FactorInOrder(const LinearGroup& group, const FactorOptions& options,
                                               LinearFinding* finding);
  StatusOr<Hessian*> Gather(std::optional<Hessian>& hessian, const LinearInputs& inputs);
  /// Returns an error if inputs are missing. `inputs` must outlive the source.
  InputSource SourceOf(const LinearInputs& inputs);
  Status ShrinkToLayer(const LinearGroup& group, Hessian* own, LinearFinding* finding);
  /// `finding` is null for a linear that is kept.
  StatusOr<OwnedMatrix> RoundLinear(size_t item, const HessianFactor* factor, const LinearFinding* finding);
  Status SaveState(int layer, CalibrationStream& stream);
  /// Loads hidden states into `stream` and returns the first layer to process.
  int Restore(CalibrationStream& stream);

  const kernels::ExecContext& ctx_;
  const checkpoint::Checkpoint& source_;
  const QuantizePlan& plan_;
  const QuantizeOptions& options_;
  Journal& journal_;
  UnitStream& units_;
  UnitRounder& rounder_;
  GptqStage& gptq_;
  std::map<std::string, size_t> item_of_;  // linears by name
  // Memory that is reused for all linears: the Hessian of a linear's inputs, of an expert's stand-ins, and of
  // the inputs that a layer's experts share.
  std::optional<Hessian> own_, stand_ins_, layer_;
  int layer_index_ = -1;                 // layer of layer_
  CalibrationStream* stream_ = nullptr;  // valid while Go() runs
  std::string stage_;                    // current stage, for progress reports
  StateStore store_;
  StateStore::Files files_;  // of the last state
  CalibrationReport report_;
};

/// Rounds the remaining pieces of items before `item`, each by itself.
Status RoundUntil(UnitStream& units, UnitRounder& rounder, size_t item);

}  // namespace moesaic::quantizer
