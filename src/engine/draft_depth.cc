#include "engine/draft_depth.h"

#include <algorithm>

namespace moesaic::engine {
namespace {

// Steps with more rows are compute-bound: another row costs at least its gain.
constexpr int kMaxRows = 256;
// Samples before the cost of a row count is used: the first steps find cold caches.
constexpr int kMinSamples = 3;
// Assumed cost of another row until it is measured, as a share of a step.
constexpr double kHopedRow = 0.05;
// Minimum cost of another row, as a share of a step without drafts: smaller measurements are noise.
constexpr double kMinRow = 0.01;
// Minimum expected gain of drafting: measurements are not more precise.
constexpr double kMinGain = 1.02;
// Share of the time without drafts that may be spent on probing whether drafts pay.
constexpr double kProbeShare = 0.005;
// Minimum assumed cost of a probe, in steps: its real cost may be unknown.
constexpr double kMinProbe = 0.5;
// Steps that share the cost of the rows that a drafter must catch up on: fewer than most outputs have.
constexpr double kSharedBy = 32;
// Interval, in steps, at which a step without drafts is measured while drafts pay.
constexpr int kRemeasure = 64;
// Prior acceptance of a place without a record, and its weight in outcomes.
constexpr double kHope = 0.8;
constexpr double kHopeWeight = 2;
// Number of entirely accepted drafts in a row after which a sequence's next place uses the prior instead of
// the record of other sequences.
constexpr int kWholeDrafts = 3;
// Decay of a sequence's record, and of all sequences' record, per outcome.
constexpr float kKeepOwn = 0.9F, kKeepAll = 0.98F;

void Keep(DraftRecord& record, int drafted, int accepted, float kept) {
  for (int place = 0; place < std::min(drafted, accepted + 1); ++place) {
    record.tried[place] = record.tried[place] * kept + 1;
    record.accepted[place] = record.accepted[place] * kept + (place < accepted ? 1.0F : 0.0F);
  }
}

}  // namespace

void DepthPolicy::Quartile::Add(double sample) {
  last[samples++ % last.size()] = sample;
  std::array<double, 9> sorted = last;
  const auto end = sorted.begin() + std::min<int64_t>(samples, static_cast<int64_t>(sorted.size()));
  const auto quarter = sorted.begin() + (end - sorted.begin() - 1) / 4;
  std::nth_element(sorted.begin(), quarter, end);
  value = *quarter;
}

void DepthPolicy::Quartile::Scale(double factor) {
  value *= factor;
  for (double& sample : last) sample *= factor;
}

double DepthPolicy::Prior(bool is_free, int place) const {
  const DraftRecord& all = is_free ? all_free_ : all_;
  double prior = kHope;
  for (int i = 0; i <= place; ++i) {
    prior = (all.accepted[i] + kHopeWeight * prior) / (all.tried[i] + kHopeWeight);
  }
  return prior;
}

double DepthPolicy::Chance(const Candidate& candidate, int place) const {
  const DraftRecord& record = *candidate.record;
  // A sequence whose drafts are accepted to their end gets longer drafts, regardless of other sequences.
  if (record.whole >= kWholeDrafts && record.tried[place] < kHopeWeight) return kHope;
  return (record.accepted[place] + kHopeWeight * Prior(candidate.is_free, place)) /
         (record.tried[place] + kHopeWeight);
}

double DepthPolicy::StepSeconds(int rows) const {
  const int end = static_cast<int>(steps_.size());
  const auto known = [this](int at) { return steps_[at].samples >= kMinSamples; };
  int below = std::min(rows, end - 1), above = rows;
  while (below > 0 && !known(below)) --below;
  while (above < end && !known(above)) ++above;
  if (below <= 0) return above < end ? steps_[above].value : 0;
  const double low = steps_[below].value;
  if (below == rows) return low;
  if (above >= end) return low * (1 + kHopedRow * (rows - below));
  return low + (steps_[above].value - low) * (rows - below) / (above - below);
}

double DepthPolicy::VerifySeconds(int decodes, int drafts) const {
  return std::max(StepSeconds(decodes + drafts), (1 + kMinRow * drafts) * StepSeconds(decodes));
}

double DepthPolicy::DraftSeconds(int passes, double pending_rows) const {
  return passes * pass_.value + pending_rows * pending_row_.value;
}

void DepthPolicy::CountStep(int rows, double seconds) {
  if (idle_) credit_ += kProbeShare * seconds;
  if (rows > kMaxRows) return;
  if (rows >= static_cast<int>(steps_.size())) steps_.resize(rows + 1);
  const double before = steps_[rows].value;
  steps_[rows].Add(seconds);
  if (steps_[rows].samples <= static_cast<int>(steps_[rows].last.size())) return;
  // A growing context or another process makes all steps slower. The other entries are scaled too, so that
  // their ratios stay as measured.
  const double change = steps_[rows].value / before;
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (static_cast<int>(i) != rows) steps_[i].Scale(change);
  }
}

void DepthPolicy::CountDrafts(int sequences, int passes, int pending_rows, double seconds) {
  if (idle_ && passes > 0) {  // the measured time of a probe replaces its estimate
    credit_ -= seconds - charged_;
    charged_ = 0;
  }
  if (passes > 0 && pending_rows <= kMaxDrafts * sequences) {  // rows of the last step belong to the pass
    pass_.Add(seconds / passes);
  } else if (pending_rows > 0) {
    pending_row_.Add(std::max(0.0, seconds - passes * pass_.value) / pending_rows);
  }
}

