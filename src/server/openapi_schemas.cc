#include "server/openapi_schemas.h"

#include <initializer_list>
#include <limits>
#include <utility>

#include "server/sampling_fields.h"
#include "server/tools.h"

namespace moesaic::server {
namespace {

constexpr int kMaxSchemaInt = std::numeric_limits<int>::max();

// Allows null, since the readers treat a null member as absent.
Json OrNull(Json schema) {
  if (schema == Json{{"type", "null"}}) return schema;
  if (schema.contains("type") && schema["type"].is_string() && !schema.contains("enum")) {
    schema["type"] = Json::array({schema["type"], "null"});
    return schema;
  }
  return {{"anyOf", Json::array({std::move(schema), {{"type", "null"}}})}};
}

Json Type(const char* name) { return {{"type", name}}; }
Json Integer(int64_t least, int64_t most) {
  return {{"type", "integer"}, {"minimum", least}, {"maximum", most}};
}
Json Number(double least, double most) { return {{"type", "number"}, {"minimum", least}, {"maximum", most}}; }
Json NumberAbove(double least, double most) {
  return {{"type", "number"}, {"exclusiveMinimum", least}, {"maximum", most}};
}
Json Text() { return Type("string"); }
Json Flag() { return Type("boolean"); }
Json AnyObject() { return Type("object"); }
Json Words(std::initializer_list<const char*> words) { return {{"type", "string"}, {"enum", words}}; }
Json ArrayOf(Json items, int least, int most = 0) {
  Json schema = {{"type", "array"}, {"items", std::move(items)}};
  if (least > 0) schema["minItems"] = least;
  if (most > 0) schema["maxItems"] = most;
  return schema;
}
Json AnyOf(std::initializer_list<Json> schemas) {
  Json all = Json::array();
  for (const Json& schema : schemas) all.push_back(schema);
  return {{"anyOf", std::move(all)}};
}
Json NonEmpty() { return {{"type", "string"}, {"minLength", 1}}; }
// A member that the readers refuse.
Json Never() { return Type("null"); }
Json StringOrStrings(int most) { return AnyOf({Text(), ArrayOf(Text(), 0, most)}); }

// Builds the schema of an object whose required members may not be null, while all others may.
class Object {
 public:
  Object& Must(const char* name, Json schema) {
    schema_["required"].push_back(name);
    schema_["properties"][name] = std::move(schema);
    return *this;
  }
  Object& May(const char* name, Json schema) {
    schema_["properties"][name] = OrNull(std::move(schema));
    return *this;
  }
  Json Take() { return std::move(schema_); }

