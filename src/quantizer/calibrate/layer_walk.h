// Takes calibration tokens through a decoder layer that is rounded on the way: each group of linears that
// read the same inputs is given to a visitor together with these inputs, and what it makes of their weights
// runs from there on. So every linear is met with the inputs that it will have when all before it is rounded.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "quantizer/calibrate/calibration_stream.h"
#include "quantizer/calibrate/folding.h"
#include "quantizer/gptq/hessian.h"

namespace moesaic::quantizer {

/// Inputs of linears, over the stream's first lane. They are made anew each time, in the same runs of tokens,
/// which live for a call.
struct LinearInputs {
  int k = 0;  // 0: none
  int64_t tokens = 0;
  std::function<void(const TokenSink&)> visit;
};

/// Linears that read the same inputs, in the order in which ListItems has them.
struct LinearGroup {
  int layer = 0;
  std::vector<std::string> modules;
  LinearInputs inputs;
  int expert = -1;  // a routed one: its inputs are those of the tokens that it was chosen for
  /// What an expert with few tokens can lean on: inputs over tokens of the whole layer, chosen for it or not.
  LinearInputs layer_inputs;
  /// layer_inputs are the same for all experts of the layer, and for the shared ones, whose own they are.
  bool same_layer_inputs = false;
  /// Of an expert: its inputs if every token of the layer were its own.
  LinearInputs every_token = {};
};

/// Tokens of the layer, at most, that stand in for those that an expert lacks.
inline constexpr int kStandIns = 2048;

/// What runs in a module's place on one lane of the stream.
struct LaneMatrix {
  int lane = 0;
  size_t module = 0;  // of the group
  OwnedMatrix matrix;
};

class LayerVisitor {
 public:
  virtual ~LayerVisitor() = default;
  /// What runs in the modules' place, one matrix for each.
  virtual StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) = 0;
  /// Scratch memory that Visit takes of a layer at most while no inputs are made: it has the same place as
  /// theirs.
  virtual int64_t ScratchBytes(int /*layer*/) const { return 0; }
  /// What else runs in their place on other lanes than the first, called after Visit with what it made.
  /// Linears outside of mixtures of experts may add lanes here.
  virtual StatusOr<std::vector<LaneMatrix>> VisitLanes(const LinearGroup&, std::span<const OwnedMatrix>) {
    return std::vector<LaneMatrix>();
  }
  /// The same of a router, before it routes: here lanes may be added for what its layer's experts do.
  virtual StatusOr<std::vector<LaneMatrix>> VisitRouter(int /*layer*/) { return std::vector<LaneMatrix>(); }
  /// Experts [rows, top_k] of tokens [first, first + rows), lanes counted on.
  virtual void SeeRoutes(int /*layer*/, int64_t /*first*/, int /*rows*/, int /*top_k*/,
                         const int32_t* /*ids*/) {}
  /// How many tokens each routed expert of a layer was chosen for, before the first of them is visited.
  virtual Status SeeRouting(int layer, std::span<const int64_t> tokens_of_expert) = 0;
};

/// Takes `stream` through layer `layer` of `source`, whose norms, biases and router are folded if `folding`
/// is not null; visitors fold linears.
Status WalkLayer(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                 const models::DecoderSpec& spec, int layer, const Folding* folding,
                 CalibrationStream& stream, LayerVisitor& visitor);

/// Scratch memory that the halves of a layer take at most, what Hessians take of their inputs included;
/// between them it is given back.
struct WalkScratch {
  int64_t attention = 0, ffn = 0;
};
WalkScratch WalkScratchOf(const models::DecoderSpec& spec, int64_t tokens, int64_t longest, int part_rows);

/// Memory of sums of experts' outputs and of routes.
int64_t RoutingBytes(const models::DecoderSpec& spec, int64_t tokens);

/// Memory that a walk takes for so many tokens beside the stream and the matrices that visitors return.
int64_t WalkBytes(const models::DecoderSpec& spec, int64_t tokens, int64_t longest);

}  // namespace moesaic::quantizer
