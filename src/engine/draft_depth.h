// Decides how many tokens are drafted for each sequence: what makes the most tokens a second by what drafts
// and steps have cost and how drafts fared, and none where that is best.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "engine/sequence.h"

namespace moesaic::engine {

/// Engine thread only.
class DepthPolicy {
 public:
  /// A decode that could be drafted for.
  struct Candidate {
    const DraftRecord* record;
    int limit;             // tokens that could be drafted
    int behind;            // rows that the drafter computes first, as Drafter::Behind
    bool is_free = false;  // as Drafter::is_free
  };

  /// Depths [candidates], each at most its limit and together at most `rows`, for a step of `decodes`
  /// sequences with the candidates among them.
  std::vector<int> Choose(std::span<const Candidate> candidates, int decodes, int rows);
  /// Tokens a second that a decode gets with the best depth for it, as if it were alone.
  double Rate(const Candidate& candidate) const;
  /// Whether a sequence of which nothing is known is worth drafting for with drafts that are computed.
  bool WorthStarting() const;

  /// A step of decodes alone took so long for so many rows, drafts among them.
  void CountStep(int rows, double seconds);
  /// Drafts, but for free ones, of so many sequences took so long: `passes` one after the other of one row a
  /// sequence, and `behind` rows before them.
  void CountDrafts(int sequences, int passes, int behind, double seconds);
  /// Of `drafted` tokens, the first `accepted` were right.
  void CountOutcome(DraftRecord& record, bool is_free, int drafted, int accepted);
  /// Of `found` free tokens that were not verified, the first `right` were said all the same.
  void CountUnused(DraftRecord& record, int found, int right);

 private:
  // The lower quartile of the last samples: what disturbs a step only ever makes it slower.
  struct Quartile {
    double value = 0;
    int samples = 0;  // ever
    std::array<double, 9> last = {};
    void Add(double sample);
    void Scale(double factor);
  };

  // What a decode step of so many rows is expected to take; 0 while nothing is known.
  double StepSeconds(int rows) const;
  // How likely the token at `place` of a draft is right when all before it are.
  double Chance(const Candidate& candidate, int place) const;
  double Prior(bool is_free, int place) const;
  double VerifySeconds(int decodes, int drafts) const;
  double DraftSeconds(int passes, double behind) const;
  std::vector<int> ChooseProbe(std::span<const Candidate> candidates, int decodes);

  std::vector<Quartile> steps_;  // seconds, by rows
  Quartile pass_, behind_row_;   // seconds
  DraftRecord all_, all_free_;   // of all sequences' drafts: computed ones and free ones
  int drafted_steps_ = 0;        // since a step without drafts was measured
  double credit_ = 0;            // seconds that may go into finding out whether drafts have become worth it
  double charged_ = 0;           // of it, for the drafts of the probe that was chosen last
  bool idle_ = false;            // the last choice was to draft nothing
  int64_t step_ = 0;
};

}  // namespace moesaic::engine
