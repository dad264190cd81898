// From a request to the endpoint that answers it: keys, CORS, limits, and what every answer carries.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/api_keys.h"
#include "server/browser_guard.h"
#include "server/call.h"
#include "server/http.h"
#include "server/metrics.h"

namespace moesaic::server {

struct RouterOptions {
  std::shared_ptr<KeyRing> keys;    ///< null: everybody may ask
  bool share_prefix_cache = false;  ///< between the holders of keys
  BrowserGuardOptions browser;
  int max_requests = 1024;                  ///< calls at once that generate; more get 429
  std::chrono::seconds request_timeout{0};  ///< a generation that takes longer ends; 0: none
};

/// One answered request, for a log. A refused one has a message; where nothing of it could be read, method
/// and path are empty.
struct AccessRecord {
  std::string peer, method, path, request_id, trace_id;
  std::string key;      // name of the API key; empty: none
  std::string refused;  // why, when the request was refused before an endpoint ran
  int status = 0;       // 499: the client left first
  double seconds = 0;
  size_t request_bytes = 0;
};

using AccessLog = std::function<void(const AccessRecord&)>;

/// Refuse whatever comes with 503, as long as there is no model that could answer. `log` may be empty.
HttpHooks LoadingHooks(AccessLog log = {});

/// Any thread. Routes are added before the first request.
class Router {
 public:
  using Endpoint = std::function<Status(Call& call)>;
  enum class Access {
    kOpen,       // without a key
    kKey,        // with one of the keys, where there are any
    kGenerates,  // likewise, refused while draining or full
    kAdmin,      // with an admin key, where there are any keys
  };

  Router(const RouterOptions& options, Metrics& metrics, AccessLog log);

  /// A segment {NAME} of `path` matches any segment that is not empty, and Call::path_values gets its value.
  /// A path without such segments is preferred.
  void Add(const char* method, const std::string& path, Access access, Endpoint endpoint);
  /// Adds an endpoint for the paths that begin with `prefix` and have no route of their own.
  void AddPrefix(const char* method, const std::string& prefix, Access access, Endpoint endpoint);

  /// Method and path of each route; prefixes end in '/'.
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
  std::optional<HttpResponse> AdmitKey(const HttpRequest& head, const Route& route,
                                       const std::optional<KeyHolder>& holder) const;
  std::optional<HttpResponse> AdmitRate(const HttpRequest& head, Tenant& tenant) const;
  void Handle(HttpRequest request, std::shared_ptr<ResponseWriter> writer, std::shared_ptr<Lane> lane);
  HttpResponse Preflight(const HttpRequest& head) const;
  HttpResponse Refuse(const HttpRequest& head, const ApiError& error, const Tenant* tenant = nullptr) const;
  /// None where no keys are set, and where the request has no valid one.
  std::optional<KeyHolder> HolderOf(const HttpRequest& head) const;

  const RouterOptions options_;
  const BrowserGuard guard_;
  Metrics& metrics_;
  const AccessLog log_;
  std::map<std::string, std::vector<Route>> routes_, patterns_, prefixes_;  // by method
  std::atomic<bool> draining_{false};
  std::atomic<int> generating_{0};
};

}  // namespace moesaic::server
