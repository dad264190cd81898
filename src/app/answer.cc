#include "app/answer.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "app/interrupt.h"
#include "app/output.h"
#include "engine/output_text.h"

namespace moesaic::app {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

Status Show(const std::string& piece, Answer* answer) {
  answer->text += piece;
  WriteOutput(piece);
  return FlushOutput();
}

// Cancels the request, so that the engine can serve another one.
void Drop(engine::Engine& engine, engine::RequestId id) {
  std::vector<engine::TokenEvent> events;
  engine.Cancel(id);
  engine.Step(&events).IgnoreError();
}

}  // namespace

StatusOr<Answer> WriteAnswer(engine::Engine& engine, const ModelText& text, std::vector<int32_t> prompt,
                             const engine::SamplingParams& sampling, const std::vector<std::string>& stops) {
  Answer answer;
  answer.prompt_tokens = static_cast<int>(prompt.size());
  engine::OutputText decoder(*text.tokenizer, /*skip_special=*/true, stops);
  const Clock::time_point start = Clock::now();
  Clock::time_point first = start, last = start;
  ASSIGN_OR_RETURN(const engine::RequestId id,
                   engine.Add({.prompt = std::move(prompt), .sampling = sampling, .prompt_logprobs = false}));
  std::vector<engine::TokenEvent> events;
  while (!engine.idle()) {
    if (Interrupted() && !answer.interrupted) {
      answer.interrupted = true;
      engine.Cancel(id);
    }
    events.clear();
    if (const Status status = engine.Step(&events); !status.ok()) {
      Drop(engine, id);
      return status;
    }
    for (const engine::TokenEvent& event : events) {
      if (event.finish == engine::FinishReason::kError) {
        return absl::InternalError("the model's logits were not finite");
      }
      answer.cut |= event.finish == engine::FinishReason::kLength;
      if (!event.token || decoder.stopped()) continue;
      last = Clock::now();
      if (answer.tokens++ == 0) first = last;
      ASSIGN_OR_RETURN(const std::string piece, decoder.Push(*event.token));
      if (const Status written = Show(piece, &answer); !written.ok()) {
        Drop(engine, id);
        return written;
      }
      if (decoder.stopped()) engine.Cancel(id);
    }
  }
  ASSIGN_OR_RETURN(const std::string rest, decoder.Finish());
  RETURN_IF_ERROR(Show(rest + "\n", &answer));
  answer.text.pop_back();
  answer.first_token_seconds = Seconds(start, first);
  answer.decode_seconds = Seconds(first, last);
  return answer;
}

std::string SpeedLine(const Answer& answer) {
  if (answer.tokens == 0) return fmt::format("[no token; {} prompt tokens]", answer.prompt_tokens);
  std::string line = fmt::format("[{} tokens, first after {:.2f} s ({} prompt tokens)", answer.tokens,
                                 answer.first_token_seconds, answer.prompt_tokens);
  if (answer.tokens > 1) line += fmt::format(", {:.1f} tok/s", (answer.tokens - 1) / answer.decode_seconds);
  if (answer.interrupted) line += ", stopped";
  if (answer.cut) line += ", cut at the limit";
  return line + "]";
}

}  // namespace moesaic::app
