#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "kernels/ops.h"

namespace moesaic::kernels {
namespace {

// A row of 256 experts takes about two microseconds, a round trip through the pool a few.
constexpr int kTaskRows = 8;

// Fixes the order that ties and rounding would leave open: the same in every loop here.
struct Best {
  float score;
  int id;
};

// Inserts into best[0, *count), sorted by falling score, of which at most `most` are kept. Ids come rising
// and only a greater score passes an earlier one, so ties go to the lower id. A NaN passes nobody but takes a
// free place: there are always `most` different ids in the end.
void Insert(Best candidate, int most, Best* best, int* count) {
  int at = *count;
  if (at == most) {
    if (!(candidate.score > best[most - 1].score)) return;
    at = most - 1;
  } else {
    ++*count;
  }
  while (at > 0 && candidate.score > best[at - 1].score) {
    best[at] = best[at - 1];
    --at;
  }
  best[at] = candidate;
}

void Score(const RouteParams& p, const float* logits, float* scores) {
  if (p.scoring == RouteParams::Scoring::kSigmoid) {
    for (int e = 0; e < p.experts; ++e) scores[e] = 1 / (1 + std::exp(-logits[e]));
    return;
  }
  const float max = *std::max_element(logits, logits + p.experts);
  float sum = 0;
  for (int e = 0; e < p.experts; ++e) {
    scores[e] = std::exp(logits[e] - max);
    sum += scores[e];
  }
  for (int e = 0; e < p.experts; ++e) scores[e] /= sum;
}

float GroupScoreOf(const RouteParams& p, const float* choice, int size) {
  float first = choice[0];
  float second = -std::numeric_limits<float>::infinity();
  for (int i = 1; i < size; ++i) {
    second = std::max(second, std::min(first, choice[i]));
    first = std::max(first, choice[i]);
  }
  return p.group_score == RouteParams::GroupScore::kMax ? first : first + second;
}

// scratch: scores [experts], scores for the choice [experts]; best: [max(top_k, top_groups)].
void RouteRow(const RouteParams& p, int row, float* scratch, Best* best, bool* open) {
  float* scores = scratch;
  float* choice = scratch + p.experts;
  Score(p, p.logits + int64_t{row} * p.experts, scores);
  for (int e = 0; e < p.experts; ++e) choice[e] = p.bias != nullptr ? scores[e] + p.bias[e] : scores[e];

  const int size = p.experts / p.groups;
  std::fill_n(open, p.groups, p.top_groups == p.groups);
  if (p.top_groups < p.groups) {
    int count = 0;
    for (int g = 0; g < p.groups; ++g) {
      Insert({GroupScoreOf(p, choice + g * size, size), g}, p.top_groups, best, &count);
    }
    for (int i = 0; i < count; ++i) open[best[i].id] = true;
  }

  int count = 0;
  for (int e = 0; e < p.experts; ++e) {
    if (open[e / size]) Insert({choice[e], e}, p.top_k, best, &count);
  }
  int32_t* ids = p.ids + int64_t{row} * p.top_k;
  float* weights = p.weights + int64_t{row} * p.top_k;
  float sum = 0;
  for (int j = 0; j < p.top_k; ++j) {
    ids[j] = best[j].id;
    weights[j] = scores[best[j].id];
    sum += weights[j];
  }
  if (p.normalize) {
    if (p.scoring == RouteParams::Scoring::kSigmoid) sum += 1e-20F;
    for (int j = 0; j < p.top_k; ++j) weights[j] /= sum;
  }
  for (int j = 0; j < p.top_k; ++j) weights[j] *= p.scale;
}

}  // namespace

void Route(const ExecContext& ctx, const RouteParams& p) {
  MOESAIC_CHECK_EQ(p.experts % p.groups, 0);
  const int size = p.experts / p.groups;
  MOESAIC_CHECK_LE(p.top_groups, p.groups);
  MOESAIC_CHECK_LE(p.top_k, p.top_groups * size);
  MOESAIC_CHECK(p.group_score == RouteParams::GroupScore::kMax || p.groups == p.top_groups || size >= 2);
  const size_t mark = ctx.scratch->Mark();
  const int workers = ctx.pool->size();
  const int most = std::max(p.top_k, p.top_groups);
  const auto scratch = ctx.scratch->Take<float>(size_t{2} * p.experts * workers);
  const auto best = ctx.scratch->Take<Best>(size_t(most) * workers);
  const auto open = ctx.scratch->Take<bool>(size_t(p.groups) * workers);
  ctx.pool->Run((int64_t{p.rows} + kTaskRows - 1) / kTaskRows, [&](int64_t task, int worker) {
    const auto first = static_cast<int>(task * kTaskRows);
    for (int row = first; row < std::min(first + kTaskRows, p.rows); ++row) {
      RouteRow(p, row, scratch.data() + int64_t{2} * p.experts * worker, best.data() + int64_t{most} * worker,
               open.data() + int64_t{p.groups} * worker);
    }
  });
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
