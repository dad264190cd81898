// Finds stop strings in text that arrives in pieces, and holds back a possible beginning of one.
#pragma once

#include <string>
#include <vector>

namespace moesaic::engine {

class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);  // empty ones are ignored

  /// Adds a piece and returns the text that is final: everything before the earliest stop string, without an
  /// end that might begin one. If not `searched`, stop strings that end in the piece are ordinary text.
  std::string Feed(const std::string& piece, bool searched = true);
  /// Ends the text. Returns the text that is still held back, unless a stop string was found.
  std::string Finish();
  bool matched() const { return matched_; }
  const std::string& match() const { return match_; }  ///< The stop string that was found.

 private:
  std::vector<std::string> stops_;
  std::string held_;
  std::string match_;
  bool matched_ = false;
};

}  // namespace moesaic::engine
