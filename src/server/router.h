// Routes requests to endpoints: checks keys, origins and limits, and adds the headers of every answer.
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
  std::shared_ptr<KeyRing> keys;    ///< valid keys; null accepts requests without a key
  bool share_prefix_cache = false;  ///< true if the holders of keys share cached blocks
  BrowserGuardOptions browser;
  int max_requests = 1024;                  ///< generating calls at a time; more are answered with 429
  std::chrono::seconds request_timeout{0};  ///< time after which a generation ends; 0 for no limit
  /// Headers of answers of generating calls, when they begin. May be empty. Any thread calls it.
  std::function<Headers()> generation_headers = {};
};

/// One answered request for the access log. Method and path are empty if the request could not be read.
struct AccessRecord {
  std::string peer, method, path, request_id, trace_id;
  std::string key;      // name of the API key, or empty
  std::string refused;  // reason of a refusal before an endpoint ran, or empty
  int status = 0;       // status of the answer; kClientLeft if the client left before it
  double seconds = 0;
  size_t request_bytes = 0;
};

using AccessLog = std::function<void(const AccessRecord&)>;

/// Returns hooks that refuse all requests with 503 while the model is being loaded. `log` may be empty.
HttpHooks LoadingHooks(AccessLog log = {});

/// Any thread may call all methods. Add the routes before the first request.
class Router {
 public:
  using Endpoint = std::function<Status(Call& call)>;
  enum class Access {
    kOpen,       // needs no key
    kKey,        // needs one of the keys, where keys are set
    kGenerates,  // needs a key too, and is refused while the server drains or is full
    kAdmin,      // needs an admin key, where keys are set
  };

  Router(const RouterOptions& options, Metrics& metrics, AccessLog log);

  /// A segment {NAME} of `path` matches any segment that is not empty, and Call::path_values gets its value.
  /// A path without such segments is preferred.
  void Add(const char* method, const std::string& path, Access access, Endpoint endpoint);
  /// Adds an endpoint for the paths that begin with `prefix` and have no route of their own.
  void AddPrefix(const char* method, const std::string& prefix, Access access, Endpoint endpoint);

  /// Returns the method and path of each route; prefixes end in '/'.
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
  /// Returns the methods that `path` has a route for, in the form of the header "allow", or "".
  std::string MethodsOf(const std::string& path) const;
  std::optional<HttpResponse> Admit(const HttpRequest& head) const;
  std::optional<HttpResponse> AdmitKey(const HttpRequest& head, const Route& route,
                                       const std::optional<KeyHolder>& holder) const;
  std::optional<HttpResponse> AdmitRate(const HttpRequest& head, Tenant& tenant) const;
  void Handle(HttpRequest request, std::shared_ptr<ResponseWriter> writer,
              std::shared_ptr<SerialExecutor> executor);
  HttpResponse Preflight(const HttpRequest& head) const;
  HttpResponse Refuse(const HttpRequest& head, const ApiError& error, const Tenant* tenant = nullptr) const;
  /// Returns the holder of the request's key. Returns nothing where no keys are set or the key is invalid.
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
