// Implements POST /v1/embeddings: returns the final hidden state at each input's last token, scaled to
// length 1.
#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "server/answer.h"
#include "server/api_keys.h"
#include "server/call.h"
#include "server/prompts.h"

namespace moesaic::server {
namespace {

std::string Base64(std::span<const float> values) {
  constexpr const char* kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());  // the API and this machine are little-endian
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t group = 0;
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    for (size_t b = 0; b < 3; ++b)
      group = group << 8 | (b < count ? static_cast<unsigned char>(bytes[i + b]) : 0u);
    for (size_t d = 0; d < 4; ++d) text += d <= count ? kDigits[group >> (18 - 6 * d) & 63] : '=';
  }
  return text;
}

// Collects the vectors of the inputs on the request's executor.
class Embedding : public std::enable_shared_from_this<Embedding> {
 public:
  Embedding(const GenerationContext& context, const Call& call, bool base64)
      : context_(context), writer_(call.writer), executor_(call.executor), base64_(base64) {}

  Status Submit(const std::vector<std::vector<int32_t>>& prompts, const Call& call) {
    RETURN_IF_ERROR(context_.model.engine->CheckRoom(call.client, std::ssize(prompts)));
    vectors_.resize(prompts.size());
    waiting_ = prompts.size();
    for (size_t i = 0; i < prompts.size(); ++i) {
      engine::Request request;
      request.prompt = prompts[i];
      request.sampling.max_tokens = 0;
      request.want_embedding = true;
      request.client = call.client;
      request.cache_namespace = CacheNamespace(call.cache_scope, "");
      request.deadline = call.deadline;
      tokens_ += static_cast<int64_t>(prompts[i].size());
      auto submitted = context_.model.engine->Submit(
          std::move(request), [self = shared_from_this(), i](std::span<engine::TokenEvent> events) {
            for (engine::TokenEvent& event : events) {
              self->executor_->Post([self, i, event = std::move(event)]() mutable { self->Take(i, event); });
            }
          });
      if (!submitted.ok()) {
        Cancel();
        return submitted.status();
      }
      requests_.push_back(*submitted);
    }
    if (call.tenant != nullptr) call.tenant->ChargePrompt(tokens_);
    return OkStatus();
  }

  void Cancel() {
    over_ = true;
    for (const engine::RequestId id : requests_) context_.model.engine->Cancel(id);
  }

 private:
  void Take(size_t index, engine::TokenEvent& event) {
    if (over_) return;
    if (!event.embedding.empty()) vectors_[index] = std::move(event.embedding);
    if (event.finish == engine::FinishReason::kNone) return;
    if (vectors_[index].empty()) {
      Cancel();
      return SendError(*writer_, MissingVector(event), ApiStyle::kOpenAi);
    }
    if (--waiting_ == 0) Answer();
  }

  static Status MissingVector(const engine::TokenEvent& event) {
    if (event.finish == engine::FinishReason::kDeadline)
      return absl::UnavailableError("the request's deadline passed before all inputs were computed");
    const Status failure = FailureOf(event);
    return failure.ok() ? absl::InternalError("the model gave no hidden state") : failure;
  }

  void Answer() {
    over_ = true;
    Json data = Json::array();
    for (size_t i = 0; i < vectors_.size(); ++i) {
      Json item = {{"object", "embedding"}, {"index", i}};
      item["embedding"] = base64_ ? Json(Base64(vectors_[i])) : Json(vectors_[i]);
      data.push_back(std::move(item));
    }
    SendJson(*writer_, {{"object", "list"},
                        {"data", std::move(data)},
                        {"model", context_.model.names.front()},
                        {"usage", {{"prompt_tokens", tokens_}, {"total_tokens", tokens_}}}});
  }

  const GenerationContext context_;
  const std::shared_ptr<ResponseWriter> writer_;
  const std::shared_ptr<SerialExecutor> executor_;
  const bool base64_;
  std::vector<std::vector<float>> vectors_;
  std::vector<engine::RequestId> requests_;
  size_t waiting_ = 0;
  int64_t tokens_ = 0;
  bool over_ = false;
};

}  // namespace

Status Embeddings(const GenerationContext& context, Call& call) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(call.request.body));
  Fields body(json, "");
  std::string name, format = "float";
  body.String("model", &name);
  if (body.ok()) body.Merge(context.model.CheckName(name));
  body.String("encoding_format", &format);
  if (body.ok() && format != "float" && format != "base64") {
    body.Fail("encoding_format", "invalid_value",
              fmt::format("Invalid 'encoding_format': 'float' or 'base64', found '{}'", format));
  }
  if (body.Has("dimensions")) {
    body.Fail("dimensions", "invalid_value", "'dimensions': the model's own width cannot be changed");
  }
  const Json* input = body.Any("input");
  if (body.ok() && input == nullptr) {
    body.Fail("input", "missing_required_parameter", "Missing required parameter: 'input'.");
  }
  RETURN_IF_ERROR(body.status());
  ASSIGN_OR_RETURN(const auto prompts, ReadPrompts(context.model, *input, "input", /*special=*/true));
  const auto embedding = std::make_shared<Embedding>(context, call, format == "base64");
  RETURN_IF_ERROR(embedding->Submit(prompts, call));
  call.writer->OnClientLeft([weak = std::weak_ptr<Embedding>(embedding), executor = call.executor] {
    executor->Post([weak] {
      if (const auto alive = weak.lock()) alive->Cancel();
    });
  });
  return OkStatus();
}

}  // namespace moesaic::server
