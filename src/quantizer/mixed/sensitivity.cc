#include "quantizer/mixed/sensitivity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/round.h"
#include "kernels/exec_context.h"
#include "quantizer/gptq/gptq.h"

namespace moesaic::quantizer {
namespace {

constexpr size_t kMaxStates = 1 << 20;
constexpr int kSensitivityRows = 64;

double CostOf(const KnapsackOption& option) { return static_cast<double>(option.bytes); }

// A step along the lower convex hull of a group's (cost, loss), from one of its options to a more expensive
// one.
struct Step {
  int group, option;
  double cost, gain;  // additional bytes, decrease of loss
  double slope() const { return gain / cost; }
};

class PrecisionChooser {
 public:
  PrecisionChooser(std::span<const KnapsackGroup> groups, double budget)
      : groups_(groups), budget_(budget), options_(groups.size()) {}

  StatusOr<KnapsackChoice> Run() {
    double least_cost = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      options_[g] = Cheapest(groups_[g]);
      least_cost += Cost(g, options_[g]);
      AddSteps(static_cast<int>(g));
    }
    if (least_cost > budget_) {
      return ResourceExhausted("the cheapest options cost {:.0f} bytes, more than the budget of {:.0f}",
                               least_cost, budget_);
    }
    WalkHull(budget_ - least_cost);
    KnapsackChoice choice = ChoiceOf(options_);
    BoundSuffixes();
    choice.least_loss = std::min(choice.loss, suffix_[0] - multiplier_ * budget_);
    choice.exact = Improve(&choice);
    if (choice.exact) choice.least_loss = choice.loss;
    return choice;
  }

 private:
  // A partial choice for the first groups.
  struct State {
    double cost, loss;
    int option, before;  // option of the last group, and the state of the groups before it
  };

  double Cost(size_t g, int option) const { return CostOf(groups_[g].options[option]); }
  double Loss(size_t g, int option) const { return groups_[g].options[option].loss; }

  int Cheapest(const KnapsackGroup& group) const {
    const auto cheaper = [&](const KnapsackOption& a, const KnapsackOption& b) {
      return std::pair(CostOf(a), a.loss) < std::pair(CostOf(b), b.loss);
    };
    const auto& options = group.options;
    return static_cast<int>(std::min_element(options.begin(), options.end(), cheaper) - options.begin());
  }

  void AddSteps(int g) {
    int at = options_[g];
    const auto& options = groups_[g].options;
    while (true) {
      Step best{g, -1, 0, 0};
      for (int o = 0; o < std::ssize(options); ++o) {
        const Step step{g, o, Cost(g, o) - Cost(g, at), Loss(g, at) - Loss(g, o)};
        if (step.cost <= 0 || step.gain <= 0) continue;
        const bool longer = best.option >= 0 && step.slope() == best.slope() && step.cost > best.cost;
        if (best.option < 0 || step.slope() > best.slope() || longer) best = step;
      }
      if (best.option < 0) return;
      steps_.push_back(best);
      at = best.option;
    }
  }

  // Takes the steepest steps while they fit. The first one that does not fit fixes the multiplier of the
  // relaxation, in which steps may be fractional. Its group stops there; others may continue.
  void WalkHull(double left) {
    std::stable_sort(steps_.begin(), steps_.end(),
                     [](const Step& a, const Step& b) { return a.slope() > b.slope(); });
    std::vector<bool> stopped(groups_.size());
    for (const Step& step : steps_) {
      if (stopped[step.group]) continue;
      if (step.cost > left) {
        if (multiplier_ == 0) multiplier_ = step.slope();
        stopped[step.group] = true;
        continue;
      }
      left -= step.cost;
      options_[step.group] = step.option;
    }
  }

  // suffix_[g] is the minimum of loss + multiplier x cost, summed over groups g and later.
  void BoundSuffixes() {
    suffix_.assign(groups_.size() + 1, 0);
    for (size_t g = groups_.size(); g-- > 0;) {
      double least = std::numeric_limits<double>::infinity();
      for (int o = 0; o < std::ssize(groups_[g].options); ++o) {
        least = std::min(least, Loss(g, o) + multiplier_ * Cost(g, o));
      }
      suffix_[g] = suffix_[g + 1] + least;
    }
  }

