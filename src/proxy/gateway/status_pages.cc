#include "proxy/gateway/status_pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>

#include "proxy/gateway/gateway.h"
#include "proxy/protocol/json_members.h"

namespace moesaic::proxy {
namespace {

double Seconds(Nanos time) { return static_cast<double>(time) * 1e-9; }

std::string Label(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '"' || c == '\\') escaped += '\\';
    if (c == '\n') {
      escaped += "\\n";
      continue;
    }
    escaped += c;
  }
  return escaped;
}

// Writes metrics of one pool.
class Writer {
 public:
  explicit Writer(std::string_view pool) : pool_(Label(pool)) {}

  void Family(std::string_view name, std::string_view type, std::string_view help) {
    fmt::format_to(std::back_inserter(text_), "# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
    name_ = name;
  }
  template <typename Value>
  void Sample(const std::string& labels, Value value) {
    fmt::format_to(std::back_inserter(text_), "{}{{pool=\"{}\"{}{}}} {}\n", name_, pool_,
                   labels.empty() ? "" : ",", labels, value);
  }
  template <typename Value>
  void One(std::string_view name, std::string_view type, std::string_view help, Value value) {
    Family(name, type, help);
    Sample("", value);
  }
  void Distribution(const std::string& labels, const Histogram& histogram) {
    const std::string name(name_);
    const std::string comma = labels.empty() ? "" : ",";
    uint64_t count = 0;
    for (int i = 0; i < Histogram::num_buckets(); ++i) {
      count += histogram.bucket(i);
      const bool last = i + 1 == Histogram::num_buckets();
      const std::string bound =
          last ? "+Inf" : fmt::format("{}", Seconds(kHistogramBounds[static_cast<size_t>(i)]));
      fmt::format_to(std::back_inserter(text_), "{}_bucket{{pool=\"{}\"{}{},le=\"{}\"}} {}\n", name, pool_,
                     comma, labels, bound, count);
    }
    fmt::format_to(std::back_inserter(text_), "{}_sum{{pool=\"{}\"{}{}}} {}\n", name, pool_, comma, labels,
                   Seconds(histogram.sum()));
    fmt::format_to(std::back_inserter(text_), "{}_count{{pool=\"{}\"{}{}}} {}\n", name, pool_, comma, labels,
                   count);
  }
  std::string Take() { return std::move(text_); }

 private:
  std::string pool_, text_;
  std::string name_;
};

std::string StageLabel(Stage stage) { return fmt::format("stage=\"{}\"", StageName(stage)); }

std::string EngineLabel(const InstanceRecord& engine) {
  return fmt::format("engine=\"{}\",rank=\"{}\",role=\"{}\"", Label(engine.config.url), engine.config.dp_rank,
                     RoleName(engine.config.role));
}

template <typename Value>
void PerEngine(Writer& out, const std::vector<InstanceRecord>& engines, std::string_view name,
               std::string_view type, std::string_view help, Value value) {
  out.Family(name, type, help);
  for (const InstanceRecord& engine : engines) out.Sample(EngineLabel(engine), value(engine));
}

void EngineMetrics(Writer& out, Gateway& gateway) {
  const std::vector<InstanceRecord> engines = gateway.state().Instances();
  const Nanos now = gateway.now();
  using Engine = const InstanceRecord&;
  PerEngine(out, engines, "moesaic_proxy_engine_up", "gauge", "1: the engine gets requests.",
            [now](Engine e) {
              return e.state == InstanceState::kEnabled && e.healthy && e.closed_until <= now ? 1 : 0;
            });
  PerEngine(out, engines, "moesaic_proxy_engine_prefill_requests", "gauge",
            "Requests scheduled or running prefill.", [](Engine e) { return e.load.prefill_requests; });
  PerEngine(out, engines, "moesaic_proxy_engine_prefill_tokens", "gauge", "Uncached prompt tokens of these.",
            [](Engine e) { return e.load.prefill_tokens; });
  PerEngine(out, engines, "moesaic_proxy_engine_decode_requests", "gauge", "Requests that decode.",
            [](Engine e) { return e.load.decode_requests; });
  PerEngine(out, engines, "moesaic_proxy_engine_decode_tokens", "gauge", "Context tokens of these.",
            [](Engine e) { return e.load.decode_tokens; });
  PerEngine(out, engines, "moesaic_proxy_engine_index_exact", "gauge",
            "1: the prefix index follows the engine's KV events without a gap.",
            [](Engine e) { return e.index_state == IndexState::kExact ? 1 : 0; });
  PerEngine(out, engines, "moesaic_proxy_engine_block_size_differs", "gauge",
            "1: the engine's KV blocks have another size than block_size of the pool, so that no prompt is "
            "matched with its cache.",
            [size = gateway.settings().block_size](Engine e) { return e.config.block_size != size ? 1 : 0; });
  PerEngine(out, engines, "moesaic_proxy_engine_requests_total", "counter",
            "Requests that the engine completed.", [](Engine e) { return e.completed; });
  PerEngine(out, engines, "moesaic_proxy_engine_failures_total", "counter",
            "Requests that failed on the engine.", [](Engine e) { return e.failed; });
  PerEngine(out, engines, "moesaic_proxy_engine_prompt_tokens_total", "counter",
            "Prompt tokens sent to the engine.", [](Engine e) { return e.prompt_tokens; });
  PerEngine(out, engines, "moesaic_proxy_engine_cached_tokens_total", "counter",
            "Prompt tokens in the engine's cache.", [](Engine e) { return e.cached_tokens; });
}

std::string_view NameOfState(const InstanceRecord& engine, Nanos now) {
  if (engine.state != InstanceState::kEnabled) return InstanceStateName(engine.state);
  if (!engine.healthy) return "unhealthy";
  if (engine.closed_until > now) return "breaker open";
  return "enabled";
}

}  // namespace

