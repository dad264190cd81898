// `moesaic chat MODEL`: a conversation in the terminal, or one question.
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "app/answer.h"
#include "app/chat_completion.h"
#include "app/conversation.h"
#include "app/interrupt.h"
#include "app/line_reader.h"
#include "app/output.h"
#include "app/sampling_flags.h"
#include "app/session.h"
#include "app/speculative_flags.h"
#include "app/table.h"
#include "app/verb.h"

namespace moesaic::app {
namespace {

constexpr const char* kCommandHelp = R"(/help                 show this text
/reset                forget the conversation, keep the system prompt
/system [TEXT]        set the system prompt; alone: show it; "" removes it
/regenerate           answer the last question again
/set [NAME VALUE]     set a sampling parameter, as in /set temperature 0.7; alone: show them
/save FILE            write the conversation as JSON
/load FILE            continue a saved conversation
/stats                show the model, its memory, and the number of generated tokens
/exit                 leave; Ctrl-D does the same
A line that ends with \ continues in the next; """ begins and ends a text of many lines. Ctrl-C stops an answer.
On a terminal Tab completes commands and file names, Ctrl-R searches earlier messages, and a paste may have many lines.
)";

struct ChatFlags {
  ModelFlags model;
  SamplingFlags sampling;
  std::string system;
  std::string prompt;
  bool quiet = false;
};

bool OnTerminal() { return isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0; }

class Chat {
 public:
  Chat(const ChatFlags& options, Session& session, const ModelText& text,
       const engine::SamplingParams& sampling)
      : session_(session),
        text_(text),
        sampling_(sampling),
        stops_(options.sampling.stop),
        quiet_(options.quiet),
        conversation_(options.system),
        reader_(OnTerminal() ? OpenLineEditor(HistoryFile(), CompleteChat) : nullptr) {
    const bool color = isatty(STDERR_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
    dim_ = color ? "\033[2m" : "";
    plain_ = color ? "\033[0m" : "";
  }

  Status AnswerQuestion(const std::string& question) {
    conversation_.Add("user", question);
    Status status = AnswerLast();
    if (!status.ok()) conversation_.DropQuestion();
    return status;
  }

  // Runs until /exit, the end of input or a second Ctrl-C.
  Status Talk() {
    if (isatty(STDIN_FILENO) != 0) Note("/help lists the commands");
    int interrupts = 0;
    for (;;) {
      std::string message;
      const LineReader::Result result = reader_.ReadMessage("> ", ". ", &message);
      if (result == LineReader::Result::kEnd) {
        if (isatty(STDIN_FILENO) != 0) WriteOutput("\n");
        return OkStatus();
      }
      if (result == LineReader::Result::kInterrupted) {
        ClearInterrupt();
        WriteNotice("\n");
        if (++interrupts > 1 || LastSignal() != SIGINT) return Cancelled("interrupted");
        Note("press Ctrl-C again or Ctrl-D to leave");
        continue;
      }
      if (message.find_first_not_of(" \t\n") == std::string::npos) continue;
      if (message == "/exit" || message == "/quit") return OkStatus();
      Status status = message[0] == '/' ? Command(message) : AnswerQuestion(message);
      interrupts = 0;
      if (Interrupted()) {  // interrupted an answer; the next Ctrl-C leaves
        if (LastSignal() != SIGINT) return Cancelled("interrupted");
        ClearInterrupt();
        interrupts = 1;
      }
      if (!FlushOutput().ok()) return status;                        // stdout is closed
      if (!status.ok() && isatty(STDIN_FILENO) == 0) return status;  // scripts get an error
      if (!status.ok()) Note(Message(status));
    }
  }

 private:
  void Note(const std::string& text) const { Tell("{}{}{}\n", dim_, text, plain_); }

  // Renders the conversation and tokenizes it. Drops the oldest turns if it does not fit the context.
  StatusOr<std::vector<int32_t>> Prompt() {
    for (int dropped = 0;; ++dropped) {
      ASSIGN_OR_RETURN(const std::string prompt, conversation_.Render(*text_.chat));
      ASSIGN_OR_RETURN(std::vector<int32_t> ids, text_.tokenizer->Encode(prompt, /*add_special=*/false));
      const int room = session_.engine->max_context();
      const bool fits = static_cast<int>(ids.size()) + std::min(sampling_.max_tokens, room / 4) <= room;
      if (fits || !conversation_.DropOldest()) {
        if (dropped > 0) Note(fmt::format("[the context is full: {} earlier turns are forgotten]", dropped));
        return ids;
      }
    }
  }

  Status AnswerLast() {
    ASSIGN_OR_RETURN(std::vector<int32_t> prompt, Prompt());
    ASSIGN_OR_RETURN(const Answer answer,
                     WriteAnswer(*session_.engine, text_, std::move(prompt), sampling_, stops_));
    conversation_.Add("assistant", answer.text);
    if (!quiet_) Note(SpeedLine(answer));
    return OkStatus();
  }

  Status Command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(1, space == std::string::npos ? space : space - 1);
    const size_t begin = line.find_first_not_of(' ', space);
    const std::string rest =
        space == std::string::npos || begin == std::string::npos ? "" : line.substr(begin);
    if (name == "help") return Say(kCommandHelp);
    if (name == "reset") {
      conversation_.Clear();
      Note("a new conversation");
      return OkStatus();
    }
    if (name == "system") return System(rest);
    if (name == "regenerate") return Regenerate();
    if (name == "set") return Set(rest);
    if (name == "save" || name == "load") {
      if (rest.empty()) return InvalidArgument("/{} needs the name of a file", name);
      RETURN_IF_ERROR(name == "save" ? conversation_.Save(rest) : conversation_.Load(rest));
      Note(fmt::format("{} messages {} {}", conversation_.messages().size(), name == "save" ? "in" : "from",
                       rest));
      return OkStatus();
    }
    if (name == "stats") return Stats();
    return InvalidArgument("unknown command /{}; /help lists the commands", name);
  }

  static Status Say(const std::string& text) {
    WriteNotice(text);
    return OkStatus();
  }

  Status System(const std::string& rest) {
    if (!rest.empty()) conversation_.set_system(rest == "\"\"" ? "" : rest);
    Note(conversation_.system().empty() ? "no system prompt" : "system: " + conversation_.system());
    return OkStatus();
  }

  Status Regenerate() {
    if (!conversation_.DropAnswer()) return InvalidArgument("there is no answer yet");
    return AnswerLast();
  }

  Status Set(const std::string& rest) {
    if (!rest.empty()) {
      const size_t space = rest.find(' ');
      if (space == std::string::npos)
        return InvalidArgument("/set needs a name and a value: /set temperature 0.7");
      RETURN_IF_ERROR(
          SetSampling(rest.substr(0, space), rest.substr(rest.find_first_not_of(' ', space)), &sampling_));
    }
    Note(DescribeSampling(sampling_));
    return OkStatus();
  }

  Status Stats() const {
    const models::ModelInfo& info = session_.model->info();
    const engine::EngineStats stats = session_.engine->stats();
    Note(fmt::format("{}: {} parameters, {} active, {} of {}, {} threads", info.model_type,
                     FormatCount(static_cast<double>(info.parameters)),
                     FormatCount(static_cast<double>(info.active_parameters)),
                     FormatBytes(static_cast<double>(info.weight_bytes)), DescribeWeights(info),
                     session_.threads->size()));
    Note(fmt::format("{} messages, context of {} tokens, {} KV blocks", conversation_.messages().size(),
                     session_.engine->max_context(), stats.total_blocks));
    Note(fmt::format("{} prompt tokens in {:.2f} s, {} output tokens in {:.2f} s", stats.prompt_tokens,
                     stats.prefill_seconds, stats.output_tokens, stats.decode_seconds));
    Note(fmt::format("speculative decoding: {}", DescribeSpeculation(*session_.engine)));
    return OkStatus();
  }

  Session& session_;
  const ModelText& text_;
  engine::SamplingParams sampling_;
  const std::vector<std::string> stops_;
  const bool quiet_;
  Conversation conversation_;
  LineReader reader_;
  std::string dim_, plain_;
};

Status RunChat(const ChatFlags& options) {
  InterruptGuard guard;
  ASSIGN_OR_RETURN(const ModelText text, OpenModelText(options.model.model));
  RETURN_IF_ERROR(text.tokenizer.status());
  RETURN_IF_ERROR(text.chat.status());
  ASSIGN_OR_RETURN(const engine::SamplingParams sampling, ResolveSampling(options.sampling, text.generation));
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, OpenSession(options.model));
  RETURN_IF_ERROR(StartEngine(*session, options.model, {.max_sequences = 1, .eos_ids = text.eos_ids}));
  Chat chat(options, *session, text, sampling);
  if (options.prompt.empty()) return chat.Talk();
  RETURN_IF_ERROR(chat.AnswerQuestion(options.prompt));
  return Interrupted() ? Cancelled("interrupted") : OkStatus();
}

}  // namespace

void AddChat(Verb& root, VerbRun& run) {
  auto options = std::make_shared<ChatFlags>();
  Verb verb = root.AddVerb("chat", "Talk to a model");
  AddModelFlags(verb, options->model, /*answers=*/true);
  AddCacheFlags(verb, options->model);
  AddSpeculativeFlags(verb, options->model);
  verb.AddOption("-p,--prompt", options->prompt, "Answer this question and exit");
  verb.AddOption("--system", options->system, "System prompt of the conversation");
  AddSamplingFlags(verb, options->sampling, 1024);
  verb.AddFlag("-q,--quiet", options->quiet, "Do not print the speed after an answer");
  verb.Footer(fmt::format(
      "In a conversation:\n{}"
      "\nAnswers are written to stdout, everything else to stderr. Without a terminal, every line of stdin "
      "is a message.\n\n"
      "Examples:\n"
      "  moesaic chat models/moesaic-tiny\n"
      "  moesaic chat model.gguf --system \"You answer in one sentence.\" --temperature 0.3\n"
      "  moesaic chat model/ -p \"What is the capital of France?\" --temperature 0",
      kCommandHelp));
  verb.OnParsed([options, &run] {
    run = [options] { return RunOnRanks(options->model, [options] { return RunChat(*options); }); };
  });
}

}  // namespace moesaic::app
