// Several precisions in one checkpoint: which linears must have theirs together, what each option costs them,
// and the choice under a budget.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "models/decoder_spec.h"
#include "quantizer/format/model_items.h"
#include "quantizer/format/scheme.h"
#include "quantizer/mixed/sensitivity.h"

namespace moesaic::quantizer {

struct MixBudget {
  enum class Unit : uint8_t {
    kBitsPerWeight,  // of what the mix decides, scales included
    kBytes,          // of all weight files, headers included
    kBytesPerToken,  // that a token reads of the whole model (weight_error.h, BytesOf)
  };
  Unit unit = Unit::kBitsPerWeight;
  double amount = 0;

  std::string Flag() const;  // "--bits-per-weight"
};

/// What a mix is made of.
struct MixSettings {
  std::vector<Precision> options;  // empty: no mix; ties in loss and bytes go to the earlier one
  MixBudget budget;
  int64_t tokens = 2048;  // of calibration, over which losses are measured

  bool wanted() const { return !options.empty(); }
  bool Has(tensor::DType kept) const;
  nlohmann::ordered_json Json() const;
  static StatusOr<MixSettings> FromJson(const nlohmann::json& json);
};

/// fp16 ends here.
inline constexpr float kLargestHalf = 65504;

/// One precision for one unit.
struct MixOption {
  Precision precision;
  int64_t bytes = 0;           // of its tensors
  int64_t header_bytes = 0;    // that name them in a file, at most
  double bytes_per_token = 0;  // of its tensors; of routed experts bytes * top_k / experts
  double loss = 0;             // nats a token; infinite: it can't be taken
  double flips = 0;            // share of tokens and MoE layers behind it with other experts
  double largest = 0;          // fp16: the largest magnitude that its arithmetic meets; infinite for NaN

  bool overflows() const { return largest > kLargestHalf; }
};

/// Linears that have one precision: those that programs fuse (q, k and v; q_a and kv_a), and all of a
/// feed-forward network's: of routed experts those of the whole layer, which fused kernels need alike.
struct MixUnit {
  std::string name;  // "model.layers.3.mlp.experts", "model.layers.3.self_attn.qkv_proj"
  int layer = 0;
  int64_t weights = 0;
  bool measured = false;  // else losses are those that a rule gives
  std::vector<MixOption> options;
  int chosen = -1;
};

/// What rounding a router would do. Routers are kept, since no loader takes rounded ones.
struct RouterFinding {
  int layer = 0;
  Precision precision;
  double loss = 0, flips = 0;
  int64_t saved = 0;  // bytes, all of which every token reads
  bool kept = true;   // what the choice would have done
};

struct Mix {
  std::vector<MixUnit> units;
  std::vector<RouterFinding> routers;
  int64_t tokens = 0;  // that losses were measured over
  double loss = 0;     // predicted: the sum of those chosen, nats a token
  double bits = 0;     // a weight, of what the mix decides
  int64_t bytes = 0;   // likewise
  bool exact = false;  // whether no choice within the budget has less loss
  double price = 0;    // most loss that a further byte of the budget's kind takes away: what it is worth

  /// By unit; of those that have one.
  std::map<std::string, Precision> Choice() const;
  nlohmann::ordered_json Json() const;
  static StatusOr<Mix> FromJson(const nlohmann::ordered_json& json);
};

/// A loss or magnitude, null where it is infinite; and back.
nlohmann::ordered_json InfiniteJson(double value);
double InfiniteIn(const nlohmann::ordered_json& json, const char* key);

/// The unit that a linear belongs to.
std::string MixUnitOf(const std::string& module);

/// "re:..." patterns that match the modules of `units`, and of no other units.
std::vector<std::string> MixPatterns(std::span<const std::string> units);

/// Rounding's squared error relative to the weights' squares as it is on bell-shaped weights: for plans that
/// nothing was measured for.
double NominalError(const Precision& precision);

/// Costs outside of the mix.
struct MixFixed {
  int64_t bytes = 0;  // tensors and headers
  double bytes_per_token = 0;
};

/// Sets `chosen` of all units and the sums: the least loss within the budget. A budget that nothing fits is
/// refused with what the least is; so is a unit of which no option is left.
Status ChooseMix(const MixSettings& settings, const MixFixed& fixed, Mix* mix);

}  // namespace moesaic::quantizer
