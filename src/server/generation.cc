#include "server/generation.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <optional>
#include <span>
#include <utility>

#include "engine/philox.h"
#include "server/answer_stops.h"
#include "server/api_keys.h"
#include "server/catch_exceptions.h"
#include "server/choice_text.h"

namespace moesaic::server {
namespace {

using engine::Clock;

// Longer waits for admission are logged.
constexpr std::chrono::seconds kLongWait{5};

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// A step's event of one choice with its time, posted from the engine's thread to the executor.
struct Arrived {
  engine::TokenEvent event;
  Clock::time_point at;
};

const char* CauseOf(engine::FinishReason finish) {
  if (finish == engine::FinishReason::kGrammar) return "grammar";
  return finish == engine::FinishReason::kError ? "model" : "engine";
}

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  Generation(const GenerationContext& context, GenerationSpec spec, std::shared_ptr<SerialExecutor> executor,
             std::shared_ptr<ResponseWriter> writer, std::unique_ptr<AnswerSink> sink)
      : context_(context),
        spec_(std::move(spec)),
        executor_(std::move(executor)),
        writer_(std::move(writer)),
        sink_(std::move(sink)) {}

  Status Start() {
    const int count = static_cast<int>(spec_.prompts.size()) * spec_.n;
    RETURN_IF_ERROR(context_.model.engine->CheckRoom(spec_.client, count));
    if (!spec_.grammar) return Submit();
    auto ticket = context_.grammars.Start(
        {spec_.grammar->kind, std::move(spec_.grammar->source), spec_.client, count},
        [self = shared_from_this()](StatusOr<std::vector<text::Grammar>> grammars) {
          self->executor_->Post([self, grammars = std::make_shared<StatusOr<std::vector<text::Grammar>>>(
                                           std::move(grammars))] { self->Compiled(std::move(*grammars)); });
        });
    RETURN_IF_ERROR(Refusal(ticket.status()));
    compiling_ = *std::move(ticket);
    return OkStatus();
  }

  Status Submit() {
    Status status = CatchExceptions(spec_.id, [this] { return SubmitAll(); });
    if (!status.ok()) {
      spdlog::debug("{}: not submitted: {}", spec_.id, Message(status));
      Cancel();
      finished_ = true;
    }
    return status;
  }

  // Returns the number of choices that were running.
  int Cancel() {
    int cancelled = 0;
    for (const Choice& choice : choices_) {
      if (choice.done) continue;
      context_.model.engine->Cancel(choice.request);
      ++cancelled;
    }
    return cancelled;
  }

  void ClientLeft() {
    finished_ = true;  // the sink gets no further calls
    compiling_ = text::GrammarPool::Ticket();
    writer_.reset();
    if (const int cancelled = Cancel(); cancelled > 0) {
      spdlog::info("{}: client left after {:.1f} s and {} tokens; cancelled {} choices", spec_.id,
                   Seconds(Clock::now() - arrived_), usage_.completion_tokens, cancelled);
    } else if (!started_) {
      spdlog::info("{}: client left after {:.1f} s, before its request was submitted", spec_.id,
                   Seconds(Clock::now() - arrived_));
    }
  }

  // Sends an error to the client: the server ends before the answer is complete.
  void ServerStops() {
    if (finished_) return;
    const Status status = absl::UnavailableError("the server is shutting down and cut this answer short");
    if (started_) return FailUnless([&status] { return status; });
    compiling_ = text::GrammarPool::Ticket();
    Refuse(status);
  }

 private:
  struct Choice {
    std::unique_ptr<ChoiceText> text;
    std::shared_ptr<LiveRequest> live;
    engine::RequestId request = 0;
    ChoiceDelta delta;  // tokens whose text is not complete yet
    int64_t outputs = 0;
    Clock::time_point submitted, first, last;
    bool heard = false;  // the first event has arrived
    bool over = false;   // the sink has received the end
    bool done = false;   // the engine has reported the end
  };

  void Compiled(StatusOr<std::vector<text::Grammar>> grammars) {
    compiling_ = text::GrammarPool::Ticket();
    if (finished_) return;  // the client has left
    Status status = Refusal(grammars.status());
    if (grammars.ok()) {
      spdlog::debug("{}: grammar of '{}' ready after {:.3f} s", spec_.id, spec_.grammar->param,
                    Seconds(Clock::now() - arrived_));
      grammars_ = *std::move(grammars);
      status = Submit();
    }
    if (!status.ok()) Refuse(status);
  }

  // Answers with an error before the first call of the sink.
  void Refuse(const Status& status) {
    finished_ = true;
    // After the head of a stream, only closing the connection can report the error.
    if (!started_) writer_->Send(ErrorResponse(ErrorOf(status), spec_.style));
    writer_.reset();
    sink_.reset();
  }

