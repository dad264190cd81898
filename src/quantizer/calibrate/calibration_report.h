// What a calibrated run finds on its way: of each linear, and of how tokens spread over experts.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moesaic::quantizer {

/// What calibration did to one linear.
struct LinearFinding {
  std::string name;
  int layer = 0;
  int64_t tokens = 0;
  double effective_tokens = 0;
  double shrinkage = 0;   // share of the layer's Hessian in an expert's (hessian.h); 1: it saw no token
  double loss = 0;        // GptqReport's
  double of_nearest = 1;  // likewise
  double damping = 0;     // FactorOptions::damping as it had to be
  bool nearest = false;   // rounded to the nearest: its inputs are 0 in every token, or RareExperts says so
  std::string xxh3;       // of the codes as they are stored, 16 hexadecimal digits
};

/// How routing spread the tokens over the experts of a layer.
struct LayerRouting {
  int layer = 0;
  std::vector<int64_t> tokens;  // [experts]
};

struct CalibrationReport {
  std::vector<LinearFinding> linears;
  std::vector<LayerRouting> routing;
  double hessian_seconds = 0, factor_seconds = 0, round_seconds = 0, walk_seconds = 0;  // of this run
  int resumed_layers = 0;

  nlohmann::ordered_json Json() const;  // linears and routing
  static CalibrationReport FromJson(const nlohmann::ordered_json& json);
};

/// A member of an object that a run wrote; what is not there, or not of its kind any more, counts as 0,
/// `missing` and "".
double NumberIn(const nlohmann::ordered_json& json, const char* key);
bool BoolIn(const nlohmann::ordered_json& json, const char* key, bool missing);
std::string TextIn(const nlohmann::ordered_json& json, const char* key);

}  // namespace moesaic::quantizer
