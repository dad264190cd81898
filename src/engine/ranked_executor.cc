#include "engine/ranked_executor.h"

#include <algorithm>
#include <utility>

#include "parallel/job_wait.h"

namespace moesaic::engine {
namespace {

using comm::Transport;
using parallel::Coordinates;
using parallel::Layout;
using parallel::Range;

constexpr double kFarewellSeconds = 2;  // limit of the end of a job: a rank may be dead
// A rank that waits for another one reports it after the time limit, so that the driver waits for its report.
constexpr double kReportSeconds = 1;

// A slot that one rank rejected holds nothing useful on others.
void Add(const cache::KvResult& part, cache::KvResult* sum) {
  for (const int32_t slot : part.rejected_slots) {
    if (std::find(sum->rejected_slots.begin(), sum->rejected_slots.end(), slot) ==
        sum->rejected_slots.end()) {
      sum->rejected_slots.push_back(slot);
    }
  }
  sum->swap_copy_seconds = std::max(sum->swap_copy_seconds, part.swap_copy_seconds);
  sum->warm_save_seconds = std::max(sum->warm_save_seconds, part.warm_save_seconds);
  sum->warm_restore_seconds = std::max(sum->warm_restore_seconds, part.warm_restore_seconds);
}

bool WantsHidden(const StepBatch& batch) { return batch.want_hidden || batch.kind == StepKind::kMtp; }

}  // namespace

RankedExecutor::RankedExecutor(std::unique_ptr<LocalExecutor> local, runtime::ThreadPool& threads,
                               const models::ModelInfo& info, Transport& job, const Layout& layout,
                               double time_limit_s, int replica)
    : local_(std::move(local)),
      threads_(threads),
      info_(info),
      job_(job),
      layout_(layout),
      time_limit_s_(time_limit_s),
      own_vocab_(replica == 0 ? info.own_vocab : Range()),
      commands_(job_) {
  for (int rank = 0; rank < layout_.ranks(); ++rank) {
    if (rank != kDriverRank && layout_.At(rank).replica == replica) {
      remote_.push_back(rank);
    } else if (layout_.tolerates_failures()) {
      job_.Ignore(rank);
    }
  }
}

StatusOr<std::unique_ptr<RankedExecutor>> RankedExecutor::Create(
    std::unique_ptr<LocalExecutor> local, runtime::ThreadPool& threads, const models::ModelInfo& info,
    Transport& job, const Layout& layout, const RankSetup& setup, double time_limit_s, int replica,
    const std::function<Status()>& check) {
  std::unique_ptr<RankedExecutor> executor(
      new RankedExecutor(std::move(local), threads, info, job, layout, time_limit_s, replica));
  if (Status status = executor->SetUp(setup, check); !status.ok()) return executor->Fail(status);
  return executor;
}

Status RankedExecutor::SetUp(RankSetup setup, const std::function<Status()>& check) {
  setup.in_flight = max_in_flight();
  MessageWriter body;
  body.Put(RankCommand::kSetup);
  body.Put(setup);
  RETURN_IF_ERROR(commands_.Start(remote_, RankTag::kCommand, {body.bytes()}));
  RETURN_IF_ERROR(commands_.Finish(time_limit_s_));
  if (own_vocab_.count > 0) columns_.push_back(own_vocab_);
  for (const int rank : remote_) {
    ASSIGN_OR_RETURN(const std::string reply, AwaitLoadedRank(job_, rank, check, time_limit_s_));
    MessageReader reader(reply);
    const auto code = reader.Get<StatusCode>();
    const std::string_view text = reader.GetText();
    if (code != StatusCode::kOk) return Status(code, fmt::format("rank {}: {}", rank, text));
    const Coordinates at = layout_.At(rank);
    const auto vocab = reader.Get<Range>();
    RETURN_IF_ERROR(reader.Finish());
    if (vocab.first < 0 || vocab.count < 0 || vocab.count > info_.vocab_size - vocab.first) {
      return InvalidArgument(
          "rank {} has columns {} to {} of a vocabulary of {}; all ranks must load the same model", rank,
          vocab.first, vocab.end(), info_.vocab_size);
    }
    // Shards have rising columns, and ranks of a stage rising shards.
    if (vocab.count > 0) columns_.push_back(vocab);
    peers_.push_back({.rank = rank,
                      .vocab = vocab,
                      .returns_hidden = vocab.count > 0 && at.shard == 0,
                      .counts_experts = at.shard == 0});
  }
  return OkStatus();
}

Status RankedExecutor::CheckPeers() {
  if (!failure_.ok()) return failure_;
  constexpr int kPolls = 128;  // transports read clocks once per some polls
  for (int poll = 0; poll < kPolls; ++poll) job_.Progress();
  failure_ = parallel::CheckRanks(job_);
  return failure_;
}

RankedExecutor::~RankedExecutor() {
  if (layout_.tolerates_failures() && lost()) return;  // the rank is dead, or has been sent the end
  const char end = static_cast<char>(RankCommand::kEnd);
  for (const int rank : remote_) {
    if (job_.failed(rank)) continue;
    SendLastMessage(job_, rank, RankTag::kCommand, {&end, 1}, kFarewellSeconds).IgnoreError();
  }
}

// Keeps the failure, whose message begins with the rank that caused it as far as one is known. Another rank
// that reports a failure has looked for its cause.
Status RankedExecutor::Fail(const Status& status) {
  const bool is_cause = reported_ && parallel::CheckRanks(job_).ok();
  failure_ = is_cause ? status : parallel::CauseOf(status, job_);
  return failure_;
}

void RankedExecutor::Start(const StepBatch& batch) {
  Started& started = started_.emplace_back();
  started.batch = &batch;
  reported_ = false;
  if (!failure_.ok()) return;
  started.status = StartOnAll(started);
  if (!started.status.ok() && !IsReported()) Fail(started.status).IgnoreError();
}

// Whether an error of a batch is one that a living rank reports: it waits for the next batch.
bool RankedExecutor::IsReported() const {
  return layout_.tolerates_failures() && (remote_.empty() || reported_);
}

Status RankedExecutor::ExcludeRanks(std::span<const int> ranks) {
  RETURN_IF_ERROR(failure_);
  MessageWriter body;
  body.Put(RankCommand::kExclude);
  body.PutAll(std::vector<int>(ranks.begin(), ranks.end()));
  const Status sent = commands_.Start(remote_, RankTag::kCommand, {body.bytes()});
  if (!sent.ok()) return Fail(sent);
  return local_ == nullptr ? OkStatus() : local_->ExcludeRanks(ranks);
}

// A rank that was only stopped ends when it continues.
void RankedExecutor::Lose(const Status& why) {
  failure_ = why;
  for (Started& started : started_) started.replies.clear();
  if (std::exchange(has_sent_end_, true)) return;
  const char end = static_cast<char>(RankCommand::kEnd);
  for (const int rank : remote_) {
    if (job_.failed(rank)) continue;
    commands_.Start({&rank, 1}, RankTag::kCommand, {{&end, 1}}).IgnoreError();
  }
}

// Ranks may be computing an earlier batch, so that nothing here waits for them but sums and hidden states.
Status RankedExecutor::StartOnAll(Started& started) {
  const StepBatch& batch = *started.batch;
  for (const Peer& peer : peers_) {
    ASSIGN_OR_RETURN(ExpectedMessage reply, ExpectedMessage::Start(job_, peer.rank, RankTag::kReply,
                                                                   FirstReplyBytes(batch, peer.vocab)));
    started.replies.push_back(std::move(reply));
  }
  const char command = static_cast<char>(RankCommand::kBatch);
  RETURN_IF_ERROR(commands_.Start(remote_, RankTag::kCommand, {{&command, 1}, Serialize(batch)}));
  RETURN_IF_ERROR(parallel::CheckRanks(job_));  // of other replicas, too
  ASSIGN_OR_RETURN(started.own, RunHere(batch));
  if (batch.candidates > 0 && own_vocab_.count > 0) {
    started.slices = SummarizeRows(batch, started.own.logits, own_vocab_, threads_);
  }
  return OkStatus();
}

StatusOr<StepResult> RankedExecutor::Finish() {
  Started started = std::move(started_.front());
  started_.pop_front();
  RETURN_IF_ERROR(failure_);
  RETURN_IF_ERROR(started.status);
  StatusOr<StepResult> result = FinishOnAll(started);
  return result.ok() || IsReported() ? std::move(result) : Fail(result.status());
}

// Runs the driver's part. For another replica than its own, the driver's work is its messages.
StatusOr<StepResult> RankedExecutor::RunHere(const StepBatch& batch) {
  StepResult result;
  moves_.clear();
  if (local_ != nullptr) {
    ASSIGN_OR_RETURN(result, local_->Run(batch));
    moves_.push_back(result.move);
  } else {
    result.ranks.emplace_back();
  }
  const int64_t sent = job_.sent_bytes();
  result.ranks.front().bytes_sent += sent - std::exchange(counted_bytes_, sent);
  return result;
}

StatusOr<StepResult> RankedExecutor::FinishOnAll(Started& started) {
  const StepBatch& batch = *started.batch;
  StepResult result = std::move(started.own);
  const int64_t rows = LogitRows(batch);
  const bool summarized = batch.candidates > 0;
  work_.assign(1, result.ranks.front());
  slices_.clear();
  if (summarized && own_vocab_.count > 0) slices_.push_back(std::move(started.slices));
  if (!summarized) {
    logits_.resize(std::max<size_t>(logits_.size(), rows * info_.vocab_size));
    if (!batch.rows.empty()) Place(result.logits, own_vocab_);
  }
  for (size_t i = 0; i < peers_.size(); ++i) {
    RETURN_IF_ERROR(Collect(peers_[i], started.replies[i], batch, &result));
  }
  AddWork(work_, &totals_);
  result.ranks = totals_;
  result.logits = {};
  if (summarized) {
    MergeRows(slices_, columns_, &summaries_);
    result.summaries = summaries_;
  } else {
    result.logits = std::span(logits_).first(rows * info_.vocab_size);
  }
  return result;
}

// Adds the results of `peer` to `result`.
Status RankedExecutor::Collect(const Peer& peer, ExpectedMessage& expected, const StepBatch& batch,
                               StepResult* result) {
  const int64_t rows = LogitRows(batch);
  const bool has_logits = rows > 0 && peer.vocab.count > 0;
  const bool summarized = batch.candidates > 0;
  ASSIGN_OR_RETURN(const std::string bytes, expected.Await(time_limit_s_ + kReportSeconds));
  StatusOr<RankReply> parsed = ParseReply(peer.rank, bytes, has_logits && summarized ? rows : 0, peer.vocab);
  reported_ = !parsed.ok();
  RETURN_IF_ERROR(parsed.status());
  RankReply& reply = *parsed;
  StepResult& part = reply.result;
  AddCounters(part.sparsity, &result->sparsity);
  Add(part.kv, &result->kv);
  work_.push_back(part.ranks.front());
  moves_.push_back(part.move);
  if (peer.counts_experts) {
    result->experts_read += part.experts_read;
    std::move(part.routes.layers.begin(), part.routes.layers.end(),
              std::back_inserter(result->routes.layers));
  }
  if (summarized && peer.vocab.count > 0) slices_.push_back(std::move(reply.slices));
  if (has_logits && !summarized) {
    part_.resize(rows * peer.vocab.count);
    RETURN_IF_ERROR(ReceiveFloats(job_, peer.rank, RankTag::kLogits, part_, time_limit_s_));
    Place(part_, peer.vocab);
  }
  if (peer.returns_hidden && WantsHidden(batch) && !batch.rows.empty()) {
    hidden_.resize(batch.tokens.size() * info_.hidden_size);
    RETURN_IF_ERROR(ReceiveFloats(job_, peer.rank, RankTag::kHidden, hidden_, time_limit_s_));
    result->hidden = hidden_;
  }
  return OkStatus();
}

StatusOr<std::span<const float>> RankedExecutor::FetchLogits(std::span<const int32_t> rows) {
  RETURN_IF_ERROR(failure_);
  StatusOr<std::span<const float>> logits = FetchFromAll(rows);
  return logits.ok() ? logits : Fail(logits.status());
}

StatusOr<std::span<const float>> RankedExecutor::FetchFromAll(std::span<const int32_t> rows) {
  MessageWriter body;
  body.Put(RankCommand::kFetch);
  body.Put(static_cast<int32_t>(started_.size()));  // batches that ranks run before they read the command
  body.PutAll(std::vector<int32_t>(rows.begin(), rows.end()));
  std::vector<int> ranks;
  for (const Peer& peer : peers_) {
    if (peer.vocab.count > 0) ranks.push_back(peer.rank);
  }
  RETURN_IF_ERROR(commands_.Start(ranks, RankTag::kCommand, {body.bytes()}));
  logits_.resize(std::max<size_t>(logits_.size(), rows.size() * info_.vocab_size));
  if (own_vocab_.count > 0) {
    ASSIGN_OR_RETURN(const std::span<const float> own, local_->FetchLogits(rows));
    Place(own, own_vocab_);
  }
  for (const Peer& peer : peers_) {
    if (peer.vocab.count == 0) continue;
    part_.resize(rows.size() * peer.vocab.count);
    RETURN_IF_ERROR(ReceiveFloats(job_, peer.rank, RankTag::kFetched, part_, time_limit_s_));
    Place(part_, peer.vocab);
  }
  return std::span<const float>(logits_).first(rows.size() * info_.vocab_size);
}

Status RankedExecutor::BeginExpertMove(const models::ExpertMoveOrder& order) {
  RETURN_IF_ERROR(failure_);
  MessageWriter body;
  body.Put(RankCommand::kMove);
  PutMoveOrder(order, &body);
  const Status sent = commands_.Start(remote_, RankTag::kCommand, {body.bytes()});
  if (!sent.ok()) return Fail(sent);
  return local_ == nullptr ? OkStatus() : local_->BeginExpertMove(order);
}

Status RankedExecutor::DropExpertMove() {
  RETURN_IF_ERROR(failure_);
  if (local_ != nullptr) RETURN_IF_ERROR(local_->DropExpertMove());
  const char command = static_cast<char>(RankCommand::kDrop);
  const Status sent = commands_.Start(remote_, RankTag::kCommand, {{&command, 1}});
  return sent.ok() ? sent : Fail(sent);
}

StatusOr<models::ExpertLoad> RankedExecutor::FetchExpertLoad() {
  RETURN_IF_ERROR(failure_);
  StatusOr<models::ExpertLoad> load = FetchLoadOfAll();
  return load.ok() ? std::move(load) : Fail(load.status());
}

// The shards of a stage route the same rows, so that one of them is asked.
StatusOr<models::ExpertLoad> RankedExecutor::FetchLoadOfAll() {
  std::vector<int> asked;
  std::ranges::copy_if(remote_, std::back_inserter(asked),
                       [&](int rank) { return layout_.At(rank).shard == 0; });
  const char command = static_cast<char>(RankCommand::kLoad);
  RETURN_IF_ERROR(commands_.Start(asked, RankTag::kCommand, {{&command, 1}}));
  models::ExpertLoad sum;
  if (local_ != nullptr) {
    ASSIGN_OR_RETURN(sum, local_->FetchExpertLoad());
  }
  for (const int rank : asked) {
    ASSIGN_OR_RETURN(const std::string bytes, ReceiveMessage(job_, rank, RankTag::kLoad, time_limit_s_));
    ASSIGN_OR_RETURN(const models::ExpertLoad load, ParseExpertLoad(bytes));
    RETURN_IF_ERROR(Annotate(AddExpertLoad(load, &sum), fmt::format("rank {}", rank)));
  }
  return sum;
}

// Copies a rank's columns, [rows, vocab.count], into logits_ [rows, vocab_size].
void RankedExecutor::Place(std::span<const float> part, Range vocab) {
  if (vocab.count == 0) return;
  const size_t rows = part.size() / vocab.count;
  for (size_t row = 0; row < rows; ++row) {
    std::copy_n(part.begin() + row * vocab.count, vocab.count,
                logits_.begin() + row * info_.vocab_size + vocab.first);
  }
}

}  // namespace moesaic::engine