 private:
  Json schema_ = {{"type", "object"}, {"required", Json::array()}, {"properties", Json::object()}};
};

Json ModelName(const ServedModel& model) {
  Json schema = {{"type", "string"}, {"enum", Json::array({""})}};
  for (const std::string& name : model.names) schema["enum"].push_back(name);
  return schema;
}

Json TokenId(const ServedModel& model) { return Integer(0, model.vocab_size - 1); }

Json Prompts(const ServedModel& model) {
  return AnyOf({NonEmpty(), ArrayOf(NonEmpty(), 1), ArrayOf(TokenId(model), 1),
                ArrayOf(ArrayOf(TokenId(model), 1), 1)});
}

Json Content() {
  const Json text =
      Object().May("type", Words({"text", "input_text", "output_text"})).Must("text", Text()).Take();
  const Json refusal = Object().Must("type", Words({"refusal"})).Must("refusal", Text()).Take();
  return AnyOf({Text(), ArrayOf(AnyOf({text, refusal}), 0)});
}

Json Calls() {
  const Json function = Object().May("name", Text()).May("arguments", AnyOf({Text(), AnyObject()})).Take();
  return ArrayOf(Object().May("id", Text()).Must("function", function).Take(), 0);
}

Json Message() {
  const auto common = [](Object& message) -> Object& {
    return message.May("name", Text()).May("tool_call_id", Text()).May("reasoning_content", Text());
  };
  Object other, assistant;
  common(other)
      .Must("role", Words({"system", "developer", "user", "tool", "function"}))
      .Must("content", Content());
  common(assistant).Must("role", Words({"assistant"})).May("content", Content()).May("tool_calls", Calls());
  return AnyOf({other.Take(), assistant.Take()});
}

Json FunctionName() {
  return {{"type", "string"}, {"minLength", 1}, {"maxLength", 256}, {"pattern", R"(^[^\r\n<>"]+$)"}};
}

// A tool's name, description and schema of arguments, for APIs that have them among the tool's other members.
Object Function() { return std::move(Object().Must("name", FunctionName()).May("description", Text())); }
Json Arguments() { return Object().May("type", Words({"object"})).Take(); }

Json ChatTools() {
  const Json function = Function().May("parameters", Arguments()).Take();
  return ArrayOf(Object().May("type", Words({"function"})).Must("function", function).Take(), 0, kMaxTools);
}

Json ResponsesTools() {
  return ArrayOf(Function().May("type", Words({"function"})).May("parameters", Arguments()).Take(), 0,
                 kMaxTools);
}

Json MessagesTools() {
  return ArrayOf(Function().May("type", Words({"custom"})).Must("input_schema", Arguments()).Take(), 0,
                 kMaxTools);
}

void AddConversation(Object& body) {
  body.Must("messages", ArrayOf(Message(), 1))
      .May("tools", ChatTools())
      .May("tool_choice", AnyOf({Words({"none", "auto", "required"}), AnyObject()}))
      .May("parallel_tool_calls", Flag())
      .May("add_generation_prompt", Flag())
      .May("continue_final_message", Flag())
      .May("chat_template", Never())
      .May("chat_template_kwargs", AnyObject())
      .May("documents", Type("array"))
      .May("reasoning_effort", Text());
}

Json Sparsity(const ServedModel& model) {
  const Json modes = model.sparsity.key_summaries ? Words({"dense", "decode", "all"}) : Words({"dense"});
  Object object;
  object.May("budget", Integer(engine::kMinSparsityBudget, kMaxSchemaInt / 2))
      .May("reuse", Integer(1, tensor::kKvBlockTokens));
  // Without key summaries, only the mode "dense" is served. The default would be another, so that "mode" is
  // required.
  return model.sparsity.key_summaries ? object.May("mode", modes).Take() : object.Must("mode", modes).Take();
}

void AddGeneration(Object& body, const ServedModel& model) {
  const Json options = Object().May("include_usage", Flag()).May("continuous_usage_stats", Flag()).Take();
  const Json session = Object()
                           .May("state", Words({"continues", "ends", ""}))
                           .May("tokens", Integer(0, std::numeric_limits<int64_t>::max()))
                           .May("returns_in", Number(0, kMaxReturnSeconds))
                           .Take();
  body.May("model", ModelName(model))
      .May("temperature", Number(0, 100))
      .May("top_p", NumberAbove(0, 1))
      .May("top_k", Integer(-1, kMaxSchemaInt))
      .May("min_p", Number(0, 1))
      .May("typical_p", NumberAbove(0, 1))
      .May("repetition_penalty", Number(1e-6, 100))
      .May("presence_penalty", Number(-2, 2))
      .May("frequency_penalty", Number(-2, 2))
      .May("seed", Integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()))
      .May("min_tokens", Integer(0, kMaxSchemaInt))
      .May("ignore_eos", Flag())
      .May("logit_bias", {{"type", "object"}, {"additionalProperties", Number(-100, 100)}})
      .May("stop_token_ids", ArrayOf(TokenId(model), 0, 1024))
      .May("stop", StringOrStrings(16))
      .May("include_stop_str_in_output", Flag())
      .May("skip_special_tokens", Flag())
      .May("n", Integer(1, kMaxChoices))
      .May("return_token_ids", Flag())
      .May("stream", Flag())
      .May("stream_options", options)
      .May("cache_salt", Text())
      .May("priority", Integer(-kMaxSchemaInt, kMaxSchemaInt))
      .May("kv_sparsity", Sparsity(model))
      .May("user", Text())
      .May("prompt_cache_key", Text())
      .May("prompt_cache_retention", Text())
      .May("session", AnyOf({Words({"continues", "ends", ""}), session}));
}

Json SchemaText() { return AnyOf({AnyObject(), Text(), Flag()}); }

void AddStructured(Object& body) {
  const Json holder = Object().May("name", {}).May("schema", SchemaText()).Take();
  const Json plain = Object().Must("type", Words({"text", "json_object"})).Take();
  const Json shaped = Object().Must("type", Words({"json_schema"})).Must("json_schema", holder).Take();
  const Json choices = ArrayOf(Text(), 1, 1000);
  body.May("response_format", AnyOf({plain, shaped}))
      .May("guided_json", SchemaText())
      .May("guided_regex", Text())
      .May("guided_choice", AnyOf({Text(), choices}))
      .May("guided_grammar", Text())
      .May("structured_outputs", Object()
                                     .May("json", SchemaText())
                                     .May("regex", Text())
                                     .May("choice", AnyOf({Text(), choices}))
                                     .May("grammar", Text())
                                     .May("json_object", Flag())
                                     .Take());
}

// Schema of the items of a response's input.
Json Items() {
  const Json call = Object()
                        .Must("type", Words({"function_call"}))
                        .May("call_id", Text())
                        .May("name", Text())
                        .May("arguments", Text())
                        .Take();
  const Json output = Object()
                          .Must("type", Words({"function_call_output"}))
                          .May("call_id", Text())
                          .May("output", Content())
                          .Take();
  const Json thought = Object().Must("type", Words({"reasoning"})).Take();
  Json message = Message();
  for (Json& role : message["anyOf"]) role["properties"]["type"] = OrNull(Words({"message"}));
  return ArrayOf(AnyOf({std::move(message), call, output, thought}), 0);
}

Json ConversationItems() {
  Json items = Items();
  items["maxItems"] = 20;
  for (Json& item : items["items"]["anyOf"]) {
    for (const char* text : {"id", "status"}) {
      if (item.contains("properties")) item["properties"][text] = OrNull(Text());
    }
  }
  return items;
}

Json Metadata() {
  return {{"type", "object"},
          {"maxProperties", 16},
          {"propertyNames", {{"maxLength", 64}}},
          {"additionalProperties", {{"type", "string"}, {"maxLength", 512}}}};
}

// Adds the members that Anthropic's messages and count_tokens share.
void AddMessages(Object& body, const ServedModel& model) {
  const Json block = {
      {"type", "object"},
      {"required", {"type"}},
      {"properties",
       {{"type", Words({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})}}}};
  const Json message = Object()
                           .Must("role", Words({"user", "assistant", "system"}))
                           .Must("content", AnyOf({Text(), ArrayOf(block, 0)}))
                           .Take();
  body.May("model", ModelName(model))
      .Must("messages", ArrayOf(message, 1))
      .May("system", Content())
      .May("tools", MessagesTools())
      .May("tool_choice", Object()
                              .Must("type", Words({"auto", "any", "tool", "none"}))
                              .May("name", Text())
                              .May("disable_parallel_tool_use", Flag())
                              .Take())
      .May("thinking", Object().May("type", Text()).Take());
}

}  // namespace

