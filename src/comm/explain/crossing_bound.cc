#include "comm/explain/crossing_bound.h"

#include <algorithm>
#include <limits>

namespace moesaic::comm {
namespace {

// Sorts and keeps the entries that exceed all earlier ones.
void Accumulate(std::vector<std::pair<double, double>>* reach) {
  std::sort(reach->begin(), reach->end());
  std::vector<std::pair<double, double>> kept;
  for (const auto& [seconds, ranks] : *reach) {
    if (!kept.empty() && ranks <= kept.back().second) continue;
    if (!kept.empty() && kept.back().first == seconds) kept.pop_back();
    kept.emplace_back(seconds, ranks);
  }
  *reach = std::move(kept);
}

double RanksWithin(const std::vector<std::pair<double, double>>& reach, double seconds) {
  double ranks = 0;
  for (const auto& [least, count] : reach) {
    if (least <= seconds) ranks = count;
  }
  return ranks;
}

}  // namespace

CrossingBound::CrossingBound(const Topology& topology) : topology_(topology) {
  for (const Group& group : topology.groups()) {
    double least = group.parent < 0 ? std::numeric_limits<double>::infinity() : exchange_s_[group.parent];
    if (group.children.size() > 1) least = std::min(least, group.link.latency_s);
    if (group.children.empty()) least = 0;  // a rank has its own data
    exchange_s_.push_back(least);
  }
}

bool CrossingBound::Contains(int group, int other) const {
  while (other > group) other = topology_.groups()[other].parent;  // a parent precedes its children
  return other == group;
}

CrossingBound::Port CrossingBound::PortOf(int group) const {
  const std::vector<Group>& groups = topology_.groups();
  Port port;
  const auto inside = static_cast<double>(groups[group].ranks.size());
  for (int other = group; other < std::ssize(groups); ++other) {
    if (!Contains(group, other)) continue;
    port.inside.emplace_back(exchange_s_[other], static_cast<double>(groups[other].ranks.size()));
  }
  Accumulate(&port.inside);
  for (int below = group, top = groups[group].parent; top >= 0; below = top, top = groups[top].parent) {
    if (groups[top].children.size() < 2) continue;
    Outside outside;
    outside.latency = groups[top].link.latency_s;
    for (int other = top + 1; other < std::ssize(groups); ++other) {
      if (!Contains(top, other) || Contains(below, other)) continue;
      outside.reach.emplace_back(exchange_s_[other], static_cast<double>(groups[other].ranks.size()));
    }
    for (int above = top; above >= 0; above = groups[above].parent) {
      outside.reach.emplace_back(exchange_s_[above],
                                 static_cast<double>(groups[above].ranks.size()) - inside);
    }
    Accumulate(&outside.reach);
    port.outside.push_back(std::move(outside));
  }
  return port;
}

// Pairs (term, result) that one byte per second serves until `total`.
double CrossingBound::Served(const Port& port, double total, bool enters) {
  std::vector<double> borders = {0, total};
  const auto add = [&](double border) {
    if (border > 0 && border < total) borders.push_back(border);
  };
  for (const Outside& outside : port.outside) {
    for (const auto& [seconds, ranks] : enters ? outside.reach : port.inside) add(outside.latency + seconds);
    for (const auto& [seconds, ranks] : enters ? port.inside : outside.reach) add(total - seconds);
  }
  std::sort(borders.begin(), borders.end());
  double served = 0;
  for (size_t i = 1; i < borders.size(); ++i) {
    const double at = (borders[i - 1] + borders[i]) / 2;  // nothing changes between two borders
    double most = 0;
    for (const Outside& outside : port.outside) {
      const Reach& terms = enters ? outside.reach : port.inside;
      const Reach& results = enters ? port.inside : outside.reach;
      most = std::max(most, RanksWithin(terms, at - outside.latency) * RanksWithin(results, total - at));
    }
    served += most * (borders[i] - borders[i - 1]);
  }
  return served;
}

double CrossingBound::Seconds(int group, double bytes, double bytes_per_s, double at_least) const {
  const auto inside = static_cast<double>(topology_.groups()[group].ranks.size());
  const double outside = static_cast<double>(topology_.ranks()) - inside;
  if (outside == 0 || bytes == 0) return at_least;
  const double needed = inside * outside * bytes / bytes_per_s;
  const Port port = PortOf(group);
  double low = at_least;
  for (const bool enters : {true, false}) {
    if (Served(port, low, enters) >= needed) continue;
    double high = std::max(low, bytes / bytes_per_s);
    while (Served(port, high, enters) < needed) high *= 2;
    for (int i = 0; i < 60; ++i) {
      const double middle = (low + high) / 2;
      (Served(port, middle, enters) < needed ? low : high) = middle;
    }
  }
  return low;
}

}  // namespace moesaic::comm
