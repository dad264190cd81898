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
  for (const StepPlan::Part& part : plan.parts) {
    Sequence& sequence = *part.sequence;
    if (sequence.request.grammar == nullptr || !sequence.draws_after(part.count)) continue;
    sequence.mask.resize((vocab_size_ + 31) / 32);
    jobs.push_back({.grammar = sequence.request.grammar.get(), .mask = sequence.mask});
  }
  masks_.Start(std::move(jobs));
}

std::vector<RowTask> RowTasks::TasksOf(const StepPlan& plan) {
  std::vector<RowTask> tasks;
  for (const StepPlan::Part& part : plan.parts) {
    for (int row = FirstLogits(part); row < part.count; ++row) {
      const int position = part.sequence->computed + row;
      const bool in_prompt = position + 1 < part.sequence->prompt_size();
      tasks.push_back({part.sequence, in_prompt ? position : -1, OkStatus()});
      if (in_prompt) part.sequence->prompt_logprobs.resize(position + 1);
    }
  }
  auto mask = made_.begin();
  for (RowTask& task : tasks) {
    if (task.prompt_index < 0 && task.sequence->request.grammar != nullptr) {
      task.mask_status = (mask++)->status;
    }
  }
  return tasks;
}

std::vector<RowTask> RowTasks::Run(const StepPlan& plan, std::span<const float> logits) {
  std::vector<RowTask> tasks = TasksOf(plan);
  threads_.Run(static_cast<int64_t>(tasks.size()), [&](int64_t i, int worker) {
    RowTask& task = tasks[i];
    const Sequence& sequence = *task.sequence;
    const std::span<const float> row = logits.subspan(i * vocab_size_, vocab_size_);
    if (task.prompt_index >= 0) {
      task.sequence->prompt_logprobs[task.prompt_index] = LogprobsOf(
          row, sequence.tokens[task.prompt_index + 1], std::max(0, sequence.request.sampling.logprobs));
    } else if (sequence.size() < sequence.limit) {
      DrawNext(task, row, scratch_[worker]);
    }
  });
  return tasks;
}

void RowTasks::DrawNext(RowTask& task, std::span<const float> logits, DrawScratch& scratch) const {
  const Sequence& sequence = *task.sequence;
  text::Grammar* grammar = sequence.request.grammar.get();
  if (!task.mask_status.ok()) {
    task.drawn = task.mask_status;
    return;
  }
  task.drawn = Draw({.logits = logits,
                     .sampling = &sequence.request.sampling,
                     .history = &sequence.history,
                     .banned = BannedIds(sequence),
                     .mask = sequence.mask,
                     .seed = sequence.seed,
                     .position = static_cast<uint64_t>(sequence.size())},
                    scratch);
  if (grammar == nullptr || !task.drawn.ok()) return;
  if (const Status status = grammar->Commit(task.drawn->token); !status.ok()) task.drawn = status;
}

std::vector<int32_t> RowTasks::BannedIds(const Sequence& sequence) const {
  const SamplingParams& sampling = sequence.request.sampling;
  if (sequence.outputs() >= sampling.min_tokens) return {};
  std::vector<int32_t> banned = sampling.stop_ids;
  if (!sampling.ignore_eos) banned.insert(banned.end(), eos_ids_.begin(), eos_ids_.end());
  return banned;
}

}  // namespace moesaic::engine
