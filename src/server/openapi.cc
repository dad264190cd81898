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
  Json (*query)() = nullptr;                         // its query parameters; null: none
};

Json Parameter(const char* name, const char* in, bool required, Json schema) {
  return {{"name", name}, {"in", in}, {"required", required}, {"schema", std::move(schema)}};
}

Json QueryParameter(const char* name, Json schema) {
  return Parameter(name, "query", false, std::move(schema));
}

// As ItemPage reads them.
Json PageQuery() {
  return Json::array(
      {QueryParameter("limit", {{"type", "integer"}, {"minimum", 1}, {"maximum", 100}, {"default", 20}}),
       QueryParameter("order", {{"type", "string"}, {"enum", {"asc", "desc"}}, {"default", "desc"}}),
       QueryParameter("after", {{"type", "string"}})});
}

Json ReplayQuery() {
  return Json::array({QueryParameter("stream", {{"type", "boolean"}, {"default", false}}),
                      QueryParameter("starting_after", {{"type", "integer"}, {"minimum", 0}})});
}

const std::map<std::string, Operation>& Operations() {
  static const std::map<std::string, Operation> operations = {
      {"POST /v1/chat/completions", {"OpenAI chat", {kJson, kEvents}, ChatSchema}},
      {"POST /v1/completions", {"OpenAI completions", {kJson, kEvents}, CompletionSchema}},
      {"POST /v1/responses", {"OpenAI responses", {kJson, kEvents}, ResponsesSchema}},
      {"GET /v1/responses/{response_id}",
       {"A stored response, or its events again", {kJson, kEvents}, nullptr, ReplayQuery}},
      {"DELETE /v1/responses/{response_id}", {"Deletes a stored response"}},
      {"GET /v1/responses/{response_id}/input_items",
       {"The input items of a stored response", {kJson}, nullptr, PageQuery}},
      {"POST /v1/responses/{response_id}/cancel",
       {"Cancels a background response; this server has none, and refuses it"}},
      {"POST /v1/responses/input_tokens", {"Tokens of a response's input", {kJson}, ResponsesSchema}},
      {"POST /v1/conversations", {"A conversation that responses share", {kJson}, ConversationSchema}},
      {"GET /v1/conversations/{conversation_id}", {"A conversation"}},
      {"POST /v1/conversations/{conversation_id}",
       {"Replaces a conversation's metadata", {kJson}, ConversationUpdateSchema}},
      {"DELETE /v1/conversations/{conversation_id}", {"Deletes a conversation"}},
      {"GET /v1/conversations/{conversation_id}/items",
       {"The items of a conversation", {kJson}, nullptr, PageQuery}},
      {"POST /v1/conversations/{conversation_id}/items",
       {"Adds items to a conversation", {kJson}, ConversationItemsSchema}},
      {"GET /v1/conversations/{conversation_id}/items/{item_id}", {"An item of a conversation"}},
      {"DELETE /v1/conversations/{conversation_id}/items/{item_id}", {"Removes an item from a conversation"}},
      {"POST /v1/embeddings", {"OpenAI embeddings", {kJson}, EmbeddingsSchema}},
      {"POST /v1/messages", {"Anthropic messages", {kJson, kEvents}, MessagesSchema}},
      {"POST /v1/messages/count_tokens", {"Tokens of Anthropic messages", {kJson}, CountTokensSchema}},
      {"GET /v1/models", {"Names of the served model"}},
      {"GET /v1/models/", {"One name of the served model"}},
      {"POST /tokenize", {"Text or messages to ids", {kJson}, TokenizeSchema}},
      {"POST /detokenize", {"Ids to text", {kJson}, DetokenizeSchema}},
      {"POST /v1/chat/completions/render", {"The prompt that a chat becomes", {kJson}, RenderSchema}},
      {"GET /health", {"Alive"}},
      {"GET /ready", {"Takes new requests"}},
      {"GET /version", {"Version"}},
      {"GET /metrics", {"Prometheus", {kText}}},
      {"GET /state", {"Blocks and requests at this moment"}},
      {"GET /expert_load", {"Tokens of each routed expert, for moesaic placement"}},
      {"GET /debug/trace", {"The latest requests as a Chrome trace"}},
      {"POST /reset_prefix_cache", {"Drops cached blocks that no request holds, and those on disk"}},
      {"GET /openapi.json", {"This description"}}};
  return operations;
}

// The names in braces of a path, as parameters.
Json PathParameters(std::string_view path) {
  Json parameters = Json::array();
  for (size_t open; (open = path.find('{')) != std::string_view::npos;) {
    const size_t close = path.find('}', open);
    const std::string name(path.substr(open + 1, close - open - 1));
    parameters.push_back(Parameter(name.c_str(), "path", true, {{"type", "string"}}));
    path.remove_prefix(close + 1);
  }
  return parameters;
}

Json Describe(const Operation& operation, const std::string& path, const ServedModel& model) {
  Json described = {{"summary", operation.summary}};
  Json parameters = PathParameters(path);
  if (operation.query != nullptr) {
    for (Json& parameter : operation.query()) parameters.push_back(std::move(parameter));
  }
  if (!parameters.empty()) described["parameters"] = std::move(parameters);
  if (operation.body != nullptr) {
    described["requestBody"] = {{"required", true},
                                {"content", {{kJson, {{"schema", operation.body(model)}}}}}};
  }
  Json content = Json::object();
  for (const char* type : operation.answers) {
    Json schema = Json::object();  // empty for events, since readers differ in their schema
    if (std::string_view(type) != kEvents) {
      schema["type"] = std::string_view(type) == kJson ? "object" : "string";
    }
    content[type] = {{"schema", std::move(schema)}};
  }
  described["responses"] = {
      {"200", {{"description", "The answer"}, {"content", std::move(content)}}},
      {"default",
       {{"description", "The error"},
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
    std::string path = route;
    if (path.ends_with('/') && path.size() > 1) path += "{model}";
    std::string verb = method;
    std::transform(verb.begin(), verb.end(), verb.begin(), [](unsigned char c) { return std::tolower(c); });
    paths[path][verb] = Describe(found->second, path, model);
  }
  MOESAIC_CHECK(routes.size() == Operations().size());
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
          // The server's settings decide whether a key is needed.
          {"security", Json::array({Json{{"key", Json::array()}}, Json::object()})},
          {"components",
           {{"schemas", {{"Error", error}}},
            {"securitySchemes", {{"key", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
}

}  // namespace moesaic::server
