#include "engine/ranked_executor.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "engine/kv_budget.h"
#include "engine/rank_messages.h"

namespace moesaic::engine {
namespace {

using comm::Transport;
using parallel::Coordinates;
using parallel::Layout;
using parallel::Range;

constexpr int kDriver = 0;
constexpr double kFarewellSeconds = 2;  // limit of the end of a job: a rank may be dead

// First byte of a command.
enum class Command : char { kSetup = 'S', kBatch = 'B', kEnd = 'E' };

// All ranks run one binary: values are sent as they are in memory.
template <typename T>
void Put(const T& value, std::string* out) {
  static_assert(std::is_trivially_copyable_v<T>);
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Takes values from the front of a message; the first that is missing is a failure.
class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T Get() {
    T value{};
    if (bytes_.size() < sizeof value) {
      failed_ = true;
      bytes_ = {};
      return value;
    }
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  std::string_view Text() { return Bytes(Get<uint32_t>()); }
  std::vector<int32_t> Ids() {
    const std::string_view bytes = Bytes(size_t{Get<uint32_t>()} * sizeof(int32_t));
    std::vector<int32_t> ids(bytes.size() / sizeof(int32_t));
    std::memcpy(ids.data(), bytes.data(), bytes.size());
    return ids;
  }
  Status Finish() const {
    if (!failed_ && bytes_.empty()) return OkStatus();
    return InvalidArgument("a message between ranks is malformed; all ranks must run the same version");
  }

 private:
  std::string_view Bytes(size_t count) {
    failed_ |= count > bytes_.size();
    const std::string_view part = bytes_.substr(0, count);
    bytes_.remove_prefix(part.size());
    return part;
  }
  std::string_view bytes_;
  bool failed_ = false;
};

void PutText(std::string_view text, std::string* out) {
  Put(static_cast<uint32_t>(text.size()), out);
  out->append(text);
}

void PutIds(const std::vector<int32_t>& ids, std::string* out) {
  Put(static_cast<uint32_t>(ids.size()), out);
  out->append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t));
}

// The outcome of a command on one rank, without logits and hidden states.
std::string Reply(const Status& status, const StepResult& result) {
  std::string bytes;
  Put(status.code(), &bytes);
  PutText(Message(status), &bytes);
  Put(result.experts_read, &bytes);
  Put(result.sparsity, &bytes);
  Put(result.kv.swap_copy_seconds, &bytes);
  Put(result.kv.warm_save_seconds, &bytes);
  Put(result.kv.warm_restore_seconds, &bytes);
  PutIds(result.kv.rejected_slots, &bytes);
  Put(static_cast<uint32_t>(result.routes.layers.size()), &bytes);
  for (const models::RouteTap::Layer& layer : result.routes.layers) {
    Put(layer.layer, &bytes);
    Put(layer.top_k, &bytes);
    PutIds(layer.ids, &bytes);
  }
  return bytes;
}

StatusOr<StepResult> ParseReply(int rank, std::string_view bytes) {
  MessageReader reader(bytes);
  const auto code = reader.Get<StatusCode>();
  const std::string_view text = reader.Text();
  if (code != StatusCode::kOk) return Status(code, fmt::format("rank {}: {}", rank, text));
  StepResult result;
  result.experts_read = reader.Get<int64_t>();
  result.sparsity = reader.Get<kernels::SparsityCounters>();
  result.kv.swap_copy_seconds = reader.Get<double>();
  result.kv.warm_save_seconds = reader.Get<double>();
  result.kv.warm_restore_seconds = reader.Get<double>();
  result.kv.rejected_slots = reader.Ids();
  const auto layers = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < layers && i < bytes.size(); ++i) {
    const int layer = reader.Get<int>(), top_k = reader.Get<int>();
    result.routes.layers.push_back({.layer = layer, .top_k = top_k, .ids = reader.Ids()});
  }
  RETURN_IF_ERROR(Annotate(reader.Finish(), fmt::format("rank {}", rank)));
  return result;
}

void Add(const kernels::SparsityCounters& part, kernels::SparsityCounters* sum) {
  sum->selections += part.selections;
  sum->reused += part.reused;
  sum->rechosen += part.rechosen;
  sum->blocks_read += part.blocks_read;
  sum->blocks_all += part.blocks_all;
  for (size_t i = 0; i < part.missed.counts.size(); ++i) sum->missed.counts[i] += part.missed.counts[i];
  sum->missed.sum += part.missed.sum;
}

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

int64_t LogitRows(const StepBatch& batch) {
  int64_t rows = 0;
  for (const BatchRows& part : batch.rows) rows += part.count - part.first_logits;
  return rows;
}

