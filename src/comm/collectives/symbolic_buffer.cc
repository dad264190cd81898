#include "comm/collectives/symbolic_buffer.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace moesaic::comm {

void SymbolicBuffer::Split(int64_t position) {
  auto after = intervals_.upper_bound(position);
  if (after == intervals_.begin()) return;
  const auto at = std::prev(after);
  if (at->first == position || at->second.end <= position) return;
  Value tail = at->second;
  at->second.end = position;
  intervals_.emplace_hint(after, position, std::move(tail));
}

bool SymbolicBuffer::Read(int64_t offset, int64_t count, SymbolicMessage* message, int64_t* missing) const {
  message->clear();
  const int64_t end = offset + count;
  int64_t at = offset;
  auto next = intervals_.upper_bound(offset);
  if (next != intervals_.begin()) --next;
  for (; at < end; ++next) {
    while (next != intervals_.end() && next->second.end <= at) ++next;
    if (next == intervals_.end() || next->first > at) {
      *missing = at;
      return false;
    }
    const Value& value = next->second;
    const int64_t stop = std::min(end, value.end);
    message->push_back({at - offset, stop - offset, value.terms, value.shift + offset});
    at = stop;
  }
  return true;
}

void SymbolicBuffer::Write(int64_t offset, const SymbolicMessage& message) {
  if (message.empty()) return;
  const int64_t begin = offset + message.front().begin, end = offset + message.back().end;
  Split(begin);
  Split(end);
  intervals_.erase(intervals_.lower_bound(begin), intervals_.lower_bound(end));
  for (const SymbolicInterval& part : message) {
    intervals_[offset + part.begin] = {offset + part.end, part.terms, part.shift - offset};
  }
}

bool SymbolicBuffer::Reduce(int64_t offset, const SymbolicMessage& message, int64_t* missing) {
  if (message.empty()) return true;
  SymbolicMessage own;
  if (!Read(offset, message.back().end, &own, missing)) return false;
  SymbolicMessage sums;
  size_t mine = 0;
  for (const SymbolicInterval& part : message) {
    for (int64_t at = part.begin; at < part.end;) {
      while (own[mine].end <= at) ++mine;
      const int64_t stop = std::min(part.end, own[mine].end);
      auto sum = std::make_shared<Terms>();
      Terms added = *part.terms;
      for (Term& term : added) term.delta += part.shift - own[mine].shift;
      std::merge(own[mine].terms->begin(), own[mine].terms->end(), added.begin(), added.end(),
                 std::back_inserter(*sum));
      sums.push_back({at, stop, std::move(sum), own[mine].shift});
      at = stop;
    }
  }
  Write(offset, sums);
  return true;
}

std::string Describe(const Terms& terms, int64_t shift) {
  std::string text;
  for (size_t i = 0; i < terms.size(); ++i) {
    if (i == 8) return text + fmt::format(", and {} more", terms.size() - i);
    text += fmt::format("{}rank {} [{:+}]", i == 0 ? "" : ", ", terms[i].rank, terms[i].delta + shift);
  }
  return text;
}

}  // namespace moesaic::comm
