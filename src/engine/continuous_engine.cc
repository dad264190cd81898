#include "engine/continuous_engine.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <random>
#include <utility>

#include "base/check.h"
#include "engine/philox.h"

namespace moesaic::engine {
namespace {

// Logits of rows that are only scored take at most this: large enough that a chunk fills the kernels' row
// tiles many times (220 rows of a 152k vocabulary), small compared with the weights of any model with such a
// vocabulary.
constexpr int64_t kScoredLogitsBytes = 128 << 20;

// Requests often allow far more output than they get, so that the limit alone says little about the work.
constexpr int kExpectedOutputs = 256;

// Returns the tokens of the prompt and the expected output tokens.
int64_t ExpectedTokens(const Request& request) {
  return static_cast<int64_t>(request.prompt.size()) +
         std::min(request.sampling.max_tokens, kExpectedOutputs);
}

// Returns the output tokens that are still expected.
int ExpectedOutputs(const Sequence& sequence) {
  return std::min(sequence.limit - sequence.size(), kExpectedOutputs);
}

// Names the state that executors keep for scored rows; no request has it.
constexpr RequestId kScoredSequence = ~RequestId{0};

// While there is nothing to compute, the engine looks so often for new requests.
constexpr std::chrono::milliseconds kDiskPoll{2};

// Drafts are verified before the next ones are made, a damaged block of the disk tier drops its step, and
// replicas that divide the experts take their steps together.
bool CanOverlap(const EngineOptions& options) {
  return options.speculative.method == "off" && !options.disk && !options.layout.exchanges_tokens();
}

std::vector<float> UnitLength(std::vector<float> values) {
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * value;
  const auto scale = static_cast<float>(1 / std::sqrt(std::max(squares, 1e-30)));
  for (float& value : values) value *= scale;
  return values;
}

}  // namespace

ContinuousEngine::ContinuousEngine(const models::ModelInfo& info, runtime::ThreadPool& threads, KvCache kv,
                                   std::unique_ptr<Executor> executor, std::unique_ptr<ModelDrafter> drafter,
                                   const EngineOptions& options, int max_context)
    : info_(info),
      kv_(std::move(kv)),
      options_(options),
      max_context_(max_context),
      scored_rows_(static_cast<int>(std::clamp<int64_t>(kScoredLogitsBytes / (int64_t{4} * info.vocab_size),
                                                        1, options.max_batch_tokens))),
      max_in_flight_(CanOverlap(options) ? executor->max_in_flight() : 1),
      scheduler_(*kv_.pool, *kv_.tree, kv_.tiers->all(),
                 {.max_sequences = options.max_sequences,
                  .max_batch_tokens = options.max_batch_tokens,
                  .max_scored_rows = scored_rows_,
                  .max_overtakes = options.max_overtakes,
                  .max_in_flight = max_in_flight_,
                  .prefix_cache = options.prefix_cache}),
      executor_(std::move(executor)),
      rows_(threads, info.vocab_size, options.eos_ids, options.max_mask_seconds) {
  if (options_.expert_load.window_s > 0 && options_.layout.degrees().data == 1) {
    load_ = std::make_unique<ExpertLoadRecorder>(options_.expert_load);
  }
  speculation_ = MakeSpeculation(options_.speculative, *executor_, *kv_.pool, info, std::move(drafter));
  if (options_.seed == 0) {
    std::random_device device;
    options_.seed = static_cast<uint64_t>(device()) << 32 | device();
  }
}

ContinuousEngine::~ContinuousEngine() {
  if (load_ != nullptr && load_->has_sink()) {
    RecordLoad().IgnoreError();  // the last window; ranks may be dead
  }
}

Status ContinuousEngine::RecordLoad() {
  ASSIGN_OR_RETURN(const models::ExpertLoad load, executor_->FetchExpertLoad());
  load_->Add(load, ExpertLoadRecorder::Clock::now());
  return OkStatus();
}

Status ContinuousEngine::CheckIds(std::span<const int32_t> ids) const {
  if (ids.empty()) return InvalidArgument("the prompt is empty");
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= info_.vocab_size) {
      return InvalidArgument("token {} of the prompt is outside the vocabulary [0, {}): {}", i,
                             info_.vocab_size, ids[i]);
    }
  }
  return OkStatus();
}

