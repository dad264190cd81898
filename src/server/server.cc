#include "server/server.h"

#include <spdlog/spdlog.h>
#include <cmath>

#include <mutex>
#include <utility>

#include "server/answer.h"
#include "server/answer_stops.h"
#include "server/api_keys.h"
#include "server/call.h"
#include "server/conversations.h"
#include "server/generation.h"
#include "server/live_requests.h"
#include "server/metrics.h"
#include "server/models.h"
#include "server/openapi.h"
#include "server/page.h"
#include "server/process_metrics.h"
#include "server/tracing.h"

namespace moesaic::server {
namespace {

constexpr size_t kShownRequests = 200;

class HttpApi : public Server {
 public:
  HttpApi(ServerOptions options, const ServedModel& model, std::unique_ptr<HttpServer> http)
      : options_(std::move(options)),
        model_(model),
        metrics_(model.names.front()),
        tracer_(options_.trace_spans),
        responses_(options_.responses),
        grammars_(model.grammars, options_.grammars),
        context_{model, metrics_, tracer_, live_, responses_, grammars_, &stops_},
        router_(RouterOptionsFor(options_.router, model), metrics_, options_.log),
        http_(std::move(http)) {
    metrics_.Kernels(options_.kernels);
    metrics_.Build(options_.version, options_.model_path);
    AddApis();
    AddOperations();
    openapi_ = Dump(OpenApi(model, options_.version, router_.Routes()));
    AddPage(router_);
    http_->Switch(router_.Hooks());
  }

  // Stops the pool's threads first, since they post to executors of `http_`.
  ~HttpApi() override { grammars_.Stop(); }

  int port() const override { return http_->port(); }
  void Drain() override {
    router_.Drain();
    model_.engine->Drain();
  }
  void Fail(const std::string& reason) override {
    {
      const std::lock_guard lock(failure_mutex_);
      failure_ = reason;
    }
    Drain();
  }
  void StopAnswers() override { stops_.StopAll(); }
  bool flushed() const override { return http_->active_requests() == 0; }
  void Close() override { http_->Close(); }
  bool idle() const override { return router_.generating() == 0 && model_.engine->idle(); }

 private:
  using Access = Router::Access;

  // Adds an endpoint that takes the context.
  void AddApi(const char* method, const char* path, Access access,
              Status (*endpoint)(const GenerationContext&, Call&)) {
    router_.Add(method, path, access, [this, endpoint](Call& call) { return endpoint(context_, call); });
  }

  void AddApis() {
    AddApi("POST", "/v1/chat/completions", Access::kGenerates, ChatCompletions);
    AddApi("POST", "/v1/completions", Access::kGenerates, Completions);
    AddApi("POST", "/v1/responses", Access::kGenerates, Responses);
    AddApi("POST", "/v1/messages", Access::kGenerates, Messages);
    AddApi("POST", "/v1/embeddings", Access::kGenerates, Embeddings);
    AddApi("POST", "/v1/messages/count_tokens", Access::kKey, CountTokens);
    AddApi("POST", "/v1/responses/input_tokens", Access::kKey, CountInputTokens);
    AddApi("POST", "/v1/conversations", Access::kKey, CreateConversation);
    AddApi("POST", "/v1/chat/completions/render", Access::kKey, RenderChat);
    AddApi("POST", "/tokenize", Access::kKey, Tokenize);
    AddApi("POST", "/detokenize", Access::kKey, Detokenize);
    constexpr const char* kResponse = "/v1/responses/{response_id}";
    AddApi("GET", kResponse, Access::kKey, GetResponse);
    AddApi("DELETE", kResponse, Access::kKey, DeleteResponse);
    AddApi("GET", "/v1/responses/{response_id}/input_items", Access::kKey, ListInputItems);
    AddApi("POST", "/v1/responses/{response_id}/cancel", Access::kKey, CancelResponse);
    constexpr const char* kConversation = "/v1/conversations/{conversation_id}";
    AddApi("GET", kConversation, Access::kKey, GetConversation);
    AddApi("POST", kConversation, Access::kKey, UpdateConversation);
    AddApi("DELETE", kConversation, Access::kKey, DeleteConversation);
    constexpr const char* kItems = "/v1/conversations/{conversation_id}/items";
    AddApi("GET", kItems, Access::kKey, ListItems);
    AddApi("POST", kItems, Access::kKey, AddItems);
    constexpr const char* kItem = "/v1/conversations/{conversation_id}/items/{item_id}";
    AddApi("GET", kItem, Access::kKey, GetItem);
    AddApi("DELETE", kItem, Access::kKey, DeleteItem);
    router_.Add("GET", "/v1/models", Access::kKey,
                [this](Call& call) { return ListModels(model_, options_.model_path, call); });
    router_.AddPrefix("GET", "/v1/models/", Access::kKey,
                      [this](Call& call) { return GetModel(model_, options_.model_path, call); });
  }

