#include "engine/rank_stats.h"

#include <algorithm>

namespace moesaic::engine {

void AddWork(std::span<const RankStats> step, std::vector<RankStats>* totals) {
  totals->resize(std::max(totals->size(), step.size()));
  double computing = 0;
  for (size_t i = 0; i < step.size(); ++i) {
    RankStats& total = (*totals)[i];
    total.rank = step[i].rank;
    total.step_seconds += step[i].step_seconds;
    total.exchange_seconds += step[i].exchange_seconds;
    total.bytes_sent += step[i].bytes_sent;
    computing += total.step_seconds - total.exchange_seconds;
  }
  const double mean = computing / static_cast<double>(totals->size());
  for (RankStats& total : *totals) {
    total.imbalance = mean > 0 ? (total.step_seconds - total.exchange_seconds) / mean : 1;
  }
}

}  // namespace moesaic::engine