Status ContinuousEngine::Check(const Request& request) const {
  RETURN_IF_ERROR(CheckIds(request.prompt));
  RETURN_IF_ERROR(CheckSampling(request.sampling, info_.vocab_size));
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t least = prompt + (request.sampling.max_tokens > 0 ? 1 : 0);
  if (least > max_context_) {
    return InvalidArgument("the prompt leaves no room in the context of {} tokens: it has {}", max_context_,
                           prompt);
  }
  if (least > pool_tokens()) {
    return InvalidArgument("the prompt leaves no room in the KV cache of {} tokens: it has {}", pool_tokens(),
                           prompt);
  }
  if (request.want_embedding && request.sampling.max_tokens > 0) {
    return InvalidArgument("max_tokens must be 0 for an embedding, found {}", request.sampling.max_tokens);
  }
  return request.sparsity ? CheckSparsity(*request.sparsity, options_.sparsity) : OkStatus();
}

StatusOr<RequestId> ContinuousEngine::Add(Request request) {
  const RequestId id = last_id_ + 1;
  RETURN_IF_ERROR(AddAs(id, std::move(request)));
  return id;
}

Status ContinuousEngine::AddAs(RequestId id, Request request) {
  RETURN_IF_ERROR(Check(request));
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  auto sequence = std::make_unique<Sequence>();
  sequence->id = last_id_ = id;
  sequence->times.queued = Clock::now();
  sequence->tokens = request.prompt;
  sequence->limit = static_cast<int>(
      std::min({prompt + request.sampling.max_tokens, int64_t{max_context_}, int64_t{pool_tokens()}}));
  const auto own = Philox({static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), 1, 0},
                          {static_cast<uint32_t>(options_.seed), static_cast<uint32_t>(options_.seed >> 32)});
  sequence->seed = request.sampling.seed.value_or(static_cast<uint64_t>(own[0]) << 32 | own[1]);
  if (HasPenalties(request.sampling)) sequence->history.AddPrompt(request.prompt);
  sequence->request = std::move(request);
  SetSparsity(*sequence);
  scheduler_.Add(std::move(sequence));
  return OkStatus();
}

int64_t ContinuousEngine::CachedTokens(const Request& request) const {
  if (!options_.prefix_cache) return 0;
  const RequestSparsity sparsity = request.sparsity.value_or(options_.sparsity.defaults);
  return kv_.tree->CountCached(NamespaceOf(request.cache_namespace, sparsity), request.prompt);
}

int64_t ContinuousEngine::PendingTokens() const {
  int64_t tokens = 0;
  for (const auto* sequences : {&scheduler_.waiting(), &scheduler_.running()}) {
    for (const auto& sequence : *sequences) {
      tokens += sequence->remaining() + ExpectedOutputs(*sequence);
    }
  }
  return tokens;
}

int64_t ContinuousEngine::MissingTokens(const Request& request, int64_t cached) const {
  int64_t needed = ExpectedTokens(request) - cached;
  for (const auto* sequences : {&scheduler_.waiting(), &scheduler_.running()}) {
    for (const auto& sequence : *sequences) {
      needed += ExpectedOutputs(*sequence);
      // A running sequence has the blocks of its tokens.
      if (sequences == &scheduler_.waiting()) needed += sequence->size();
    }
  }
  const int64_t blocks = kv_.pool->free_blocks() + kv_.pool->idle_blocks();
  return std::max<int64_t>(0, needed - blocks * tensor::kKvBlockTokens);
}

int64_t ContinuousEngine::CutTokens(const Request& request) const {
  return std::max<int64_t>(0, std::min<int64_t>(ExpectedTokens(request), max_context_) - pool_tokens());
}

StepDemand ContinuousEngine::Demand() const {
  StepDemand demand;
  int64_t prefill = 0;
  for (const auto& sequence : scheduler_.running()) {
    sequence->remaining() == 1 ? ++demand.decodes : prefill += sequence->remaining();
  }
  auto slots = static_cast<int64_t>(options_.max_sequences) - std::ssize(scheduler_.running());
  for (const auto& sequence : scheduler_.waiting()) {
    if (slots-- <= 0 || prefill >= options_.max_batch_tokens) break;
    prefill += std::max<int64_t>(1, sequence->size() - CachedTokens(sequence->request));
  }
  demand.prefill = static_cast<int>(std::min<int64_t>(prefill, options_.max_batch_tokens));
  return demand;
}