void DepthPolicy::CountOutcome(DraftRecord& record, bool is_free, int drafted, int accepted) {
  Keep(record, drafted, accepted, kKeepOwn);
  Keep(is_free ? all_free_ : all_, drafted, accepted, kKeepAll);
  record.last_accepted = accepted > 0;
  record.whole = accepted == drafted ? record.whole + 1 : 0;
  record.last_step = step_;
}

// Such tokens are no draft: last_accepted, whole and last_step of the record do not change.
void DepthPolicy::CountUnused(DraftRecord& record, int found, int right) {
  Keep(record, found, right, kKeepOwn);
  Keep(all_free_, found, right, kKeepAll);
}

double DepthPolicy::Rate(const Candidate& candidate) const {
  const bool timed = StepSeconds(1) > 0;  // else tokens a step
  double rate = timed ? 1 / StepSeconds(1) : 1, chance = 1, tokens = 1;
  for (int place = 0; place < candidate.limit; ++place) {
    chance *= Chance(candidate, place);
    tokens += chance;
    double seconds = timed ? VerifySeconds(1, place + 1) : 1;
    if (timed && !candidate.is_free) seconds += DraftSeconds(place + 1, candidate.pending_rows / kSharedBy);
    rate = std::max(rate, tokens / seconds);
  }
  return rate;
}

bool DepthPolicy::WorthStarting() const {
  const double one = StepSeconds(1);
  return one <= 0 ||
         (1 + Prior(/*is_free=*/false, 0)) * one >= kMinGain * (VerifySeconds(1, 1) + DraftSeconds(1, 0));
}

std::vector<int> DepthPolicy::Choose(std::span<const Candidate> candidates, int decodes, int rows) {
  ++step_;
  std::vector<int> depths(candidates.size());
  const double without = StepSeconds(decodes);
  idle_ = true;
  if (without <= 0 || candidates.empty() || decodes >= kMaxRows) return depths;
  if (drafted_steps_ >= kRemeasure) {
    drafted_steps_ = 0;
    return depths;
  }
  struct Row {
    double chance;  // probability that this token and all before it in its draft are accepted
    int candidate;
    int place;
  };
  std::vector<Row> order;
  for (size_t i = 0; i < candidates.size(); ++i) {
    double chance = 1;
    for (int place = 0; place < candidates[i].limit; ++place) {
      chance *= Chance(candidates[i], place);
      order.push_back({chance, static_cast<int>(i), place});
    }
  }
  // Chances fall along a draft, so the first m rows are the likeliest whole beginnings of drafts.
  std::stable_sort(order.begin(), order.end(),
                   [](const Row& a, const Row& b) { return a.chance > b.chance; });
  order.resize(std::min<size_t>({order.size(), static_cast<size_t>(rows), size_t{kMaxRows}}));
  const double rate_without = decodes / without;
  double best_rate = kMinGain * rate_without, tokens = decodes;
  size_t best = 0;
  int passes = 0, pending_rows = 0;
  for (size_t m = 0; m < order.size(); ++m) {
    tokens += order[m].chance;
    const Candidate& candidate = candidates[order[m].candidate];
    if (!candidate.is_free) passes = std::max(passes, order[m].place + 1);
    if (order[m].place == 0) pending_rows += candidate.pending_rows;
    const double rate = tokens / (VerifySeconds(decodes, static_cast<int>(m) + 1) +
                                  DraftSeconds(passes, pending_rows / kSharedBy));
    if (rate > best_rate) {
      best_rate = rate;
      best = m + 1;
    }
  }
  if (best == 0) return rows > 0 ? ChooseProbe(candidates, decodes) : depths;
  for (size_t m = 0; m < best; ++m) ++depths[order[m].candidate];
  idle_ = false;
  ++drafted_steps_;
  return depths;
}

// Drafts one token for a sequence whose last draft was accepted. If there is none, drafts one token for the
// sequence that has had no draft for longest, if enough time was saved up.
std::vector<int> DepthPolicy::ChooseProbe(std::span<const Candidate> candidates, int decodes) {
  std::vector<int> depths(candidates.size());
  const auto better = [&candidates](int a, int b) {
    const DraftRecord &x = *candidates[a].record, &y = *candidates[b].record;
    return x.last_accepted != y.last_accepted ? x.last_accepted : x.last_step < y.last_step;
  };
  int chosen = -1;
  for (int i = 0; i < static_cast<int>(candidates.size()); ++i) {
    if (candidates[i].limit > 0 && (chosen < 0 || better(i, chosen))) chosen = i;
  }
  if (chosen < 0) return depths;
  const Candidate& candidate = candidates[chosen];
  charged_ = candidate.is_free ? 0 : DraftSeconds(1, candidate.pending_rows);
  const double cost =
      std::max(VerifySeconds(decodes, 1) - StepSeconds(decodes) + charged_, kMinProbe * StepSeconds(decodes));
  if (!candidate.record->last_accepted) {
    if (credit_ < cost) return depths;
    credit_ -= cost;
  }
  depths[chosen] = 1;
  return depths;
}

}  // namespace moesaic::engine
