#include "server/openai_stream.h"

#include <utility>

namespace moesaic::server {

Json AnswerHead(const OpenAiShape& shape, const char* object) {
  return {{"id", shape.id}, {"object", object}, {"created", shape.created}, {"model", shape.model}};
}

void OpenAiStream::SendChunk(Json choice, const Usage& so_far, const Json& more) {
  Json chunk = AnswerHead(shape_, object_);
  if (more.is_object()) chunk.update(more);
  chunk["choices"] = Json::array({std::move(choice)});
  if (shape_.usage) chunk["usage"] = shape_.continuous ? UsageJson(so_far) : Json(nullptr);
  stream_.Data(chunk);
}

void OpenAiStream::Done(const Usage& usage) {
  if (shape_.usage) {
    Json last = AnswerHead(shape_, object_);
    last["choices"] = Json::array();
    last["usage"] = UsageJson(usage);
    stream_.Data(last);
  }
  stream_.Done();
  stream_.End();
}

void OpenAiStream::Failed(const ApiError& error) {
  stream_.Data(Json::parse(ErrorJson(error, ApiStyle::kOpenAi)));
  stream_.Done();
  stream_.End();
}

}  // namespace moesaic::server
