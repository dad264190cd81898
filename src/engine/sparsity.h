// Which rows of which requests choose the blocks that they read. docs/contracts/sparsity.md is the law.
#pragma once

#include <string>

#include "base/status.h"
#include "kernels/block_sparsity.h"
#include "models/model.h"

namespace moesaic::engine {

enum class SparsityMode {
  kDense,   ///< every row reads all blocks
  kDecode,  ///< rows of output tokens choose
  kAll      ///< rows of the prompt too
};

/// "dense", "decode" or "all".
StatusOr<SparsityMode> ParseSparsityMode(const std::string& name);
const char* ToString(SparsityMode mode);

inline constexpr int kMinSparsityBudget = kernels::kLeastSparseBlocks * tensor::kKvBlockTokens;

/// How a request's rows choose.
struct RequestSparsity {
  SparsityMode mode = SparsityMode::kDense;
  /// Tokens that a row reads at most, rounded up to whole blocks; rows with no more before them read all.
  int budget = 2048;
  /// Heads that may leave out more of their softmax mass than this read all blocks; 1: none do.
  float eps = 1;
  /// Below 1, a row takes its best blocks only until they have this share of its attention's mass, as digests
  /// estimate it; the budget is then the most that it takes, and shorter rows choose too.
  float mass = 1;
  /// So many rows in a row read what the first of them chose, at most to the end of their block of 64.
  int reuse = 1;
};

/// What blocks are chosen by.
enum class DigestKind {
  kBox,     ///< bounds of the block's keys
  kSketch,  ///< bounds, and signs of every key
};
/// "box" or "sketch".
StatusOr<DigestKind> ParseDigestKind(const std::string& name);

/// Of an engine.
struct SparsityOptions {
  bool digests = false;  ///< built and kept; without them requests are dense
  DigestKind digest = DigestKind::kBox;
  RequestSparsity defaults = {};  ///< of requests that don't say
  int dense_layers = 2;           ///< so many first layers read all blocks
  /// One of so many choices, of a row and KV head, is held against dense attention for the metrics; 0: none.
  /// A dense read costs about budget / context choices, so that 1,021 cost a hundredth at 16k/2k. A prime, so
  /// that all KV heads and layers have their turn.
  int audit_every = 1021;
};

/// Refuses members out of range, by name, and any mode but kDense where there are no digests.
Status CheckSparsity(const RequestSparsity& sparsity, const SparsityOptions& options);

/// Settings of the kernels for a request with a prompt of `prompt` tokens. Their pointers are null.
kernels::BlockSparsity BlockSparsityOf(const RequestSparsity& sparsity, const SparsityOptions& options,
                                       int prompt);

/// The namespace of cached blocks whose rows chose so: the client's own unless rows of prompts choose. No two
/// (name, choice) share one.
std::string NamespaceOf(const std::string& name, const RequestSparsity& sparsity);

/// Bytes of one layer's digests in a block.
int64_t DigestBytesOf(const models::KvSpec& kv, DigestKind kind = DigestKind::kBox);

}  // namespace moesaic::engine
