// Choice of the plan of a collective by predicted cost.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "comm/collectives/plan.h"
#include "comm/collectives/plan_cost.h"
#include "comm/collectives/plan_factory.h"
#include "comm/collectives/rank_tree.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Elements of a plan that the planner chooses.
struct Candidate {
  /// Levels of the topology's tree that the plan follows. 1: flat in the order of the tree; 0: flat in the
  /// order of ranks.
  int levels = 0;
  PlanShape shape;
  /// Bit d is set if the plan leaves out the groups of depth d, 0 < d < levels. Their children become
  /// children of the groups above.
  uint32_t skipped = 0;
};
/// Returns the key of tuning tables, such as "levels 2, ring, pairwise, segments 8, streams 1". Skipped
/// depths, encodings and fixed order follow if they are set.
std::string Name(const Candidate& candidate);

/// Measured times, which correct predictions.
class TuningTable {
 public:
  /// Reads {"entries": [{"collective": "all_reduce", "ranks": 4, "bytes": 65536, "candidate": NAME,
  /// "seconds": 1e-3}]}. `source` names the file in messages.
  static StatusOr<TuningTable> Parse(std::string_view json, const std::string& source);
  std::string ToJson() const;

  void Add(Collective collective, int ranks, int64_t bytes, const std::string& candidate, double seconds);
  /// Returns the time at `bytes`, interpolated between measured sizes. Empty beyond twice the largest or half
  /// of the smallest size.
  std::optional<double> Find(Collective collective, int ranks, int64_t bytes,
                             const std::string& candidate) const;
  bool empty() const { return times_.empty(); }

 private:
  std::map<std::tuple<Collective, int, std::string>, std::map<int64_t, double>> times_;  // seconds by bytes
};

struct PlannerOptions {
  CostOptions cost;
  /// Must be equal on all ranks.
  std::shared_ptr<const TuningTable> tuning;
};

/// Restrictions of a call.
struct PlanMode {
  bool fixed_order = false;
  WireFormat wire = WireFormat::kExact;
  auto operator<=>(const PlanMode&) const = default;
};

struct Choice {
  Candidate candidate;
  double seconds = 0;  ///< predicted, or measured where the tuning table has it
};

/// Returns the bytes by which requests are divided into size classes: the larger of a rank's input and
/// output.
int64_t RequestBytes(const PlanRequest& request);

/// Not thread-safe. Equal calls on all ranks give equal plans.
class Planner {
 public:
  Planner(Topology topology, PlannerOptions options = {});

  const Topology& topology() const { return topology_; }
  /// Builds the plan of a candidate.
  StatusOr<Plan> Build(const PlanRequest& request, const Candidate& candidate) const;

  /// Returns all candidates with one segment, and the best of them with more, cheapest first.
  std::vector<Choice> Compare(const PlanRequest& request, const PlanMode& mode) const;
  /// Returns the cheapest candidate. It is computed once per collective, size class (two per power of two),
  /// element size, root and mode.
  StatusOr<Candidate> Choose(const PlanRequest& request, const PlanMode& mode);
  /// Returns the plan of the candidate that Choose() returns. The planner does not keep plans; callers do.
  StatusOr<Plan> PlanCollective(const PlanRequest& request, const PlanMode& mode);

 private:
  using ClassKey = std::tuple<Collective, int, int, int, PlanMode>;  // size class, element bytes, root

  struct Entry {
    Candidate candidate;
    double seconds = 0;  // estimated or simulated
    double bound = 0;    // of the bottleneck
    int64_t messages = 0;
  };

  // Levels of the topology's tree that a plan follows.
  struct Levels {
    int levels = 0;
    uint32_t skipped = 0;
    RankTree tree;
  };

  std::vector<Candidate> Candidates(const PlanRequest& request, const PlanMode& mode) const;
  // Replaces predicted times by measured ones. If two plans or more were measured, the predictions of the
  // others are scaled, because measured times contain costs that all predictions lack.
  void CorrectByTuning(const PlanRequest& request, std::vector<Choice>* choices) const;
  // Adds plans of several streams to candidates, which are sorted by time.
  void AddStreams(const PlanRequest& request, std::vector<Entry>* entries) const;

  Topology topology_;
  PlannerOptions options_;
  std::vector<Levels> trees_;  // in the order in which candidates are compared
  std::map<ClassKey, Candidate> choices_;
};

}  // namespace moesaic::comm