void ContinuousEngine::SetSparsity(Sequence& sequence) {
  const RequestSparsity sparsity = sequence.request.sparsity.value_or(options_.sparsity.defaults);
  sequence.cache_namespace = NamespaceOf(sequence.request.cache_namespace, sparsity);
  if (sparsity.mode == SparsityMode::kDense) return;
  sequence.sparsity = SparsitySettingsOf(sparsity, options_.sparsity, sequence.prompt_size());
  if (sparsity.mode == SparsityMode::kDecode) sequence.shared_limit = sequence.sparsity->first_sparse();
}

void ContinuousEngine::Cancel(RequestId id) { End(id, FinishReason::kCancelled); }

void ContinuousEngine::End(RequestId id, FinishReason reason) {
  const auto& running = scheduler_.running();
  const auto it = std::ranges::find(running, id, [](const auto& sequence) { return sequence->id; });
  if (it != running.end() && (*it)->in_flight) {
    (*it)->ending = reason;
    return;
  }
  if (!scheduler_.Remove(id)) return;
  TokenEvent& end = ended_.emplace_back();
  end.request = id;
  end.finish = reason;
}

int64_t ContinuousEngine::Abort(const Status& why, std::vector<TokenEvent>* events) {
  DropSteps();
  std::vector<RequestId> ids;
  for (const auto* sequences : {&scheduler_.running(), &scheduler_.waiting()}) {
    for (const auto& sequence : *sequences) ids.push_back(sequence->id);
  }
  for (const RequestId id : ids) End(id, FinishReason::kError);
  for (TokenEvent& end : ended_) {
    if (end.finish == FinishReason::kError) end.status = why;
    events->push_back(std::move(end));
  }
  ended_.clear();
  return std::ssize(ids);
}

void ContinuousEngine::ClearCache() {
  scheduler_.ClearTree();
  for (cache::KvTier* tier : kv_.tiers->all()) tier->Clear();
}

void ContinuousEngine::SaveCache(const std::function<bool()>& stop) {
  const auto apply = [this](cache::KvOps ops) {
    const Status applied = ApplyOps(std::move(ops));
    if (!applied.ok()) spdlog::error("KV blocks are not stored: {}", Message(applied));
  };
  for (cache::KvTier* tier : kv_.tiers->all()) tier->Flush(stop, apply);
}

// Applies the operations that are due, and `ops` after them.
Status ContinuousEngine::ApplyOps(cache::KvOps ops) {
  StepBatch batch = scheduler_.TakePending();
  batch.ops_before.insert(batch.ops_before.end(), ops.begin(), ops.end());
  if (batch.ops_before.empty() && batch.ended.empty()) return OkStatus();
  ASSIGN_OR_RETURN(const StepResult result, executor_->Run(batch));
  TakeResult(result);
  return OkStatus();
}

// Moves blocks between the cache and its tiers, as far as that does not belong to a step with rows.
Status ContinuousEngine::MoveBlocks() {
  scheduler_.BeginStep();
  if (!scheduler_.empty() || !steps_.empty()) return OkStatus();
  RETURN_IF_ERROR(ApplyOps({}));
  if (saving()) WaitForTiers();
  return OkStatus();
}

void ContinuousEngine::WaitForTiers() {
  for (cache::KvTier* tier : kv_.tiers->all()) tier->Wait(kDiskPoll);
}

void ContinuousEngine::TakeResult(const StepResult& result) {
  for (cache::KvTier* tier : kv_.tiers->all()) tier->OnResult(result.kv);
  stats_.sparsity = result.sparsity;
}

// Takes the outcome of a failed step's operations before another batch runs (X6).
Status ContinuousEngine::TakeOutcome() {
  ASSIGN_OR_RETURN(const StepResult outcome, executor_->Run({}));
  TakeResult(outcome);
  if (outcome.kv.damaged_block >= 0) scheduler_.OnDamage(outcome.kv.damaged_block);
  return OkStatus();
}

Status ContinuousEngine::Step(std::vector<TokenEvent>* events) {
  Begin();
  RETURN_IF_ERROR(Finish(events));
  if (load_ != nullptr && load_->Due(ExpertLoadRecorder::Clock::now())) return RecordLoad();
  return OkStatus();
}

