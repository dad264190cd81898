#include "parallel/placement/pair_counts.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

// Of the logarithm of the objective, a 64th power. From 0.05, a hundred large experts keep the order of a
// good start; from 16, a few experts reach all counts.
constexpr double kFirstTemperatures[] = {0.05, 16}, kLastTemperature = 0.0025;
constexpr int kTriesPerStop = 256;

struct Replica {
  float size = 0;
  int expert = 0;
};

// Replicas of all experts in ascending order of size, of which two experts' counts change at a time.
class SortedReplicas {
 public:
  SortedReplicas(const std::vector<int>& copies, const ReplicaSize& size) {
    for (int e = 0; e < static_cast<int>(copies.size()); ++e) {
      for (int copy = 0; copy < copies[e]; ++copy) now_.push_back({size(e, copies[e]), e});
    }
    std::sort(now_.begin(), now_.end(), Before);
    next_.resize(now_.size());
  }

  // Replaces the replicas of `more` by one more of size `more_size`, and those of `fewer` by one fewer. The
  // change is pending until Accept().
  void Try(int more, float more_size, int more_copies, int fewer, float fewer_size, int fewer_copies) {
    Replica added[2] = {{more_size, more}, {fewer_size, fewer}};
    int left[2] = {more_copies, fewer_copies};
    if (Before(added[1], added[0])) {
      std::swap(added[0], added[1]);
      std::swap(left[0], left[1]);
    }
    size_t out = 0;
    int adding = 0;
    const auto add_before = [&](const Replica* limit) {
      for (; adding < 2 && (limit == nullptr || Before(added[adding], *limit)); ++adding)
        for (; left[adding] > 0; --left[adding]) next_[out++] = added[adding];
    };
    for (const Replica& replica : now_) {
      if (replica.expert == more || replica.expert == fewer) continue;
      add_before(&replica);
      next_[out++] = replica;
    }
    add_before(nullptr);
  }
  void Accept() { now_.swap(next_); }

  const std::vector<Replica>& now() const { return now_; }
  const std::vector<Replica>& next() const { return next_; }

 private:
  static bool Before(const Replica& a, const Replica& b) {
    return a.size != b.size ? a.size < b.size : a.expert < b.expert;
  }
  std::vector<Replica> now_, next_;
};

struct Pairs {
  double log_power = 0;  // logarithm of the sum of 64th powers of the pairs' sums
  float worst = 0;
  int large = 0, small = 0;  // experts of the pair with the largest sum
};

Pairs Pair(const std::vector<Replica>& replicas, float scale) {
  Pairs pairs;
  double power = 0;
  const size_t count = replicas.size();
  for (size_t i = 0; i < count / 2; ++i) {
    const float sum = replicas[i].size + replicas[count - 1 - i].size;
    if (sum > pairs.worst) pairs = {0, sum, replicas[count - 1 - i].expert, replicas[i].expert};
    double x = double{sum} * scale;
    for (int square = 0; square < 6; ++square) x *= x;
    power += x;
  }
  pairs.log_power = std::log(power);
  return pairs;
}

// Starts from `copies`. `best`, with the largest sum `least`, is replaced by better counts.
void Anneal(std::vector<int> copies, int ranks, const ReplicaSize& size, int tries, double first_temperature,
            const std::function<bool()>& stop, std::vector<int>& best, float& least) {
  const int experts = static_cast<int>(copies.size());
  SortedReplicas replicas(copies, size);
  const float scale = 1 / Pair(replicas.now(), 1).worst;
  Pairs pairs = Pair(replicas.now(), scale);
  std::vector<int> shared;  // experts with several replicas
  for (int e = 0; e < experts; ++e) {
    if (copies[e] > 1) shared.push_back(e);
  }
  if (shared.empty()) return;
  Random random(1);
  for (int attempt = 0; attempt < tries; ++attempt) {
    if (attempt % kTriesPerStop == 0 && stop && stop()) return;
    // An expert of the pair with the largest sum gets a replica half of the time, else any expert.
    const int kind = random.Below(4);
    const int more = kind == 0 ? pairs.large : kind == 1 ? pairs.small : random.Below(experts);
    const int fewer = shared[random.Below(static_cast<int>(shared.size()))];
    if (more == fewer || copies[more] >= ranks) continue;
    replicas.Try(more, size(more, copies[more] + 1), copies[more] + 1, fewer, size(fewer, copies[fewer] - 1),
                 copies[fewer] - 1);
    const Pairs next = Pair(replicas.next(), scale);
    const double temperature = first_temperature * std::pow(kLastTemperature / first_temperature,
                                                            static_cast<double>(attempt) / tries);
    if (next.log_power > pairs.log_power &&
        std::exp((pairs.log_power - next.log_power) / temperature) <= random.Uniform())
      continue;
    replicas.Accept();
    pairs = next;
    if (++copies[more] == 2) shared.push_back(more);
    if (--copies[fewer] == 1) shared.erase(std::find(shared.begin(), shared.end(), fewer));
    if (pairs.worst >= least) continue;
    least = pairs.worst;
    best = copies;
  }
}

}  // namespace

std::vector<int> SearchPairCounts(std::vector<int> copies, int ranks, const ReplicaSize& size, int tries,
                                  const std::function<bool()>& stop) {
  std::vector<int> best = copies;
  float least = Pair(SortedReplicas(copies, size).now(), 1).worst;
  if (!(least > 0)) return best;  // no tokens
  for (const double temperature : kFirstTemperatures)
    Anneal(copies, ranks, size, tries / static_cast<int>(std::size(kFirstTemperatures)), temperature, stop,
           best, least);
  return best;
}

}  // namespace moesaic::parallel
