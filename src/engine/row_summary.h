// Summaries of rows of logits. A rank that has part of the head sends them to the driver instead of its
// logits: the greatest logits and sums over all of its columns.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "parallel/shard.h"

namespace moesaic::engine {

/// Number of candidates of a row from which a token is drawn. Requests seldom use a larger top_k or more top
/// logprobs, and top_p ends earlier in almost all rows. A row takes about 0.5 KB.
inline constexpr int kRowCandidates = 64;

struct TokenLogit {
  int32_t token;
  float logit;
};

/// Returns whether `a` comes before `b` in the order of candidates: greater logits first, ties by lower id.
inline bool ComesBefore(const TokenLogit& a, const TokenLogit& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

/// Sums that a row's draw and log-probabilities need.
struct RowNeeds {
  float temperature = 0;    // of a random draw; 0: none
  bool normalizer = false;  // for log-probabilities

  bool operator==(const RowNeeds&) const = default;
};

/// Sums over one rank's columns of a row.
struct SliceSums {
  float greatest = 0;     // NaN if a logit is NaN
  double exp_sum = 0;     // of exp(logit - greatest); 0: not wanted
  double weight_sum = 0;  // of exp((logit - greatest) / temperature); 0: not wanted
};

/// Summary of one row, merged from all ranks that have part of the head.
struct RowSummary {
  int vocab_size = 0;
  std::vector<TokenLogit> best = {};   // ordered; every other logit comes after the last one
  std::vector<SliceSums> slices = {};  // by rising column

  bool is_whole() const { return std::ssize(best) == vocab_size; }
  bool has_nan() const;
  float greatest() const;
  /// Returns the logarithm of the sum of exp(logit); NaN if it was not wanted.
  double LogNormalizer() const;
  /// Returns the sum of exp((logit - greatest()) / temperature); 0 if it was not wanted.
  double WeightSum(float temperature) const;
};

/// Summarizes a rank's columns of a row, which begin at token `first`, with up to `count` candidates.
/// Appends the candidates to `best`.
SliceSums SummarizeSlice(std::span<const float> logits, int first, int count, const RowNeeds& needs,
                         std::vector<TokenLogit>* best);

/// Merges one row's slices. `best` holds the candidates of all slices, `counts` [slices] their numbers;
/// slices with fewer candidates than `columns` [slices] have other tokens after their last one.
RowSummary MergeSlices(std::vector<TokenLogit> best, std::span<const int> counts,
                       std::span<const parallel::Range> columns, std::vector<SliceSums> slices);

/// Returns the token of the greatest logit, the lowest id of equal ones; -1: a logit is NaN.
int32_t LikeliestToken(const RowSummary& row);

}  // namespace moesaic::engine
