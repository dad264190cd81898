#include "comm/collectives/copy_elision.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <utility>

namespace moesaic::comm {
namespace {

// Ranges of a buffer that are to have the contents of a range of the input, but were not copied yet.
class Aliases {
 public:
  void Add(int64_t offset, int64_t count, int64_t input) {
    auto next = ranges_.upper_bound(offset);
    if (next != ranges_.begin()) {
      const auto before = std::prev(next);
      if (before->second.end == offset && before->second.delta == input - offset) {
        before->second.end = offset + count;
        return;
      }
    }
    ranges_.emplace_hint(next, offset, Range{offset + count, input - offset});
  }
  // Offset in the input if the whole range is an alias of one range of it, otherwise -1.
  int64_t Find(const Slice& slice) const {
    auto at = ranges_.upper_bound(slice.offset);
    if (at == ranges_.begin()) return -1;
    --at;
    return at->second.end >= slice.offset + slice.count ? slice.offset + at->second.delta : -1;
  }
  // Removes the aliases in the range and returns the copies that they stand for.
  std::vector<LocalStep> Remove(const Slice& slice) {
    Split(slice.offset);
    Split(slice.offset + slice.count);
    const auto first = ranges_.lower_bound(slice.offset),
               last = ranges_.lower_bound(slice.offset + slice.count);
    std::vector<LocalStep> copies;
    for (auto at = first; at != last; ++at) {
      const int64_t count = at->second.end - at->first;
      copies.push_back(
          {{PlanBuffer::kInput, at->first + at->second.delta, count}, {slice.buffer, at->first, count}});
    }
    ranges_.erase(first, last);
    return copies;
  }
  std::vector<LocalStep> RemoveAll(PlanBuffer buffer) {
    if (ranges_.empty()) return {};
    const int64_t first = ranges_.begin()->first, end = std::prev(ranges_.end())->second.end;
    return Remove({buffer, first, end - first});
  }

 private:
  struct Range {
    int64_t end = 0, delta = 0;  // delta: offset in the input minus offset here
  };
  void Split(int64_t position) {
    const auto next = ranges_.upper_bound(position);
    if (next == ranges_.begin()) return;
    const auto at = std::prev(next);
    if (at->first == position || at->second.end <= position) return;
    const Range tail = at->second;
    at->second.end = position;
    ranges_.emplace_hint(next, position, tail);
  }

  std::map<int64_t, Range> ranges_;  // by begin; disjoint
};

class StreamPass {
 public:
  void Run(Stream* stream) {
    for (Round& round : stream->rounds) {
      local_.clear();
      for (const LocalStep& step : round.local) OnLocal(step);
      for (Message& message : round.sends) OnRead(&message.slice);
      for (Message& message : round.receives) OnReceive(&message);
      round.local = std::exchange(local_, {});
    }
    std::vector<LocalStep> left = of(PlanBuffer::kOutput).RemoveAll(PlanBuffer::kOutput);
    if (left.empty()) return;
    const int step = stream->rounds.empty() ? 0 : stream->rounds.back().step + 1;
    stream->rounds.push_back({std::move(left), {}, {}, step});
  }

 private:
  Aliases& of(PlanBuffer buffer) { return aliases_[static_cast<size_t>(buffer)]; }

  void Copy(const Slice& slice) {
    if (slice.buffer == PlanBuffer::kInput) return;
    const std::vector<LocalStep> copies = of(slice.buffer).Remove(slice);
    local_.insert(local_.end(), copies.begin(), copies.end());
  }

  void OnRead(Slice* slice) {
    if (slice->buffer == PlanBuffer::kInput || slice->count == 0) return;
    const int64_t input = of(slice->buffer).Find(*slice);
    if (input >= 0) {
      *slice = {PlanBuffer::kInput, input, slice->count};
    } else {
      Copy(*slice);
    }
  }

  void OnLocal(LocalStep step) {
    OnRead(&step.from);
    const bool in_place = step.from.buffer == step.to.buffer && step.from.offset == step.to.offset;
    if (step.reduce || in_place) {
      Copy(step.to);
    } else {
      of(step.to.buffer).Remove(step.to);
      if (step.from.buffer == PlanBuffer::kInput && step.wire == WireFormat::kExact) {
        of(step.to.buffer).Add(step.to.offset, step.to.count, step.from.offset);
        return;
      }
    }
    local_.push_back(step);
  }

  void OnReceive(Message* message) {
    if (message->slice.count == 0) return;
    Aliases& aliases = of(message->slice.buffer);
    if (message->reduce) message->addend = aliases.Find(message->slice);
    if (message->reduce && message->addend < 0) {
      Copy(message->slice);
    } else {
      aliases.Remove(message->slice);
    }
  }

  std::array<Aliases, 3> aliases_;  // by buffer; that of the input stays empty
  std::vector<LocalStep> local_;    // of the round
};

}  // namespace

void ElideCopies(RankPlan* plan) {
  for (Stream& stream : plan->streams) StreamPass().Run(&stream);
}

}  // namespace moesaic::comm
