// `moesaic proxy simulate` replays traces in virtual time and compares scheduling policies.
#include "app/proxy_simulate.h"

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "app/interrupt.h"
#include "app/output.h"
#include "app/progress.h"
#include "app/table.h"
#include "proxy/simulate/simulation.h"

namespace moesaic::app {
namespace {

using proxy::SimulationResult;

struct SimulateFlags {
  std::vector<std::string> traces, policies;
  int engines = 0, prefill = 4, decode = 4, copies = 1, requests = 0;
  double rate = 0, slo_ttft = 2, slo_tpot = 0.05, starvation = 30, event_delay = 0.01, jitter = 0.03;
  int64_t kv_tokens = 1'000'000, batch_tokens = 8192, sequences = 256, seed = 1;
  double prefill_base = 16.5, prefill_token = 15.183, prefill_pair = 0.000421, step_base = 5.74,
         step_sequence = 50, step_kv = 0.012, transfer = 1;
  bool json = false, markdown = false, reject = false;
};

std::vector<std::string> AllPolicies() {
  const auto names = proxy::PolicyNames();
  return {names.begin(), names.end()};
}

proxy::SimulationOptions OptionsOf(const SimulateFlags& flags) {
  proxy::SimulationOptions options;
  options.engines = flags.engines;
  options.prefill = flags.prefill;
  options.decode = flags.decode;
  options.kv_tokens = static_cast<uint64_t>(flags.kv_tokens);
  options.engine.max_batch_tokens = static_cast<uint32_t>(flags.batch_tokens);
  options.engine.max_sequences = static_cast<uint32_t>(flags.sequences);
  options.engine.jitter = flags.jitter;
  options.engine.seed = static_cast<uint64_t>(flags.seed);
  options.engine.transfer_nanos_per_token = flags.transfer * 1e3;
  options.engine.time = {.base = flags.prefill_base * 1e6,
                         .per_token = flags.prefill_token * 1e3,
                         .per_pair = flags.prefill_pair * 1e3,
                         .step_base = flags.step_base * 1e6,
                         .per_sequence = flags.step_sequence * 1e3,
                         .per_kv_token = flags.step_kv * 1e3};
  options.policy_options.seed = static_cast<uint64_t>(flags.seed);
  options.policy_options.slo_ttft = static_cast<proxy::Nanos>(flags.slo_ttft * proxy::kSecond);
  options.policy_options.slo_tpot = static_cast<proxy::Nanos>(flags.slo_tpot * proxy::kSecond);
  options.policy_options.rejects = flags.reject;
  options.policy_options.transfer = {.latency = options.engine.transfer_latency,
                                     .nanos_per_token = options.engine.transfer_nanos_per_token};
  options.scheduler.starvation_bound = static_cast<proxy::Nanos>(flags.starvation * proxy::kSecond);
  options.scheduler.queue_limit =
      1 << 20;  // nothing is rejected because the queue is long: the load is the same for all
  options.event_delay = static_cast<proxy::Nanos>(flags.event_delay * proxy::kSecond);
  return options;
}

// Returns how many times as fast as real time a simulation ran.
double SpeedOf(const SimulationResult& r, double wall) {
  return static_cast<double>(r.virtual_time) / proxy::kSecond / wall;
}

nlohmann::ordered_json JsonOf(const SimulationResult& r, double wall) {
  return {{"policy", r.policy},
          {"requests", r.requests},
          {"completed", r.completed},
          {"rejected", r.rejected},
          {"good", r.good},
          {"offered_rate", r.offered_rate},
          {"goodput", r.goodput},
          {"ttft_ms", {{"p50", r.ttft_ms[0]}, {"p90", r.ttft_ms[1]}, {"p99", r.ttft_ms[2]}}},
          {"tpot_ms", {{"p50", r.tpot_ms[0]}, {"p90", r.tpot_ms[1]}, {"p99", r.tpot_ms[2]}}},
          {"hit_rate", r.hit_rate},
          {"imbalance", r.imbalance},
          {"utilization", r.utilization},
          {"longest_wait_s", static_cast<double>(r.longest_wait) / proxy::kSecond},
          {"prefill_skipped", r.prefill_skipped},
          {"preemptions", r.preemptions},
          {"virtual_s", static_cast<double>(r.virtual_time) / proxy::kSecond},
          {"wall_s", wall},
          {"times_real_time", SpeedOf(r, wall)}};
}

std::vector<std::string> RowOf(const SimulationResult& r) {
  return {r.policy,
          fmt::format("{:.2f}", r.goodput),
          fmt::format("{:.1f}", 100.0 * static_cast<double>(r.good) / static_cast<double>(r.requests)),
          fmt::format("{:.0f}", r.ttft_ms[0]),
          fmt::format("{:.0f}", r.ttft_ms[1]),
          fmt::format("{:.0f}", r.ttft_ms[2]),
          fmt::format("{:.1f}", r.tpot_ms[0]),
          fmt::format("{:.1f}", r.tpot_ms[2]),
          fmt::format("{:.1f}", 100 * r.hit_rate),
          fmt::format("{:.2f}", r.imbalance),
          fmt::format("{:.0f}", 100 * r.utilization),
          fmt::format("{}", r.rejected)};
}

StatusOr<proxy::Trace> LoadTrace(const std::string& path, const SimulateFlags& flags) {
  ASSIGN_OR_RETURN(proxy::Trace trace, proxy::ReadTrace(path));
  if (flags.copies > 1) trace.Replicate(flags.copies);
  if (flags.rate > 0) trace.ScaleTo(flags.rate);
  if (flags.requests > 0) trace.Truncate(static_cast<size_t>(flags.requests));
  return trace;
}

Status RunSimulate(const SimulateFlags& flags) {
  const InterruptGuard guard;
  const std::vector<std::string> policies = flags.policies.empty() ? AllPolicies() : flags.policies;
  nlohmann::ordered_json document = nlohmann::ordered_json::array();
  for (const std::string& path : flags.traces) {
    ASSIGN_OR_RETURN(const proxy::Trace trace, LoadTrace(path, flags));
    std::vector<std::vector<std::string>> rows = {{"policy", "goodput/s", "in SLO %", "TTFT p50", "p90",
                                                   "p99 ms", "TPOT p50", "p99 ms", "hit %", "imbalance",
                                                   "busy %", "rejects"}};
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    double fastest = 0, slowest = 0;
    for (const std::string& policy : policies) {
      proxy::SimulationOptions options = OptionsOf(flags);
      options.policy = policy;
      Progress progress(trace.name + " " + policy);
      const auto start = std::chrono::steady_clock::now();
      const auto result = proxy::Simulate(trace, options, [&](uint64_t done) {
        progress.Show(static_cast<int64_t>(done), static_cast<int64_t>(trace.requests.size()), "");
        return !Interrupted();
      });
      if (!result.ok()) return Annotate(result.status(), trace.name + ", " + policy);
      const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      const double speed = SpeedOf(*result, wall);
      fastest = std::max(fastest, speed);
      slowest = slowest == 0 ? speed : std::min(slowest, speed);
      rows.push_back(RowOf(*result));
      results.push_back(JsonOf(*result, wall));
    }
    const double span = static_cast<double>(trace.span()) / proxy::kSecond;
    if (flags.json) {
      document.push_back({{"trace", trace.name},
                          {"requests", trace.requests.size()},
                          {"span_s", span},
                          {"reusable", trace.reusable()},
                          {"goodput_bound", proxy::GoodputBound(trace, OptionsOf(flags))},
                          {"common_cache_goodput", proxy::CommonCacheGoodput(trace, OptionsOf(flags))},
                          {"results", std::move(results)}});
      continue;
    }
    const std::string cluster =
        flags.engines > 0 ? fmt::format("{} aggregated engines", flags.engines)
                          : fmt::format("{} prefill and {} decode engines", flags.prefill, flags.decode);
    Print(
        "{}: {} requests in {:.0f} s ({:.2f}/s), prompts of {:.0f} tokens, answers of {:.0f}, {:.1f}% of the "
        "prompt "
        "tokens reusable\n{}; SLO: TTFT {} s, TPOT {} ms\n\n",
        trace.name, trace.requests.size(), span,
        static_cast<double>(trace.requests.size()) / std::max(span, 1e-9),
        static_cast<double>(trace.prompt_tokens()) / static_cast<double>(trace.requests.size()),
        static_cast<double>(trace.output_tokens()) / static_cast<double>(trace.requests.size()),
        100 * trace.reusable(), cluster, flags.slo_ttft, flags.slo_tpot * 1000);
    Print("{}\n", FormatTable(rows, flags.markdown));
    Tell("{}: simulated {:.0f} to {:.0f} times as fast as real time\n", trace.name, slowest, fastest);
  }
  if (flags.json) Print("{}\n", document.dump(1));
  return OkStatus();
}

void AddEngineFlags(const Verb& verb, SimulateFlags& flags) {
  const std::string group = "Engines";
  verb.AddOption("--kv-tokens", flags.kv_tokens, "KV cache of an engine in tokens")
      .Range(int64_t{1024}, int64_t{1} << 40)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--batch-tokens", flags.batch_tokens, "Token budget of a step")
      .Range(int64_t{16}, int64_t{1} << 24)
      .ShowDefault()
      .Group(group);
  verb.AddOption("--sequences", flags.sequences, "Sequences that run at once")
      .Range(int64_t{1}, int64_t{1} << 20)
      .ShowDefault()
      .Group(group);
  const auto time = [&](const char* name, double& value, const char* help) {
    verb.AddOption(name, value, help).Range(0.0, 1e9).ShowDefault().Group(group);
  };
  time("--prefill-base", flags.prefill_base, "Milliseconds of a step with prefill");
  time("--prefill-token", flags.prefill_token, "Microseconds per computed prompt token");
  time("--prefill-pair", flags.prefill_pair, "Microseconds per pair of tokens in (new+cached)^2 - cached^2");
  time("--step-base", flags.step_base, "Milliseconds of a decode step");
  time("--step-sequence", flags.step_sequence, "Microseconds per sequence of a step");
  time("--step-kv", flags.step_kv, "Microseconds per token of context in a step");
  time("--transfer", flags.transfer, "Microseconds per token to move KV from P to D");
  time("--jitter", flags.jitter, "Relative standard deviation of step times");
}

}  // namespace

void AddProxySimulate(const Verb& proxy, VerbRun& run) {
  auto flags = std::make_shared<SimulateFlags>();
  const Verb verb = proxy.AddVerb("simulate", "Replay traces in virtual time and compare policies");
  verb.AddOption("TRACE", flags->traces,
                 "Mooncake JSON lines, Azure CSV, sessions of kv-cache-tester, or SWE-agent trajectories "
                 "(.traj, .tar.gz)")
      .ExistingFile()
      .Required();
  verb.AddOption("--policies", flags->policies, "Policies to compare; default: all")
      .OneOf(AllPolicies())
      .Delimiter(',')
      .OneValue();
  verb.AddOption("--engines", flags->engines, "Aggregated engines, instead of prefill and decode engines")
      .Range(1, proxy::kMaxInstances);
  verb.AddOption("--prefill", flags->prefill, "Prefill engines").Range(1, proxy::kMaxInstances).ShowDefault();
  verb.AddOption("--decode", flags->decode, "Decode engines").Range(1, proxy::kMaxInstances).ShowDefault();
  verb.AddOption("--rate", flags->rate, "Mean requests per second; default: that of the trace")
      .Range(1e-6, 1e6);
  verb.AddOption("--copies", flags->copies, "Copies of the trace with prefixes of their own, shifted in time")
      .Range(1, 10'000)
      .ShowDefault();
  verb.AddOption("--requests", flags->requests, "Requests to take from the beginning; default: all")
      .Range(1, 1 << 30);
  verb.AddOption("--slo-ttft", flags->slo_ttft, "Target for the time to the first token, in seconds")
      .Range(0.001, 1e6)
      .ShowDefault();
  verb.AddOption("--slo-tpot", flags->slo_tpot, "Target for the mean time per further token, in seconds")
      .Range(0.0001, 1e6)
      .ShowDefault();
  verb.AddOption("--starvation", flags->starvation, "Starvation bound of the queue, in seconds")
      .Range(0.001, 1e6)
      .ShowDefault();
  verb.AddOption("--event-delay", flags->event_delay, "Delay of KV events, in seconds")
      .Range(0.0, 60.0)
      .ShowDefault();
  verb.AddFlag("--reject", flags->reject, "Let policies reject requests that would miss the TTFT target");
  verb.AddOption("--seed", flags->seed, "Seed of the random numbers")
      .Range(int64_t{0}, int64_t{1} << 62)
      .ShowDefault();
  verb.AddFlag("--json", flags->json, "Print JSON");
  verb.AddFlag("--markdown", flags->markdown, "Print Markdown tables");
  AddEngineFlags(verb, *flags);
  verb.Footer(
      "Goodput counts requests that meet both targets. All policies get the same arrivals, and nothing is "
      "rejected by "
      "default.\ndocs/proxy-policies.md describes the columns.\n\n"
      "Examples:\n"
      "  moesaic proxy simulate mooncake_synthetic_trace.jsonl.gz --rate 11\n"
      "  moesaic proxy simulate AzureLLMInferenceTrace_code.csv.gz --engines 8 --rate 60 --policies "
      "moesaic,omni --json");
  verb.OnParsed([flags, &run] { run = [flags] { return RunSimulate(*flags); }; });
}

}  // namespace moesaic::app
