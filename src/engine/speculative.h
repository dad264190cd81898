// How an engine drafts tokens, and what came of it.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "models/model.h"

namespace moesaic::engine {

/// Tokens that may be drafted for one sequence and step. MLA takes up to so many rows and one behind a token
/// as it takes a single one (MlaAttention::Expands), so a verified row is to the bit what a decode gives.
inline constexpr int kMaxDrafts = 15;

/// Choices that an executor keeps for a sequence, KV head and layer when `reuse` rows read one choice: that
/// of the next row, and those of drafts after it, which may all be refused. Among one fewer rows than
/// kMaxDrafts as many begin a group as fit, one group began before, and one is cut short by the end of a
/// block.
constexpr int KeptChoicesPerHead(int reuse) { return 1 + kMaxDrafts / reuse + 2; }

/// What "mtp" drafts at most unless told otherwise, and "mtp+ngram" with the module in any case: a chained
/// module loses its way soon.
inline constexpr int kMtpTokens = 4;

/// Speculative decoding: tokens are drafted cheaply and verified together in one step.
struct SpeculativeOptions {
  /// "off"; "ngram": what followed the last tokens where they stood before; "mtp": the model's own module;
  /// "mtp+ngram": that module, or what stood before where that promises more; "draft": draft_model; "auto":
  /// "draft" with a draft_model, else "mtp+ngram" where the model has a module, else "ngram".
  std::string method = "off";
  int most_tokens = 0;        ///< drafted for a sequence and step, [1, kMaxDrafts]; 0: as suits the method
  bool adaptive = true;       ///< draft as deep as pays, and not where it doesn't; false: always most_tokens
  int prompt_lookup_min = 2;  ///< n-gram: fewest last tokens that must stand before
  int prompt_lookup_max = 5;  ///< and most that are looked for
  models::Model* draft_model = nullptr;  ///< of the same vocabulary; borrowed, must outlive the engine
};

/// Whether a method drafts with the model's own module.
inline bool UsesMtp(const std::string& method) { return method == "mtp" || method == "mtp+ngram"; }

/// Rise over the engine's life.
struct SpeculationStats {
  int64_t drafts = 0;                                ///< verified, of one sequence and step each
  int64_t draft_tokens = 0;                          ///< verified
  int64_t accepted_tokens = 0;                       ///< of these
  std::array<int64_t, kMaxDrafts> accepted_at = {};  ///< by place in the draft
};

/// With "auto" and 0 replaced by what they mean for this model; refuses what is out of range or what the
/// model lacks, by name.
StatusOr<SpeculativeOptions> ResolveSpeculative(SpeculativeOptions options, const models::ModelInfo& info);

}  // namespace moesaic::engine
