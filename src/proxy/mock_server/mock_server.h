// Serves the mock engine over HTTP and ZeroMQ in real time, for tests and benchmarks of routers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "proxy/events/kv_encode.h"
#include "proxy/mock/engine_options.h"
#include "proxy/protocol/request_body.h"

namespace moesaic::proxy {

struct MockServerOptions {
  std::string host = "127.0.0.1";
  int port = 0;  ///< 0: any free port
  std::string model = "mock";
  Transfer transfer = Transfer::kAggregated;
  MockEngineOptions engine;
  std::string kv_endpoint;         ///< PUB socket; empty: no events. A concrete host is connected to, as vLLM does
  std::string kv_replay_endpoint;  ///< ROUTER socket; empty: none
  KvEncoding kv_encoding = KvEncoding::kArray;
  std::string kv_topic;
};

/// Answers /v1/completions and /v1/chat/completions with and without streaming, /v1/models, /health, /metrics, and:
///   GET /query                     the bootstrap server of vLLM's Mooncake connector
///   GET /mock/state                engine statistics, blocks pinned for other engines, requests served
///   GET /mock/requests             bodies and headers of the last requests, newest last
///   POST /mock/faults              {"unhealthy", "fail_request", "slowdown", "drop_message", ...}
///   POST /mock/reset               drops the cache; {"restart": true} forgets everything, as a new process does
/// Headers of a request inject faults: x-mock-status (answer with this status), x-mock-delay-ms (before the answer),
/// x-mock-drop-after (close the connection after so many tokens).
///
/// A text has one token for every four bytes. Ids in the body are used as they are.
class MockServer {
 public:
  static StatusOr<std::unique_ptr<MockServer>> Create(const MockServerOptions& options);
  ~MockServer();
  int port() const;
  /// Serves until Stop.
  void Run();
  /// May be called from any thread and from signal handlers' threads.
  void Stop();

 private:
  class Impl;
  explicit MockServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::proxy