void ContinuousEngine::Begin() {
  for (const RequestId id : scheduler_.PastDeadline(Clock::now())) End(id, FinishReason::kDeadline);
  while (std::ssize(steps_) < max_in_flight_ && StartStep()) {
  }
}

// Returns whether a step has started. While others are in flight, a step needs rows.
bool ContinuousEngine::StartStep() {
  if (!steps_.empty()) {
    const StepState& last = steps_.back();
    if (last.moves || last.batch.rows.empty() || scheduler_.fetching()) return false;
  }
  failure_ = MoveBlocks();
  if (!failure_.ok() || scheduler_.empty()) return false;
  StepState step;
  rows_.CancelOverdue();
  step.begin = Clock::now();
  if (speculation_ != nullptr) {
    speculation_->Draft(scheduler_.running(), std::min(options_.max_batch_tokens, most_rows_));
  }
  step.drafted = Clock::now();
  step.plan = scheduler_.Plan(most_rows_);
  if (!steps_.empty() && step.plan.chunks.empty()) return false;
  if (speculation_ != nullptr) speculation_->Planned(step.plan);
  step.batch = scheduler_.Commit(step.plan);
  if (speculation_ != nullptr) speculation_->Committed(step.plan, &step.batch.ops_before);
  step.masks_are_late = std::ranges::any_of(scheduler_.running(),
                                            [](const auto& sequence) { return sequence->waits_for_mask(); });
  if (!step.plan.chunks.empty()) {
    CountAdmissions(step.plan);
    rows_.StartMasks(step.plan);
    step.embeds = std::ranges::any_of(step.plan.chunks, [](const StepPlan::ScheduledChunk& chunk) {
      return chunk.sequence->request.want_embedding;
    });
    step.batch.want_hidden = step.embeds || (speculation_ != nullptr && speculation_->wants_hidden());
  }
  StepState& started = steps_.emplace_back(std::move(step));
  if (max_in_flight_ > 1) Follow(started);
  executor_->Start(started.batch);
  return true;
}

// Lets other steps run while this one is in flight. Chunks without results advance now: later batches run
// after this one, and a batch that fails ends the engine.
void ContinuousEngine::Follow(StepState& step) {
  step.moves = std::ranges::any_of(step.batch.ops_before, [](const cache::KvOp& op) {
    return op.kind != cache::KvOpKind::kCopy && op.kind != cache::KvOpKind::kClear;
  });
  StepPlan advanced;
  std::erase_if(step.plan.chunks, [&](const StepPlan::ScheduledChunk& chunk) {
    const bool advances =
        !step.embeds && chunk.count < chunk.sequence->remaining() && chunk.FirstLogits() == chunk.count;
    if (advances) advanced.chunks.push_back(chunk);
    return advances;
  });
  for (const StepPlan::ScheduledChunk& chunk : step.plan.chunks) chunk.sequence->in_flight = true;
  for (const StepPlan::ScheduledChunk& chunk : advanced.chunks) step.advanced_rows += chunk.count;
  scheduler_.Advance(advanced);
  CountPrompts(advanced);
  // Another step follows at once if a sequence can run, and then stages need not divide this one's rows.
  const bool follows =
      steps_.size() > 1 || std::ranges::any_of(scheduler_.running(), [](const auto& sequence) {
        return !sequence->in_flight && !sequence->waits_for_mask();
      });
  step.batch.divides = !follows;
}

Status ContinuousEngine::Finish(std::vector<TokenEvent>* events) {
  std::move(ended_.begin(), ended_.end(), std::back_inserter(*events));
  ended_.clear();
  RETURN_IF_ERROR(std::exchange(failure_, OkStatus()));
  if (steps_.empty()) return OkStatus();
  StepState& step = steps_.front();
  const Status status = step.batch.rows.empty() ? FinishMoves(step) : FinishRows(step, events);
  if (status.ok()) {
    steps_.pop_front();  // its plan pins slots of the warm tier
  } else {
    DropSteps();
  }
  return status;
}

