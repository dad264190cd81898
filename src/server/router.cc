#include "server/router.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "server/catch_exceptions.h"
#include "server/http_syntax.h"

namespace moesaic::server {
namespace {

using Clock = std::chrono::steady_clock;

// Header names of a preflight that names none.
constexpr std::string_view kAllowedHeaders =
    "authorization, content-type, x-api-key, anthropic-version, traceparent";

ApiStyle StyleOf(const std::string& path) {
  return path.starts_with("/v1/messages") ? ApiStyle::kAnthropic : ApiStyle::kOpenAi;
}

// Returns the key of a request, or "". The case of the scheme does not matter (RFC 9110, 11.1).
std::string_view KeyIn(const HttpRequest& head) {
  constexpr std::string_view kBearer = "bearer ";
  const std::string_view authorization = head.Header("authorization");
  if (Lower(authorization.substr(0, kBearer.size())) == kBearer) {
    return TrimBlanks(authorization.substr(kBearer.size()));
  }
  return head.Header("x-api-key");
}

// Returns the request's own id where it is valid, else a new one.
std::string RequestId(const HttpRequest& head) {
  const std::string_view given = head.Header("x-request-id");
  const bool usable = !given.empty() && given.size() <= 128 &&
                      std::all_of(given.begin(), given.end(), [](char c) { return c > ' ' && c < 127; });
  return usable ? std::string(given) : RandomHex(32);
}

// Returns the answer to a request that is refused before an endpoint runs, and logs it.
HttpResponse RefusalAnswer(const HttpRequest& head, const ApiError& error, const AccessLog& log,
                           std::string key) {
  HttpResponse response = ErrorResponse(error, StyleOf(head.path));
  std::string id = RequestId(head);
  response.headers.emplace_back("x-request-id", id);
  if (log) {
    log({.peer = head.peer,
         .method = head.method,
         .path = head.path,
         .request_id = std::move(id),
         .trace_id = {},
         .key = std::move(key),
         .refused = error.message,
         .status = error.http_status});
  }
  return response;
}

// Matches `path` against a route with {NAME} segments. Appends their values to `values`, which may be null.
bool Matches(std::string_view pattern, std::string_view path, std::vector<std::string>* values) {
  for (;;) {
    const std::string_view wanted = pattern.substr(0, pattern.find('/'));
    const std::string_view found = path.substr(0, path.find('/'));
    const bool is_name = wanted.starts_with('{');
    if (is_name ? found.empty() : wanted != found) return false;
    if (is_name && values != nullptr) values->emplace_back(found);
    const bool pattern_ends = wanted.size() == pattern.size(), path_ends = found.size() == path.size();
    if (pattern_ends || path_ends) return pattern_ends && path_ends;
    pattern.remove_prefix(wanted.size() + 1);
    path.remove_prefix(found.size() + 1);
  }
}

// Returns the header names that a preflight requests. Official clients send many of their own
// ("x-stainless-os"), and a name is no risk: a page of an allowed origin may send what any client may.
std::string_view WantedHeaders(const HttpRequest& head) {
  const std::string_view wanted = head.Header("access-control-request-headers");
  const std::vector<std::string_view> names = ListMembers(wanted);
  return std::all_of(names.begin(), names.end(), IsToken) ? wanted : kAllowedHeaders;
}

int WholeSeconds(double seconds) { return std::max(1, static_cast<int>(std::ceil(seconds))); }

}  // namespace

HttpHooks LoadingHooks(AccessLog log) {
  const auto refuse = [log = std::move(log)](const HttpRequest& head) {
    return RefusalAnswer(head,
                         {.http_status = 503,
                          .message = "the model is still being loaded",
                          .type = "service_unavailable_error",
                          .retry_after = 1},
                         log, "");
  };
  HttpHooks hooks;
  hooks.admit = refuse;
  hooks.handle = [refuse](const HttpRequest& request, const std::shared_ptr<ResponseWriter>& writer,
                          const std::shared_ptr<SerialExecutor>&) { writer->Send(refuse(request)); };
  hooks.refuse = [refuse](const HttpRequest& head, int, const std::string&) { return refuse(head); };
  return hooks;
}

// Adds the headers of every answer. Records the answer in the metrics and the access log when it ends.
class Router::Answer : public ResponseWriter {
 public:
  Answer(Router& router, const Route& route, const HttpRequest& request,
         std::shared_ptr<ResponseWriter> writer, Headers headers, std::shared_ptr<Tenant> tenant)
      : router_(router),
        route_(route),
        writer_(std::move(writer)),
        headers_(std::move(headers)),
        tenant_(std::move(tenant)) {
    if (tenant_ != nullptr) record_.key = tenant_->name;
    record_.peer = request.peer;
    record_.method = request.method;
    record_.path = request.path;
    record_.request_bytes = request.body.size();
    for (const auto& [name, value] : headers_) {
      if (name == "x-request-id") record_.request_id = value;
      if (name == "traceparent") record_.trace_id = value.substr(3, 32);
    }
    if (route_.access == Access::kGenerates) ++router_.generating_;
  }

