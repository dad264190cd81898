// Findings of a calibrated run: one per linear, and the distribution of tokens over experts.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moesaic::quantizer {

/// Effect of calibration on one linear.
struct LinearFinding {
  std::string name;
  int layer = 0;
  int64_t tokens = 0;
  double shrinkage = 0;   // share of the layer's Hessian in an expert's (hessian.h); 1: no token reached it
  double loss = 0;        // GptqReport::loss
  double of_nearest = 1;  // GptqReport::of_nearest
  double damping = 0;     // damping that was needed
  bool nearest = false;   // rounded to the nearest because its inputs are 0 in every token
  std::string xxh3;       // of the stored codes, 16 hexadecimal digits
};

/// Minimum number of tokens of a routed expert that counts as covered.
inline constexpr int64_t kCoveredTokens = 32;

/// Distribution of the tokens over the experts of a layer.
struct LayerRouting {
  int layer = 0;
  std::vector<int64_t> tokens;  // [experts]

  /// True if more than a tenth of the experts are not covered.
  bool thin() const;
};

struct CalibrationReport {
  std::vector<LinearFinding> linears;
  std::vector<LayerRouting> routing;
  double hessian_seconds = 0, factor_seconds = 0, round_seconds = 0, walk_seconds = 0;  // of this process
  int resumed_layers = 0;

  nlohmann::ordered_json Json() const;  // linears and routing
  static CalibrationReport FromJson(const nlohmann::ordered_json& json);
};

/// Returns a member of an object that a run wrote. A missing member, or one of another type, is returned as
/// 0, `missing` or "".
double NumberIn(const nlohmann::ordered_json& json, const char* key);
bool BoolIn(const nlohmann::ordered_json& json, const char* key, bool missing);
std::string TextIn(const nlohmann::ordered_json& json, const char* key);

}  // namespace moesaic::quantizer
