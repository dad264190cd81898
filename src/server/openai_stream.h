// Streams of /v1/chat/completions and /v1/completions: chunks with one head, and the same end.
#pragma once

#include <memory>
#include <string>

#include "server/answer.h"
#include "server/call.h"

namespace moesaic::server {

/// What of a request both APIs' answers depend on.
struct OpenAiShape {
  std::string id, model;
  int64_t created = UnixNow();
  bool usage = false;       // one last event with the usage
  bool continuous = false;  // and the usage so far in every event
  bool ids = false;         // token ids beside the text
};

/// Members that every answer and chunk begins with.
Json AnswerHead(const OpenAiShape& shape, const char* object);

class OpenAiStream : public AnswerSink {
 public:
  /// `shape` is the derived class's own, and outlives this.
  OpenAiStream(const OpenAiShape& shape, const char* object, std::shared_ptr<ResponseWriter> writer)
      : shape_(shape), object_(object), stream_(std::move(writer)) {}

  void Started() override { stream_.Begin(); }
  void Done(const Usage& usage) override;
  void Failed(const ApiError& error) override;

 protected:
  /// Sends `choice` as a chunk. `more`: members of the chunk itself, or null.
  void SendChunk(Json choice, const Usage& so_far, const Json& more);

 private:
  const OpenAiShape& shape_;
  const char* const object_;
  EventStream stream_;
};

}  // namespace moesaic::server
