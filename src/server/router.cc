#include "server/router.h"

#include <algorithm>
#include <utility>

#include "server/contained.h"

namespace moesaic::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kClientLeft = 499;  // nginx's number
constexpr const char* kAllowedHeaders =
    "authorization, content-type, x-api-key, anthropic-version, traceparent";

ApiStyle StyleOf(const std::string& path) {
  return path.starts_with("/v1/messages") ? ApiStyle::kAnthropic : ApiStyle::kOpenAi;
}

// Takes as long whatever the texts share.
bool SameSecret(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(difference | (a[i] ^ (b.empty() ? 0 : b[i % b.size()])));
  }
  return difference == 0;
}

std::string_view KeyIn(const HttpRequest& head) {
  constexpr std::string_view kBearer = "Bearer ";
  const std::string_view authorization = head.Header("authorization");
  if (authorization.starts_with(kBearer)) return authorization.substr(kBearer.size());
  return head.Header("x-api-key");
}

}  // namespace

HttpHooks LoadingHooks() {
  const auto refuse = [](const HttpRequest& head) {
    return ErrorResponse({.http_status = 503,
                          .message = "the model is still being loaded",
                          .type = "service_unavailable_error",
                          .retry_after = 1},
                         StyleOf(head.path));
  };
  HttpHooks hooks;
  hooks.admit = refuse;
  hooks.handle = [refuse](const HttpRequest& request, const std::shared_ptr<ResponseWriter>& writer,
                          const std::shared_ptr<Lane>&) { writer->Send(refuse(request)); };
  hooks.refuse = [refuse](const HttpRequest& head, int, const std::string&) { return refuse(head); };
  return hooks;
}