  // Answers with the reason of Fail(), if it was called.
  bool SendFailure(Call& call) const {
    std::string reason;
    {
      const std::lock_guard lock(failure_mutex_);
      reason = failure_;
    }
    if (reason.empty()) return false;
    call.writer->Send({.status = 503,
                       .headers = {{"content-type", "application/json"}},
                       .body = Dump({{"status", "failed"}, {"error", reason}})});
    return true;
  }

  void AddOperations() {
    router_.Add("GET", "/health", Access::kOpen, [this](Call& call) {
      if (SendFailure(call)) return OkStatus();
      const std::shared_ptr<const engine::SurvivalStats> survival = model_.engine->survival();
      if (survival == nullptr || survival->alive == survival->ranks) {
        SendJson(*call.writer, {{"status", "ok"}});
      } else {
        SendJson(*call.writer, {{"status", "degraded"}, {"survival", SurvivalJson(survival)}});
      }
      return OkStatus();
    });
    router_.Add("GET", "/ready", Access::kOpen, [this](Call& call) {
      if (SendFailure(call)) return OkStatus();
      const bool draining = router_.draining();
      call.writer->Send({.status = draining ? 503 : 200,
                         .headers = {{"content-type", "application/json"}},
                         .body = Dump({{"status", draining ? "draining" : "ready"}})});
      return OkStatus();
    });
    router_.Add("GET", "/version", Access::kOpen, [this](Call& call) {
      SendJson(*call.writer, {{"version", options_.version}});
      return OkStatus();
    });
    router_.Add("GET", "/metrics", Access::kOpen, [this](Call& call) {
      const HttpGauges http{.connections = http_->connections(),
                            .active_requests = http_->active_requests(),
                            .draining = router_.draining()};
      call.writer->Send({.status = 200,
                         .headers = {{"content-type", "text/plain; version=0.0.4; charset=utf-8"}},
                         .body = metrics_.Text(model_.engine->stats(), http) + ProcessMetricsText() +
                                 KeyMetricsText(call.admin ? options_.router.keys.get() : nullptr)});
      return OkStatus();
    });
    router_.Add("GET", "/openapi.json", Access::kOpen, [this](Call& call) {
      call.writer->Send({.status = 200, .headers = {{"content-type", "application/json"}}, .body = openapi_});
      return OkStatus();
    });
    router_.Add("GET", "/state", Access::kAdmin, [this](Call& call) {
      SendJson(*call.writer, StateJson());
      return OkStatus();
    });
    router_.Add("GET", "/expert_load", Access::kAdmin, [this](Call& call) {
      const std::shared_ptr<const engine::ExpertLoadStats> load = model_.engine->stats().expert_load;
      call.writer->Send({.status = 200,
                         .headers = {{"content-type", "application/json"}},
                         .body = engine::ToJson(load == nullptr ? engine::ExpertLoadStats() : *load)});
      return OkStatus();
    });
    router_.Add("GET", "/debug/trace", Access::kAdmin, [this](Call& call) {
      call.writer->Send(
          {.status = 200, .headers = {{"content-type", "application/json"}}, .body = tracer_.ChromeJson()});
      return OkStatus();
    });
    router_.Add("POST", "/reset_prefix_cache", Access::kAdmin, [this](Call& call) {
      model_.engine->ClearCache();
      spdlog::info("prefix cache cleared by {}", call.client);
      SendJson(*call.writer, {{"status", "ok"}});
      return OkStatus();
    });
  }

