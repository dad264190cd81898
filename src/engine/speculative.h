// Options and statistics of speculative decoding.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "models/model.h"

namespace moesaic::engine {

/// Maximum draft tokens of one sequence and step. Up to this many rows and one more, MLA uses the computation
/// of a single row (MlaAttention::Expands), so a verified row is bit-identical to a decode.
inline constexpr int kMaxDrafts = 15;

/// Choices that an executor keeps for a sequence, KV head and layer when `reuse` rows read one choice: that
/// of the next row, and those of drafts after it, which may all be refused. Among one fewer rows than
/// kMaxDrafts as many begin a group as fit, one group began before, and one is cut short by the end of a
/// block.
constexpr int KeptChoicesPerHead(int reuse) { return 1 + kMaxDrafts / reuse + 2; }

/// Default maximum of "mtp", and the maximum of the module in "mtp+ngram": acceptance of a chained module
/// drops fast.
inline constexpr int kMtpTokens = 4;

/// Options of speculative decoding.
struct SpeculativeOptions {
  /// "off"; "ngram": the tokens that followed an earlier occurrence of the last ones; "mtp": the model's own
  /// module; "mtp+ngram": for each draft the better of both; "draft": draft_model; "auto": "draft" with a
  /// draft_model, else "mtp+ngram" if the model has a module, else "ngram".
  std::string method = "off";
  int most_tokens =
      0;  ///< Maximum draft tokens per sequence and step, [1, kMaxDrafts]; 0: the method's default.
  bool adaptive = true;                  ///< Drafts only as many tokens as pay; false: always most_tokens.
  int prompt_lookup_min = 2;             ///< n-gram: minimum length of the matched tokens.
  int prompt_lookup_max = 5;             ///< n-gram: maximum length of the matched tokens.
  models::Model* draft_model = nullptr;  ///< Model of the same vocabulary; borrowed.
};

/// Returns whether `method` uses the model's own module.
inline bool UsesMtp(const std::string& method) { return method == "mtp" || method == "mtp+ngram"; }

/// Counters; they rise over the engine's life.
struct SpeculationStats {
  int64_t drafts = 0;                                ///< verified drafts
  int64_t draft_tokens = 0;                          ///< verified tokens
  int64_t accepted_tokens = 0;                       ///< accepted ones of these
  std::array<int64_t, kMaxDrafts> accepted_at = {};  ///< accepted tokens by place in the draft
};

/// Replaces "auto" and 0 by the values for this model. InvalidArgument names an option that is out of range
/// or that the model does not support.
StatusOr<SpeculativeOptions> ResolveSpeculative(SpeculativeOptions options, const models::ModelInfo& info);

}  // namespace moesaic::engine
