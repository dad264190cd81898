// Sends the chunks that streams of /v1/chat/completions and /v1/completions have in common.
#pragma once

#include <memory>
#include <string>

#include "server/answer.h"
#include "server/call.h"

namespace moesaic::server {

/// Fields of a request that the answers of both APIs need.
struct OpenAiShape {
  std::string id, model;
  int64_t created = UnixNow();
  bool usage = false;       // true: the last event has the usage
  bool continuous = false;  // true: every event has the usage so far
  bool ids = false;         // true: answers have token ids too
};

/// Returns the first members of every answer and chunk.
Json AnswerHead(const OpenAiShape& shape, const char* object);

class OpenAiStream : public AnswerSink {
 public:
  /// `shape` is a member of the derived class.
  OpenAiStream(const OpenAiShape& shape, const char* object, std::shared_ptr<ResponseWriter> writer)
      : shape_(shape), object_(object), stream_(std::move(writer)) {}

  void Started() override { stream_.Begin(); }
  void Done(const Usage& usage) override;
  void Failed(const ApiError& error) override;

 protected:
  /// Sends `choice` as a chunk. `more` has further members of the chunk, or is null.
  void SendChunk(Json choice, const Usage& so_far, const Json& more);

 private:
  const OpenAiShape& shape_;
  const char* const object_;
  EventStream stream_;
};

}  // namespace moesaic::server
