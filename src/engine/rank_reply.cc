#include "engine/rank_reply.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace moesaic::engine {

using parallel::Range;

int64_t LogitRows(const StepBatch& batch) {
  int64_t rows = 0;
  for (const BatchRows& part : batch.rows) rows += part.count - part.first_logits;
  return rows;
}

SliceSummaries SummarizeRows(const StepBatch& batch, std::span<const float> logits, Range columns,
                             runtime::ThreadPool& threads) {
  std::vector<const RowNeeds*> needs;
  for (const BatchRows& part : batch.rows) {
    needs.insert(needs.end(), part.count - part.first_logits, &part.needs);
  }
  SliceSummaries slices;
  slices.sums.resize(needs.size());
  std::vector<std::vector<TokenLogit>> best(needs.size());
  threads.Run(std::ssize(needs), [&](int64_t row, int) {
    slices.sums[row] = SummarizeSlice(logits.subspan(row * columns.count, columns.count), columns.first,
                                      batch.candidates, *needs[row], &best[row]);
  });
  for (const std::vector<TokenLogit>& row : best) {
    slices.counts.push_back(static_cast<int32_t>(row.size()));
    slices.best.insert(slices.best.end(), row.begin(), row.end());
  }
  return slices;
}

void MergeRows(std::span<const SliceSummaries> slices, std::span<const Range> columns,
               std::vector<RowSummary>* merged) {
  std::vector<size_t> next(slices.size());
  std::vector<int> counts;
  merged->resize(slices.empty() ? 0 : slices.front().sums.size());
  for (size_t row = 0; row < merged->size(); ++row) {
    std::vector<TokenLogit> best = std::move((*merged)[row].best);
    std::vector<SliceSums> sums = std::move((*merged)[row].slices);
    best.clear();
    sums.clear();
    counts.clear();
    for (size_t i = 0; i < slices.size(); ++i) {
      const auto from = slices[i].best.begin() + static_cast<ptrdiff_t>(next[i]);
      counts.push_back(slices[i].counts[row]);
      best.insert(best.end(), from, from + counts.back());
      next[i] += counts.back();
      sums.push_back(slices[i].sums[row]);
    }
    (*merged)[row] = MergeSlices(std::move(best), counts, columns, std::move(sums));
  }
}

size_t FirstReplyBytes(const StepBatch& batch, Range columns) {
  // The default has room for all but the summaries of later rows.
  const int64_t row_bytes =
      sizeof(SliceSums) + sizeof(int32_t) + sizeof(TokenLogit) * std::min(batch.candidates, columns.count);
  const int64_t later_rows = std::max<int64_t>(0, LogitRows(batch) - 1);
  return kFirstPartBytes + (batch.candidates > 0 && columns.count > 0 ? later_rows * row_bytes : 0);
}

void PutReply(const Status& status, const RankReply& reply, MessageWriter* writer) {
  const StepResult& result = reply.result;
  writer->Put(status.code());
  writer->PutText(Message(status));
  writer->Put(result.experts_read);
  writer->Put(result.ranks.empty() ? RankStats{} : result.ranks.front());
  writer->Put(result.sparsity);
  writer->Put(result.kv.swap_copy_seconds);
  writer->Put(result.kv.warm_save_seconds);
  writer->Put(result.kv.warm_restore_seconds);
  writer->PutAll(result.kv.rejected_slots);
  writer->Put(result.move.number);
  writer->Put(result.move.state);
  writer->Put(result.move.sent_bytes);
  writer->Put(result.move.step_seconds);
  writer->PutText(result.move.failure);
  writer->Put(static_cast<uint32_t>(result.routes.layers.size()));
  for (const models::RouteTap::Layer& layer : result.routes.layers) {
    writer->Put(layer.layer);
    writer->Put(layer.top_k);
    writer->PutAll(layer.ids);
  }
  writer->PutAll(reply.slices.sums);
  writer->PutAll(reply.slices.counts);
  writer->PutAll(reply.slices.best);
}