  // Null where replicas do not divide the experts. State "fixed": experts stay on their ranks. "speeds" are
  // those of the last plan; none: equal ones.
  static Json ExpertsJson(const engine::EngineStats& stats) {
    if (stats.balance == nullptr && stats.rank_loads == nullptr) return nullptr;
    Json json = {{"state", "fixed"},
                 {"epoch", 0},
                 {"history", Json::array()},
                 {"speeds", Json::array()},
                 {"rank_load", nullptr}};
    if (stats.balance != nullptr) {
      const engine::ExpertBalanceStats& balance = *stats.balance;
      json["state"] = balance.state;
      json["epoch"] = balance.epoch;
      json["history"] = balance.history;
      json["speeds"] = balance.speeds;
    }
    if (stats.rank_loads != nullptr) {
      const engine::RankLoads& loads = *stats.rank_loads;
      Json rows = Json::array();
      for (size_t first = 0; first < loads.over_mean.size(); first += loads.ranks) {
        Json row = Json::array();
        for (int rank = 0; rank < loads.ranks; ++rank)
          row.push_back(std::round(loads.over_mean[first + rank] * 1000.0) / 1000);
        rows.push_back(std::move(row));
      }
      json["rank_load"] = {{"layers", loads.layers}, {"over_mean", std::move(rows)}};
    }
    return json;
  }

  // Answers that experts are missing from say so.
  static RouterOptions RouterOptionsFor(RouterOptions options, const ServedModel& model) {
    options.generation_headers = [&model]() -> Headers {
      const std::shared_ptr<const engine::SurvivalStats> survival = model.engine->survival();
      if (survival == nullptr || survival->left_out_experts == 0) return {};
      return {{"x-moesaic-missing-experts", std::to_string(survival->left_out_experts)}};
    };
    return options;
  }

  // Null where a failed rank ends the server.
  static Json SurvivalJson(const std::shared_ptr<const engine::SurvivalStats>& survival) {
    if (survival == nullptr) return nullptr;
    Json missing = Json::object();
    for (const models::LeftOutExperts& layer : survival->left_out) {
      missing[std::to_string(layer.layer)] = layer.experts;
    }
    return {{"ranks", survival->ranks},
            {"alive", survival->alive},
            {"failures", survival->failures},
            {"missing_experts", std::move(missing)}};
  }

  Json StateJson() const {
    const engine::EngineStats stats = model_.engine->stats();
    const int used = stats.total_blocks - stats.free_blocks - stats.cached_blocks;
    return {{"model", model_.names.front()},
            {"running", stats.running},
            {"waiting", stats.waiting},
            {"kv",
             {{"total_blocks", stats.total_blocks},
              {"used_blocks", used},
              {"cached_blocks", stats.cached_blocks},
              {"free_blocks", stats.free_blocks},
              {"tree_nodes", stats.tree_nodes},
              {"block_tokens", tensor::kKvBlockTokens}}},
            {"experts", ExpertsJson(stats)},
            {"survival", SurvivalJson(stats.survival)},
            {"requests", live_.List(kShownRequests)}};
  }

  const ServerOptions options_;
  const ServedModel& model_;
  Metrics metrics_;
  Tracer tracer_;
  LiveRequests live_;
  ResponseStore responses_;
  AnswerStops stops_;
  text::GrammarPool grammars_;
  const GenerationContext context_;
  Router router_;
  std::string openapi_;
  mutable std::mutex failure_mutex_;
  std::string failure_;                     // reason of Fail(); empty: none
  const std::unique_ptr<HttpServer> http_;  // last, since its threads use all members above
};

}  // namespace

std::unique_ptr<Server> Server::Start(ServerOptions options, const ServedModel& model,
                                      std::unique_ptr<HttpServer> http) {
  return std::make_unique<HttpApi>(std::move(options), model, std::move(http));
}

}  // namespace moesaic::server
