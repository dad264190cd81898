#include "carve/balanced_clusters.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::carve {
namespace {

constexpr int kRowsPerTask = 64;

void NormalizeRows(RowMatrix* rows) {
  for (int64_t i = 0; i < rows->rows(); ++i) {
    const float norm = rows->row(i).norm();
    if (norm > 0) rows->row(i) /= norm;
  }
}

std::vector<int> AssignGreedily(const RowMatrix& similarity, int room) {
  const auto items = similarity.rows(), clusters = similarity.cols();
  std::vector<int> order(static_cast<size_t>(items * clusters));
  std::iota(order.begin(), order.end(), 0);
  const float* value = similarity.data();
  std::sort(order.begin(), order.end(),
            [value](int a, int b) { return value[a] != value[b] ? value[a] > value[b] : a < b; });
  std::vector<int> assigned(static_cast<size_t>(items), -1), used(static_cast<size_t>(clusters), 0);
  for (const int pair : order) {
    const int item = pair / static_cast<int>(clusters), cluster = pair % static_cast<int>(clusters);
    if (assigned[item] >= 0 || used[cluster] == room) continue;
    assigned[item] = cluster;
    ++used[cluster];
  }
  return assigned;
}

}  // namespace

std::vector<int> BalancedClusters(runtime::ThreadPool& pool, RowMatrix features, int clusters,
                                  int iterations) {
  const auto items = static_cast<int>(features.rows());
  MOESAIC_CHECK_EQ(items % clusters, 0);
  NormalizeRows(&features);
  // Starting points are spread evenly over the items.
  RowMatrix centers(clusters, features.cols());
  for (int c = 0; c < clusters; ++c)
    centers.row(c) = features.row(static_cast<int64_t>(c) * items / clusters);
  std::vector<int> assigned;
  RowMatrix similarity(items, clusters);
  for (int i = 0; i < iterations; ++i) {
    pool.Run(base::CeilDiv(items, kRowsPerTask), [&](int64_t task, int) {
      const int64_t first = task * kRowsPerTask, count = std::min<int64_t>(kRowsPerTask, items - first);
      similarity.middleRows(first, count).noalias() = features.middleRows(first, count) * centers.transpose();
    });
    std::vector<int> next = AssignGreedily(similarity, items / clusters);
    if (next == assigned) break;
    assigned = std::move(next);
    centers.setZero();
    for (int item = 0; item < items; ++item) centers.row(assigned[item]) += features.row(item);
    NormalizeRows(&centers);
  }
  return assigned;
}

}  // namespace moesaic::carve
