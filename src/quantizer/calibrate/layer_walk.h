// Moves calibration tokens through a decoder layer that is rounded on the way. A visitor receives each group
// of linears with common inputs, together with these inputs. The matrices that it returns run from then on.
// So every linear is visited with the inputs that it has when all linears before it are rounded.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/exec_context.h"
#include "quantizer/calibrate/calibration_stream.h"
#include "quantizer/calibrate/folding.h"
#include "quantizer/gptq/hessian.h"

namespace moesaic::quantizer {

/// Inputs of linears over the stream's first variant. Each visit computes them again, in the same runs of
/// tokens, which are valid during the call.
struct LinearInputs {
  int k = 0;  // 0: none
  int64_t tokens = 0;
  std::function<void(const TokenSink&)> visit;
};

/// Linears that read the same inputs, in the order of ListItems.
struct LinearGroup {
  int layer = 0;
  std::vector<std::string> modules;
  LinearInputs inputs;
  int expert = -1;  // routed expert, whose inputs are those of its tokens; -1: none
  /// For experts with few tokens: inputs of all tokens of the layer, whether routed to the expert or not.
  LinearInputs layer_inputs;
  /// True if layer_inputs are equal for all experts of the layer. Shared experts have the same inputs.
  bool same_layer_inputs = false;
};

/// Maximum number of tokens of the layer that stand in for an expert's missing ones.
inline constexpr int kStandIns = 2048;

/// Matrix that replaces a module on one variant of the stream.
struct VariantMatrix {
  int variant = 0;
  size_t module = 0;  // index in the group
  OwnedMatrix matrix;
};

class LayerVisitor {
 public:
  virtual ~LayerVisitor() = default;
  /// Returns the matrices to run, one for each module.
  virtual StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) = 0;
  /// Returns the maximum scratch bytes of Visit for a layer. Visit uses them while no inputs are computed, so
  /// they overlap with the scratch memory of inputs.
  virtual int64_t ScratchBytes(int /*layer*/) const { return 0; }
  /// Returns replacements for variants other than the first. Called after Visit with its result. For linears
  /// outside of experts it may add variants.
  virtual StatusOr<std::vector<VariantMatrix>> VisitVariants(const LinearGroup&,
                                                             std::span<const OwnedMatrix>) {
    return std::vector<VariantMatrix>();
  }
  /// The same for a router, before it routes. Variants for the layer's experts may be added here.
  virtual StatusOr<std::vector<VariantMatrix>> VisitRouter(int /*layer*/) {
    return std::vector<VariantMatrix>();
  }
  /// Reports the experts [rows, top_k] of tokens [first, first + rows) of all variants.
  virtual void OnRoutes(int /*layer*/, int64_t /*first*/, int /*rows*/, int /*top_k*/,
                        const int32_t* /*ids*/) {}
  /// Reports the number of tokens of each routed expert of a layer, before the first expert is visited.
  virtual Status OnRouting(int layer, std::span<const int64_t> tokens_of_expert) = 0;
};

/// Moves `stream` through layer `layer` of `source`. If `folding` is not null, norms, biases and the router
/// are folded; visitors fold linears.
Status WalkLayer(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                 const models::DecoderSpec& spec, int layer, const Folding* folding,
                 CalibrationStream& stream, LayerVisitor& visitor);

/// Maximum scratch memory of the halves of a layer, including that of Hessians of their inputs. It is
/// released between them.
struct WalkScratch {
  int64_t attention = 0, ffn = 0;
};
WalkScratch WalkScratchOf(const models::DecoderSpec& spec, int64_t tokens, int64_t longest, int part_rows);

/// Returns the memory in bytes of the sums of experts' outputs and of the routes.
int64_t RoutingBytes(const models::DecoderSpec& spec, int64_t tokens);

/// Returns the memory in bytes of a walk for `tokens` tokens, in addition to the stream and the matrices that
/// visitors return.
int64_t WalkBytes(const models::DecoderSpec& spec, int64_t tokens, int64_t longest);

}  // namespace moesaic::quantizer
