#include "kernels/kept_choices.h"

#include <algorithm>

#include "base/check.h"

namespace moesaic::kernels {

KeptChoices::KeptChoices(int layers, int heads, int most)
    : heads_(heads), rings_(static_cast<size_t>(layers) * heads) {
  MOESAIC_CHECK_LT(0, most);
  for (Ring& ring : rings_) ring.choices.resize(most);
}

std::span<const int32_t> KeptChoices::Find(int layer, int head, int position) const {
  const std::vector<Choice>& choices = rings_[static_cast<size_t>(layer) * heads_ + head].choices;
  const auto it = std::ranges::find(choices, position, &Choice::position);
  if (it == choices.end()) return {};
  return it->places;
}

void KeptChoices::Put(int layer, int head, int position, std::span<const int32_t> places) {
  Ring& ring = rings_[static_cast<size_t>(layer) * heads_ + head];
  auto it = std::ranges::find(ring.choices, position, &Choice::position);
  if (it == ring.choices.end()) {
    it = ring.choices.begin() + static_cast<int64_t>(ring.next);
    ring.next = (ring.next + 1) % ring.choices.size();
  }
  it->position = position;
  it->places.assign(places.begin(), places.end());
}

}  // namespace moesaic::kernels
