// RunRank: the loop of a rank other than the driver.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/kv_budget.h"
#include "engine/rank_capacity.h"
#include "engine/rank_messages.h"
#include "engine/rank_reply.h"
#include "engine/ranked_executor.h"
#include "parallel/counted_transport.h"
#include "parallel/job_wait.h"

namespace moesaic::engine {
namespace {

class RankWorker {
 public:
  RankWorker(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
             comm::Transport& job, const parallel::Layout& layout, double time_limit_s, int local_ranks)
      : model_(model),
        kernels_(kernels),
        threads_(threads),
        job_(job),
        all_(job),
        first_shard_(layout.At(job.rank()).shard == 0),
        tolerates_failures_(layout.tolerates_failures()),
        stages_(layout.degrees().pipeline),
        time_limit_s_(time_limit_s),
        local_ranks_(local_ranks),
        replies_(job_) {
    for (int rank = 0; rank < job.size(); ++rank) {
      if (rank != kDriverRank) job_.Ignore(rank);
    }
  }

  /// Runs commands until the driver ends the job.
  Status Run() {
    for (;;) {
      const double limit_s = failure_.ok() || tolerates_failures_ ? std::numeric_limits<double>::infinity()
                                                                  : time_limit_s_ + kEndSeconds;
      const StatusOr<std::string> message = AwaitMessage(
          job_, kDriverRank, RankTag::kCommand,
          [this] {
            model_.AdvanceExpertMove(/*in_step=*/false);
            return OkStatus();
          },
          limit_s, time_limit_s_);
      if (message.status().code() == StatusCode::kDeadlineExceeded && !failure_.ok()) return failure_;
      if (!message.ok()) return message.status();
      const auto command = message->empty() ? RankCommand::kEnd : static_cast<RankCommand>(message->front());
      if (command == RankCommand::kEnd) return OkStatus();
      RETURN_IF_ERROR(Apply(command, std::string_view(*message).substr(1)));
    }
  }

 private:
  Status Apply(RankCommand command, std::string_view body) {
    switch (command) {
      case RankCommand::kCapacity:
        return AnswerCapacity(body);
      case RankCommand::kSetup:
        return SetUpAndReply(body);
      case RankCommand::kBatch:
        return RunBatch(body);
      case RankCommand::kFetch:
        return SendLogits(body);
      case RankCommand::kExclude:
        return Exclude(body);
      case RankCommand::kLoad:
        return SendLoad();
      case RankCommand::kMove:
        return BeginMove(body);
      case RankCommand::kDrop:
        model_.DropExpertMove();
        return OkStatus();
      case RankCommand::kEnd:
        break;
    }
    return InvalidArgument("an unknown command came from the driver; all ranks must run the same version");
  }

  Status AnswerCapacity(std::string_view body) {
    MessageReader reader(body);
    const auto question = reader.Get<CapacityQuestion>();
    RETURN_IF_ERROR(reader.Finish());
    const StatusOr<RankCapacity> capacity = CapacityOfRank(model_.info().kv, question, local_ranks_);
    MessageWriter reply;
    reply.Put(capacity.status().code());
    reply.PutText(Message(capacity.status()));
    reply.Put(capacity.value_or(RankCapacity()));
    RETURN_IF_ERROR(SendMessage(job_, kDriverRank, RankTag::kReply, reply.bytes(), time_limit_s_));
    return capacity.status();
  }

  Status SetUp(std::string_view body) {
    MessageReader reader(body);
    const auto setup = reader.Get<RankSetup>();
    RETURN_IF_ERROR(reader.Finish());
    if (setup.blocks < 1 || setup.swap_slots < 0 || setup.warm_slots < 0 || setup.in_flight < 1 ||
        setup.in_flight > stages_) {
      return InvalidArgument("a cache of {} blocks, {} and {} slots for {} batches in flight can't be made",
                             setup.blocks, setup.swap_slots, setup.warm_slots, setup.in_flight);
    }
    const tensor::KvLayout layout =
        LayoutFor(model_.info().kv, setup.dtype, setup.key_summaries, setup.summary_kind);
    ASSIGN_OR_RETURN(store_, cache::KvStore::Create({.layout = layout,
                                                     .blocks = setup.blocks,
                                                     .swap_slots = setup.swap_slots,
                                                     .warm_slots = setup.warm_slots,
                                                     .warm_exact = setup.warm_exact},
                                                    threads_));
    executor_ =
        std::make_unique<LocalExecutor>(model_, kernels_, threads_, *store_, setup.first_sparse_layer);
    executor_->KeepLogits(std::max(1, setup.in_flight));
    executor_->BindCaller();
    return OkStatus();
  }

