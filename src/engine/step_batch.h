// StepBatch: one step of an engine as a plain value. It names no memory, so the same batch runs in this
// process or on another rank. docs/contracts/executors.md is normative.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/kv_op.h"
#include "engine/rank_stats.h"
#include "engine/row_summary.h"
#include "kernels/block_sparsity.h"
#include "models/model.h"

namespace moesaic::engine {

/// Rows of one sequence in a step.
struct BatchRows {
  uint64_t sequence = 0;     // names the state that executors keep for the sequence
  int32_t first_token = 0;   // of the rows, in StepBatch::tokens
  int32_t count = 0;         // rows
  int32_t start = 0;         // position of the first row
  int32_t first_logits = 0;  // rows from this one on need logits; count: none does
  int32_t first_block = 0;   // of the sequence's block table, in StepBatch::block_tables
  int32_t blocks = 0;        // in the table; they hold start + count tokens
  int32_t sparsity = -1;     // index in StepBatch::sparsity; -1: the rows read all blocks
  RowNeeds needs = {};       // of rows with logits

  bool operator==(const BatchRows&) const = default;
};

/// Which part of the model a step runs.
enum class StepKind : uint8_t {
  kDecoder,  ///< The decoder.
  kMtp       ///< MTP module 0: row i takes `hidden` of the position before it.
};

/// Operations on KV blocks, rows to compute, and operations that follow the rows. A batch without rows only
/// applies its operations, and takes part in the exchanges of a joint step.
struct StepBatch {
  StepKind kind = StepKind::kDecoder;
  bool want_hidden = false;  // final hidden states of all rows; always on for kMtp
  bool count_experts = false;
  bool want_routes = false;
  // Pipeline stages divide the rows into micro-batches. Off if other batches keep the stages busy.
  bool divides = true;
  // Candidates per row of logits in the summaries that ranks send; 0: they send the logits.
  int32_t candidates = kRowCandidates;
  cache::KvOps ops_before = {}, ops_after = {};
  std::vector<uint64_t> ended = {};  // sequences whose state executors release
  std::vector<int32_t> tokens = {};
  std::vector<int32_t> block_tables = {};
  std::vector<BatchRows> rows = {};
  std::vector<kernels::SparsitySettings> sparsity = {};
  std::vector<float> hidden = {};  // kMtp: [rows, hidden_size]
  // Of a step in which all replicas exchange tokens of experts; number 0: no joint step.
  models::JointStep joint = {};

  /// Appends rows of `tokens` and `drafts`, whose first_token, count, first_block and blocks are set here.
  void AddRows(BatchRows rows, std::span<const int32_t> tokens, std::span<const int32_t> drafts,
               std::span<const int32_t> block_table, const kernels::SparsitySettings* sparsity = nullptr);
};

/// The outcome of a step.
struct StepResult {
  // [rows that need them, vocab_size], valid until the executor's next Run; empty if there are summaries.
  std::span<const float> logits;
  std::span<const RowSummary> summaries;  // [rows that need logits] of a head on other ranks; valid as long
  std::span<const float> hidden;          // [rows, hidden_size] if wanted, valid as long
  int64_t experts_read = 0;               // routed experts of all layers that rows go to, if counted
  models::RouteTap routes;                // experts that routers chose, if wanted
  // Work of this step on this rank alone, or that of all steps so far on each rank of a job.
  std::vector<RankStats> ranks;
  kernels::SparsityCounters sparsity;  // of all steps so far; failed and dropped ones are not counted
  cache::KvResult kv;
  models::ExpertMoveReport move;  // of this rank
};

/// Sizes that a batch must respect to be run by an executor.
struct StepLimits {
  int blocks = 0, swap_slots = 0, warm_slots = 0;
  int layers = 0;  // of the model, those of MTP modules included
  int vocab_size = 0;
  int hidden_size = 0;
  bool disk = false;  // operations on the disk tier are allowed: the records that they name are its own
};

/// Checks that every index and number of `batch` is in range. InvalidArgument names the first that is not.
Status CheckBatch(const StepBatch& batch, const StepLimits& limits);

/// The batch as bytes: little-endian, with a magic number and a version.
std::string Serialize(const StepBatch& batch);
/// Parses the output of Serialize. InvalidArgument: `bytes` are no such batch, are truncated or have trailing
/// bytes. The result still has to be checked against the limits of its executor.
StatusOr<StepBatch> ParseStepBatch(std::span<const std::byte> bytes);

}  // namespace moesaic::engine
