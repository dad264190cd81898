// Several precisions in one checkpoint: the linears that must share one, the cost of each option, and the
// choice under a budget.
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
  enum class Kind : uint8_t {
    kBitsPerWeight,  // average over the linears of the mix, scales included
    kBytes,          // size of all weight files, headers included
  };
  Kind kind = Kind::kBitsPerWeight;
  double amount = 0;

  std::string Flag() const;  // "--bits-per-weight"
};

/// Options and budget of a mix.
struct MixSettings {
  std::vector<Precision> options;  // empty: no mix; ties in loss and bytes go to the earlier option
  MixBudget budget;
  int64_t tokens = 2048;  // calibration tokens for measuring losses

  bool wanted() const { return !options.empty(); }
  bool Has(tensor::DType kept) const;
  nlohmann::ordered_json Json() const;
  static StatusOr<MixSettings> FromJson(const nlohmann::json& json);
};

/// Largest finite fp16 value.
inline constexpr float kLargestHalf = 65504;

/// One precision for one precision group.
struct MixOption {
  Precision precision;
  int64_t bytes = 0;         // bytes of its tensors
  int64_t header_bytes = 0;  // maximum size of their entries in a file's header
  // Bytes of its tensors that a token reads; routed experts: bytes * top_k / experts.
  double loss = 0;     // nats per token; infinite: not allowed
  double flips = 0;    // share of tokens and later MoE layers whose routing changes
  double largest = 0;  // fp16: largest magnitude in its arithmetic; infinite for NaN

  bool overflows() const { return largest > kLargestHalf; }
};

/// Linears that must share a precision: fused ones (q, k and v; q_a and kv_a), and those of a feed-forward
/// network. All routed experts of a layer form one group, because fused kernels need one precision.
struct PrecisionGroup {
  std::string name;  // "model.layers.3.mlp.experts", "model.layers.3.self_attn.qkv_proj"
  int layer = 0;
  int64_t weights = 0;
  bool measured = false;  // false: losses follow a rule
  std::vector<MixOption> options;
  int chosen = -1;
};

/// Effect of rounding a router. Routers are kept, because no loader accepts rounded ones.
struct RouterFinding {
  int layer = 0;
  Precision precision;
  double loss = 0, flips = 0;
  int64_t saved = 0;  // bytes, all of which every token reads
  bool kept = true;   // true if the choice would keep it
};

struct Mix {
  std::vector<PrecisionGroup> units;
  std::vector<RouterFinding> routers;
  int64_t tokens = 0;  // number of tokens of the measurement
  double loss = 0;     // predicted loss: sum over the chosen options, nats per token
  double bits = 0;     // bits per weight of the linears of the mix
  int64_t bytes = 0;   // bytes of these linears
  bool exact = false;  // true if no choice within the budget has less loss
  double price = 0;    // price: largest decrease of loss per additional byte of the budget's kind

  /// Returns the chosen precision by group; groups without a choice are omitted.
  std::map<std::string, Precision> Choice() const;
  nlohmann::ordered_json Json() const;
  static StatusOr<Mix> FromJson(const nlohmann::ordered_json& json);
};

/// Converts a loss or magnitude to JSON (null: infinite) and back.
nlohmann::ordered_json InfiniteJson(double value);
double InfiniteIn(const nlohmann::ordered_json& json, const char* key);

/// Returns the precision group of a linear.
std::string PrecisionGroupOf(const std::string& module);

/// Returns "re:..." patterns that match exactly the modules of `units`.
std::vector<std::string> MixPatterns(std::span<const std::string> units);

/// Returns the nominal relative squared error of rounding bell-shaped weights, for plans without
/// measurements.
double NominalError(const Precision& precision);

/// Costs outside of the mix.
struct MixFixed {
  int64_t bytes = 0;  // bytes of tensors and headers
};

/// Sets `chosen` of all groups, and the sums: the choice of least loss within the budget. Fails if nothing
/// fits the budget, stating the minimum, or if a group has no allowed option.
Status ChooseMix(const MixSettings& settings, const MixFixed& fixed, Mix* mix);

}  // namespace moesaic::quantizer
