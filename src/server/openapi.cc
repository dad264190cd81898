#include "server/openapi.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <string_view>

#include "base/check.h"
#include "server/openapi_schemas.h"

namespace moesaic::server {
namespace {

constexpr const char* kJson = "application/json";
constexpr const char* kEvents = "text/event-stream";
constexpr const char* kText = "text/plain";

struct Operation {
  const char* summary;
  std::vector<const char*> answers = {kJson};        // content types
  Json (*body)(const ServedModel& model) = nullptr;  // its schema; null: none
  const char* parameter = nullptr;                   // the name behind the path
};

const std::map<std::string, Operation>& Operations() {
  static const std::map<std::string, Operation> operations = {
      {"POST /v1/chat/completions", {"OpenAI chat", {kJson, kEvents}, ChatSchema}},
      {"POST /v1/completions", {"OpenAI completions", {kJson, kEvents}, CompletionSchema}},
      {"POST /v1/responses", {"OpenAI responses", {kJson, kEvents}, ResponsesSchema}},
      {"GET /v1/responses/", {"A kept response", {kJson}, nullptr, "response_id"}},
      {"DELETE /v1/responses/", {"Forgets a kept response", {kJson}, nullptr, "response_id"}},
      {"POST /v1/responses/input_tokens", {"Tokens of a response's input", {kJson}, ResponsesSchema}},
      {"POST /v1/conversations", {"A conversation that responses share", {kJson}, ConversationSchema}},
      {"GET /v1/conversations/", {"A conversation", {kJson}, nullptr, "conversation_id"}},
      {"POST /v1/conversations/",
       {"Replaces a conversation's metadata", {kJson}, ConversationUpdateSchema, "conversation_id"}},
      {"DELETE /v1/conversations/", {"Forgets a conversation", {kJson}, nullptr, "conversation_id"}},
      {"POST /v1/embeddings", {"OpenAI embeddings", {kJson}, EmbeddingsSchema}},
      {"POST /v1/messages", {"Anthropic messages", {kJson, kEvents}, MessagesSchema}},
      {"POST /v1/messages/count_tokens", {"Tokens of Anthropic messages", {kJson}, CountTokensSchema}},
      {"GET /v1/models", {"What is served"}},
      {"GET /v1/models/", {"One served name", {kJson}, nullptr, "model"}},
      {"POST /tokenize", {"Text or messages to ids", {kJson}, TokenizeSchema}},
      {"POST /detokenize", {"Ids to text", {kJson}, DetokenizeSchema}},
      {"POST /v1/chat/completions/render", {"The prompt that a chat becomes", {kJson}, RenderSchema}},
      {"GET /health", {"Alive"}},
      {"GET /ready", {"Takes new requests"}},
      {"GET /version", {"Version"}},
      {"GET /metrics", {"Prometheus", {kText}}},
      {"GET /state", {"Blocks and requests at this moment"}},
      {"GET /debug/trace", {"The latest requests as a Chrome trace"}},
      {"POST /reset_prefix_cache", {"Forgets cached blocks that no request holds, and those on disk"}},
      {"GET /openapi.json", {"This description"}}};
  return operations;
}

// Below the prefix of another route, which leads there.
struct Nested {
  const char *verb, *path;
  std::vector<const char*> parameters;
  Operation operation;
};

const std::vector<Nested>& NestedOperations() {
  static const std::vector<Nested> operations = {
      {"get",
       "/v1/conversations/{conversation_id}/items",
       {"conversation_id"},
       {"The items of a conversation: after, limit, order"}},
      {"post",
       "/v1/conversations/{conversation_id}/items",
       {"conversation_id"},
       {"Adds items to a conversation", {kJson}, ConversationItemsSchema}},
      {"get",
       "/v1/conversations/{conversation_id}/items/{item_id}",
       {"conversation_id", "item_id"},
       {"An item of a conversation"}},
      {"delete",
       "/v1/conversations/{conversation_id}/items/{item_id}",
       {"conversation_id", "item_id"},
       {"Removes an item from a conversation"}}};
  return operations;
}

Json PathParameter(const char* name) {
  return {{"name", name}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}}}};
}

Json Describe(const Operation& operation, const ServedModel& model) {
  Json described = {{"summary", operation.summary}};
  if (operation.parameter != nullptr) {
    described["parameters"] = Json::array({PathParameter(operation.parameter)});
  }
  if (operation.body != nullptr) {
    described["requestBody"] = {{"required", true},
                                {"content", {{kJson, {{"schema", operation.body(model)}}}}}};
  }
  Json content = Json::object();
  for (const char* type : operation.answers) {
    Json schema = Json::object();  // of events nothing: readers differ in what they take for one
    if (std::string_view(type) != kEvents) {
      schema["type"] = std::string_view(type) == kJson ? "object" : "string";
    }
    content[type] = {{"schema", std::move(schema)}};
  }
  described["responses"] = {
      {"200", {{"description", "The answer"}, {"content", std::move(content)}}},
      {"default",
       {{"description", "Why not"},
        {"content", {{kJson, {{"schema", {{"$ref", "#/components/schemas/Error"}}}}}}}}}};
  return described;
}

}  // namespace

Json OpenApi(const ServedModel& model, const std::string& version,
             const std::vector<std::pair<std::string, std::string>>& routes) {
  Json paths = Json::object();
  for (const auto& [method, route] : routes) {
    const auto found = Operations().find(fmt::format("{} {}", method, route));
    MOESAIC_CHECK(found != Operations().end());
    const Operation& operation = found->second;
    std::string path = route;
    if (operation.parameter != nullptr) path += fmt::format("{{{}}}", operation.parameter);
    std::string verb = method;
    std::transform(verb.begin(), verb.end(), verb.begin(), [](unsigned char c) { return std::tolower(c); });
    paths[path][verb] = Describe(operation, model);
  }
  MOESAIC_CHECK(routes.size() == Operations().size());
  for (const Nested& nested : NestedOperations()) {
    Json described = Describe(nested.operation, model);
    described["parameters"] = Json::array();
    for (const char* name : nested.parameters) described["parameters"].push_back(PathParameter(name));
    paths[nested.path][nested.verb] = std::move(described);
  }
  const Json error = {
      {"type", "object"},
      {"required", {"error"}},
      {"properties",
       {{"error",
         {{"type", "object"},
          {"required", {"message", "type"}},
          {"properties", {{"message", {{"type", "string"}}}, {"type", {{"type", "string"}}}}}}}}}};
  return {{"openapi", "3.1.0"},
          {"info", {{"title", "Moesaic"}, {"version", version}}},
          {"paths", std::move(paths)},
          // A key, or none: which it is, is the server's setting.
          {"security", Json::array({Json{{"key", Json::array()}}, Json::object()})},
          {"components",
           {{"schemas", {{"Error", error}}},
            {"securitySchemes", {{"key", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
}

}  // namespace moesaic::server