// Adds what every answer carries, and tells metrics and log when it ended.
class Router::Answer : public ResponseWriter {
 public:
  Answer(Router& router, const Route& route, const HttpRequest& request,
         std::shared_ptr<ResponseWriter> writer, Headers headers)
      : router_(router), route_(route), writer_(std::move(writer)), headers_(std::move(headers)) {
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

  ~Answer() override {
    if (route_.access == Access::kGenerates) --router_.generating_;
    record_.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    if (!ended_) record_.status = kClientLeft;
    router_.metrics_.Answered(route_.path, record_.status, record_.seconds);
    if (router_.log_) router_.log_(record_);
  }

  void Send(HttpResponse response) override {
    record_.status = response.status;
    ended_ = true;
    response.headers.insert(response.headers.end(), headers_.begin(), headers_.end());
    writer_->Send(std::move(response));
  }

  void Start(int status, Headers headers) override {
    started_ = true;
    record_.status = status;
    headers.insert(headers.end(), headers_.begin(), headers_.end());
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
  Router& router_;
  const Route& route_;
  const std::shared_ptr<ResponseWriter> writer_;
  const Headers headers_;
  const Clock::time_point start_ = Clock::now();
  AccessRecord record_;
  bool started_ = false, ended_ = false;
};

Router::Router(const RouterOptions& options, Metrics& metrics, std::function<void(const AccessRecord&)> log)
    : options_(options), metrics_(metrics), log_(std::move(log)) {}

void Router::Add(const char* method, const std::string& path, Access access, Endpoint endpoint) {
  routes_[method].push_back({path, access, std::move(endpoint)});
}

void Router::AddPrefix(const char* method, const std::string& prefix, Access access, Endpoint endpoint) {
  prefixes_[method].push_back({prefix, access, std::move(endpoint)});
}

std::vector<std::pair<std::string, std::string>> Router::Routes() const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto* table : {&routes_, &prefixes_}) {
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
                        std::shared_ptr<Lane> lane) {
    Handle(std::move(request), std::move(writer), std::move(lane));
  };
  hooks.refuse = [this](const HttpRequest& head, int status, const std::string& message) {
    ApiError error{.http_status = status, .message = message, .type = "invalid_request_error"};
    if (status == 503) error.retry_after = 1;
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

bool Router::HasKey(const HttpRequest& head) const {
  if (options_.api_keys.empty()) return true;
  const std::string_view given = KeyIn(head);
  if (given.empty()) return false;  // whatever the keys are
  bool found = false;
  for (const std::string& key : options_.api_keys) found = SameSecret(given, key) || found;
  return found;
}

Headers Router::CorsHeaders(const HttpRequest& head) const {
  const std::string_view origin = head.Header("origin");
  if (origin.empty()) return {};
  for (const std::string& allowed : options_.cors_origins) {
    if (allowed == "*") return {{"access-control-allow-origin", "*"}};
    if (allowed == origin) return {{"access-control-allow-origin", allowed}, {"vary", "origin"}};
  }
  return {};
}

HttpResponse Router::Refuse(const HttpRequest& head, const ApiError& error) const {
  HttpResponse response = ErrorResponse(error, StyleOf(head.path));
  const Headers cors = CorsHeaders(head);
  response.headers.insert(response.headers.end(), cors.begin(), cors.end());
  metrics_.Answered("refused", response.status, 0);
  return response;
}

std::optional<HttpResponse> Router::Admit(const HttpRequest& head) const {
  const std::string_view origin = head.Header("origin");
  if (head.method == "OPTIONS" && !origin.empty()) {
    HttpResponse response{.status = 204, .headers = CorsHeaders(head), .body = {}};
    if (!response.headers.empty()) {
      response.headers.emplace_back("access-control-allow-methods", "GET, POST, DELETE, OPTIONS");
      response.headers.emplace_back("access-control-allow-headers", kAllowedHeaders);
      response.headers.emplace_back("access-control-max-age", "86400");
    }
    return response;
  }
  if (head.method == "OPTIONS" && head.path == "*") {
    return HttpResponse{
        .status = 204, .headers = {{"allow", "GET, HEAD, POST, DELETE, OPTIONS"}}, .body = {}};
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
  if (route->access != Access::kOpen && !HasKey(head)) {
    return Refuse(head, {.http_status = 401,
                         .message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                         .type = "invalid_request_error",
                         .code = "invalid_api_key"});
  }
  if (route->access != Access::kGenerates) return std::nullopt;
  if (draining_) {
    return Refuse(head, {.http_status = 503,
                         .message = "the server is shutting down",
                         .type = "service_unavailable_error",
                         .retry_after = 5});
  }
  if (generating_ >= options_.max_requests) {
    return Refuse(
        head, {.http_status = 429,
               .message = fmt::format("{} requests are running or waiting already", options_.max_requests),
               .type = "rate_limit_error",
               .retry_after = 1});
  }
  return std::nullopt;
}

void Router::Handle(HttpRequest request, std::shared_ptr<ResponseWriter> writer, std::shared_ptr<Lane> lane) {
  const Route* route = Find(request.method, request.path);  // Admit has seen to it that there is one
  Call call;
  call.style = StyleOf(request.path);
  call.trace = ReadTraceparent(request.Header("traceparent"));
  const std::string_view given = request.Header("x-request-id");
  const bool usable = !given.empty() && given.size() <= 128 &&
                      std::all_of(given.begin(), given.end(), [](char c) { return c > ' ' && c < 127; });
  Headers headers = CorsHeaders(request);
  headers.emplace_back("x-request-id", usable ? std::string(given) : RandomHex(32));
  headers.emplace_back("traceparent", call.trace.Traceparent());
  // Whom the engine is fair to: the holder of a key, else the address.
  const std::string_view key = options_.api_keys.empty() ? "" : KeyIn(request);
  if (!key.empty()) call.owner = "key " + std::string(key);
  call.client = key.empty() ? request.peer : "key " + std::string(key);
  const auto answer = std::make_shared<Answer>(*this, *route, request, std::move(writer), std::move(headers));
  call.writer = answer;
  call.request = std::move(request);
  if (options_.request_timeout.count() > 0) call.deadline = Clock::now() + options_.request_timeout;
  call.lane = std::move(lane);
  const Status status =
      Contained(fmt::format("{} {}, request {}", call.request.method, route->path, answer->request_id()),
                [route, &call] { return route->endpoint(call); });
  // Of an answer that has begun, the end of its connection is all that can tell.
  if (!status.ok() && !answer->started()) SendError(*answer, status, call.style);
}

}  // namespace moesaic::server