bool WantsHidden(const StepBatch& batch) { return batch.want_hidden || batch.kind == StepKind::kMtp; }

}  // namespace

RankedExecutor::RankedExecutor(std::unique_ptr<LocalExecutor> local, const models::ModelInfo& info,
                               Transport& job, const Layout& layout, double time_limit_s)
    : local_(std::move(local)), info_(info), job_(job), layout_(layout), time_limit_s_(time_limit_s) {}

StatusOr<std::unique_ptr<RankedExecutor>> RankedExecutor::Create(std::unique_ptr<LocalExecutor> local,
                                                                 const models::ModelInfo& info,
                                                                 Transport& job, const Layout& layout,
                                                                 const RankSetup& setup,
                                                                 double time_limit_s) {
  if (layout.degrees().data > 1) {
    return Unimplemented("one engine can't drive data parallel replicas; found {}", Name(layout.degrees()));
  }
  std::unique_ptr<RankedExecutor> executor(
      new RankedExecutor(std::move(local), info, job, layout, time_limit_s));
  std::string bytes(1, static_cast<char>(Command::kSetup));
  Put(setup, &bytes);
  RETURN_IF_ERROR(executor->Command(bytes));
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    if (rank == kDriver) continue;
    ASSIGN_OR_RETURN(const std::string reply, ReceiveMessage(job, rank, RankTag::kReply, time_limit_s));
    MessageReader reader(reply);
    const auto code = reader.Get<StatusCode>();
    const std::string_view text = reader.Text();
    if (code != StatusCode::kOk) return Status(code, fmt::format("rank {}: {}", rank, text));
    const Coordinates at = layout.At(rank);
    const auto vocab = reader.Get<Range>();
    RETURN_IF_ERROR(reader.Finish());
    executor->peers_.push_back({.rank = rank,
                                .vocab = vocab,
                                .returns_hidden = vocab.count > 0 && at.shard == 0,
                                .counts_experts = at.shard == 0});
  }
  return executor;
}

RankedExecutor::~RankedExecutor() {
  const std::string end(1, static_cast<char>(Command::kEnd));
  for (int rank = 0; rank < layout_.ranks(); ++rank) {
    if (rank == kDriver || job_.failed(rank)) continue;
    SendMessage(job_, rank, RankTag::kCommand, end, kFarewellSeconds).IgnoreError();
  }
}

Status RankedExecutor::Command(std::string_view bytes) {
  for (int rank = 0; rank < layout_.ranks(); ++rank) {
    if (rank == kDriver) continue;
    RETURN_IF_ERROR(SendMessage(job_, rank, RankTag::kCommand, bytes, time_limit_s_));
  }
  return OkStatus();
}

StatusOr<StepResult> RankedExecutor::Run(const StepBatch& batch) {
  RETURN_IF_ERROR(failure_);
  StatusOr<StepResult> result = RunOnAll(batch);
  failure_ = result.status();
  return result;
}

StatusOr<StepResult> RankedExecutor::RunOnAll(const StepBatch& batch) {
  RETURN_IF_ERROR(Command(static_cast<char>(Command::kBatch) + Serialize(batch)));
  ASSIGN_OR_RETURN(StepResult result, local_->Run(batch));
  const int64_t rows = LogitRows(batch);
  logits_.resize(std::max<size_t>(logits_.size(), rows * info_.vocab_size));
  if (!batch.rows.empty()) Place(result.logits, info_.own_vocab);
  for (const Peer& peer : peers_) RETURN_IF_ERROR(Collect(peer, batch, &result));
  result.logits = std::span(logits_).first(rows * info_.vocab_size);
  return result;
}

// Adds what `peer` computed to `result`.
Status RankedExecutor::Collect(const Peer& peer, const StepBatch& batch, StepResult* result) {
  ASSIGN_OR_RETURN(const std::string reply, ReceiveMessage(job_, peer.rank, RankTag::kReply, time_limit_s_));
  ASSIGN_OR_RETURN(StepResult part, ParseReply(peer.rank, reply));
  Add(part.sparsity, &result->sparsity);
  Add(part.kv, &result->kv);
  if (peer.counts_experts) {
    result->experts_read += part.experts_read;
    std::move(part.routes.layers.begin(), part.routes.layers.end(),
              std::back_inserter(result->routes.layers));
  }
  const int64_t rows = LogitRows(batch);
  if (rows > 0 && peer.vocab.count > 0) {
    part_.resize(rows * peer.vocab.count);
    RETURN_IF_ERROR(ReceiveFloats(peer.rank, static_cast<comm::Tag>(RankTag::kLogits), part_));
    Place(part_, peer.vocab);
  }
  if (peer.returns_hidden && WantsHidden(batch) && !batch.rows.empty()) {
    hidden_.resize(batch.tokens.size() * info_.hidden_size);
    RETURN_IF_ERROR(ReceiveFloats(peer.rank, static_cast<comm::Tag>(RankTag::kHidden), hidden_));
    result->hidden = hidden_;
  }
  return OkStatus();
}