  // Converts a refused grammar to an error of the client and counts it.
  Status Refusal(const Status& status) {
    if (status.ok()) return status;
    if (status.code() == StatusCode::kInvalidArgument) context_.metrics.Failed("grammar_refused");
    spdlog::debug("{}: grammar of '{}' refused: {}", spec_.id, spec_.grammar->param, Message(status));
    return GrammarRefused(spec_.grammar->param, status);
  }

  Status SubmitAll() {
    for (const auto& prompt : spec_.prompts) usage_.prompt_tokens += static_cast<int64_t>(prompt.size());
    for (const int budget : spec_.budgets) {
      if (spec_.sampling.min_tokens <= budget) continue;
      return FieldError("min_tokens", "invalid_value",
                        fmt::format("Invalid 'min_tokens': the answer may have {} tokens, found {}", budget,
                                    spec_.sampling.min_tokens));
    }
    const size_t count = spec_.prompts.size() * static_cast<size_t>(spec_.n);
    choices_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      RETURN_IF_ERROR(SubmitChoice(static_cast<int>(i)));
    }
    spdlog::debug("{}: submitted {} choices with {} prompt tokens, the first is request {}, trace {}",
                  spec_.id, count, usage_.prompt_tokens, choices_.front().request, spec_.trace.trace_id);
    if (spec_.tenant != nullptr) spec_.tenant->ChargePrompt(usage_.prompt_tokens);
    started_ = true;
    writer_.reset();  // the sink has the writer
    sink_->Started();
    return OkStatus();
  }

  Status SubmitChoice(int index) {
    const size_t prompt = static_cast<size_t>(index / spec_.n);
    engine::Request request;
    request.prompt = spec_.prompts[prompt];
    request.sampling = spec_.sampling;
    request.sampling.max_tokens = spec_.budgets[prompt];
    // Choices of one prompt differ from each other, and each is the same in every run.
    if (std::optional<uint64_t>& seed = request.sampling.seed) seed = engine::SeedOf(*seed, index % spec_.n);
    request.prompt_logprobs = spec_.prompt_logprobs;
    request.cache_namespace = spec_.cache_namespace;
    request.client = spec_.client;
    request.session = spec_.session;
    request.priority = spec_.priority;
    request.sparsity = spec_.sparsity;
    request.deadline = spec_.deadline;
    if (spec_.grammar) {
      request.grammar = std::make_shared<text::Grammar>(std::move(grammars_[static_cast<size_t>(index)]));
    }
    Choice& choice = choices_.emplace_back();
    choice.text = std::make_unique<ChoiceText>(context_.model, spec_);
    choice.submitted = arrived_;
    choice.delta.choice = index;
    choice.live = context_.live.Add(spec_.id, static_cast<int64_t>(request.prompt.size()));
    auto submitted = context_.model.engine->Submit(
        std::move(request), [self = shared_from_this(), index](std::span<engine::TokenEvent> events) {
          self->FromEngine(index, events);
        });
    if (!submitted.ok()) {
      choices_.pop_back();
      return submitted.status();
    }
    choice.request = *submitted;
    ++running_;
    return OkStatus();
  }

  // Runs on the engine's thread.
  void FromEngine(int index, std::span<engine::TokenEvent> events) {
    std::vector<Arrived> arrived;
    const auto now = Clock::now();
    for (engine::TokenEvent& event : events) arrived.push_back({std::move(event), now});
    executor_->Post([self = shared_from_this(), index, arrived = std::move(arrived)]() mutable {
      for (Arrived& one : arrived) self->Take(self->choices_[static_cast<size_t>(index)], one);
    });
  }

  void Take(Choice& choice, Arrived& arrived) {
    engine::TokenEvent& event = arrived.event;
    if (choice.done) return;
    CountCached(choice, event);
    if (event.token) CountToken(choice, arrived.at);
    const bool ends = event.finish != engine::FinishReason::kNone;
    if (ends) {
      choice.done = true;
      --running_;
      Record(choice, event, arrived.at);
    }
    if (!finished_ && !choice.over) {
      FailUnless([&] { return Deliver(choice, event, ends); });
    }
    if (running_ == 0 && !finished_) {
      FailUnless([this] {
        sink_->Done(usage_);
        finished_ = true;
        return OkStatus();
      });
    }
    if (running_ == 0) sink_.reset();
  }

  // Counts once, at the first event, which has no token when the answer ends at once.
  void CountCached(Choice& choice, const engine::TokenEvent& event) {
    if (std::exchange(choice.heard, true)) return;
    if (choice.delta.choice % spec_.n == 0) {
      usage_.cached_tokens += event.cached_tokens;
      if (spec_.tenant != nullptr) spec_.tenant->cached_tokens += event.cached_tokens;
    }
    choice.live->cached_tokens = event.cached_tokens;
  }

