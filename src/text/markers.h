// Finds markers in text that arrives in pieces. Private to this room.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>

namespace moesaic::text {

inline constexpr std::string_view kSpace = " \t\r\n";

/// `text` without spaces, tabs and line ends at both ends.
inline std::string Trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(kSpace) - first + 1));
}

/// Moves the text of `held` before `end` to `content`, without white space at its end, which may only
/// separate calls. Returns the number of moved bytes.
inline size_t MoveText(std::string* held, size_t end, std::string* content) {
  const size_t last = end == 0 ? std::string::npos : held->find_last_not_of(kSpace, end - 1);
  const size_t moved = last == std::string::npos ? 0 : last + 1;
  content->append(*held, 0, moved);
  held->erase(0, moved);
  return moved;
}

/// Returns the length of the longest end of `text` that is a beginning of `mark`, but not all of it; 0 for an
/// empty mark.
inline size_t BegunAtEnd(std::string_view text, std::string_view mark) {
  if (mark.empty()) return 0;
  for (size_t length = std::min(text.size(), mark.size() - 1); length > 0; --length) {
    if (text.substr(text.size() - length) == mark.substr(0, length)) return length;
  }
  return 0;
}

struct FoundMark {
  size_t at = std::string_view::npos;
  std::string_view mark;  // empty: not found
};

/// Returns the earliest occurrence of any of `marks`, ignoring empty ones; the first listed wins a tie.
inline FoundMark FindMark(std::string_view text, std::initializer_list<std::string_view> marks) {
  FoundMark found;
  for (const std::string_view mark : marks) {
    if (mark.empty()) continue;
    if (const size_t at = text.find(mark); at < found.at) found = {at, mark};
  }
  return found;
}

/// Returns the length of the longest suffix of `text` that may begin one of `marks`.
inline size_t BegunAtEnd(std::string_view text, std::initializer_list<std::string_view> marks) {
  size_t longest = 0;
  for (const std::string_view mark : marks) longest = std::max(longest, BegunAtEnd(text, mark));
  return longest;
}

}  // namespace moesaic::text
