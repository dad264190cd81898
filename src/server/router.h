// From a request to the endpoint that answers it: keys, CORS, limits, and what every answer carries.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/call.h"
#include "server/http.h"
#include "server/metrics.h"

namespace moesaic::server {

struct RouterOptions {
  std::vector<std::string> api_keys;        ///< none: everybody may ask
  std::vector<std::string> cors_origins;    ///< "*": any
  int max_requests = 1024;                  ///< calls at once that generate; more get 429
  std::chrono::seconds request_timeout{0};  ///< a generation that takes longer ends; 0: none
};

/// One answered request, for a log.
struct AccessRecord {
  std::string peer, method, path, request_id, trace_id;
  int status = 0;  // 499: the client left first
  double seconds = 0;
  size_t request_bytes = 0;
};

/// Refuse whatever comes with 503, as long as there is no model that could answer.
HttpHooks LoadingHooks();

/// Any thread. Routes are added before the first request.
class Router {
 public:
  using Endpoint = std::function<Status(Call& call)>;
  enum class Access {
    kOpen,       // without a key
    kKey,        // with one of the keys, where there are any
    kGenerates,  // likewise, refused while draining or full
  };

  Router(const RouterOptions& options, Metrics& metrics, std::function<void(const AccessRecord&)> log);

  void Add(const char* method, const std::string& path, Access access, Endpoint endpoint);
  /// For paths that begin with `prefix` and have no route of their own.
  void AddPrefix(const char* method, const std::string& prefix, Access access, Endpoint endpoint);

  /// Method and path of everything added so far; prefixes end in '/'.
  std::vector<std::pair<std::string, std::string>> Routes() const;

  HttpHooks Hooks();
  void Drain() { draining_ = true; }
  bool draining() const { return draining_; }
  int generating() const { return generating_; }

 private:
  struct Route {
    std::string path;
    Access access;
    Endpoint endpoint;
  };
  class Answer;

  const Route* Find(const std::string& method, const std::string& path) const;
  /// Those that `path` has a route for, as the header "allow" lists them; empty: there is no such path.
  std::string MethodsOf(const std::string& path) const;
  std::optional<HttpResponse> Admit(const HttpRequest& head) const;
  void Handle(HttpRequest request, std::shared_ptr<ResponseWriter> writer, std::shared_ptr<Lane> lane);
  HttpResponse Refuse(const HttpRequest& head, const ApiError& error) const;
  bool HasKey(const HttpRequest& head) const;
  /// Headers that let a browser's page of an allowed origin read the answer.
  Headers CorsHeaders(const HttpRequest& head) const;

  const RouterOptions options_;
  Metrics& metrics_;
  const std::function<void(const AccessRecord&)> log_;
  std::map<std::string, std::vector<Route>> routes_, prefixes_;  // by method
  std::atomic<bool> draining_{false};
  std::atomic<int> generating_{0};
};

}  // namespace moesaic::server
