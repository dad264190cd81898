#include "engine/ngram_drafter.h"

#include <algorithm>

namespace moesaic::engine {

std::span<const int32_t> LookUp(std::span<const int32_t> tokens, int shortest, int longest, int most) {
  const auto size = static_cast<int64_t>(tokens.size());
  const int32_t* data = tokens.data();
  int64_t best = 0, best_end = 0;  // length of the match, and the position after it
  for (int64_t end = shortest; end < size && best < longest; ++end) {
    int64_t same = 0;
    while (same < longest && same < end && data[end - 1 - same] == data[size - 1 - same]) ++same;
    if (same < shortest || same <= best) continue;
    best = same;
    best_end = end;
  }
  if (best == 0) return {};
  return tokens.subspan(best_end, std::min<int64_t>(most, size - best_end));
}

void NgramDrafter::Keep(const std::vector<std::unique_ptr<Sequence>>&) { found_.clear(); }

int NgramDrafter::Limit(const Sequence& sequence, int most) {
  const std::span<const int32_t> found = LookUp(sequence.tokens, shortest_, longest_, most);
  if (!found.empty()) found_[&sequence] = found;
  return static_cast<int>(found.size());
}

std::span<const int32_t> NgramDrafter::Found(const Sequence& sequence) const {
  const auto found = found_.find(&sequence);
  return found == found_.end() ? std::span<const int32_t>() : found->second;
}

Status NgramDrafter::Draft(std::span<const DraftJob> jobs) {
  for (const DraftJob& job : jobs) {
    const std::span<const int32_t> found = Found(*job.sequence);
    const auto tokens = found.first(std::min<size_t>(job.depth, found.size()));
    job.sequence->draft.tokens.assign(tokens.begin(), tokens.end());
  }
  return OkStatus();
}

}  // namespace moesaic::engine
