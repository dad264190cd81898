// Statistics of a calibrated run: one record per linear, and the distribution of tokens over experts.
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
  int64_t tokens = 0;  // calibration tokens that reached the linear
  // Weight of the layer's Hessian in that of a routed expert with few tokens (hessian.h), 0 to 1; 1 if no
  // token reached the expert.
  double shrinkage = 0;
  double loss = 0;        // squared error of the outputs after GPTQ (GptqReport::loss)
  double of_nearest = 1;  // `loss` divided by that of rounding to the nearest (GptqReport::of_nearest)
  double damping = 0;     // damping at which the Hessian could be factored
  bool nearest = false;   // rounded to the nearest because its inputs are 0 in every token
  std::string xxh3;       // checksum of the stored codes, 16 hexadecimal digits
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
  // Times of this process only.
  double hessian_seconds = 0, factor_seconds = 0, round_seconds = 0, walk_seconds = 0;
  int resumed_layers = 0;  // layers that an earlier process had finished

  /// Times are not part of the JSON object.
  nlohmann::ordered_json Json() const;
  static CalibrationReport FromJson(const nlohmann::ordered_json& json);
};

/// Each returns a member of an object that a run wrote. If the member is missing or has another type, the
/// result is 0, `missing` or "".
double NumberIn(const nlohmann::ordered_json& json, const char* key);
bool BoolIn(const nlohmann::ordered_json& json, const char* key, bool missing);
std::string TextIn(const nlohmann::ordered_json& json, const char* key);

}  // namespace moesaic::quantizer
