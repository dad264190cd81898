#include "engine/stop_strings.h"

#include <algorithm>
#include <utility>

namespace moesaic::engine {
namespace {

// Length of the longest end of `text` that begins `stop`.
size_t BegunAtEnd(const std::string& text, const std::string& stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length) {
    if (text.compare(text.size() - length, length, stop, 0, length) == 0) return length;
  }
  return 0;
}

}  // namespace

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase(stops_, "");
}

std::string StopStrings::Feed(const std::string& piece, bool searched) {
  if (matched_) return "";
  const size_t old = held_.size();
  held_ += piece;
  size_t first = std::string::npos;
  size_t begun = 0;
  for (const std::string& stop : stops_) {
    // It must end in the piece.
    const size_t from = old - std::min(old, stop.size() - 1);
    if (const size_t at = held_.find(stop, from); searched && at < first) {
      first = at;
      match_ = stop;
    }
    begun = std::max(begun, BegunAtEnd(held_, stop));
  }
  matched_ = first != std::string::npos;
  const size_t certain = matched_ ? first : held_.size() - begun;
  std::string text = held_.substr(0, certain);
  held_.erase(0, certain);
  return text;
}

std::string StopStrings::Finish() { return matched_ ? "" : std::exchange(held_, ""); }

}  // namespace moesaic::engine
