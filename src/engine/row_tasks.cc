#include "engine/row_tasks.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace moesaic::engine {
namespace {

// Time that a step waits for masks after the model: little compared with a step of most models. Sequences
// with late masks draw in a later step, so other rows lose no more than this.
constexpr std::chrono::milliseconds kMaskGrace{2};
// The same if all rows of the step wait for masks.
constexpr std::chrono::milliseconds kLongMaskGrace{20};
// Interval at which the engine checks for new requests while all sequences wait for masks.
constexpr std::chrono::milliseconds kMaskPoll{5};

// Number of leading masks that are valid: those after drafts are valid for the drafts that they were computed
// for.
int PlacesOf(const MaskJob& job, std::span<const int32_t> drafts) {
  const auto same = std::ranges::mismatch(job.drafts, drafts).in1 - job.drafts.begin();
  return std::min(job.made, 1 + static_cast<int>(same));
}

}  // namespace

RowTasks::RowTasks(runtime::ThreadPool& threads, int vocab_size, std::vector<int32_t> eos_ids,
                   double max_mask_seconds)
    : threads_(threads),
      vocab_size_(static_cast<size_t>(vocab_size)),
      eos_ids_(std::move(eos_ids)),
      masks_(max_mask_seconds),
      scratch_(threads.size()) {}

void RowTasks::StartMask(Sequence& sequence, std::span<const int32_t> drafts) {
  auto job = std::make_shared<MaskJob>();
  job->grammar = sequence.request.grammar;
  job->drafts.assign(drafts.begin(), drafts.end());
  job->words = (vocab_size_ + 31) / 32;
  job->slow = sequence.slow_masks;
  sequence.mask = MaskTicket(job);
  masks_.Start(std::move(job));
}

void RowTasks::StartMasks(const StepPlan& plan) {
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    if (sequence.request.grammar == nullptr || !sequence.draws_after(chunk.count) || sequence.mask) continue;
    StartMask(sequence, std::span(sequence.draft.tokens).first(chunk.drafts));
  }
}

void RowTasks::StartSlowMask(Sequence& sequence) {
  if (sequence.slow_masks && sequence.size() < sequence.limit) StartMask(sequence, {});
}

void RowTasks::CollectMasks(StepPlan& plan) {
  std::vector<std::shared_ptr<MaskJob>> pending;
  for (const StepPlan::ScheduledChunk& chunk : plan.chunks) {
    const Sequence& sequence = *chunk.sequence;
    if (sequence.mask && sequence.draws_after(chunk.count)) pending.push_back(sequence.mask.job());
  }
  if (pending.empty()) return;
  const bool others_wait = pending.size() < plan.chunks.size();
  masks_.WaitForAll(pending, Clock::now() + (others_wait ? kMaskGrace : kLongMaskGrace));
  for (StepPlan::ScheduledChunk& chunk : plan.chunks) {
    Sequence& sequence = *chunk.sequence;
    if (!sequence.mask || !sequence.draws_after(chunk.count)) continue;
    chunk.late = !sequence.mask->done();
    const bool slow =
        chunk.late ? masks_.Demote(*sequence.mask.job()) : sequence.mask->seconds >= MaskWorker::kSlowSeconds;
    sequence.slow_masks |= slow;
  }
}

void RowTasks::WaitForAnyMask() { masks_.WaitForAny(Clock::now() + kMaskPoll); }

std::vector<RowTask> RowTasks::TasksOf(StepPlan& plan) {
  std::vector<RowTask> tasks;
  int next = 0;
  for (StepPlan::ScheduledChunk& chunk : plan.chunks) {
    for (int row = chunk.FirstLogits(); row < chunk.count; ++row) {
      const int position = chunk.sequence->computed + row;
      const int task_row = next++;
      const bool in_prompt = position + 1 < chunk.sequence->prompt_size();
      if (!in_prompt && !chunk.sequence->draws_after(chunk.count)) continue;  // max_tokens 0: nothing follows
      if (!in_prompt && chunk.late) continue;
      tasks.push_back({.chunk = &chunk,
                       .prompt_index = in_prompt ? position : -1,
                       .row = task_row,
                       .places = 1 + chunk.drafts});
      if (in_prompt) chunk.sequence->prompt_logprobs.resize(position + 1);
    }
    next += chunk.drafts;
  }
  for (RowTask& task : tasks) {
    const Sequence& sequence = *task.chunk->sequence;
    if (task.prompt_index >= 0 || sequence.request.grammar == nullptr) continue;
    task.places = PlacesOf(*sequence.mask.job(), std::span(sequence.draft.tokens).first(task.chunk->drafts));
    task.status = sequence.mask->status;
    task.grammar_failed = !task.status.ok();
  }
  return tasks;
}