Status RankedExecutor::ReceiveFloats(int rank, comm::Tag tag, std::span<float> values) {
  ASSIGN_OR_RETURN(const comm::TransferId id, job_.Receive(rank, tag, std::as_writable_bytes(values)));
  return comm::Wait(job_, id, time_limit_s_);
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

namespace {

// The cache and the executor of a rank other than the driver.
struct RankCache {
  std::unique_ptr<cache::KvStore> store;
  std::unique_ptr<LocalExecutor> executor;
};

StatusOr<RankCache> SetUp(std::string_view bytes, models::Model& model, const kernels::KernelTable& kernels,
                          runtime::ThreadPool& threads) {
  MessageReader reader(bytes);
  const auto setup = reader.Get<RankSetup>();
  RETURN_IF_ERROR(reader.Finish());
  const tensor::KvLayout layout =
      LayoutFor(model.info().kv, setup.dtype, setup.key_summaries, setup.summary_kind);
  RankCache rank;
  ASSIGN_OR_RETURN(rank.store, cache::KvStore::Create({.layout = layout,
                                                       .blocks = setup.blocks,
                                                       .swap_slots = setup.swap_slots,
                                                       .warm_slots = setup.warm_slots,
                                                       .warm_exact = setup.warm_exact},
                                                      threads));
  rank.executor =
      std::make_unique<LocalExecutor>(model, kernels, threads, *rank.store, setup.first_sparse_layer);
  return rank;
}

Status SendFloats(Transport& job, RankTag tag, std::span<const float> values, double time_limit_s) {
  ASSIGN_OR_RETURN(const comm::TransferId id,
                   job.Send(kDriver, static_cast<comm::Tag>(tag), std::as_bytes(values)));
  return comm::Wait(job, id, time_limit_s);
}

}  // namespace

Status RunRank(models::Model& model, const kernels::KernelTable& kernels, runtime::ThreadPool& threads,
               Transport& job, const Layout& layout, const std::function<bool()>& stop, double time_limit_s) {
  RankCache rank;
  const bool first_shard = layout.At(job.rank()).shard == 0;
  for (;;) {
    ASSIGN_OR_RETURN(const std::string message,
                     AwaitMessage(job, kDriver, RankTag::kCommand, stop, time_limit_s));
    if (message.empty() || message[0] == static_cast<char>(Command::kEnd)) return OkStatus();
    const std::string_view body = std::string_view(message).substr(1);
    if (message[0] == static_cast<char>(Command::kSetup)) {
      StatusOr<RankCache> created = SetUp(body, model, kernels, threads);
      std::string reply = {};
      Put(created.status().code(), &reply);
      PutText(Message(created.status()), &reply);
      Put(model.info().own_vocab, &reply);
      RETURN_IF_ERROR(SendMessage(job, kDriver, RankTag::kReply, reply, time_limit_s));
      RETURN_IF_ERROR(created.status());
      rank = *std::move(created);
      rank.executor->BindCaller();
      continue;
    }
    StatusOr<StepBatch> batch = ParseStepBatch(std::as_bytes(std::span(body)));
    Status status = batch.status();
    if (status.ok() && rank.executor == nullptr)
      status = InvalidArgument("a batch came before the cache's size");
    if (status.ok()) status = CheckBatch(*batch, rank.executor->limits());
    StepResult result;
    if (status.ok()) {
      StatusOr<StepResult> computed = rank.executor->Run(*batch);
      status = computed.status();
      if (computed.ok()) result = *std::move(computed);
    }
    RETURN_IF_ERROR(SendMessage(job, kDriver, RankTag::kReply, Reply(status, result), time_limit_s));
    RETURN_IF_ERROR(status);
    if (!result.logits.empty()) {
      RETURN_IF_ERROR(SendFloats(job, RankTag::kLogits, result.logits, time_limit_s));
    }
    if (first_shard && !result.hidden.empty()) {
      RETURN_IF_ERROR(SendFloats(job, RankTag::kHidden, result.hidden, time_limit_s));
    }
  }
}

}  // namespace moesaic::engine