  Status SetUpAndReply(std::string_view body) {
    const Status status = SetUp(body);
    MessageWriter reply;
    reply.Put(status.code());
    reply.PutText(Message(status));
    reply.Put(model_.info().own_vocab);
    RETURN_IF_ERROR(SendMessage(job_, kDriverRank, RankTag::kReply, reply.bytes(), time_limit_s_));
    return status;
  }

  StatusOr<StepResult> Compute(std::string_view body, StepBatch* batch) {
    if (executor_ == nullptr) return InvalidArgument("a batch came before the cache's size");
    ASSIGN_OR_RETURN(*batch, ParseStepBatch(std::as_bytes(std::span(body))));
    RETURN_IF_ERROR(CheckBatch(*batch, executor_->limits()));
    return executor_->Run(*batch);
  }

  Status RunBatch(std::string_view body) {
    StepBatch batch;
    RankReply reply;
    StatusOr<StepResult> computed = Compute(body, &batch);
    failure_ = computed.status();
    if (computed.ok()) {
      reply.result = *std::move(computed);
      // Messages of the last reply are counted now.
      const int64_t sent = job_.sent_bytes();
      reply.result.ranks.front().bytes_sent += sent - std::exchange(counted_bytes_, sent);
      if (batch.candidates > 0 && model_.info().own_vocab.count > 0) {
        reply.slices = SummarizeRows(batch, reply.result.logits, model_.info().own_vocab, threads_);
      }
    }
    MessageWriter writer;
    if (IsOfPeer(failure_) && !tolerates_failures_) {
      failure_ = parallel::CauseOf(failure_, all_);
    }
    PutReply(failure_, reply, &writer);
    // The driver may be computing its part of the next batch.
    RETURN_IF_ERROR(replies_.Start(std::span(&kDriverRank, 1), RankTag::kReply, {writer.bytes()},
                                   FirstReplyBytes(batch, model_.info().own_vocab)));
    if (!computed.ok()) {
      RETURN_IF_ERROR(replies_.Finish(time_limit_s_));
      if (!IsOfPeer(failure_) || job_.failed(kDriverRank)) return failure_;
      spdlog::warn("a step failed: {}", Message(failure_));
      return OkStatus();
    }
    if (batch.candidates == 0 && !reply.result.logits.empty()) {
      RETURN_IF_ERROR(replies_.StartFloats(kDriverRank, RankTag::kLogits, reply.result.logits));
    }
    if (first_shard_ && !reply.result.hidden.empty()) {
      RETURN_IF_ERROR(replies_.StartFloats(kDriverRank, RankTag::kHidden, reply.result.hidden));
    }
    return OkStatus();
  }

  Status Exclude(std::string_view body) {
    MessageReader reader(body);
    const std::vector<int32_t> ranks = reader.GetAll<int32_t>();
    RETURN_IF_ERROR(reader.Finish());
    return model_.ExcludeRanks(ranks);
  }

  Status SendLogits(std::string_view body) {
    MessageReader reader(body);
    const auto later = reader.Get<int32_t>();
    const std::vector<int32_t> rows = reader.GetAll<int32_t>();
    RETURN_IF_ERROR(reader.Finish());
    if (executor_ == nullptr) return InvalidArgument("logits were requested before the cache's size");
    ASSIGN_OR_RETURN(const std::span<const float> logits, executor_->FetchLogitsOf(later, rows));
    return replies_.StartFloats(kDriverRank, RankTag::kFetched, logits);
  }

  // A move that can't begin is reported with the next batch, and the driver gives it up.
  Status BeginMove(std::string_view body) {
    ASSIGN_OR_RETURN(const models::ExpertMoveOrder order, ParseMoveOrder(body));
    const Status begun = model_.BeginExpertMove(order);
    if (!begun.ok()) spdlog::warn("move {} of experts: {}", order.number, Message(begun));
    return OkStatus();
  }

  Status SendLoad() {
    MessageWriter reply;
    PutExpertLoad(model_.expert_load(), &reply);
    return replies_.Start(std::span(&kDriverRank, 1), RankTag::kLoad, {reply.bytes()});
  }

  models::Model& model_;
  const kernels::KernelTable& kernels_;
  runtime::ThreadPool& threads_;
  parallel::CountedTransport job_;  // of messages with the driver; other ranks may be dead
  const comm::Transport& all_;      // of the same ranks, the dead ones included
  const bool first_shard_, tolerates_failures_;
  const int stages_;
  const double time_limit_s_;
  const int local_ranks_;
  MessageSender replies_;
  Status failure_;             // of the last batch
  int64_t counted_bytes_ = 0;  // of the messages of this rank to the driver
  std::unique_ptr<cache::KvStore> store_;
  std::unique_ptr<LocalExecutor> executor_;
};

}  // namespace

Status RunRank(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
               comm::Transport& job, const parallel::Layout& layout, double time_limit_s, int local_ranks) {
  return RankWorker(model, kernels, threads, job, layout, time_limit_s, local_ranks).Run();
}

}  // namespace moesaic::engine