  // The count falls last: a server without generating requests may be destroyed while the engine's thread is
  // still here.
  ~Answer() override {
    record_.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    if (!ended_) record_.status = kClientLeft;
    router_.metrics_.Answered(route_.path, record_.status, record_.seconds);
    if (router_.log_) router_.log_(record_);
    writer_.reset();
    tenant_.reset();
    if (route_.access == Access::kGenerates) --router_.generating_;
  }

  void Send(HttpResponse response) override {
    record_.status = response.status;
    ended_ = true;
    Append(response.headers);
    writer_->Send(std::move(response));
  }

  void Start(int status, Headers headers) override {
    started_ = true;
    record_.status = status;
    Append(headers);
    writer_->Start(status, std::move(headers));
  }

  void Write(std::string piece) override { writer_->Write(std::move(piece)); }
  void End() override {
    ended_ = true;
    writer_->End();
  }
  void OnClientLeft(std::function<void()> left) override { writer_->OnClientLeft(std::move(left)); }

  bool started() const { return started_; }
  const std::string& request_id() const { return record_.request_id; }

 private:
  void Append(Headers& headers) const {
    headers.insert(headers.end(), headers_.begin(), headers_.end());
    if (route_.access == Access::kGenerates && router_.options_.generation_headers) {
      const Headers added = router_.options_.generation_headers();
      headers.insert(headers.end(), added.begin(), added.end());
    }
    if (tenant_ == nullptr) return;
    const Headers limits = RateLimitHeaders(tenant_->request_bucket.Look(), tenant_->token_bucket.Look());
    headers.insert(headers.end(), limits.begin(), limits.end());
  }

  Router& router_;
  const Route& route_;
  std::shared_ptr<ResponseWriter> writer_;
  const Headers headers_;
  std::shared_ptr<Tenant> tenant_;  // null for a request without a key
  const Clock::time_point start_ = Clock::now();
  AccessRecord record_;
  bool started_ = false, ended_ = false;
};

Router::Router(const RouterOptions& options, Metrics& metrics, AccessLog log)
    : options_(options), guard_(options.browser), metrics_(metrics), log_(std::move(log)) {}

void Router::Add(const char* method, const std::string& path, Access access, Endpoint endpoint) {
  auto& table = path.find('{') == std::string::npos ? routes_ : patterns_;
  table[method].push_back({path, access, std::move(endpoint)});
}

void Router::AddPrefix(const char* method, const std::string& prefix, Access access, Endpoint endpoint) {
  prefixes_[method].push_back({prefix, access, std::move(endpoint)});
}

std::vector<std::pair<std::string, std::string>> Router::Routes() const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto* table : {&routes_, &patterns_, &prefixes_}) {
    for (const auto& [method, routes] : *table) {
      for (const Route& route : routes) all.emplace_back(method, route.path);
    }
  }
  return all;
}

HttpHooks Router::Hooks() {
  HttpHooks hooks;
  hooks.admit = [this](const HttpRequest& head) { return Admit(head); };
  hooks.handle = [this](HttpRequest request, std::shared_ptr<ResponseWriter> writer,
                        std::shared_ptr<SerialExecutor> executor) {
    Handle(std::move(request), std::move(writer), std::move(executor));
  };
  hooks.refuse = [this](const HttpRequest& head, int status, const std::string& message) {
    ApiError error{.http_status = status, .message = message, .type = "invalid_request_error"};
    if (status == 503) {
      error.type = "service_unavailable_error";
      error.retry_after = 1;
    }
    return Refuse(head, error);
  };
  return hooks;
}

