// Settings of block-sparse attention for requests and engines. docs/contracts/sparsity.md is normative.
#pragma once

#include <string>

#include "base/status.h"
#include "kernels/block_sparsity.h"
#include "models/model.h"

namespace moesaic::engine {

enum class SparsityMode {
  kDense,   ///< every row reads all blocks
  kDecode,  ///< rows of output tokens choose
  kAll      ///< rows of the prompt choose, too
};

/// Parses "dense", "decode" or "all".
StatusOr<SparsityMode> ParseSparsityMode(const std::string& name);
const char* ToString(SparsityMode mode);

inline constexpr int kMinSparsityBudget = kernels::kMinSparseBlocks * tensor::kKvBlockTokens;

/// Settings of one request.
struct RequestSparsity {
  SparsityMode mode = SparsityMode::kDense;
  /// Maximum tokens that a row reads, rounded up to whole blocks; rows with fewer read all.
  int budget = 2048;
  /// Number of adjacent rows that share the choice of the first, at most to the end of their block of 64.
  int reuse = 1;
};

/// Contents of the key summaries.
enum class KeySummaryKind {
  kBox,     ///< bounds of the block's keys
  kSketch,  ///< bounds, and signs of every key
};
/// Parses "box" or "sketch".
StatusOr<KeySummaryKind> ParseKeySummaryKind(const std::string& name);

/// Settings of an engine.
struct SparsityOptions {
  bool key_summaries = false;  ///< Builds key summaries; without them requests are dense.
  KeySummaryKind summary_kind = KeySummaryKind::kBox;
  RequestSparsity defaults = {};  ///< of requests without settings
  int dense_layers = 2;           ///< number of leading layers that read all blocks
  /// One of this many choices, of a row and KV head, is compared with dense attention for the metrics; 0:
  /// none. An audit costs about context / budget choices, so 1,021 costs about 1 % at 16k/2k. A prime reaches
  /// all KV heads and layers.
  int audit_every = 1021;
};

/// InvalidArgument names a member that is out of range, or a mode other than kDense without key summaries.
Status CheckSparsity(const RequestSparsity& sparsity, const SparsityOptions& options);

/// Returns the kernels' settings for a request with a prompt of `prompt` tokens.
kernels::SparsitySettings SparsitySettingsOf(const RequestSparsity& sparsity, const SparsityOptions& options,
                                             int prompt);

/// Returns the namespace of cached blocks that rows with this setting computed: `name`, the client's own,
/// unless rows of prompts choose. Different names or settings of such rows have different namespaces.
std::string NamespaceOf(const std::string& name, const RequestSparsity& sparsity);

/// Returns the bytes of one layer's key summaries of a block.
int64_t KeySummaryBytesOf(const models::KvSpec& kv, KeySummaryKind kind = KeySummaryKind::kBox);

void AddCounters(const kernels::SparsityCounters& part, kernels::SparsityCounters* sum);

}  // namespace moesaic::engine
