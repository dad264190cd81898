// Serves one model over the HTTP APIs.
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
  size_t trace_spans = 20'000;  ///< maximum number of spans for GET /debug/trace
  std::vector<kernels::KernelChoice> kernels;
  AccessLog log;  ///< called by any thread; may be empty
};

class Server {
 public:
  /// Answers the requests of `http`, which uses LoadingHooks before. Borrows `model` and its engine. Call
  /// Close() and wait until the engine is idle before destroying the server.
  static std::unique_ptr<Server> Start(ServerOptions options, const ServedModel& model,
                                       std::unique_ptr<HttpServer> http);
  virtual ~Server() = default;

  virtual int port() const = 0;
  /// Refuses new generations. /ready answers with 503 from then on.
  virtual void Drain() = 0;
  /// Reports that the model cannot compute any more: /health and /ready answer with 503 and `reason` from
  /// then on. Refuses new generations like Drain().
  virtual void Fail(const std::string& reason) = 0;
  /// Ends the running answers with an error. A stream gets an error event in the form of its API and its end.
  /// Later answers end at once.
  virtual void StopAnswers() = 0;
  /// Returns true if every answer has been written to its client.
  virtual bool flushed() const = 0;
  /// Closes all connections, cancels their requests and accepts no more.
  virtual void Close() = 0;
  /// Returns true if no generation is running or waiting.
  virtual bool idle() const = 0;
};

}  // namespace moesaic::server