Json ChatSchema(const ServedModel& model) {
  Object body;
  AddConversation(body);
  AddGeneration(body, model);
  AddStructured(body);
  return body.May("max_tokens", Integer(1, kMaxSchemaInt))
      .May("max_completion_tokens", Integer(1, kMaxSchemaInt))
      .May("logprobs", Flag())
      .May("top_logprobs", Integer(0, kMaxLogprobs))
      .Take();
}

Json CompletionSchema(const ServedModel& model) {
  Object body;
  body.Must("prompt", Prompts(model));
  AddGeneration(body, model);
  AddStructured(body);
  return body.May("max_tokens", Integer(0, kMaxSchemaInt))
      .May("best_of", Integer(1, kMaxChoices))
      .May("logprobs", Integer(0, kMaxLogprobs))
      .May("echo", Flag())
      .May("add_special_tokens", Flag())
      .May("suffix", Never())
      .Take();
}

Json ResponsesSchema(const ServedModel& model) {
  Object body;
  body.May("input", AnyOf({Text(), Items()}));
  AddGeneration(body, model);
  const Json format =
      Object().May("type", Words({"text", "json_object", "json_schema"})).May("schema", SchemaText()).Take();
  return body.May("n", Integer(1, 1))
      .May("instructions", Text())
      .May("previous_response_id", Text())
      .May("store", Flag())
      .May("conversation", AnyOf({Text(), Object().Must("id", NonEmpty()).Take()}))
      .May("background", {{"type", "boolean"}, {"enum", {false}}})
      .May("tools", ResponsesTools())
      .May("tool_choice", AnyOf({Words({"none", "auto", "required"}), AnyObject()}))
      .May("parallel_tool_calls", Flag())
      .May("text", Object().May("format", format).Take())
      .May("max_tokens", Integer(0, kMaxSchemaInt))
      .May("max_output_tokens", Integer(1, kMaxSchemaInt))
      .May("top_logprobs", Integer(0, kMaxLogprobs))
      .May("include", StringOrStrings(16))
      .May("reasoning", Object().May("effort", Text()).Take())
      .Take();
}

Json ConversationSchema(const ServedModel&) {
  return Object().May("items", ConversationItems()).May("metadata", Metadata()).Take();
}

Json ConversationUpdateSchema(const ServedModel&) { return Object().May("metadata", Metadata()).Take(); }

Json ConversationItemsSchema(const ServedModel&) {
  return Object().Must("items", ConversationItems()).Take();
}

Json EmbeddingsSchema(const ServedModel& model) {
  return Object()
      .Must("input", Prompts(model))
      .May("model", ModelName(model))
      .May("encoding_format", Words({"float", "base64"}))
      .May("dimensions", Never())
      .Take();
}

Json MessagesSchema(const ServedModel& model) {
  Object body;
  AddMessages(body, model);
  return body.Must("max_tokens", Integer(1, kMaxSchemaInt))
      .May("temperature", Number(0, 1))
      .May("top_p", NumberAbove(0, 1))
      .May("top_k", Integer(0, kMaxSchemaInt))
      .May("stop_sequences", StringOrStrings(16))
      .May("stream", Flag())
      .May("metadata", Object().May("user_id", Text()).Take())
      .Take();
}

Json CountTokensSchema(const ServedModel& model) {
  Object body;
  AddMessages(body, model);
  return body.Take();
}

Json TokenizeSchema(const ServedModel& model) {
  Object chat;
  AddConversation(chat);
  const auto common = [&model](Object& body) {
    return body.May("model", ModelName(model))
        .May("add_special_tokens", Flag())
        .May("return_token_strs", Flag())
        .Take();
  };
  Object text;
  text.Must("prompt", Text());
  return AnyOf({common(text), common(chat)});
}

Json DetokenizeSchema(const ServedModel& model) {
  return Object().Must("tokens", ArrayOf(TokenId(model), 0)).May("model", ModelName(model)).Take();
}

Json RenderSchema(const ServedModel& model) {
  Object body;
  AddConversation(body);
  return body.May("model", ModelName(model)).Take();
}

}  // namespace moesaic::server