std::string MetricsText(Gateway& gateway) {
  const Totals totals = gateway.state().ReadTotals();
  Board& board = gateway.board();
  Writer out(gateway.settings().name);
  out.Family("moesaic_proxy_requests", "gauge", "Requests that are in a stage now.");
  for (int i = 0; i + 1 < kNumStages; ++i) {
    out.Sample(StageLabel(static_cast<Stage>(i)), totals.in_stage[static_cast<size_t>(i)]);
  }
  out.Family("moesaic_proxy_stage_entered_total", "counter", "Requests that entered a stage.");
  for (int i = 0; i < kNumStages; ++i) {
    out.Sample(StageLabel(static_cast<Stage>(i)), totals.entered[static_cast<size_t>(i)]);
  }
  out.Family("moesaic_proxy_requests_total", "counter", "Requests by outcome.");
  for (int i = 0; i < kNumOutcomes; ++i) {
    out.Sample(fmt::format("outcome=\"{}\"", OutcomeName(static_cast<Outcome>(i))),
               totals.outcomes[static_cast<size_t>(i)]);
  }
  out.Family("moesaic_proxy_stage_seconds", "histogram", "Time in a stage.");
  for (int i = 0; i + 1 < kNumStages; ++i) {
    const Stage stage = static_cast<Stage>(i);
    out.Distribution(StageLabel(stage), gateway.state().stage_histogram(stage));
  }
  out.Family("moesaic_proxy_time_to_first_token_seconds", "histogram",
             "From the request to its first token.");
  out.Distribution("", gateway.state().ttft());
  out.Family("moesaic_proxy_time_per_output_token_seconds", "histogram",
             "Mean time between tokens of a request.");
  out.Distribution("", gateway.state().tpot());
  out.Family("moesaic_proxy_request_seconds", "histogram", "From the request to its end.");
  out.Distribution("", gateway.state().e2e());
  out.One("moesaic_proxy_prompt_tokens_total", "counter", "Prompt tokens of completed requests.",
          totals.prompt_tokens);
  out.One("moesaic_proxy_cached_tokens_total", "counter", "Prompt tokens found in caches.",
          totals.cached_tokens);
  out.One("moesaic_proxy_output_tokens_total", "counter", "Output tokens.", totals.output_tokens);
  out.One("moesaic_proxy_slots_used", "gauge", "Request slots in use.", totals.slots_used);
  out.One("moesaic_proxy_keys_used", "gauge", "Block keys of requests in use.", totals.keys_used);
  out.One("moesaic_proxy_repairs_total", "counter", "Repairs of counters after a process died.",
          totals.repairs);
  out.One("moesaic_proxy_reclaimed_total", "counter", "Requests of dead workers that were freed.",
          totals.reclaimed);
  out.One("moesaic_proxy_retries_total", "counter", "Attempts on another engine.", board.retries.load());
  out.One("moesaic_proxy_released_kv_total", "counter", "Fetches of KV blocks whose client left.",
          board.released_kv.load());
  out.One("moesaic_proxy_failed_releases_total", "counter", "Fetches of abandoned KV blocks that failed.",
          board.failed_releases.load());
  out.One("moesaic_proxy_takeovers_total", "counter", "Changes of the scheduling worker.",
          board.takeovers.load());
  out.One("moesaic_proxy_rendered_total", "counter", "Prompts tokenized by the proxy.",
          board.rendered.load());
  out.One("moesaic_proxy_unrendered_total", "counter", "Prompts left to the engines.",
          board.unrendered.load());
  out.One("moesaic_proxy_kv_messages_total", "counter", "KV event messages.", board.kv_messages.load());
  out.One("moesaic_proxy_kv_gaps_total", "counter", "Gaps in the sequence numbers of KV event messages.",
          board.kv_gaps.load());
  out.One("moesaic_proxy_kv_errors_total", "counter", "Damaged KV event messages.", board.kv_errors.load());
  out.One("moesaic_proxy_discovery_errors_total", "counter",
          "Lookups of engines' names that failed, answers of etcd that failed, and values there that are no "
          "engine.",
          board.discovery_errors.load());
  const IndexStats index = gateway.index().Stats();
  out.One("moesaic_proxy_index_blocks", "gauge", "Distinct blocks in the prefix index.", index.blocks);
  out.One("moesaic_proxy_index_memberships", "gauge", "Pairs of a block and an engine that holds it.",
          index.memberships);
  out.One("moesaic_proxy_index_speculative", "gauge", "Blocks that are expected after a dispatch.",
          index.speculative);
  out.One("moesaic_proxy_index_clearing", "gauge", "Cleared engines whose blocks are being removed.",
          index.clearing);
  out.One("moesaic_proxy_index_dropped_total", "counter", "Insertions that found no room.", index.dropped);
  EngineMetrics(out, gateway);
  return out.Take();
}