const Router::Route* Router::Find(const std::string& method, const std::string& path) const {
  const std::string known = method == "HEAD" ? "GET" : method;
  if (const auto found = routes_.find(known); found != routes_.end()) {
    for (const Route& route : found->second) {
      if (route.path == path) return &route;
    }
  }
  if (const auto found = patterns_.find(known); found != patterns_.end()) {
    for (const Route& route : found->second) {
      if (Matches(route.path, path, nullptr)) return &route;
    }
  }
  if (const auto found = prefixes_.find(known); found != prefixes_.end()) {
    for (const Route& route : found->second) {
      if (path.starts_with(route.path)) return &route;
    }
  }
  return nullptr;
}

std::string Router::MethodsOf(const std::string& path) const {
  std::string methods;
  for (const char* method : {"GET", "POST", "DELETE"}) {
    if (Find(method, path) != nullptr) methods += (methods.empty() ? "" : ", ") + std::string(method);
  }
  return methods;
}

std::optional<KeyHolder> Router::HolderOf(const HttpRequest& head) const {
  return options_.keys == nullptr ? std::nullopt : options_.keys->Find(KeyIn(head));
}

HttpResponse Router::Refuse(const HttpRequest& head, const ApiError& error, const Tenant* tenant) const {
  HttpResponse response = RefusalAnswer(head, error, log_, tenant == nullptr ? "" : tenant->name);
  const Headers cors = guard_.CorsHeaders(head);
  response.headers.insert(response.headers.end(), cors.begin(), cors.end());
  if (tenant != nullptr) {
    const Headers limits = RateLimitHeaders(tenant->request_bucket.Look(), tenant->token_bucket.Look());
    response.headers.insert(response.headers.end(), limits.begin(), limits.end());
  }
  metrics_.Answered("refused", response.status, 0);
  return response;
}

HttpResponse Router::Preflight(const HttpRequest& head) const {
  HttpResponse response{.status = 204, .headers = guard_.CorsHeaders(head), .body = {}};
  if (!response.headers.empty()) {
    response.headers.emplace_back("access-control-allow-methods", "GET, POST, DELETE, OPTIONS");
    response.headers.emplace_back("access-control-allow-headers", WantedHeaders(head));
    response.headers.emplace_back("access-control-max-age", "86400");
  }
  response.headers.emplace_back("x-request-id", RequestId(head));
  return response;
}

std::optional<HttpResponse> Router::AdmitKey(const HttpRequest& head, const Route& route,
                                             const std::optional<KeyHolder>& holder) const {
  if (options_.keys == nullptr || route.access == Access::kOpen) return std::nullopt;
  if (!holder) {
    return Refuse(head, {.http_status = 401,
                         .message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                         .type = "invalid_request_error",
                         .code = "invalid_api_key"});
  }
  if (route.access != Access::kAdmin || holder->admin) return std::nullopt;
  return Refuse(
      head,
      {.http_status = 403,
       .message =
           options_.keys->has_admin()
               ? "this endpoint needs an admin key, and the request's key is not one"
               : "this endpoint needs an admin key, and none is set: start the server with --admin-key, "
                 "or give a key of --api-key-file role=admin",
       .type = "invalid_request_error",
       .code = "admin_key_needed"},
      holder->tenant.get());
}

// Takes one request from the key's limit.
std::optional<HttpResponse> Router::AdmitRate(const HttpRequest& head, Tenant& tenant) const {
  const TokenBucket::State tokens = tenant.token_bucket.Look();
  const bool out_of_tokens = tokens.limit > 0 && tokens.wait > 0;
  if (!out_of_tokens && tenant.request_bucket.TryTake()) {
    ++tenant.requests;
    return std::nullopt;
  }
  ++tenant.limited;
  const TokenBucket::State state = out_of_tokens ? tokens : tenant.request_bucket.Look();
  const char* unit = out_of_tokens ? "tokens" : "requests";
  return Refuse(
      head,
      {.http_status = 429,
       .message = fmt::format("the limit of {} {} per minute of the key \"{}\" is reached; try again in "
                              "{} s",
                              state.limit, unit, tenant.name, WholeSeconds(state.wait)),
       .type = unit,
       .code = "rate_limit_exceeded",
       .retry_after = WholeSeconds(state.wait)},
      &tenant);
}