  void CountToken(Choice& choice, Clock::time_point at) {
    if (choice.outputs == 0) {
      choice.first = at;
      context_.metrics.FirstToken(Seconds(at - choice.submitted));
      spdlog::debug("{}: first token of choice {} after {:.3f} s, {} of {} prompt tokens were cached",
                    spec_.id, choice.delta.choice, Seconds(at - choice.submitted),
                    choice.live->cached_tokens.load(), choice.live->prompt_tokens);
    } else {
      context_.metrics.InterToken(Seconds(at - choice.last));
    }
    choice.last = at;
    if (spec_.tenant != nullptr) spec_.tenant->ChargeOutput();
    choice.live->output_tokens = ++choice.outputs;
  }

  Status Deliver(Choice& choice, engine::TokenEvent& event, bool ends) {
    ChoiceDelta& delta = choice.delta;
    if (!event.prompt_logprobs.empty()) delta.prompt_logprobs = std::move(event.prompt_logprobs);
    bool stopped = false;
    if (event.token) {
      ++usage_.completion_tokens;
      delta.tokens.push_back({*event.token, std::move(event.logprobs)});
      ASSIGN_OR_RETURN(stopped, choice.text->Push(*event.token, &delta));
      if (choice.text->in_reasoning()) ++usage_.reasoning_tokens;
    }
    RETURN_IF_ERROR(CheckEnd(event, choice.outputs));
    if (ends || stopped) {
      RETURN_IF_ERROR(choice.text->Finish(&delta));
      SetFinish(choice, event, stopped);
      choice.over = true;
      if (!ends) context_.model.engine->Cancel(choice.request);
    }
    NameCalls(delta);
    const bool says = !delta.reasoning.empty() || !delta.content.empty() || !delta.calls.empty() ||
                      !delta.finish_reason.empty();
    if (!says) return OkStatus();
    const int index = delta.choice;
    sink_->Delta(std::exchange(delta, ChoiceDelta{}), usage_);
    choice.delta.choice = index;
    return OkStatus();
  }

  // Converts an end by a failure to the client's error.
  Status CheckEnd(const engine::TokenEvent& event, int64_t tokens) const {
    if (event.finish != engine::FinishReason::kGrammar) return FailureOf(event);
    return FieldError(spec_.grammar->param, "grammar_failed",
                      fmt::format("Invalid '{}': the grammar failed after {} tokens: {}",
                                  spec_.grammar->param, tokens, Message(event.status)));
  }

  void SetFinish(Choice& choice, const engine::TokenEvent& event, bool stopped) {
    ChoiceDelta& delta = choice.delta;
    const std::string& stop = choice.text->stop();
    if (!stop.empty()) {
      delta.finish_reason = "stop";
      delta.stop_cause = stop;
    } else if (event.finish == engine::FinishReason::kLength) {
      delta.finish_reason = "length";
    } else if (event.finish == engine::FinishReason::kDeadline) {
      delta.finish_reason = "deadline";
    } else if (event.finish == engine::FinishReason::kCancelled && !stopped) {
      delta.finish_reason = "abort";
    } else {
      delta.finish_reason = "stop";
      for (const int32_t id : spec_.sampling.stop_ids) {
        if (event.stopped_by == id) delta.stop_cause = id;
      }
    }
    if (choice.text->calls() > 0 && delta.finish_reason == "stop") delta.finish_reason = "tool_calls";
  }

  void NameCalls(ChoiceDelta& delta) const {
    const std::optional<PromptTemplate>& chat = context_.model.chat;
    for (text::ToolCallDelta& call : delta.calls) {
      if (call.name.empty() || !call.id.empty()) continue;
      call.id = NewCallId(chat ? chat->call_form() : CallForm());
    }
  }

  template <typename Work>
  void FailUnless(const Work& work) {
    const Status status = CatchExceptions(spec_.id, work);
    if (status.ok()) return;
    finished_ = true;
    const int cancelled = Cancel();
    const ApiError error = ErrorOf(status);
    const auto level = error.http_status < 500 ? spdlog::level::info : spdlog::level::warn;
    spdlog::log(level, "{}: failed after {} tokens: {}; cancelled {} choices", spec_.id,
                usage_.completion_tokens, error.message, cancelled);
    sink_->Failed(error);
  }

