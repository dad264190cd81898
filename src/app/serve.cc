// `moesaic serve MODEL`: serves a model over the APIs of OpenAI and Anthropic.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "app/interrupt.h"
#include "app/logging.h"
#include "app/model_files.h"
#include "app/model_text.h"
#include "app/output.h"
#include "app/sampling_flags.h"
#include "app/serve_flags.h"
#include "app/serve_keys.h"
#include "app/service_notify.h"
#include "app/session.h"
#include "app/sparsity_flags.h"
#include "app/speculative_flags.h"
#include "app/table.h"
#include "app/verb.h"
#include "engine/engine_thread.h"
#include "engine/ranked_executor.h"
#include "server/http_server.h"
#include "server/server.h"

namespace moesaic::app {
namespace {

constexpr std::chrono::milliseconds kPoll{50};
// Steps that take longer are logged.
constexpr double kSlowStepSeconds = 1;
// For clients to take the last bytes of answers that the drain deadline ended.
constexpr std::chrono::seconds kFlushTime{2};
// For the engine's last requests to end after a rank failed.
constexpr std::chrono::seconds kFailureTime{2};
// For clients to read errors after a rank failed. Other ranks wait for the end of the job, and a server needs
// some time to close its connections.
constexpr std::chrono::seconds kMaxFailureTime{engine::kEndSeconds - 20};

StatusOr<std::optional<engine::DiskOptions>> DiskOf(const ServeFlags& flags) {
  if (flags.disk_folder.empty()) {
    if (flags.disk_bytes == ServeFlags().disk_bytes) return std::nullopt;
    return InvalidArgument("--kv-disk-size needs --kv-disk, the folder whose files it limits");
  }
  if (!flags.prefix_cache) return InvalidArgument("--kv-disk goes with --prefix-cache");
  // The engine would refuse it as well, but after minutes of loading.
  if (flags.model.job != nullptr && flags.model.job->layout().ranks() > 1)
    return InvalidArgument(
        "--kv-disk goes with one rank: its files have whole blocks, and each rank has a part");
  ASSIGN_OR_RETURN(std::string files, DescribeFiles(flags.model.model));
  return engine::DiskOptions{
      .folder = flags.disk_folder, .bytes = flags.disk_bytes, .model = std::move(files)};
}

// The engine would refuse the events as well, but after minutes of loading.
Status CheckEvents(const ServeFlags& flags) {
  if (flags.kv_events.endpoint.empty() || flags.model.job == nullptr) return OkStatus();
  const parallel::Degrees& degrees = flags.model.job->layout().degrees();
  if (degrees.data == 1) return OkStatus();
  return InvalidArgument(
      "KV events describe one cache, but {} has one for each replica; start one server for each",
      Name(degrees));
}

StatusOr<server::ServedModel> ServeModel(const ServeFlags& flags, const ModelText& text,
                                         const Session& session) {
  if (!text.tokenizer.ok()) return Annotate(text.tokenizer.status(), "serving needs a tokenizer");
  ASSIGN_OR_RETURN(text::GrammarCompiler grammars,
                   text::GrammarCompiler::Create(*text.tokenizer, text.eos_ids, flags.grammar_limits));
  ASSIGN_OR_RETURN(engine::SamplingParams defaults,
                   ResolveSampling(SamplingFlags(), text.generation, kServerTemperature));
  ASSIGN_OR_RETURN(const std::optional<int> max_new_tokens, MaxNewTokens(text.generation));
  server::ServedModel model{.names = flags.names,
                            .tokenizer = *text.tokenizer,
                            .chat = {},
                            .grammars = std::move(grammars),
                            .defaults = {}};
  if (model.names.empty()) model.names = {ModelName(flags.model.model)};
  model.defaults = defaults;
  model.default_output = max_new_tokens.value_or(model.default_output);
  // A model without a template serves completions only; a broken template is an error.
  if (!text.chat.ok() && text.chat.status().code() != StatusCode::kNotFound) return text.chat.status();
  if (text.chat.ok()) {
    model.chat.emplace(*text.chat);
    model.tools = text::DetectToolFormat(text.chat->source());
    model.reasoning = text::DetectReasoningFormat(text.chat->source());
  }
  if (flags.tool_format != "auto") {
    ASSIGN_OR_RETURN(model.tools, text::ParseToolFormat(flags.tool_format));
  }
  if (flags.reasoning_format != "auto") {
    ASSIGN_OR_RETURN(model.reasoning, text::ParseReasoningFormat(flags.reasoning_format));
  }
  model.max_context = session.engine->max_context();
  model.vocab_size = static_cast<int>(session.model->info().vocab_size);
  model.sparsity = session.engine->sparsity();
  model.longest_token = server::LongestToken(model.tokenizer);
  model.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  return model;
}

void Describe(spdlog::logger& log, const ServeFlags& flags, const Session& session,
              const server::ServedModel& model, const engine::EngineThread& engine,
              const std::string& speculation) {
  const engine::EngineStats stats = engine.stats();
  log.info("{} as \"{}\", loaded in {:.1f} s; context {} tokens, {} KV blocks of {} tokens",
           flags.model.model, model.names.front(), session.load_seconds, model.max_context,
           stats.total_blocks, tensor::kKvBlockTokens);
  log.info("{}", DescribeWeights(session.model->info()));
  if (flags.model.job != nullptr) log.info("ranks: {}", flags.model.job->Describe());
  log.info("kernels: {}", session.tuning);
  log.info("tools: {}, reasoning: {}, chat template: {}", text::Name(model.tools),
           text::Name(model.reasoning), model.chat ? "yes" : "none");
  log.info("speculative decoding: {}", speculation);
  log.info("block-sparse attention: {}", DescribeSparsity(model.sparsity));
  if (!flags.disk_folder.empty()) {
    log.info("KV blocks on disk: {} in {}, which may take {}", stats.disk.blocks, flags.disk_folder,
             FormatBytes(static_cast<double>(flags.disk_bytes)));
  }
  std::set<std::string> kernels;  // operators share some
  for (const auto& choice : session.kernels.choices) kernels.insert(choice.name);
  log.info("kernels: {}", fmt::join(kernels, ", "));
}

// When draining must have ended; far away before it begins.
using DrainEnd = std::atomic<std::chrono::steady_clock::time_point>;

bool MustStop(const DrainEnd& end) {
  const std::chrono::steady_clock::time_point then = end;
  return then != then.max() && (Interrupted() || std::chrono::steady_clock::now() >= then);
}

// Grows while the engine computes steps or loads blocks from disk.
uint64_t StepProgress(const engine::EngineStats& stats) {
  return static_cast<uint64_t>(stats.steps + stats.disk.loads + stats.disk.abandoned_loads +
                               stats.disk.loaded_bytes);
}

// The parts of a running server that signals concern.
struct Running {
  spdlog::logger& log;
  server::Server& server;
  const engine::EngineThread& engine;
  const ServiceNotifier& notifier;
  const RankJob* job = nullptr;  // null: one rank
  Watchdog watchdog{notifier};