std::string StateJson(Gateway& gateway, bool check) {
  State& state = gateway.state();
  const Nanos now = gateway.now();
  const Totals totals = state.ReadTotals();
  const IndexStats index = gateway.index().Stats();
  std::string invariants = "null";
  if (check) {
    const Status status = state.CheckInvariants();
    invariants = JsonQuoted(status.ok() ? "ok" : Message(status));
  }
  std::string json;
  const auto out = std::back_inserter(json);
  fmt::format_to(
      out,
      R"({{"pool":{},"policy":{},"transfer":{},"master":{},"master_since_ns":{},"worker":{},"pid":{},"stages":[)",
      JsonQuoted(gateway.settings().name), JsonQuoted(gateway.settings().policy),
      JsonQuoted(TransferName(gateway.settings().transfer)), state.lease().holder(),
      gateway.board().master_since.load(), gateway.worker(), gateway.pid());
  for (int i = 0; i < kNumStages; ++i) {
    const Stage stage = static_cast<Stage>(i);
    const Histogram& time = state.stage_histogram(stage);
    fmt::format_to(out, R"({}{{"name":"{}","now":{},"entered":{},"seconds":{:.6f},"count":{}}})",
                   i == 0 ? "" : ",", StageName(stage), totals.in_stage[static_cast<size_t>(i)],
                   totals.entered[static_cast<size_t>(i)], Seconds(time.sum()), time.count());
  }
  json += "],\"outcomes\":{";
  for (int i = 0; i < kNumOutcomes; ++i) {
    fmt::format_to(out, R"({}"{}":{})", i == 0 ? "" : ",", OutcomeName(static_cast<Outcome>(i)),
                   totals.outcomes[static_cast<size_t>(i)]);
  }
  fmt::format_to(
      out,
      R"(}},"tokens":{{"prompt":{},"cached":{},"output":{}}},"ttft":{{"seconds":{:.6f},"count":{}}},)"
      R"("slots_used":{},"keys_used":{},"index":{{"blocks":{},"memberships":{},"speculative":{},"dropped":{}}},)"
      R"("invariants":{},"engines":[)",
      totals.prompt_tokens, totals.cached_tokens, totals.output_tokens, Seconds(state.ttft().sum()),
      state.ttft().count(), totals.slots_used, totals.keys_used, index.blocks, index.memberships,
      index.speculative, index.dropped, invariants);
  bool first = true;
  for (const InstanceRecord& e : state.Instances()) {
    fmt::format_to(
        out,
        R"({}{{"id":{},"url":{},"rank":{},"role":"{}","state":"{}","index":"{}","prefill_requests":{},)"
        R"("prefill_tokens":{},"decode_requests":{},"decode_tokens":{},"kv_blocks":{},"reported_kv_blocks":{},"references":{},)"
        R"("completed":{},"failed":{},"prompt_tokens":{},"cached_tokens":{},"output_tokens":{}}})",
        first ? "" : ",", e.id, JsonQuoted(e.config.url), e.config.dp_rank, RoleName(e.config.role),
        NameOfState(e, now), IndexStateName(e.index_state), e.load.prefill_requests, e.load.prefill_tokens,
        e.load.decode_requests, e.load.decode_tokens, e.load.kv_blocks, e.reported_kv_blocks,
        e.load.references, e.completed, e.failed, e.prompt_tokens, e.cached_tokens, e.output_tokens);
    first = false;
  }
  json += "]}\n";
  return json;
}

