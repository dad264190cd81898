// Draws a token from a row of logits, in vLLM's order: biases, bans (min_tokens, grammar), repetition,
// frequency and presence penalties, then greedy, or temperature, min-p, top-k, top-p, typical and a random
// draw.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "engine/request.h"
#include "engine/row_summary.h"

namespace moesaic::engine {

/// Counts of the tokens of a sequence, for penalties.
class TokenHistory {
 public:
  struct Counts {
    bool in_prompt = false;
    int outputs = 0;
  };
  void AddPrompt(std::span<const int32_t> tokens);
  void AddOutput(int32_t token) { ++counts_[token].outputs; }
  const std::unordered_map<int32_t, Counts>& counts() const { return counts_; }

 private:
  std::unordered_map<int32_t, Counts> counts_;
};

/// Returns whether `sampling` needs a TokenHistory.
bool HasPenalties(const SamplingParams& sampling);

/// Refuses parameters out of range by name; token ids must be below `vocab_size`.
Status CheckSampling(const SamplingParams& sampling, int vocab_size);

/// Input of one draw.
struct DrawParams {
  std::span<const float> logits;  // [vocab], not changed; empty: only `summary` is known
  const SamplingParams* sampling;
  const TokenHistory* history;
  std::span<const int32_t> banned;      // not drawn unless the mask leaves nothing else
  std::span<const uint32_t> mask = {};  // bit i: token i may be drawn; empty: all may
  uint64_t seed;
  uint64_t position;  // of the drawn token in its sequence; the draw depends on (seed, position) only
  // Summary of the row if several ranks share the head; null otherwise. With a summary, results are equal
  // with and without `logits`.
  const RowSummary* summary = nullptr;
};

/// Scratch memory of successive draws on one thread.
struct DrawScratch {
  struct Candidate {
    int32_t token;
    float weight;  // exp((logit - greatest) / temperature)
  };
  std::vector<float> logits;
  std::vector<TokenLogit> best;
  std::vector<Candidate> candidates;
};

struct Drawn {
  int32_t token = 0;
  bool needs_logits = false;  // the summary alone does not decide: the row's logits are needed
  LogprobEntry logprobs;      // when sampling->logprobs >= 0
};

/// Internal: no finite logit is left, or one is NaN. Ties go to the lower id.
StatusOr<Drawn> Draw(const DrawParams& params, DrawScratch& scratch);

/// The sums that a draw with `sampling` takes from summaries.
RowNeeds NeedsOf(const SamplingParams& sampling);

/// Returns the log-softmax over `logits` of `token` and of the `top` most likely tokens. The normalizer is
/// that of `summary`, if it has one.
LogprobEntry LogprobsOf(std::span<const float> logits, int32_t token, int top,
                        const RowSummary* summary = nullptr);

/// The token of the greatest logit, ties to the lower id; -1: a logit is NaN.
int32_t LikeliestToken(std::span<const float> logits);

}  // namespace moesaic::engine