  /// Of a rank, after which no step can be computed.
  Status Failure() const {
    if (job == nullptr) return OkStatus();
    const Status ended = job->Failure();
    return ended.ok() ? engine.failure() : ended;
  }

  // Waits until `done`, at most until the clock says `end`.
  template <typename Done>
  void SleepUntil(std::chrono::steady_clock::time_point end, const Done& done) {
    while (!done() && std::chrono::steady_clock::now() < end) Sleep();
  }
  // An answer that is complete may still be on its way to a client that reads slowly.
  bool AnswersEnded() const { return server.idle() && server.flushed(); }
  // Waits until all answers have ended or MustStop(end). Returns whether they have ended.
  bool AwaitAnswers(const DrainEnd& end) {
    while (!AnswersEnded()) {
      if (MustStop(end)) return false;
      Sleep();
    }
    return true;
  }
  // Ends the running answers with an error, which clients get some time to read.
  void CutAnswers() {
    server.StopAnswers();
    SleepUntil(std::chrono::steady_clock::now() + kFlushTime, [this] { return server.flushed(); });
  }
  void Sleep() {
    watchdog.Check(engine.idle(), StepProgress(engine.stats()));
    std::this_thread::sleep_for(kPoll);
  }
};

// Shuts down in order. New calls are refused, running ones have until the drain timeout to finish, and the
// rest ends with an error that gives the reason.
void ShutDown(const ServeFlags& flags, Running& running, DrainEnd* end) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto elapsed = [start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  ClearInterrupt();
  running.notifier.Send("STOPPING=1\nSTATUS=draining");
  *end = std::chrono::steady_clock::now() + std::chrono::seconds(flags.drain_seconds);
  running.server.Drain();
  const engine::EngineStats stats = running.engine.stats();
  running.log.info("draining: at most {} s; {} requests run and {} wait", flags.drain_seconds, stats.running,
                   stats.waiting);
  if (running.AwaitAnswers(*end)) {
    running.log.info("drained: all answers ended after {:.1f} s", elapsed());
  } else {
    running.log.warn("drain deadline reached: ending the running answers with an error");
    running.CutAnswers();
  }
  running.server.Close();
  while (!running.engine.idle()) running.Sleep();
  running.log.info("engine idle after {:.1f} s", elapsed());
}

// One thing that SIGHUP reloads. `reload` keeps the old state when it fails.
struct ReloadHook {
  std::string name;
  std::function<Status()> reload;
};

void Reload(spdlog::logger& log, const std::vector<ReloadHook>& hooks) {
  if (hooks.empty()) {
    log.info("SIGHUP: no key file, certificate or log file is set, so there is nothing to reload");
  }
  for (const ReloadHook& hook : hooks) {
    if (const Status status = hook.reload(); !status.ok()) {
      log.error("reload of {} failed, the old state stays in use: {}", hook.name, Message(status));
    } else {
      log.info("reloaded {}", hook.name);
    }
  }
}

// Ends the server after a rank failed: the engine's requests end with an error, which clients have the drain
// timeout to read.
void ShutDownFailed(const ServeFlags& flags, const Status& failure, Running& running) {
  running.log.error("{}; the server stops", Message(failure));
  running.notifier.Send("STOPPING=1\nSTATUS=a rank failed");
  running.server.Fail(Message(failure));
  const auto time = std::clamp(std::chrono::seconds(flags.drain_seconds), kFailureTime, kMaxFailureTime);
  running.AwaitAnswers(DrainEnd(std::chrono::steady_clock::now() + time));
  running.CutAnswers();
  running.server.Close();
  // The engine's thread may still end requests, whose endpoints belong to the server.
  running.SleepUntil(std::chrono::steady_clock::now() + kFailureTime,
                     [&running] { return running.engine.idle(); });
}

// Returns at SIGINT or SIGTERM, or with the failure of a rank. Also handles a SIGHUP that came while the
// model was loaded.
Status WaitForInterrupt(Running& running, const std::vector<ReloadHook>& hooks) {
  while (!Interrupted()) {
    RETURN_IF_ERROR(running.Failure());
    if (TakeReload()) {
      running.notifier.Reloading();
      Reload(running.log, hooks);
      running.notifier.Send("READY=1");
    }
    running.Sleep();
  }
  return OkStatus();
}

std::vector<ReloadHook> ReloadHooks(const ServeFlags& flags, const ServerLog& log,
                                    const std::shared_ptr<server::KeyRing>& keys) {
  std::vector<ReloadHook> hooks;
  // First, so that the other hooks write to the new file.
  if (log.reopen) hooks.push_back({"--log-file", log.reopen});
  if (!flags.keys.file.empty()) {
    hooks.push_back({"--api-key-file", [&flags, keys]() -> Status {
                       ASSIGN_OR_RETURN(const std::vector<server::KeyEntry> entries, ReadKeys(flags.keys));
                       keys->Replace(entries);
                       return OkStatus();
                     }});
  }
  return hooks;
}

// Raises the limit of open files to that of the connections, as far as the system allows. Many systems start
// programs with 1024, and a server without a free descriptor cannot read its key file either.
void RaiseFileLimit(int64_t connections) {
  constexpr int64_t kOtherFiles = 512;  // model files, blocks on disk, logs, sockets of ranks
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto wanted = static_cast<rlim_t>(connections + kOtherFiles);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    spdlog::warn("the limit of open files can't be raised: {}", std::strerror(errno));
    return;
  }
  if (limit.rlim_cur >= wanted) return;
  spdlog::warn("the limit of open files is {}, less than --max-connections {} needs: raise it (ulimit -Hn)",
               limit.rlim_cur, connections);
}

std::string Address(const ServeFlags& flags, int port) {
  const std::string& host = flags.http.host;
  const bool ipv6 = host.find(':') != std::string::npos;
  const char* scheme = flags.http.tls_certificate.empty() ? "http" : "https";
  return fmt::format("{}://{}:{}", scheme, ipv6 ? "[" + host + "]" : host, port);
}

Status RunServe(const ServeFlags& flags) {
  if (flags.max_batch_tokens < flags.max_sequences) {
    return InvalidArgument("--max-batch-tokens must be at least --max-sequences ({}), found {}",
                           flags.max_sequences, flags.max_batch_tokens);
  }
  ASSIGN_OR_RETURN(const std::optional<engine::DiskOptions> disk, DiskOf(flags));
  RETURN_IF_ERROR(CheckEvents(flags));
  InterruptGuard guard(HangUp::kReloads);
  LogOptions log_options = flags.log;
  if (flags.no_access_log) log_options.access = "off";
  ASSIGN_OR_RETURN(const ServerLog server_log, OpenLog(log_options));
  const std::shared_ptr<spdlog::logger> log = server_log.logger;
  spdlog::set_default_logger(log);  // for all rooms; stdout has the address only
  const server::AccessLog access_log = MakeAccessLog(log_options, server_log);
  RaiseFileLimit(flags.http.max_connections);
  ASSIGN_OR_RETURN(const std::vector<server::KeyEntry> entries, ReadKeys(flags.keys));
  const auto keys = entries.empty() ? nullptr : std::make_shared<server::KeyRing>(entries);
  const ServiceNotifier notifier;
  notifier.Send("STATUS=loading the model");
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  log->info("moesaic {}: opening {}", MOESAIC_VERSION, flags.model.model);
  ASSIGN_OR_RETURN(const ModelText text, OpenModelText(flags.model.model));
  log->info("read the tokenizer in {:.1f} s: {} tokens, {} of them end an answer", elapsed(),
            text.tokenizer.ok() ? text.tokenizer->vocab_size() : 0, text.eos_ids.size());
  // Binds before the model is loaded, which may take minutes. An address that is taken is reported at once,
  // and clients and probes get 503 meanwhile.
  ASSIGN_OR_RETURN(std::unique_ptr<server::HttpServer> http, server::HttpServer::Listen(flags.http));
  http->Start(server::LoadingHooks(access_log));
  log->info("listening on {}; requests get 503 until the model is loaded", Address(flags, http->port()));
  std::vector<ReloadHook> reload_hooks = ReloadHooks(flags, server_log, keys);
  if (!flags.http.tls_certificate.empty()) {
    server::HttpServer* const transport = http.get();
    reload_hooks.push_back({"the TLS certificate and key", [transport] { return transport->ReloadTls(); }});
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, OpenSession(flags.model));
  log->info("loaded {} of weights in {:.1f} s with {} threads",
            FormatBytes(static_cast<double>(session->model->info().weight_bytes)), session->load_seconds,
            session->threads->size());
  std::shared_ptr<cache::KvObserver> observer;
  if (!flags.kv_events.endpoint.empty()) {
    ASSIGN_OR_RETURN(observer, server::KvPublisher::Create(flags.kv_events));
  }
  RETURN_IF_ERROR(
      StartEngine(*session, flags.model,
                  {.kv_bytes = flags.kv_bytes,
                   .swap_bytes = flags.swap_bytes,
                   .warm_bytes = flags.warm_bytes,
                   .max_sequences = flags.max_sequences,
                   .max_batch_tokens = flags.max_batch_tokens,
                   .max_mask_seconds = std::chrono::duration<double>(flags.grammars.max_time).count(),
                   .eos_ids = text.eos_ids,
                   .seed = flags.seed,
                   .slow_step_seconds = kSlowStepSeconds,
                   .prefix_cache = flags.prefix_cache,
                   .disk = disk,
                   .eviction = flags.eviction,
                   .kv_observer = observer}));
  log->debug("started the engine after {:.1f} s", elapsed());
  ASSIGN_OR_RETURN(server::ServedModel model, ServeModel(flags, text, *session));
  log->debug("built the grammar compiler after {:.1f} s", elapsed());
  const std::string speculation = DescribeSpeculation(*session->engine);
  DrainEnd drain_end = std::chrono::steady_clock::time_point::max();
  const auto stop_saving = [&drain_end] { return MustStop(drain_end); };
  engine::EngineThread engine(std::move(session->engine), {.max_queued = flags.max_queue,
                                                           .stop_saving = stop_saving,
                                                           .fails_for_good = flags.model.job != nullptr});
  model.engine = &engine;
  Describe(*log, flags, *session, model, engine, speculation);

  server::ServerOptions options;
  options.router = flags.router;
  options.router.keys = keys;
  options.router.browser.bound_host = flags.http.host;
  options.responses = flags.responses;
  options.grammars = flags.grammars;
  options.version = MOESAIC_VERSION;
  options.model_path = flags.model.model;
  options.kernels = session->kernels.choices;
  options.log = access_log;
  std::unique_ptr<server::Server> server = server::Server::Start(std::move(options), model, std::move(http));
  Print("listening on {}\n", Address(flags, server->port()));
  RETURN_IF_ERROR(FlushOutput());
  notifier.Send("READY=1\nSTATUS=serving");
  log->info("ready after {:.1f} s", elapsed());
  Running running{*log, *server, engine, notifier, flags.model.job.get()};
  const Status failure = WaitForInterrupt(running, reload_hooks);
  if (failure.ok()) {
    ShutDown(flags, running, &drain_end);
  } else {
    ShutDownFailed(flags, failure, running);
  }
  server.reset();  // before the engine: its endpoints use it
  log->info("stopped");
  return failure;
}

}  // namespace

void AddServe(Verb& root, VerbRun& run) {
  auto flags = std::make_shared<ServeFlags>();
  Verb verb = root.AddVerb("serve", "Answer requests over the OpenAI and Anthropic HTTP APIs");
  AddServeFlags(verb, *flags);
  verb.OnParsed([flags, verb, &run] {
    run = [flags, verb]() -> Status {
      RETURN_IF_ERROR(ReadConfigFile(verb, *flags));
      if (flags->print_config) {
        WriteOutput(PrintConfig(verb));
        return OkStatus();
      }
      return RunOnRanks(flags->model, [flags] { return RunServe(*flags); });
    };
  });
}

}  // namespace moesaic::app