std::optional<HttpResponse> Router::Admit(const HttpRequest& head) const {
  if (const auto error = guard_.Check(head)) return Refuse(head, *error);
  if (head.method == "OPTIONS" && !head.Header("origin").empty()) return Preflight(head);
  if (head.method == "OPTIONS" && head.path == "*") {
    return HttpResponse{
        .status = 204,
        .headers = {{"allow", "GET, HEAD, POST, DELETE, OPTIONS"}, {"x-request-id", RequestId(head)}},
        .body = {}};
  }
  const Route* route = Find(head.method, head.path);
  if (route == nullptr) {
    const std::string methods = MethodsOf(head.path);
    HttpResponse response = Refuse(head, {.http_status = methods.empty() ? 404 : 405,
                                          .message = fmt::format("there is no {} {}", head.method, head.path),
                                          .type = "invalid_request_error"});
    if (!methods.empty()) response.headers.emplace_back("allow", methods);
    return response;
  }
  const std::optional<KeyHolder> holder = HolderOf(head);
  if (auto refusal = AdmitKey(head, *route, holder)) return refusal;
  Tenant* tenant = holder ? holder->tenant.get() : nullptr;
  if (const auto error = CheckContentType(head)) return Refuse(head, *error, tenant);
  if (route->access == Access::kGenerates && draining_) {
    return Refuse(head,
                  {.http_status = 503,
                   .message = "the server is shutting down",
                   .type = "service_unavailable_error",
                   .retry_after = 5},
                  tenant);
  }
  if (route->access == Access::kGenerates && generating_ >= options_.max_requests) {
    return Refuse(
        head,
        {.http_status = 429,
         .message = fmt::format("{} requests are running or waiting already", options_.max_requests),
         .type = "rate_limit_error",
         .retry_after = 1},
        tenant);
  }
  const bool counts = head.method == "POST" && route->access != Access::kAdmin;
  return tenant != nullptr && counts ? AdmitRate(head, *tenant) : std::nullopt;
}

void Router::Handle(HttpRequest request, std::shared_ptr<ResponseWriter> writer,
                    std::shared_ptr<SerialExecutor> executor) {
  const Route* route = Find(request.method, request.path);  // Admit has refused requests without a route
  Call call;
  Matches(route->path, request.path, &call.path_values);
  call.style = StyleOf(request.path);
  call.trace = ReadTraceparent(request.Header("traceparent"));
  Headers headers = guard_.CorsHeaders(request);
  headers.emplace_back("x-request-id", RequestId(request));
  headers.emplace_back("traceparent", call.trace.Traceparent());
  const std::optional<KeyHolder> holder = HolderOf(request);
  // A reload may have removed the key since Admit checked it.
  if (const auto refusal = AdmitKey(request, *route, holder)) return writer->Send(*refusal);
  call.admin = options_.keys == nullptr || (holder && holder->admin);
  if (holder) {
    call.tenant = holder->tenant;
    call.owner = "key " + call.tenant->id;
    if (!options_.share_prefix_cache) call.cache_scope = call.tenant->id;
  }
  call.client = holder ? call.owner : request.peer;
  const auto answer =
      std::make_shared<Answer>(*this, *route, request, std::move(writer), std::move(headers), call.tenant);
  spdlog::debug("request {}: {} {} of {} with {} bytes", answer->request_id(), request.method, request.path,
                request.peer, request.body.size());
  call.writer = answer;
  call.request = std::move(request);
  if (options_.request_timeout.count() > 0) call.deadline = Clock::now() + options_.request_timeout;
  call.executor = std::move(executor);
  const Status status = CatchExceptions(
      fmt::format("{} {}, request {}", call.request.method, route->path, answer->request_id()),
      [route, &call] { return route->endpoint(call); });
  // After the head of an answer, only closing the connection can report the error.
  if (!status.ok() && !answer->started()) SendError(*answer, status, call.style);
}

}  // namespace moesaic::server
