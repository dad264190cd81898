// Typed reading of config.json that remembers what was read, so that nothing in it is silently ignored.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::checkpoint {

/// Reads fields of one JSON object. The first fault is kept and reported by Finish(); readers return a safe
/// value meanwhile, so that a config is read in straight lines. Every message names the field, expected and
/// found:
///   config.json: "num_hidden_layers" must be an integer in [1, 1024], found 0
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& object, std::string file);

  int64_t Int(const std::string& key, int64_t low, int64_t high);  // required
  int64_t IntOr(const std::string& key, int64_t low, int64_t high,
                int64_t fallback);                                 // absent or null: fallback
  double Number(const std::string& key, double low, double high);  // finite, within bounds
  double NumberOr(const std::string& key, double low, double high, double fallback);
  bool BoolOr(const std::string& key, bool fallback);
  std::string StringOr(const std::string& key, const std::string& fallback);
  std::vector<int64_t> IntsOr(const std::string& key, int64_t low, int64_t high,
                              std::vector<int64_t> fallback);
  bool Has(const std::string& key) const;                // present and not null; does not count as read
  const nlohmann::json* Object(const std::string& key);  // null when absent; counts as read

  /// Records a fault that relates fields, e.g. "num_experts_per_tok" is 9 but "n_routed_experts" is 8.
  void Fail(std::string message);
  /// A field that must have one of these values when present, since nothing else is supported.
  void OnlyString(const std::string& key, const std::vector<std::string>& allowed);
  void OnlyBool(const std::string& key, bool allowed);
  /// Marks fields that do not change inference (dropout, initializer_range, ...) as known.
  void Ignore(const std::vector<std::string>& keys);

  /// The first fault; else a fault that names the fields nobody read or ignored.
  Status Finish();

 private:
  const nlohmann::json& object_;
  std::string file_;
  std::set<std::string> read_;
  Status fault_ = OkStatus();
};

}  // namespace moesaic::checkpoint
