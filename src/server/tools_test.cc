// Tests that every API refuses the same tools, and that templates get valid tools in one form.
#include "server/tools.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/anthropic_prompt.h"
#include "server/api_error.h"
#include "server/responses_request.h"
#include "server/test_model.h"

namespace moesaic::server {
namespace {

using testing::HasSubstr;

enum class Api { kChat, kResponses, kMessages };

// Reads a request whose tools are given as functions of chat/completions.
StatusOr<Conversation> Read(Api api, const Json& functions, const Json& choice = nullptr) {
  static const ServedModel model = TinyModel();
  Json request = {{"tool_choice", choice}, {"tools", Json::array()}};
  request[api == Api::kResponses ? "input" : "messages"] = {{{"role", "user"}, {"content", "hi"}}};
  for (const Json& function : functions) {
    Json tool = function;
    if (api == Api::kChat) tool = {{"type", "function"}, {"function", function}};
    if (api == Api::kResponses && tool.is_object()) tool["type"] = "function";
    if (api == Api::kMessages && tool.is_object()) {
      Json schema = tool.value("parameters", Json());
      tool.erase("parameters");
      tool["input_schema"] = schema.is_null() ? Json::object() : std::move(schema);  // required in this API
    }
    request["tools"].push_back(tool);
  }
  Fields body(request, "");
  Conversation conversation = api == Api::kChat        ? ReadConversation(body)
                              : api == Api::kResponses ? ReadResponses(body, model, Json()).conversation
                                                       : ReadMessages(body);
  RETURN_IF_ERROR(body.status());
  return conversation;
}

constexpr Api kApis[] = {Api::kChat, Api::kResponses, Api::kMessages};

Json Parsed(const char* text) { return ParseJson(text).value(); }

TEST(Tools, AreRefusedWithEqualErrorsByEveryApi) {
  struct Case {
    const char *functions, *member, *words;
  };
  for (const Case& one : {
           Case{R"([{"name": "f"}, 7])", "tools[1]", "expected an object"},
           Case{R"([{"description": "f"}])", "tools[0].name", "Missing"},
           Case{R"([{"name": null}])", "tools[0].name", "Missing"},
           Case{R"([{"name": 3}])", "tools[0].name", "expected a string"},
           Case{R"([{"name": ""}])", "tools[0].name", "1 to 256"},
           Case{R"([{"name": "a\nb"}])", "tools[0].name", "1 to 256"},
           Case{R"([{"name": "<f>"}])", "tools[0].name", "1 to 256"},
           Case{R"([{"name": "f"}, {"name": "g"}, {"name": "f"}])", "tools[2].name", "another tool"},
           Case{R"([{"name": "f", "description": 3}])", "tools[0].description", "expected a string"},
           Case{R"([{"name": "f", "parameters": []}])", "tools[0].parameters", "expected an object"},
           Case{R"([{"name": "f", "parameters": "x"}])", "tools[0].parameters", "expected an object"},
           Case{R"([{"name": "f", "parameters": {"type": "array"}}])", "tools[0].parameters.type",
                "'object'"},
           Case{R"([{"name": "f", "parameters": {"type": 3}}])", "tools[0].parameters.type",
                "expected a string"},
       }) {
    for (const Api api : kApis) {
      const auto read = Read(api, Parsed(one.functions));
      ASSERT_FALSE(read.ok()) << one.functions;
      const ApiError error = ErrorOf(read.status());
      std::string member = one.member;
      const size_t dot = member.find("].");
      if (api == Api::kChat) member.insert(dot == std::string::npos ? member.size() : dot + 1, ".function");
      const size_t schema = member.find("parameters");
      if (api == Api::kMessages && schema != std::string::npos) member.replace(schema, 10, "input_schema");
      EXPECT_EQ(error.http_status, 400);
      EXPECT_EQ(error.param, member) << one.functions;
      EXPECT_THAT(error.message, HasSubstr(one.words));
    }
  }
}

TEST(Tools, AreLimitedTo512) {
  Json functions = Json::array();
  for (int i = 0; i < kMaxTools; ++i) functions.push_back({{"name", fmt::format("f{}", i)}});
  for (const Api api : kApis) EXPECT_TRUE(Read(api, functions).ok());
  functions.push_back({{"name", "one more"}});
  for (const Api api : kApis) EXPECT_EQ(ErrorOf(Read(api, functions).status()).param, "tools");
}

TEST(Tools, AreReadIntoTheSameFormByEveryApi) {
  const Json functions = Parsed(R"([{"name": "get", "description": "Weather", "strict": true,
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}])");
  const Json expected = Parsed(R"([{"type": "function", "function": {"name": "get", "description": "Weather",
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}])");
  for (const Api api : kApis) {
    const auto read = Read(api, functions);
    ASSERT_TRUE(read.ok()) << Message(read.status());
    EXPECT_EQ(Dump(read->tools), Dump(expected));
    EXPECT_EQ(read->tool_use, ToolUse::kAuto);
  }
}

// For example, Hermes-3's and DeepSeek-V3.1's templates fail without members that clients may leave out.
TEST(Tools, WithoutDescriptionOrParametersGetEmptyDefaults) {
  ServedModel model = TinyModel();
  model.max_context = 4096;
  model.chat.emplace(
      text::ChatTemplate::FromSource(
          "{% for tool in tools %}{% set f = tool.function %}{{ f.name + ':' + f.description }}|"
          "{% for name in f.parameters.properties | default({}) %}{{ name }}{% endfor %};{% endfor %}")
          .value());
  const Json bare = Parsed(R"([{"name": "stop"}, {"name": "go", "description": null, "parameters": null}])");
  for (const Api api : kApis) {
    auto read = Read(api, bare);
    ASSERT_TRUE(read.ok()) << Message(read.status());
    const auto prompt = RenderPrompt(model, *read);
    ASSERT_TRUE(prompt.ok()) << Message(prompt.status());
    EXPECT_EQ(prompt->text, "stop:|;go:|;");
  }
}

TEST(Tools, OfOtherTypesAreRefused) {
  const auto refused = [](auto read, const char* request) {
    const Json json = Parsed(request);
    Fields body(json, "");
    read(body);
    return ErrorOf(body.status()).param;
  };
  EXPECT_EQ(refused(ReadConversation, R"({"messages": [{"role": "user", "content": "x"}],
                                          "tools": [{"type": "web_search"}]})"),
            "tools[0].type");
  EXPECT_EQ(refused(ReadMessages, R"({"messages": [{"role": "user", "content": "x"}],
                                      "tools": [{"type": "web_search_20250305", "name": "web_search"}]})"),
            "tools[0].type");
  EXPECT_EQ(refused(ReadMessages, R"({"messages": [{"role": "user", "content": "x"}],
                                      "tools": [{"name": "f"}]})"),
            "tools[0].input_schema");
}

}  // namespace
}  // namespace moesaic::server
