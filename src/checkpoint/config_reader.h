// Typed reading of config.json that tracks which fields were read, so that no field is silently ignored.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::checkpoint {

/// Reads fields of one JSON object. The first error is kept and returned by Finish(); until then readers
/// return a safe value, so that callers need no error checks in between. Every message names the field, the
/// expected and the found value:
///   config.json: "num_hidden_layers" must be an integer in [1, 1024], found 0
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& object, std::string file);

  int64_t Int(const std::string& key, int64_t low, int64_t high);  // required
  int64_t IntOr(const std::string& key, int64_t low, int64_t high,
                int64_t fallback);                                 // returns fallback if absent or null
  double Number(const std::string& key, double low, double high);  // must be finite and within bounds
  double NumberOr(const std::string& key, double low, double high, double fallback);
  bool BoolOr(const std::string& key, bool fallback);
  std::string StringOr(const std::string& key, const std::string& fallback);
  std::vector<int64_t> IntsOr(const std::string& key, int64_t low, int64_t high,
                              std::vector<int64_t> fallback);
  bool Has(const std::string& key) const;  // true if present and not null; does not mark the field as read
  const nlohmann::json* Object(const std::string& key);  // null if absent; marks the field as read

  /// Records an error that relates fields, e.g. "num_experts_per_tok" is 9 but "n_routed_experts" is 8.
  void Fail(std::string message);
  /// Requires that the field, if present, has one of the supported values.
  void OnlyString(const std::string& key, const std::vector<std::string>& allowed);
  void OnlyBool(const std::string& key, bool allowed);
  /// Marks fields that do not affect inference (dropout, initializer_range, ...) as known.
  void Ignore(const std::vector<std::string>& keys);

  /// Returns the first error; otherwise an error that names fields that were neither read nor ignored.
  Status Finish();

 private:
  const nlohmann::json& object_;
  std::string file_;
  std::set<std::string> read_;
  Status fault_ = OkStatus();
};

}  // namespace moesaic::checkpoint
