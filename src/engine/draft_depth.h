// Chooses the number of draft tokens per sequence that maximizes expected tokens per second, from the
// measured costs of drafts and steps and the recent acceptance.
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
    int limit;             // maximum draft tokens
    int pending_rows;      // rows computed first, as Drafter::PendingRows
    bool is_free = false;  // as Drafter::is_free
  };

  /// Returns the depths [candidates] for a step of `decodes` sequences that include the candidates. Each is
  /// at most its limit, and their sum is at most `rows`.
  std::vector<int> Choose(std::span<const Candidate> candidates, int decodes, int rows);
  /// Returns the expected tokens per second of a decode alone, with its best depth.
  double Rate(const Candidate& candidate) const;
  /// Returns whether computed drafts are expected to pay for a sequence without a record.
  bool WorthStarting() const;

  /// Records the time of a step of `rows` decode and draft rows.
  void CountStep(int rows, double seconds);
  /// Records the time of computed drafts: `passes` successive passes of one row per sequence, after
  /// `pending_rows` rows.
  void CountDrafts(int sequences, int passes, int pending_rows, double seconds);
  /// Records that the first `accepted` of `drafted` tokens were accepted.
  void CountOutcome(DraftRecord& record, bool is_free, int drafted, int accepted);
  /// Records that the first `right` of `found` unverified look-up tokens equal the tokens drawn later.
  void CountUnused(DraftRecord& record, int found, int right);

 private:
  // Lower quartile of the last samples, because disturbances only make steps slower.
  struct Quartile {
    double value = 0;
    int samples = 0;  // so far
    std::array<double, 9> last = {};
    void Add(double sample);
    void Scale(double factor);
  };

  // Expected time of a decode step of `rows` rows; 0: unknown.
  double StepSeconds(int rows) const;
  // Probability that the token at `place` of a draft is accepted if all tokens before it are.
  double Chance(const Candidate& candidate, int place) const;
  double Prior(bool is_free, int place) const;
  double VerifySeconds(int decodes, int drafts) const;
  double DraftSeconds(int passes, double pending_rows) const;
  std::vector<int> ChooseProbe(std::span<const Candidate> candidates, int decodes);

  std::vector<Quartile> steps_;  // seconds, by rows
  Quartile pass_, pending_row_;  // seconds
  DraftRecord all_, all_free_;   // of all sequences: computed drafts, and free ones
  int drafted_steps_ = 0;        // since a step without drafts was measured
  double credit_ = 0;            // seconds that may be spent on probing whether drafts pay
  double charged_ = 0;           // part of credit_ spent on the last probe
  bool idle_ = false;            // the last choice was no draft
  int64_t step_ = 0;
};

}  // namespace moesaic::engine