  // Finds the best choice, or returns false and leaves `choice` unchanged.
  bool Improve(KnapsackChoice* choice) const {
    std::vector<std::vector<State>> layers = {{{0, 0, -1, -1}}};
    size_t states = 1;
    // Rounding error of the bound's sums. A choice that gains less is not better.
    const double slack = 1e-12 * (std::fabs(suffix_[0]) + multiplier_ * budget_ + choice->loss);
    for (size_t g = 0; g < groups_.size(); ++g) {
      std::vector<State> next;
      for (int s = 0; s < std::ssize(layers.back()); ++s) {
        const State& state = layers.back()[s];
        for (int o = 0; o < std::ssize(groups_[g].options); ++o) {
          const State grown{state.cost + Cost(g, o), state.loss + Loss(g, o), o, s};
          const double bound = grown.loss + suffix_[g + 1] - multiplier_ * (budget_ - grown.cost);
          if (grown.cost > budget_ || bound > choice->loss + slack) continue;
          next.push_back(grown);
        }
      }
      std::stable_sort(next.begin(), next.end(), [](const State& a, const State& b) {
        return std::pair(a.cost, a.loss) < std::pair(b.cost, b.loss);
      });
      double least = std::numeric_limits<double>::infinity();
      std::erase_if(next, [&](const State& state) {
        if (state.loss >= least) return true;
        least = state.loss;
        return false;
      });
      states += next.size();
      if (states > kMaxStates) return false;
      layers.push_back(std::move(next));
    }
    if (layers.back().empty()) return true;                    // no better choice exists
    int at = static_cast<int>(std::ssize(layers.back())) - 1;  // most expensive, so of least loss
    if (layers.back()[at].loss > choice->loss) return true;
    std::vector<int> options(groups_.size());
    for (size_t g = groups_.size(); g-- > 0;) {
      const State& state = layers[g + 1][at];
      options[g] = state.option;
      at = state.before;
    }
    const double bound = choice->least_loss;
    *choice = ChoiceOf(options);
    choice->least_loss = bound;
    return true;
  }

  KnapsackChoice ChoiceOf(const std::vector<int>& options) const {
    KnapsackChoice choice;
    choice.options = options;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const KnapsackOption& option = groups_[g].options[options[g]];
      choice.loss += option.loss;
      choice.bytes += option.bytes;
    }
    return choice;
  }

  std::span<const KnapsackGroup> groups_;
  double budget_;
  std::vector<int> options_;  // options of the walk so far
  std::vector<Step> steps_;
  std::vector<double> suffix_;
  double multiplier_ = 0;
};

}  // namespace

StatusOr<KnapsackChoice> SolveKnapsack(std::span<const KnapsackGroup> groups, double budget) {
  for (const KnapsackGroup& group : groups) {
    if (group.options.empty()) return InvalidArgument("{} has no options", group.name);
    for (const KnapsackOption& option : group.options) {
      if (!(option.loss >= 0) || !std::isfinite(option.loss) || option.bytes < 0) {
        return InvalidArgument("{}: {} must have a finite loss and a size, found {} and {} bytes", group.name,
                               option.name, option.loss, option.bytes);
      }
    }
  }
  return PrecisionChooser(groups, budget).Run();
}

StatusOr<double> MeasureLoss(const kernels::ExecContext& ctx, const Grid& grid, const float* rows, int n,
                             int k, const HessianFactor& factor, const ScaleSearch& search, bool gptq) {
  const int together = grid.group_outputs(), blocks = base::CeilDiv(n, together);
  const int picked = std::min(blocks, std::max(1, kSensitivityRows / together));
  std::vector<float> sample;
  for (int i = 0; i < picked; ++i) {
    const int first = static_cast<int>((2 * int64_t{i} + 1) * blocks / (2 * picked)) * together;
    const float* begin = rows + int64_t{first} * k;
    sample.insert(sample.end(), begin, begin + int64_t{std::min(together, n - first)} * k);
  }
  ScaleSearch whole = search;
  if (grid.kind == GridKind::kNvfp4 && whole.global_scale == 0) {
    ASSIGN_OR_RETURN(const float amax, LargestMagnitude(ctx, rows, n, k));
    whole.global_scale = Nvfp4GlobalScale(amax, search.by_error);
  }
  const auto count = static_cast<int>(std::ssize(sample) / k);
  GptqReport report;
  ASSIGN_OR_RETURN(const QuantizedMatrix rounded,
                   gptq ? RoundByGptq(ctx, grid, sample.data(), count, k, factor, whole, &report)
                        : RoundToNearest(ctx, grid, sample.data(), count, k, whole));
  const double power = OutputLoss(ctx, factor, sample.data(), count);
  if (power == 0) return 0.0;
  std::vector<float> errors(sample.size());
  Dequantize(rounded, 0, count, errors.data());
  for (size_t i = 0; i < errors.size(); ++i) errors[i] = sample[i] - errors[i];
  return OutputLoss(ctx, factor, errors.data(), count) / power;
}

}  // namespace moesaic::quantizer