namespace {

Status CheckSlices(const SliceSummaries& slices, int64_t rows, Range columns) {
  bool valid = std::ssize(slices.sums) == rows && std::ssize(slices.counts) == rows;
  int64_t best = 0;
  for (const int32_t count : slices.counts) {
    valid &= count >= 0 && count <= columns.count;
    best += count;
  }
  valid &= best == std::ssize(slices.best);
  for (const TokenLogit& entry : slices.best) {
    valid &= entry.token >= columns.first && entry.token < columns.end();
  }
  return valid ? OkStatus() : InvalidArgument("summaries of {} rows of logits expected, found others", rows);
}

// Readers of routes divide them by rows.
Status CheckRoutes(const models::RouteTap& routes) {
  for (const models::RouteTap::Layer& layer : routes.layers) {
    const bool valid = layer.layer >= 0 && layer.top_k > 0 && std::ssize(layer.ids) % layer.top_k == 0 &&
                       std::ranges::all_of(layer.ids, [](int32_t id) { return id >= 0; });
    if (!valid) {
      return InvalidArgument("routes of layer {} have {} choices of {} each", layer.layer, layer.ids.size(),
                             layer.top_k);
    }
  }
  return OkStatus();
}

}  // namespace

StatusOr<RankReply> ParseReply(int rank, std::string_view bytes, int64_t rows, Range columns) {
  MessageReader reader(bytes);
  const auto code = reader.Get<StatusCode>();
  const std::string_view text = reader.GetText();
  if (code != StatusCode::kOk) {
    Status own(code, fmt::format("rank {}: {}", rank, text));
    return IsOfPeer(own) ? Status(code, fmt::format("{}; reported by rank {}", text, rank)) : own;
  }
  RankReply reply;
  StepResult& result = reply.result;
  result.experts_read = reader.Get<int64_t>();
  result.ranks = {reader.Get<RankStats>()};
  result.ranks.front().rank = rank;
  result.sparsity = reader.Get<kernels::SparsityCounters>();
  result.kv.swap_copy_seconds = reader.Get<double>();
  result.kv.warm_save_seconds = reader.Get<double>();
  result.kv.warm_restore_seconds = reader.Get<double>();
  result.kv.rejected_slots = reader.GetAll<int32_t>();
  result.move.number = reader.Get<uint64_t>();
  result.move.state = reader.Get<models::MoveState>();
  result.move.sent_bytes = reader.Get<int64_t>();
  result.move.step_seconds = reader.Get<double>();
  result.move.rank = rank;
  result.move.failure = reader.GetText();
  const auto layers = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < layers && i < bytes.size(); ++i) {
    const int layer = reader.Get<int>(), top_k = reader.Get<int>();
    result.routes.layers.push_back({.layer = layer, .top_k = top_k, .ids = reader.GetAll<int32_t>()});
  }
  reply.slices.sums = reader.GetAll<SliceSums>();
  reply.slices.counts = reader.GetAll<int32_t>();
  reply.slices.best = reader.GetAll<TokenLogit>();
  const std::string name = fmt::format("rank {}", rank);
  RETURN_IF_ERROR(Annotate(reader.Finish(), name));
  RETURN_IF_ERROR(Annotate(CheckSlices(reply.slices, rows, columns), name));
  RETURN_IF_ERROR(Annotate(CheckRoutes(result.routes), name));
  if (result.move.state > models::MoveState::kFailed) {
    return InvalidArgument("rank {} reports state {} of a move, which does not exist", rank,
                           static_cast<int>(result.move.state));
  }
  return reply;
}

void PutExpertLoad(const models::ExpertLoad& load, MessageWriter* writer) {
  writer->Put(load.experts);
  writer->PutAll(load.layers);
  writer->PutAll(load.tokens);
}

StatusOr<models::ExpertLoad> ParseExpertLoad(std::string_view bytes) {
  MessageReader reader(bytes);
  models::ExpertLoad load;
  load.experts = reader.Get<int>();
  load.layers = reader.GetAll<int>();
  load.tokens = reader.GetAll<int64_t>();
  RETURN_IF_ERROR(reader.Finish());
  return load;
}

void PutMoveOrder(const models::ExpertMoveOrder& order, MessageWriter* writer) {
  writer->Put(order.number);
  writer->Put(order.layer);
  writer->Put(static_cast<uint32_t>(order.next.size()));
  for (const std::vector<int>& experts : order.next) writer->PutAll(experts);
  writer->PutAll(order.loads);
  writer->PutAll(order.speeds);
}

StatusOr<models::ExpertMoveOrder> ParseMoveOrder(std::string_view bytes) {
  MessageReader reader(bytes);
  models::ExpertMoveOrder order;
  order.number = reader.Get<uint64_t>();
  order.layer = reader.Get<int>();
  const auto ranks = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < ranks && i < bytes.size(); ++i) order.next.push_back(reader.GetAll<int>());
  order.loads = reader.GetAll<double>();
  order.speeds = reader.GetAll<double>();
  RETURN_IF_ERROR(reader.Finish());
  return order;
}

}  // namespace moesaic::engine