// Ends all steps in flight after one has failed: the executor does not finish the others.
void ContinuousEngine::DropSteps() {
  for (const StepState& step : steps_) {
    Land(step.plan);
    for (const StepPlan::ScheduledChunk& chunk : step.plan.chunks) {
      if (chunk.sequence->ending != FinishReason::kNone) End(chunk.sequence->id, chunk.sequence->ending);
    }
  }
  steps_.clear();
}

// Ends a step without rows.
Status ContinuousEngine::FinishMoves(StepState& step) {
  ASSIGN_OR_RETURN(const StepResult moved, executor_->Finish());
  TakeResult(moved);
  if (step.masks_are_late) {
    rows_.WaitForAnyMask();
    return OkStatus();
  }
  // Nothing runs, since the front always advances: all sequences wait for their blocks.
  const std::vector<StepPlan::Fetch>& fetches = step.plan.fetches;
  MOESAIC_CHECK(scheduler_.running().empty() && (scheduler_.fetching() || !fetches.empty()));
  const bool filled =
      std::ranges::any_of(fetches, [](const StepPlan::Fetch& fetch) { return fetch.hit.exclusive; });
  if (!filled && scheduler_.fetching()) WaitForTiers();
  return OkStatus();
}

// Sequences of a step that is not in flight any more may be planned again, or end.
void ContinuousEngine::Land(const StepPlan& plan) {
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) chunk.sequence->in_flight = false;
}

Status ContinuousEngine::FinishRows(StepState& step, std::vector<TokenEvent>* events) {
  StepPlan& plan = step.plan;
  const StatusOr<StepResult> result = executor_->Finish();
  if (result.ok() && step.embeds && result->kv.damaged_block < 0) KeepHidden(plan, result->hidden);
  rows_.CollectMasks(plan);
  Land(plan);
  if (!result.ok()) {
    if (max_in_flight_ == 1) RETURN_IF_ERROR(TakeOutcome());
    return result.status();
  }
  TakeResult(*result);
  if (result->kv.damaged_block >= 0) {  // the step is dropped
    scheduler_.OnDamage(result->kv.damaged_block);
    return OkStatus();
  }
  ASSIGN_OR_RETURN(std::vector<RowTask> tasks, rows_.Run(plan, *result, *executor_));
  Accept(tasks);
  const Clock::time_point end = Clock::now();
  const Clock::time_point begin = std::max(step.begin, std::exchange(last_end_, end));
  CountTime(step, std::chrono::duration<double>(end - begin).count());
  if (speculation_ != nullptr) {
    speculation_->Computed(plan, result->hidden, std::chrono::duration<double>(end - step.drafted).count());
  }
  scheduler_.Advance(plan);
  CountPrompts(plan);
  std::vector<Sequence*> ending;
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    if (chunk.sequence->ending != FinishReason::kNone) ending.push_back(chunk.sequence);
  }
  for (RowTask& task : tasks) {
    const bool ends = task.chunk->sequence->ending != FinishReason::kNone;
    if (task.prompt_index < 0 && !ends) Emit(task, events);
  }
  for (const Sequence* sequence : ending) End(sequence->id, sequence->ending);
  EmitPromptOnly(events);
  for (const auto& sequence : scheduler_.running()) {
    if (!sequence->in_flight && !sequence->mask && sequence->remaining() == 1) rows_.StartSlowMask(*sequence);
  }
  return OkStatus();
}

// Appends accepted drafts to the tokens; Emit reports the token drawn after them.
void ContinuousEngine::Accept(std::span<RowTask> tasks) {
  for (RowTask& task : tasks) {
    if (task.drawn.size() < 2) continue;
    task.chunk->accepted = static_cast<int>(task.drawn.size()) - 1;
    const auto& drafts = task.chunk->sequence->draft.tokens;
    std::vector<int32_t>& tokens = task.chunk->sequence->tokens;
    tokens.insert(tokens.end(), drafts.begin(), drafts.begin() + task.chunk->accepted);
  }
}

void ContinuousEngine::CountAdmissions(const StepPlan& plan) {
  stats_.preemptions += std::ssize(plan.preempt);
  if (const int64_t count = preempted_.Count(std::ssize(plan.preempt), Clock::now()); count > 0) {
    spdlog::info("the KV cache is full: preempted {} requests, {} run and {} wait", count,
                 scheduler_.running().size(), scheduler_.waiting().size());
  }
  for (const StepPlan::Admission& admission : plan.admit) {
    const Sequence& sequence = *admission.sequence;
    if (!admission.first) continue;
    stats_.cache_queries += sequence.prompt_size();
    stats_.cache_hits += sequence.cached_tokens;
  }
}

