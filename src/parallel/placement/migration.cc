#include "parallel/placement/migration.h"

#include <algorithm>
#include <map>

#include "parallel/placement/baseline_slots.h"

namespace moesaic::parallel {
namespace {

// Transfers between two ranks, by direction. One of each is done per round.
struct PeerLink {
  std::vector<ExpertTransfer> up = {};    // to the higher rank
  std::vector<ExpertTransfer> down = {};  // to the lower rank

  int rounds() const { return static_cast<int>(std::max(up.size(), down.size())); }
};

using PeerLinks = std::map<std::pair<int, int>, PeerLink>;  // by (lower rank, higher rank)

// Experts that a rank has to receive, with the ranks that may send them.
struct MissingExpert {
  ExpertTransfer transfer;
  std::vector<int> holders;
};

StatusOr<std::vector<MissingExpert>> MissingExperts(const LayerPlacement& current,
                                                    const LayerPlacement& next) {
  std::map<int, std::vector<int>> holders;
  for (size_t rank = 0; rank < current.size(); ++rank) {
    for (const int expert : current[rank]) {
      std::vector<int>& ranks = holders[expert];
      if (ranks.empty() || ranks.back() != static_cast<int>(rank)) ranks.push_back(static_cast<int>(rank));
    }
  }
  std::vector<MissingExpert> missing;
  for (size_t rank = 0; rank < next.size(); ++rank) {
    for (size_t slot = 0; slot < next[rank].size(); ++slot) {
      const int expert = next[rank][slot];
      if (HoldsExpert(current[rank], expert)) continue;
      if (HoldsExpert({next[rank].begin(), next[rank].begin() + static_cast<std::ptrdiff_t>(slot)}, expert))
        continue;
      const auto found = holders.find(expert);
      if (found == holders.end())
        return InvalidArgument("expert {} of rank {} needs a holder in the placement in use, found none",
                               expert, rank);
      missing.push_back({{expert, -1, static_cast<int>(rank), static_cast<int>(slot)}, found->second});
    }
  }
  return missing;
}

constexpr int kPasses = 4;  // over all sources; later passes change next to nothing

// Chooses sources so that the sum over ranks of the squared number of rounds is small. An exchange with a
// rank that already sends in the other direction needs no further round.
class SourceChoice {
 public:
  explicit SourceChoice(size_t ranks) : rounds_(ranks, 0) {}

  void Choose(std::vector<MissingExpert>& missing) {
    for (int pass = 0; pass < kPasses; ++pass) {
      for (MissingExpert& expert : missing) {
        if (pass > 0) Count(expert.transfer.from, expert.transfer.to, -1);
        int64_t least = -1;
        for (const int holder : expert.holders) {
          const int64_t cost = Cost(holder, expert.transfer.to);
          if (least >= 0 && cost >= least) continue;
          least = cost;
          expert.transfer.from = holder;
        }
        Count(expert.transfer.from, expert.transfer.to, 1);
      }
    }
  }

 private:
  int LinkRounds(int from, int to) { return std::max(sent_[{from, to}], sent_[{to, from}]); }
  // Growth of the sum by a transfer.
  int64_t Cost(int from, int to) {
    if (sent_[{from, to}] < sent_[{to, from}]) return 0;
    return 2 * (int64_t{rounds_[from]} + rounds_[to]) + 2;
  }
  void Count(int from, int to, int change) {
    const int before = LinkRounds(from, to);
    sent_[{from, to}] += change;
    const int grown = LinkRounds(from, to) - before;
    rounds_[from] += grown;
    rounds_[to] += grown;
  }

  std::vector<int> rounds_;                  // of each rank
  std::map<std::pair<int, int>, int> sent_;  // by (from, to)
};

PeerLinks ChooseSources(std::vector<MissingExpert> missing, size_t ranks) {
  // Experts with few holders come first, as they have no choice.
  std::stable_sort(missing.begin(), missing.end(), [](const MissingExpert& a, const MissingExpert& b) {
    return a.holders.size() < b.holders.size();
  });
  SourceChoice(ranks).Choose(missing);
  PeerLinks links;
  for (const MissingExpert& expert : missing) {
    const ExpertTransfer& transfer = expert.transfer;
    PeerLink& link = links[std::minmax(transfer.from, transfer.to)];
    (transfer.from < transfer.to ? link.up : link.down).push_back(transfer);
  }
  return links;
}

}  // namespace

LayerPlacement KeepSlots(const LayerPlacement& current, const LayerPlacement& next) {
  LayerPlacement kept(next.size());
  for (size_t rank = 0; rank < next.size(); ++rank) {
    std::vector<int> experts = next[rank];
    std::vector<int>& slots = kept[rank];
    slots.assign(experts.size(), -1);
    for (size_t slot = 0; slot < std::min(slots.size(), current[rank].size()); ++slot) {
      const auto same = std::find(experts.begin(), experts.end(), current[rank][slot]);
      if (same == experts.end()) continue;
      slots[slot] = *same;
      experts.erase(same);
    }
    auto rest = experts.begin();
    for (int& slot : slots) {
      if (slot < 0) slot = *rest++;
    }
  }
  return kept;
}

StatusOr<std::vector<TransferRound>> PlanTransfers(const LayerPlacement& current,
                                                   const LayerPlacement& next) {
  if (current.size() != next.size())
    return InvalidArgument("both placements must have {} ranks, found {}", current.size(), next.size());
  ASSIGN_OR_RETURN(std::vector<MissingExpert> missing, MissingExperts(current, next));
  PeerLinks links = ChooseSources(std::move(missing), current.size());
  std::vector<int> left(current.size(), 0);  // rounds that a rank still needs
  for (const auto& [pair, link] : links) {
    left[pair.first] += link.rounds();
    left[pair.second] += link.rounds();
  }
  std::vector<TransferRound> rounds;
  while (!links.empty()) {
    // Pairs whose ranks need most rounds come first, so that no rank is left with all its transfers at the
    // end.
    std::vector<PeerLinks::iterator> order;
    for (auto link = links.begin(); link != links.end(); ++link) order.push_back(link);
    const auto need = [&](PeerLinks::iterator link) {
      const auto [low, high] = std::minmax(left[link->first.first], left[link->first.second]);
      return std::pair(high, low);
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](PeerLinks::iterator a, PeerLinks::iterator b) { return need(a) > need(b); });
    std::vector<char> busy(current.size(), 0);
    std::vector<PeerLinks::iterator> taken;
    for (const PeerLinks::iterator link : order) {
      const auto [low, high] = link->first;
      if (busy[low] || busy[high]) continue;
      busy[low] = busy[high] = 1;
      taken.push_back(link);
    }
    TransferRound& round = rounds.emplace_back();
    for (const PeerLinks::iterator link : taken) {
      for (std::vector<ExpertTransfer>* direction : {&link->second.up, &link->second.down}) {
        if (direction->empty()) continue;
        round.push_back(direction->back());
        direction->pop_back();
      }
      --left[link->first.first];
      --left[link->first.second];
      if (link->second.rounds() == 0) links.erase(link);
    }
  }
  return rounds;
}

}  // namespace moesaic::parallel