  void Record(const Choice& choice, const engine::TokenEvent& event, Clock::time_point at) {
    ChoiceRecord record;
    record.prompt_tokens = choice.live->prompt_tokens;
    record.output_tokens = choice.outputs;
    record.max_tokens = spec_.budgets[static_cast<size_t>(choice.delta.choice / spec_.n)];
    record.whole = Seconds(at - choice.submitted);
    record.had_token = choice.outputs > 0;
    const Clock::time_point start = event.times.started.value_or(at);
    record.queue = Seconds(start - choice.submitted);
    if (record.had_token) {
      record.prefill = Seconds(choice.first - start);
      record.decode = Seconds(choice.last - choice.first);
    }
    switch (event.finish) {
      case engine::FinishReason::kLength:
        record.finish = "length";
        break;
      case engine::FinishReason::kDeadline:
        record.finish = "deadline";
        break;
      case engine::FinishReason::kGrammar:
      case engine::FinishReason::kError:
      case engine::FinishReason::kInternal:
        record.finish = "error";
        context_.metrics.Failed(CauseOf(event.finish));
        break;
      case engine::FinishReason::kCancelled:
        record.finish = choice.over ? "stop" : "abort";
        break;
      default:
        record.finish = "stop";
    }
    context_.metrics.Choice(record);
    Log(choice, event, record);
    Trace(choice, record, start, at);
  }

  void Log(const Choice& choice, const engine::TokenEvent& event, const ChoiceRecord& record) const {
    const int index = choice.delta.choice;
    if (record.queue > Seconds(kLongWait)) {
      spdlog::info("{}: choice {} waited {:.1f} s for its first step", spec_.id, index, record.queue);
    }
    const bool by_deadline = event.finish == engine::FinishReason::kDeadline;
    spdlog::log(by_deadline ? spdlog::level::info : spdlog::level::debug,
                "{}: choice {} ended after {:.2f} s with {} tokens: {}", spec_.id, index, record.whole,
                record.output_tokens, record.finish);
  }

  void Trace(const Choice& choice, const ChoiceRecord& record, Clock::time_point start,
             Clock::time_point end) {
    const auto add = [&](const char* name, Clock::time_point from, Clock::time_point to,
                         std::string arguments) {
      context_.tracer.Add({name, spec_.trace.trace_id, spec_.trace.span_id, RandomHex(16), choice.request,
                           from, to, std::move(arguments)});
    };
    add("queue", choice.submitted, start, "{}");
    add("prefill", start, record.had_token ? choice.first : end,
        fmt::format(R"({{"prompt_tokens":{},"cached_tokens":{}}})", record.prompt_tokens,
                    choice.live->cached_tokens.load()));
    if (record.had_token) {
      add("decode", choice.first, end,
          fmt::format(R"({{"output_tokens":{},"finish":"{}"}})", record.output_tokens, record.finish));
    }
  }

  const GenerationContext context_;
  GenerationSpec spec_;
  const std::shared_ptr<SerialExecutor> executor_;
  const Clock::time_point arrived_ = Clock::now();
  std::shared_ptr<ResponseWriter> writer_;  // until the choices are submitted
  std::unique_ptr<AnswerSink> sink_;
  text::GrammarPool::Ticket compiling_;
  std::vector<text::Grammar> grammars_;  // one for each choice, at the start of its text
  std::vector<Choice> choices_;
  Usage usage_;
  int running_ = 0;
  bool started_ = false;
  bool finished_ = false;  // the sink gets no further calls
};

}  // namespace

Status StartGeneration(const GenerationContext& context, GenerationSpec spec,
                       const std::shared_ptr<SerialExecutor>& executor,
                       const std::shared_ptr<ResponseWriter>& writer, std::unique_ptr<AnswerSink> sink) {
  const auto generation =
      std::make_shared<Generation>(context, std::move(spec), executor, writer, std::move(sink));
  RETURN_IF_ERROR(generation->Start());
  if (context.stops != nullptr) {
    // The entry may outlive the server's threads, so it must not keep a executor alive.
    context.stops->Add(generation, [weak = std::weak_ptr<Generation>(generation),
                                    weak_executor = std::weak_ptr<SerialExecutor>(executor)] {
      const std::shared_ptr<SerialExecutor> alive_executor = weak_executor.lock();
      if (alive_executor == nullptr) return;
      alive_executor->Post([weak] {
        if (const auto alive = weak.lock()) alive->ServerStops();
      });
    });
  }
  writer->OnClientLeft([weak = std::weak_ptr<Generation>(generation), executor] {
    executor->Post([weak] {
      if (const auto alive = weak.lock()) alive->ClientLeft();
    });
  });
  return OkStatus();
}

Status FailureOf(const engine::TokenEvent& event) {
  switch (event.finish) {
    case engine::FinishReason::kError:
      return WithCode(absl::InternalError(fmt::format("the model failed: {}", Message(event.status))),
                      "model_failed");
    case engine::FinishReason::kInternal:
      // The only replica whose cache holds the prompt has failed.
      if (event.status.code() == StatusCode::kInvalidArgument) return event.status;
      return WithCode(absl::InternalError(fmt::format("the engine failed: {}", Message(event.status))),
                      "engine_failed");
    default:
      return OkStatus();
  }
}

std::string NewId(const char* prefix) { return prefix + RandomHex(32); }

}  // namespace moesaic::server
