// The context of endpoints and a writer of answers, for tests.
#pragma once

#include <functional>
#include <string>

#include "server/generation.h"
#include "server/live_requests.h"
#include "server/metrics.h"
#include "server/response_store.h"
#include "server/test_model.h"
#include "server/tracing.h"
#include "text/grammar_pool.h"

namespace moesaic::server {

struct TestContext {
  /// Borrows all members.
  GenerationContext Get() { return {model, metrics, tracer, live, responses, grammars}; }

  ServedModel model = TinyModel();
  Metrics metrics{"m"};
  Tracer tracer{100};
  LiveRequests live;
  ResponseStore responses{{}};
  text::GrammarPool grammars{model.grammars, {}};
};

/// Drops the answer.
class NoWriter : public ResponseWriter {
 public:
  void Send(HttpResponse) override {}
  void Start(int, Headers) override {}
  void Write(std::string) override {}
  void End() override {}
  void OnClientLeft(std::function<void()>) override {}
};

}  // namespace moesaic::server
