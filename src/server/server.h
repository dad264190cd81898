// The server: one model behind the HTTP APIs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/kernel_table.h"
#include "server/http_server.h"
#include "server/response_store.h"
#include "server/router.h"
#include "server/served_model.h"
#include "text/grammar_pool.h"

namespace moesaic::server {

struct ServerOptions {
  RouterOptions router;
  std::string version;
  std::string model_path;
  ResponseStoreOptions responses;
  text::GrammarPoolOptions grammars;
  size_t trace_spans = 20'000;  ///< kept for GET /debug/trace
  std::vector<kernels::KernelChoice> kernels;
  AccessLog log;  ///< may be empty; any thread
};

class Server {
 public:
  /// From now on answers what comes to `http`, which runs under LoadingHooks until then. `model` and its
  /// engine are borrowed. Close, then let the engine become idle, before the server goes.
  static std::unique_ptr<Server> Start(ServerOptions options, const ServedModel& model,
                                       std::unique_ptr<HttpServer> http);
  virtual ~Server() = default;

  virtual int port() const = 0;
  /// Refuses new generations from now on; /ready says so.
  virtual void Drain() = 0;
  /// Ends the answers that are on their way with an error that says so: a stream gets an error event, in the
  /// form of its API, and its end. Further ones end at once.
  virtual void StopAnswers() = 0;
  /// Every answer has been written to its client.
  virtual bool flushed() const = 0;
  /// Closes all connections and takes no more; what they asked for is cancelled.
  virtual void Close() = 0;
  /// No generation is on its way.
  virtual bool idle() const = 0;
};

}  // namespace moesaic::server