void ContinuousEngine::KeepHidden(const StepPlan& plan, std::span<const float> hidden) {
  const size_t width = info_.hidden_size;
  size_t rows = 0;
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    rows += chunk.rows();
    Sequence& sequence = *chunk.sequence;
    if (!sequence.request.want_embedding || chunk.count < sequence.remaining()) continue;
    const std::span<const float> last = hidden.subspan((rows - 1) * width, width);
    sequence.hidden.assign(last.begin(), last.end());
  }
}

void ContinuousEngine::CountTime(const StepState& step, double seconds) {
  int prefill = step.advanced_rows, rows = prefill;
  for (const StepPlan::ScheduledChunk& chunk : step.plan.chunks) {
    rows += chunk.rows();
    if (!chunk.is_decode()) prefill += chunk.count;
  }
  stats_.prefill_seconds += seconds * prefill / rows;
  stats_.decode_seconds += seconds * (rows - prefill) / rows;
  prefilled_ += prefill;
  if (prefilled_ > 0) {
    const double token_seconds = stats_.prefill_seconds / static_cast<double>(prefilled_);
    for (cache::KvTier* tier : kv_.tiers->all()) tier->SetTokenSeconds(std::max(token_seconds, 1e-12));
  }
  ++stats_.steps;
  LogSlowStep(step, seconds, rows, prefill);
}

void ContinuousEngine::LogSlowStep(const StepState& step, double seconds, int rows, int prefill) {
  if (seconds < options_.slow_step_seconds) return;
  const int64_t count = slow_.Count(1, Clock::now());
  if (count == 0) return;
  spdlog::info(
      "slow step: {:.2f} s for {} prompt tokens and {} other rows of {} requests; {} slow steps since the "
      "last report",
      seconds, prefill, rows - prefill, step.batch.rows.size(), count);
}

void ContinuousEngine::CountPrompts(const StepPlan& plan) {
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    if (sequence.prompt_counted || sequence.computed < sequence.prompt_size()) continue;
    sequence.prompt_counted = true;
    stats_.prompt_tokens += sequence.prompt_size();
  }
}

// Fills the members that only a request's first event has, and those of every event.
void ContinuousEngine::ReportFirst(Sequence& sequence, TokenEvent& event) const {
  event.request = sequence.id;
  if (!std::exchange(sequence.first_event_sent, true)) {
    event.prompt_logprobs = std::move(sequence.prompt_logprobs);
    event.cached_tokens = sequence.cached_tokens;
    sequence.times.first_token = Clock::now();
  }
  event.times = sequence.times;
}

void ContinuousEngine::Emit(RowTask& task, std::vector<TokenEvent>* events) {
  Sequence& sequence = *task.chunk->sequence;
  sequence.mask.Drop();
  FinishReason finish = FinishReason::kNone;
  for (size_t i = 0; i < task.drawn.size(); ++i) {
    const int32_t token = task.drawn[i].token;
    TokenEvent& event = events->emplace_back();
    ReportFirst(sequence, event);
    if (rows_.Ends(sequence, token)) {
      event.finish = finish = FinishReason::kStop;
      event.stopped_by = token;
      break;
    }
    event.token = token;
    event.logprobs = std::move(task.drawn[i].logprobs);
    ++stats_.output_tokens;
    if (i + 1 < task.drawn.size()) continue;  // an accepted draft, which was appended already
    sequence.tokens.push_back(token);
    if (sequence.size() >= sequence.limit) finish = FinishReason::kLength;
    const text::Grammar* grammar = sequence.request.grammar.get();
    if (grammar != nullptr && grammar->IsStopped()) finish = FinishReason::kStop;
    event.finish = finish;
  }
  if (!task.status.ok() && finish == FinishReason::kNone) {
    TokenEvent& event = events->emplace_back();
    ReportFirst(sequence, event);
    event.finish = finish = task.grammar_failed ? FinishReason::kGrammar : FinishReason::kError;
    event.status = std::move(task.status);
  }
  if (finish != FinishReason::kNone) scheduler_.Remove(sequence.id);
}

