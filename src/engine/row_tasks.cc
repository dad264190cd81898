#include "engine/row_tasks.h"

#include <algorithm>
#include <utility>

namespace moesaic::engine {

int FirstLogits(const StepPlan::Part& part) {
  const Sequence& sequence = *part.sequence;
  const int last = part.count - 1;
  if (sequence.wants_prompt_logprobs()) {
    const int known = static_cast<int>(sequence.prompt_logprobs.size());
    return std::clamp(known - sequence.computed, 0, part.count);
  }
  return sequence.draws_after(part.count) ? last : part.count;
}

RowTasks::RowTasks(runtime::ThreadPool& threads, int vocab_size, std::vector<int32_t> eos_ids)
    : threads_(threads),
      vocab_size_(static_cast<size_t>(vocab_size)),
      eos_ids_(std::move(eos_ids)),
      scratch_(threads.size()) {}

void RowTasks::StartMasks(const StepPlan& plan) {
  std::vector<MaskWorker::Job> jobs;
  const size_t words = (vocab_size_ + 31) / 32;
  for (const StepPlan::Part& part : plan.parts) {
    Sequence& sequence = *part.sequence;
    if (sequence.request.grammar == nullptr || !sequence.draws_after(part.count)) continue;
    sequence.masks.resize(words * (1 + part.drafts));
    jobs.push_back({.grammar = sequence.request.grammar.get(),
                    .drafts = std::span(sequence.draft.tokens).first(part.drafts),
                    .masks = sequence.masks});
  }
  masks_.Start(std::move(jobs));
}

std::vector<RowTask> RowTasks::TasksOf(StepPlan& plan) {
  std::vector<RowTask> tasks;
  int next = 0;
  for (StepPlan::Part& part : plan.parts) {
    for (int row = FirstLogits(part); row < part.count; ++row) {
      const int position = part.sequence->computed + row;
      const int task_row = next++;
      const bool in_prompt = position + 1 < part.sequence->prompt_size();
      if (!in_prompt && !part.sequence->draws_after(part.count)) continue;  // max_tokens 0: nothing follows
      tasks.push_back({.part = &part,
                       .prompt_index = in_prompt ? position : -1,
                       .row = task_row,
                       .places = 1 + part.drafts});
      if (in_prompt) part.sequence->prompt_logprobs.resize(position + 1);
    }
    next += part.drafts;
  }
  auto mask = made_.begin();
  for (RowTask& task : tasks) {
    if (task.prompt_index < 0 && task.part->sequence->request.grammar != nullptr) {
      task.places = mask->made;
      task.status = (mask++)->status;
    }
  }
  return tasks;
}

std::vector<RowTask> RowTasks::Run(StepPlan& plan, std::span<const float> logits) {
  std::vector<RowTask> tasks = TasksOf(plan);
  threads_.Run(static_cast<int64_t>(tasks.size()), [&](int64_t i, int worker) {
    RowTask& task = tasks[i];
    Sequence& sequence = *task.part->sequence;
    const std::span<const float> rows = logits.subspan(task.row * vocab_size_);
    if (task.prompt_index >= 0) {
      sequence.prompt_logprobs[task.prompt_index] =
          LogprobsOf(rows.first(vocab_size_), sequence.tokens[task.prompt_index + 1],
                     std::max(0, sequence.request.sampling.logprobs));
    } else {
      DrawAll(task, rows, scratch_[worker]);
    }
  });
  return tasks;
}

// What a draft says decides only how far one step goes: each token is drawn as it would be without, from its
// own row by its own place, so no draft can change what is said.
void RowTasks::DrawAll(RowTask& task, std::span<const float> logits, DrawScratch& scratch) const {
  Sequence& sequence = *task.part->sequence;
  text::Grammar* grammar = sequence.request.grammar.get();
  for (int place = 0; place < task.places && task.status.ok(); ++place) {
    StatusOr<Drawn> drawn =
        DrawOne(sequence, place, logits.subspan(place * vocab_size_, vocab_size_), scratch);
    task.status = drawn.status();
    if (!drawn.ok()) return;
    const int32_t token = drawn->token;
    task.drawn.push_back(*std::move(drawn));
    if (HasPenalties(sequence.request.sampling)) sequence.history.AddOutput(token);
    if (place + 1 == task.places || token != sequence.draft.tokens[place] || Ends(sequence, token)) return;
    if (grammar != nullptr && grammar->IsStopped()) return;
  }
}

StatusOr<Drawn> RowTasks::DrawOne(Sequence& sequence, int place, std::span<const float> row,
                                  DrawScratch& scratch) const {
  text::Grammar* grammar = sequence.request.grammar.get();
  const size_t words = grammar == nullptr ? 0 : (vocab_size_ + 31) / 32;
  ASSIGN_OR_RETURN(Drawn drawn, Draw({.logits = row,
                                      .sampling = &sequence.request.sampling,
                                      .history = &sequence.history,
                                      .banned = BannedIds(sequence, place),
                                      .mask = std::span(sequence.masks).subspan(place * words, words),
                                      .seed = sequence.seed,
                                      .position = static_cast<uint64_t>(sequence.size() + place)},
                                     scratch));
  if (grammar != nullptr) RETURN_IF_ERROR(grammar->Commit(drawn.token));
  return drawn;
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