std::string TraceJson(Gateway& gateway) {
  const Nanos now = gateway.now();
  std::string json = "{\"traceEvents\":[";
  bool first = true;
  const auto spans = [&](const std::array<Nanos, kNumStages>& entered, int worker, uint32_t slot,
                         uint32_t prompt_tokens) {
    Nanos begin = 0;
    Stage stage = Stage::kReceived;
    const auto span = [&](Nanos end) {
      if (begin == 0 || stage == Stage::kDone) return;
      fmt::format_to(
          std::back_inserter(json),
          R"({}{{"name":"{}","ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{{"prompt_tokens":{}}}}})",
          first ? "" : ",", StageName(stage), worker, slot, static_cast<double>(begin) / 1e3,
          static_cast<double>(end - begin) / 1e3, prompt_tokens);
      first = false;
    };
    for (int i = 0; i < kNumStages; ++i) {
      const Nanos at = entered[static_cast<size_t>(i)];
      if (at == 0) continue;
      span(at);
      begin = at;
      stage = static_cast<Stage>(i);
    }
    span(now);
  };
  gateway.board().ForEachEnded([&](const Board::Ended& ended) {
    spans(ended.entered, ended.worker, ended.slot, ended.prompt_tokens);
  });
  gateway.state().ForEachRequest([&](const RequestRecord& request) {
    spans(request.entered, request.worker, request.id.slot, request.facts.prompt_tokens);
  });
  json += "]}\n";
  return json;
}

}  // namespace moesaic::proxy
