// The calibrated way through a model: layer by layer, each linear is rounded by GPTQ on the inputs that the
// layers before it, rounded already, give it. Weights are read once, in waves; what is kept of the tokens is
// their hidden states.
#pragma once

#include <map>
#include <optional>

#include "quantizer/calibrate/calibration_report.h"
#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/gptq/gptq_stage.h"
#include "quantizer/io/unit_rounder.h"
#include "quantizer/io/unit_stream.h"

namespace moesaic::quantizer {

/// Tokens that a routed expert must see to be covered.
inline constexpr int64_t kCoveredTokens = 32;

/// A Hessian of so many times as many tokens as inputs has little left that a layer's could correct.
inline constexpr int kPlenty = 4;

class CalibratedRun : private LayerVisitor {
 public:
  /// The arguments must outlive it.
  CalibratedRun(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                const QuantizePlan& plan, const QuantizeOptions& options, const std::string& folder,
                Journal& journal, UnitStream& units, UnitRounder& rounder, GptqStage& stage);

  /// Works through all units; goes on from the last state that the journal has.
  Status Go();
  const CalibrationReport& report() const { return report_; }

 private:
  StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) override;
  int64_t ScratchBytes(int layer) const override;
  Status SeeRouting(int layer, std::span<const int64_t> tokens_of_expert) override;

  /// Null where linears are to be rounded to the nearest: all inputs are 0 in every token, or an expert has
  /// too few (RareExperts). Else it is there until the next call.
  StatusOr<const HessianFactor*> Factor(const LinearGroup& group, LinearFinding* finding);
  StatusOr<const HessianFactor*> FactorInOrder(const LinearGroup& group, const FactorOptions& options,
                                               LinearFinding* finding);
  StatusOr<Hessian*> Gather(std::optional<Hessian>& hessian, const LinearInputs& inputs);
  /// An error: not all of them came. `inputs` must outlive it.
  InputSource SourceOf(const LinearInputs& inputs);
  Status LeanOnLayer(const LinearGroup& group, Hessian* own, LinearFinding* finding);
  /// `finding`: of a linear that is rounded; null: it is kept.
  StatusOr<OwnedMatrix> RoundLinear(size_t item, const HessianFactor* factor, const LinearFinding* finding);
  std::string StatePath(int layer) const;
  Status SaveState(int layer, CalibrationStream& stream);
  /// The layer to begin with, whose hidden states are put in `stream`.
  int Restore(CalibrationStream& stream);

  const kernels::ExecContext& ctx_;
  const checkpoint::Checkpoint& source_;
  const QuantizePlan& plan_;
  const QuantizeOptions& options_;
  const std::string folder_;
  Journal& journal_;
  UnitStream& units_;
  UnitRounder& rounder_;
  GptqStage& gptq_;
  std::map<std::string, size_t> item_of_;  // linears by name
  // Memory that is kept from linear to linear: of a linear's inputs, of an expert's stand-ins, and of the
  // inputs that a layer's experts share.
  std::optional<Hessian> own_, stand_ins_, layer_;
  int layer_index_ = -1;                 // that layer_ is of
  CalibrationStream* stream_ = nullptr;  // while Go() runs
  std::string stage_;                    // that a run tells
  size_t saved_linears_ = 0, saved_routing_ = 0;
  int saved_layer_ = 0;  // that the last state was before
  CalibrationReport report_;
};

/// Works through the pieces of items before `item` that are left, each by itself.
Status RoundUntil(UnitStream& units, UnitRounder& rounder, size_t item);

}  // namespace moesaic::quantizer
