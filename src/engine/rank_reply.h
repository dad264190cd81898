// The outcome of a batch on one rank, as it is sent to the driver.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/rank_messages.h"
#include "engine/row_summary.h"
#include "engine/step_batch.h"
#include "parallel/shard.h"
#include "runtime/thread_pool.h"

namespace moesaic::engine {

/// Summaries of one rank's columns of all rows that need logits.
struct SliceSummaries {
  std::vector<SliceSums> sums;   // [rows]
  std::vector<int32_t> counts;   // [rows] candidates
  std::vector<TokenLogit> best;  // of all rows, one after the other
};

/// Summarizes `logits` [rows, columns.count], a rank's columns of the rows of `batch` that need logits.
SliceSummaries SummarizeRows(const StepBatch& batch, std::span<const float> logits, parallel::Range columns,
                             runtime::ThreadPool& threads);

/// Returns the number of rows that need logits.
int64_t LogitRows(const StepBatch& batch);

/// Merges the slices of the ranks that have part of the head, in the order of `columns` [slices]. Replaces
/// `merged`, whose memory is used again.
void MergeRows(std::span<const SliceSummaries> slices, std::span<const parallel::Range> columns,
               std::vector<RowSummary>* merged);

/// Reply to a batch. Logits and hidden states follow in other messages.
struct RankReply {
  StepResult result;
  SliceSummaries slices;
};

/// Returns the size of the first part of the reply to `batch` by a rank that has `columns` of the head.
/// Replies without routes fit into it.
size_t FirstReplyBytes(const StepBatch& batch, parallel::Range columns);

void PutReply(const Status& status, const RankReply& reply, MessageWriter* writer);
/// Returns the rank's error, if it sent one, with the rank's number: at the end, if it failed by another
/// rank, whose number comes first. InvalidArgument: the reply has not `rows` rows of `columns`, or other
/// parts of it are malformed.
StatusOr<RankReply> ParseReply(int rank, std::string_view bytes, int64_t rows, parallel::Range columns);

void PutMoveOrder(const models::ExpertMoveOrder& order, MessageWriter* writer);
/// InvalidArgument: the message is no order.
StatusOr<models::ExpertMoveOrder> ParseMoveOrder(std::string_view bytes);

void PutExpertLoad(const models::ExpertLoad& load, MessageWriter* writer);
/// InvalidArgument: the message is no load.
StatusOr<models::ExpertLoad> ParseExpertLoad(std::string_view bytes);

}  // namespace moesaic::engine
