#include "app/nearest_name.h"

#include <algorithm>

namespace moesaic::app {
namespace {

// Optimal string alignment distance: insertions, deletions, replacements, and swaps of neighbours.
size_t EditDistance(std::string_view a, std::string_view b) {
  const size_t width = b.size() + 1;
  std::vector<size_t> cost((a.size() + 1) * width);  // [a.size() + 1, b.size() + 1]
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      size_t& here = cost[i * width + j];
      if (i == 0 || j == 0) {
        here = i + j;
        continue;
      }
      here = std::min({cost[(i - 1) * width + j] + 1, cost[i * width + j - 1] + 1,
                       cost[(i - 1) * width + j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        here = std::min(here, cost[(i - 2) * width + j - 2] + 1);
      }
    }
  }
  return cost.back();
}

// Normalizes spelling differences: --max_queue equals --max-queue.
std::string Canonical(std::string_view word) {
  std::string text(word.substr(std::min(word.find_first_not_of('-'), word.size())));
  std::replace(text.begin(), text.end(), '_', '-');
  return text;
}

}  // namespace

std::string NearestName(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string wanted = Canonical(word);
  size_t best = std::max<size_t>(wanted.size() / 3, wanted.size() > 2 ? 1 : 0) + 1;
  std::string nearest;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(wanted, Canonical(candidate));
    if (distance >= best) continue;
    best = distance;
    nearest = candidate;
  }
  return nearest;
}

}  // namespace moesaic::app
