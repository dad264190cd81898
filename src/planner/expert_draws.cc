#include "planner/expert_draws.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace moesaic::planner {
namespace {

constexpr int kSteps = 64;           // to draw
constexpr int kMaxDraws = 1 << 14;  // of one step; more are close to their mean

ExpertUse Mean(int experts, int top_k, int parts, int rows) {
  const double missed = std::pow(1.0 - static_cast<double>(top_k) / experts, rows);
  return {.experts = experts * (1 - missed) / parts, .rows = static_cast<double>(rows) * top_k / parts};
}

// Draws one step and adds the use of its busiest part.
void DrawStep(int experts, int top_k, int parts, int rows, std::mt19937& random, ExpertUse* sum) {
  std::vector<int> order(experts), used(experts, 0), part_experts(parts, 0), part_rows(parts, 0);
  for (int e = 0; e < experts; ++e) order[e] = e;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < top_k; ++k) {
      std::swap(order[k], order[k + random() % (experts - k)]);
      const int expert = order[k];
      const int part = static_cast<int>(static_cast<long>(expert) * parts / experts);
      part_experts[part] += used[expert]++ == 0 ? 1 : 0;
      ++part_rows[part];
    }
  }
  sum->experts += *std::ranges::max_element(part_experts);
  sum->rows += *std::ranges::max_element(part_rows);
}

}  // namespace

ExpertUse BusiestPart(int experts, int top_k, int parts, int rows) {
  if (experts <= 0 || top_k <= 0 || rows <= 0) return {};
  if (parts == 1 || static_cast<long>(rows) * top_k > kMaxDraws) return Mean(experts, top_k, parts, rows);
  std::mt19937 random(1);
  ExpertUse sum;
  for (int step = 0; step < kSteps; ++step) DrawStep(experts, top_k, parts, rows, random, &sum);
  return {.experts = sum.experts / kSteps, .rows = sum.rows / kSteps};
}

}  // namespace moesaic::planner