// Requests with max_tokens 0 end when their prompt is read.
void ContinuousEngine::EmitPromptOnly(std::vector<TokenEvent>* events) {
  std::vector<RequestId> done;
  for (const auto& sequence : scheduler_.running()) {
    if (sequence->request.sampling.max_tokens > 0 || sequence->remaining() > 0) continue;
    TokenEvent& event = events->emplace_back();
    ReportFirst(*sequence, event);
    event.finish = FinishReason::kLength;
    if (sequence->request.want_embedding) event.embedding = UnitLength(std::move(sequence->hidden));
    done.push_back(sequence->id);
  }
  for (const RequestId id : done) scheduler_.Remove(id);
}

EngineStats ContinuousEngine::stats() const {
  EngineStats stats = stats_;
  stats.ranks = executor_->ranks();
  if (load_ != nullptr) {
    stats.expert_load = load_->stats();
    stats.expert_load_write_errors = load_->write_errors();
  }
  stats.running = static_cast<int>(scheduler_.running().size());
  stats.waiting = static_cast<int>(scheduler_.waiting().size());
  for (const auto& sequence : scheduler_.waiting()) ++stats.waiting_of[sequence->request.client];
  stats.free_blocks = kv_.pool->free_blocks();
  stats.cached_blocks = kv_.pool->idle_blocks();
  stats.total_blocks = kv_.pool->total_blocks();
  stats.cache_evictions = kv_.tree->evicted();
  stats.tree_nodes = kv_.tree->nodes();
  if (speculation_ != nullptr) stats.speculation = speculation_->stats();
  const cache::TierStats tiers = kv_.tiers->stats();
  stats.warm = tiers.warm;
  stats.disk = tiers.disk;
  stats.swapped_out = tiers.swap.saved_blocks;
  stats.swapped_in = tiers.swap.restored_blocks;
  stats.swapped_blocks = tiers.swap.blocks;
  stats.swap_blocks = tiers.swap.capacity_blocks;
  return stats;
}

Status ContinuousEngine::Score(std::span<const int32_t> ids,
                               const std::function<Status(int64_t, std::span<const float>)>& sink,
                               models::RouteTap* routes) {
  if (!idle()) return absl::FailedPreconditionError("scoring needs an engine without requests");
  RETURN_IF_ERROR(CheckIds(ids));
  const int64_t room = std::min(max_context_, pool_tokens());
  if (static_cast<int64_t>(ids.size()) > room) {
    return InvalidArgument("at most {} tokens can be scored at once (context {}, KV cache {}), found {}",
                           room, max_context_, pool_tokens(), ids.size());
  }
  std::vector<cache::BlockRef> blocks;
  std::vector<int32_t> table;
  const int needed = tensor::KvBlocksFor(static_cast<int64_t>(ids.size()));
  kv_.tree->Evict(needed - kv_.pool->free_blocks());
  for (int i = 0; i < needed; ++i) {
    ASSIGN_OR_RETURN(cache::BlockRef block, kv_.pool->Allocate());
    table.push_back(block.index());
    blocks.push_back(std::move(block));
  }
  RETURN_IF_ERROR(ApplyOps({}));
  const RequestSparsity& defaults = options_.sparsity.defaults;
  const kernels::SparsitySettings sparsity = SparsitySettingsOf(defaults, options_.sparsity, 0);
  for (size_t start = 0; start < ids.size(); start += scored_rows_) {
    const size_t count = std::min<size_t>(scored_rows_, ids.size() - start);
    StepBatch batch;
    if (start == 0) batch.ended.push_back(kScoredSequence);  // of a run that failed
    batch.want_routes = routes != nullptr;
    batch.candidates = 0;
    batch.AddRows({.sequence = kScoredSequence, .start = static_cast<int>(start), .first_logits = 0},
                  ids.subspan(start, count), {}, table,
                  defaults.mode == SparsityMode::kAll ? &sparsity : nullptr);
    ASSIGN_OR_RETURN(StepResult result, executor_->Run(batch));
    TakeResult(result);
    if (routes != nullptr) *routes = std::move(result.routes);
    RETURN_IF_ERROR(sink(static_cast<int64_t>(start), result.logits));
  }
  StepBatch last;
  last.ended.push_back(kScoredSequence);
  return executor_->Run(last).status();
}

}  // namespace moesaic::engine
