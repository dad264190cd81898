// Finds stop strings in text that comes in pieces, and holds back what might become one.
#pragma once

#include <string>
#include <vector>

namespace moesaic::engine {

class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);  // empty ones are ignored

  /// Takes the next piece and returns the text that is certain: everything before the earliest stop string,
  /// less an end that might begin one.
  std::string Feed(const std::string& piece);
  /// The text is over: what was held back, unless a stop string was met.
  std::string Finish();
  bool matched() const { return matched_; }
  const std::string& match() const { return match_; }  ///< the stop string that was met

 private:
  std::vector<std::string> stops_;
  std::string held_;
  std::string match_;
  bool matched_ = false;
};

}  // namespace moesaic::engine