StatusOr<std::vector<RowTask>> RowTasks::Run(StepPlan& plan, const StepResult& result, Executor& executor) {
  std::vector<RowTask> tasks = TasksOf(plan);
  std::vector<RowTask*> open;
  std::vector<TaskRows> rows;
  for (RowTask& task : tasks) {
    open.push_back(&task);
    TaskRows& of = rows.emplace_back();
    if (!result.summaries.empty()) {
      of.summaries = result.summaries.subspan(task.row, task.places);
    } else {
      of.logits = result.logits.subspan(task.row * vocab_size_, task.places * vocab_size_);
    }
  }
  RunTasks(open, rows);
  std::erase_if(open, [](const RowTask* task) { return !task->needs_logits; });
  if (open.empty()) return tasks;
  std::vector<int32_t> fetched;
  rows.clear();
  for (const RowTask* task : open) {
    const auto first = static_cast<int>(task->drawn.size());
    rows.push_back(
        {.first = first, .logits = {}, .summaries = result.summaries.subspan(task->row, task->places)});
    for (int place = first; place < task->places; ++place) fetched.push_back(task->row + place);
  }
  ASSIGN_OR_RETURN(const std::span<const float> logits, executor.FetchLogits(fetched));
  size_t next = 0;
  for (size_t i = 0; i < open.size(); ++i) {
    const size_t count = (open[i]->places - rows[i].first) * vocab_size_;
    rows[i].logits = logits.subspan(next, count);
    next += count;
  }
  RunTasks(open, rows);
  return tasks;
}

void RowTasks::RunTasks(std::span<RowTask* const> tasks, std::span<const TaskRows> rows) {
  threads_.Run(std::ssize(tasks),
               [&](int64_t i, int worker) { Compute(*tasks[i], rows[i], scratch_[worker]); });
}

void RowTasks::Compute(RowTask& task, const TaskRows& rows, DrawScratch& scratch) const {
  Sequence& sequence = *task.chunk->sequence;
  task.needs_logits = task.prompt_index >= 0 && rows.logits.empty();
  if (task.needs_logits) return;  // the prompt's token is seldom a candidate
  if (task.prompt_index < 0) return DrawAll(task, rows, scratch);
  sequence.prompt_logprobs[task.prompt_index] = LogprobsOf(
      rows.logits, sequence.tokens[task.prompt_index + 1], std::max(0, sequence.request.sampling.logprobs),
      rows.summaries.empty() ? nullptr : rows.summaries.data());
}

// A draft only decides how many tokens one step draws: each token is drawn from its own row by its own
// position, as without drafts. So no draft can change a result.
void RowTasks::DrawAll(RowTask& task, const TaskRows& rows, DrawScratch& scratch) const {
  Sequence& sequence = *task.chunk->sequence;
  text::Grammar* grammar = sequence.request.grammar.get();
  for (int place = rows.first; place < task.places && task.status.ok(); ++place) {
    StatusOr<Drawn> drawn = DrawOne(sequence, place, rows, scratch);
    task.status = drawn.status();
    if (!drawn.ok()) return;
    task.needs_logits = drawn->needs_logits;
    if (task.needs_logits) return;
    const int32_t token = drawn->token;
    if (grammar != nullptr) {
      task.status = grammar->Commit(token);
      task.grammar_failed = !task.status.ok();
      if (task.grammar_failed) return;
    }
    task.drawn.push_back(*std::move(drawn));
    if (HasPenalties(sequence.request.sampling)) sequence.history.AddOutput(token);
    if (place + 1 == task.places || token != sequence.draft.tokens[place] || Ends(sequence, token)) return;
    if (grammar != nullptr && grammar->IsStopped()) return;
  }
}

StatusOr<Drawn> RowTasks::DrawOne(Sequence& sequence, int place, const TaskRows& rows,
                                  DrawScratch& scratch) const {
  std::span<const uint32_t> mask;
  if (sequence.request.grammar != nullptr) {
    mask = std::span(sequence.mask->masks).subspan(place * sequence.mask->words, sequence.mask->words);
  }
  const std::span<const float> logits =
      rows.logits.empty() ? rows.logits
                          : rows.logits.subspan((place - rows.first) * vocab_size_, vocab_size_);
  return Draw({.logits = logits,
               .sampling = &sequence.request.sampling,
               .history = &sequence.history,
               .banned = BannedIds(sequence, place),
               .mask = mask,
               .seed = sequence.seed,
               .position = static_cast<uint64_t>(sequence.size() + place),
               .summary = rows.summaries.empty() ? nullptr : &rows.summaries[place]},
              scratch);
}

bool RowTasks::Ends(const Sequence& sequence, int32_t token) const {
  const SamplingParams& sampling = sequence.request.sampling;
  const auto holds = [token](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  return holds(sampling.stop_ids) || (!sampling.ignore_eos && holds(eos_ids_));
}

std::vector<int32_t> RowTasks::BannedIds(const Sequence& sequence, int place) const {
  const SamplingParams& sampling = sequence.request.sampling;
  if (sequence.outputs() + place >= sampling.min_tokens) return {};
  std::vector<int32_t> banned = sampling.stop_ids;
  if (!sampling.ignore_eos) banned.insert(banned.end(), eos_ids_.begin(), eos_ids_.end());
  return banned;
}

}  // namespace moesaic::engine
