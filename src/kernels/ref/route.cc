#include "kernels/ref/route.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moesaic::kernels::ref {
namespace {

// Defines the order that ties and rounding would leave open, the same in every loop here.
struct Best {
  float score;
  int id;
};

// Inserts into best[0, *count), sorted by descending score, and keeps at most `most`. Ids arrive in ascending
// order and only a greater score passes an earlier one, so ties go to the lower id. A NaN passes no other
// candidate but takes a free position: the result always has `most` distinct ids.
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

void Score(const RouteTask& p, const float* logits, float* scores) {
  if (p.sigmoid) {
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

float GroupScoreOf(const RouteTask& p, const float* choice, int size) {
  float first = choice[0];
  float second = -std::numeric_limits<float>::infinity();
  for (int i = 1; i < size; ++i) {
    second = std::max(second, std::min(first, choice[i]));
    first = std::max(first, choice[i]);
  }
  return p.top_two ? first + second : first;
}

void RouteRow(const RouteTask& p, const float* logits, int32_t* ids, float* weights) {
  float* scores = p.scratch;
  float* choice = scores + p.experts;
  auto* best = reinterpret_cast<Best*>(choice + p.experts);  // [max(top_k, top_groups)]
  auto* open = reinterpret_cast<bool*>(best + p.experts);    // [groups]
  Score(p, logits, scores);
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
  float sum = 0;
  for (int j = 0; j < p.top_k; ++j) {
    ids[j] = best[j].id;
    weights[j] = scores[best[j].id];
    sum += weights[j];
  }
  if (p.normalize) {
    if (p.sigmoid) sum += 1e-20F;
    for (int j = 0; j < p.top_k; ++j) weights[j] /= sum;
  }
  for (int j = 0; j < p.top_k; ++j) weights[j] *= p.scale;
}

}  // namespace

void Route(const RouteTask& p) {
  for (int row = 0; row < p.rows; ++row) {
    RouteRow(p, p.logits + row * p.experts, p.ids + row * p.top_k, p.weights + row * p.top_k);
  }
}

}  // namespace moesaic::kernels::ref
