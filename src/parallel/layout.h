// Placement of one model on ranks: tensor, pipeline, data and expert parallelism, and their hybrids.
//
// Ranks are numbered like vLLM's: rank = (replica * pipeline + stage) * tensor + shard. A *replica* has its
// own sequences; a *stage* has a range of layers; the *shards* of a stage divide its matrices. The ranks of
// one stage in all replicas are the stage's *expert group*: with expert parallelism they divide its routed
// experts.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "parallel/batch_split_options.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Degrees of parallelism. Each is at least 1.
struct Degrees {
  int tensor = 1;
  int pipeline = 1;
  int data = 1;
  /// Number of parts into which an expert group of tensor * data ranks divides the routed experts. A part is
  /// divided among tensor * data / expert ranks by slices of its experts. 1: each rank has a slice of every
  /// expert.
  int expert = 1;

  int ranks() const { return tensor * pipeline * data; }
  bool operator==(const Degrees&) const = default;
};

/// Returns a name such as "TP2 x PP2 x EP2"; "1 rank" if all degrees are 1.
std::string Name(const Degrees& degrees);

/// Sizes of uneven parts, for ranks of different speed or memory. Empty: sizes differ by at most one.
struct Split {
  std::vector<int> layers;   // decoder layers of each stage, [pipeline]
  std::vector<int> experts;  // routed experts of each part, [expert]
  bool operator==(const Split&) const = default;
};

/// Minimum rows of each part into which pipeline stages divide a batch. Each part reads the weights of its
/// rows' experts again; from 32 rows on, dense matrices are bound by computation.
inline constexpr int kMinPartRows = 32;
/// Maximum parts of a batch, divided by the number of stages. With m parts, a stage computes for
/// m / (m + stages - 1) of the time: 4/5 or more.
inline constexpr int kPartsPerStage = 4;

struct Coordinates {
  int replica = 0, stage = 0, shard = 0;
  bool operator==(const Coordinates&) const = default;
};

/// Immutable.
class Layout {
 public:
  /// One rank.
  Layout() = default;
  /// InvalidArgument: a degree is below 1, the expert degree does not divide tensor * data (with several
  /// replicas it must be 1 or tensor * data), or a split has not a number of at least 1 for each stage or
  /// part.
  static StatusOr<Layout> Create(const Degrees& degrees, Split split = {});
  /// Parses "tp=2,pp=2": sizes (tp, pp, dp, ep) and splits (layers=20+28, experts=70+58), each at most once.
  static StatusOr<Layout> Parse(std::string_view text);

  const Degrees& degrees() const { return degrees_; }
  const Split& split() const { return split_; }
  std::string Name() const;  ///< "TP2 x PP2, layers 20+28"
  /// Returns the parts of one replica as text for Parse(): "tp=2,pp=2,layers=20+28"; "tp=1" for one rank.
  /// The text has dp if replicas divide the experts: "tp=1,dp=2,ep=2". Layouts with equal texts and
  /// without a placement of experts give their ranks equal parts of a model.
  std::string PartsText() const;
  int ranks() const { return degrees_.ranks(); }
  Coordinates At(int rank) const;
  int RankAt(const Coordinates& at) const;

  /// Returns the ranks of the same replica and stage, by shard.
  std::vector<int> TensorGroup(int rank) const;
  /// Returns the ranks of the same stage, by replica and shard.
  std::vector<int> ExpertGroup(int rank) const;
  /// Returns the number of the part of the routed experts that a rank has, in [0, expert).
  int ExpertPart(int rank) const;
  /// Returns the number of the rank's slice of that part's experts, in [0, expert_slices()).
  int ExpertSlice(int rank) const;
  int expert_slices() const;
  /// Returns whether replicas divide the experts of their stage, so that tokens travel to the ranks of their
  /// experts.
  bool exchanges_tokens() const { return degrees_.data > 1 && degrees_.expert > 1; }

  /// Sets the experts of each rank of an expert group; by default they are contiguous ranges. The layers of
  /// `placement` are the model's MoE layers, or all its decoder layers. InvalidArgument: the layout does not
  /// exchange tokens, or its expert groups have another number of ranks.
  Status PlaceExperts(std::shared_ptr<const Placement> placement);
  const Placement* placement() const { return placement_.get(); }  ///< or null
  /// Allows experts to move to other ranks while the model serves. Sums then do not depend on their
  /// placement.
  void LetExpertsMove() { experts_move_ = true; }
  bool experts_move() const { return experts_move_; }
  /// Sets the options of dividing tokens over the replicas of experts.
  void SetBatchSplit(const BatchSplitOptions& split) { batch_split_ = split; }
  const BatchSplitOptions& batch_split() const { return batch_split_; }
  /// Sets the relative speeds of the ranks of an expert group, [ranks]; empty: all equal. InvalidArgument:
  /// their number is wrong, or one is not positive.
  Status SetSpeeds(std::vector<double> speeds);
  const std::vector<double>& speeds() const { return speeds_; }
  /// Lets the job continue without ranks that fail, except for the driver. InvalidArgument: the layout does
  /// not exchange tokens, or its replicas have several ranks, whose parts no other rank has.
  Status TolerateFailures();
  bool tolerates_failures() const { return tolerates_failures_; }
  /// Returns the position of a rank in its expert group.
  int IndexInExpertGroup(int rank) const;

 private:
  Layout(const Degrees& degrees, Split split) : degrees_(degrees), split_(std::move(split)) {}

  Degrees degrees_;
  Split split_;
  std::shared_ptr<const Placement> placement_;
  BatchSplitOptions batch_split_;
  std::vector<double> speeds_;
  bool experts_move_ = false;
  bool tolerates_failures_ = false;
};

}  // namespace moesaic::parallel
