// Tests prompts of conversations that chat templates render.
#include "server/chat_prompt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "base/test_patience.h"
#include "server/api_error.h"

namespace moesaic::server {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string ReadText(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

PromptTemplate TemplateOf(const std::string& source) {
  text::ChatTemplate chat = text::ChatTemplate::FromSource(source).value();
  chat.SetToken("bos_token", "<s>");
  chat.SetToken("eos_token", "</s>");
  return PromptTemplate(std::move(chat));
}

StatusOr<std::string> Render(const PromptTemplate& chat, const Json& request) {
  Fields body(request, "");
  const Conversation conversation = ReadConversation(body);
  RETURN_IF_ERROR(body.status());
  return RenderText(chat, conversation);
}

Json CallOf(int number, const Json& arguments) {
  return {{"id", fmt::format("callno{:03}", number)},
          {"type", "function"},
          {"function", {{"name", "get_weather"}, {"arguments", arguments}}}};
}

Json One(const Json& arguments) { return Json::array({CallOf(0, arguments)}); }

Json Result(int number) {
  return {{"role", "tool"}, {"content", "12 degrees"}, {"tool_call_id", fmt::format("callno{:03}", number)}};
}

// Returns a chat that called a tool. For a null `content` the member is absent.
Json Request(const Json& content, const Json& calls, bool with_tools = true) {
  Json assistant = {{"role", "assistant"}, {"tool_calls", calls}};
  if (!content.is_null()) assistant["content"] = content;
  Json messages = Json::array({Json{{"role", "user"}, {"content", "Weather?"}}, assistant});
  for (size_t i = 0; i < calls.size(); ++i) messages.push_back(Result(static_cast<int>(i)));
  Json request = {{"messages", std::move(messages)}};
  if (with_tools) {
    request["tools"] = Json::parse(R"([{"type": "function", "function": {"name": "get_weather",
        "description": "Weather of a city", "parameters": {"type": "object",
        "properties": {"city": {"type": "string", "description": "City"}}, "required": ["city"]}}}])");
  }
  return request;
}

std::filesystem::path Templates() {
  return std::filesystem::path(MOESAIC_SOURCE_DIR) / ".." / "shared" / "data" / "templates" / "jinja";
}

std::vector<std::filesystem::path> TemplatesWithCalls() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(Templates())) {
    if (entry.path().extension() != ".jinja") continue;
    if (ReadText(entry.path()).find("tool_calls") != std::string::npos) paths.push_back(entry.path());
  }
  std::ranges::sort(paths);
  return paths;
}

// Every template shows a call of the history with its arguments, or the request is refused.
TEST(CallHistory, IsInThePromptOfEveryTemplateOrRefused) {
  if (!std::filesystem::exists(Templates())) GTEST_SKIP() << "no test data: " << Templates();
  int shown = 0, refused = 0;
  for (const auto& path : TemplatesWithCalls()) {
    SCOPED_TRACE(path.filename().string());
    const PromptTemplate chat = TemplateOf(ReadText(path));
    for (const Json& content : {Json(), Json(""), Json("I look it up.")}) {
      for (const int calls : {1, 2}) {
        for (const bool with_tools : {true, false}) {
          Json list = Json::array();
          for (int i = 0; i < calls; ++i)
            list.push_back(CallOf(i, fmt::format(R"({{"city": "Springfield {}"}})", i)));
          const StatusOr<std::string> prompt = Render(chat, Request(content, list, with_tools));
          if (!prompt.ok()) {
            EXPECT_EQ(ErrorOf(prompt.status()).http_status, 400);
            ++refused;
            continue;
          }
          ++shown;
          for (int i = 0; i < calls; ++i) {
            EXPECT_THAT(*prompt, HasSubstr(fmt::format("Springfield {}", i)));
          }
          EXPECT_THAT(*prompt, Not(HasSubstr(R"(\"city)"))) << "escaped twice";
          EXPECT_THAT(*prompt, Not(HasSubstr("'city': '"))) << "as Python prints it";
        }
      }
    }
  }
  std::cout << shown << " conversations shown, " << refused << " refused\n";
  EXPECT_GT(shown, 900);
  EXPECT_LT(refused, 130);
}

// One call without text is the most frequent history. Only templates that fail on it by themselves refuse it.
TEST(CallHistory, FewTemplatesRefuseASingleCall) {
  if (!std::filesystem::exists(Templates())) GTEST_SKIP() << "no test data: " << Templates();
  std::vector<std::string> refusing;
  for (const auto& path : TemplatesWithCalls()) {
    const auto prompt =
        Render(TemplateOf(ReadText(path)), Request(Json(), One(R"({"city": "Springfield"})")));
    if (!prompt.ok()) refusing.push_back(path.filename().string());
  }
  // The first template needs a variable "functions", and the second writes a generator as JSON.
  EXPECT_THAT(refusing, testing::ElementsAre("fireworks-ai-llama-3-firefunction-v2.jinja",
                                             "llama-cpp-deepseek-r1.jinja"));
}

TEST(CallHistory, IsWrittenAsDeepSeekV3WritesIt) {
  const auto path = Templates() / "hf-deepseek_v3.jinja";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no test data: " << path;
  const PromptTemplate chat = TemplateOf(ReadText(path));
  EXPECT_EQ(chat.call_form().content, CallForm::Content::kNull);
  EXPECT_TRUE(chat.call_form().text_arguments);
  const std::string call =
      "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
      "{\"city\":  \"Rome\"}\n```<｜tool▁call▁end｜>";
  const Json calls = One(R"({"city":  "Rome"})");
  EXPECT_THAT(*Render(chat, Request(Json(), calls)), HasSubstr(call));
  // The text becomes a message of its own, since the template shows either the text or the call.
  EXPECT_THAT(*Render(chat, Request("Let me see.", calls)),
              HasSubstr("<｜Assistant｜>Let me see.<｜end▁of▁sentence｜><｜Assistant｜>" + call));
}

TEST(CallHistory, AddsNoEmptyTurn) {
  const auto path = Templates() / "llama.cpp" / "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no test data: " << path;
  const auto prompt = Render(TemplateOf(ReadText(path)), Request("", One(R"({"city": "Rome"})")));
  ASSERT_TRUE(prompt.ok()) << Message(prompt.status());
  EXPECT_THAT(*prompt, HasSubstr(R"({"city": "Rome"})"));
  EXPECT_THAT(*prompt, Not(HasSubstr("<｜Assistant｜><｜end▁of▁sentence｜>")));
}

// Minimal templates show one form each.
TEST(CallHistory, UsesTheFormOfTheTemplate) {
  const auto form = [](const std::string& message) {
    return TemplateOf("{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}" +
                      message + "{% else %}{{ m.content }}{% endif %}{% endfor %}")
        .call_form();
  };
  using Content = CallForm::Content;
  const CallForm json = form("{{ m.content }}{{ c.arguments | tojson }}");
  EXPECT_EQ(json.content, Content::kEmpty);
  EXPECT_FALSE(json.text_arguments);
  EXPECT_FALSE(json.split);
  EXPECT_TRUE(form("{{ 'call ' + c.arguments }}").text_arguments);
  EXPECT_TRUE(form("{{ c.arguments }}").text_arguments) << "an object would be Python's";
  EXPECT_EQ(form("{% if m.content is none %}{{ c.arguments | tojson }}{% endif %}").content, Content::kNull);
  EXPECT_EQ(form("{% if m.content is not defined %}{{ c.arguments | tojson }}{% endif %}").content,
            Content::kAbsent);
  EXPECT_TRUE(form("{% if m.content %}{{ m.content }}{% else %}{{ c.arguments | tojson }}{% endif %}").split);
}

// Checks ids as Mistral's templates do.
constexpr const char* kShortIds =
    "{% for m in messages %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}"
    "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('9 letters') }}{% "
    "endif %}"
    "/{{ m.tool_call_id }}{% endif %}{% endfor %}";

TEST(CallIds, HaveTheLengthThatTheTemplateDemands) {
  const PromptTemplate chat = TemplateOf(kShortIds);
  EXPECT_TRUE(chat.call_form().short_ids);
  EXPECT_EQ(NewCallId(chat.call_form()).size(), 9u);
  EXPECT_NE(NewCallId(chat.call_form()), NewCallId(chat.call_form()));
  const PromptTemplate any = TemplateOf(
      "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments | tojson }}{% "
      "endfor %}{% endfor %}");
  EXPECT_FALSE(any.call_form().short_ids);
  EXPECT_EQ(NewCallId(any.call_form()).size(), 29u);
}

TEST(CallIds, OfOtherServersAreShortened) {
  const PromptTemplate chat = TemplateOf(kShortIds);
  const auto rendered = [&chat](const char* id) {
    Json request = Request("", One("{}"));
    request["messages"][1]["tool_calls"][0]["id"] = id;
    request["messages"][2]["tool_call_id"] = id;
    return Render(chat, request).value();
  };
  EXPECT_EQ(rendered("callno000"), "callno000{}/callno000");
  const std::string long_id = rendered("call_0123456789abcdef01234567");
  EXPECT_EQ(long_id, rendered("call_0123456789abcdef01234567")) << "the same in each turn";
  EXPECT_NE(long_id, rendered("call_0123456789abcdef01234568"));
  EXPECT_EQ(long_id.substr(0, 9), long_id.substr(12)) << "the result names its call";
}

TEST(CallIds, AreAcceptedByMistralsTemplates) {
  for (const char* name :
       {"mistralai-Mistral-Nemo-Instruct-2407.jinja", "Mistral-Small-3.2-24B-Instruct-2506.jinja"}) {
    const auto path = Templates() / "llama.cpp" / name;
    if (!std::filesystem::exists(path)) GTEST_SKIP() << "no test data: " << path;
    const PromptTemplate chat = TemplateOf(ReadText(path));
    EXPECT_TRUE(chat.call_form().short_ids) << name;
    for (const std::string& id : {NewCallId(chat.call_form()), NewCallId(CallForm())}) {
      Json request = Request(Json(), One(R"({"city": "Rome"})"));
      request["messages"][1]["tool_calls"][0]["id"] = id;
      request["messages"][2]["tool_call_id"] = id;
      const auto prompt = Render(chat, request);
      EXPECT_TRUE(prompt.ok()) << name << " " << id << " " << Message(prompt.status());
    }
  }
}

TEST(CallHistory, IsRefusedWhereTheTemplateLeavesItOut) {
  const PromptTemplate first = TemplateOf(
      "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | "
      "tojson }}"
      "{% endif %}{% endfor %}");
  EXPECT_TRUE(Render(first, Request("", One(R"({"city": "Rome"})"))).ok());
  // Both calls have the same arguments, so that the text alone does not show the missing one.
  const auto two = Render(
      first, Request("", Json::array({CallOf(0, R"({"city": "Rome"})"), CallOf(1, R"({"city": "Rome"})")})));
  EXPECT_EQ(ErrorOf(two.status()).http_status, 400);
  EXPECT_THAT(Message(two.status()), HasSubstr("leaves out tool call 2 of 2"));
  const PromptTemplate none = TemplateOf("{% for m in messages %}{{ m.content }}{% endfor %}");
  EXPECT_FALSE(Render(none, Request("", One("{}"))).ok());
}

// A search for each call from the start of the prompt would take minutes of CPU time.
TEST(CallHistory, IsCheckedInLinearTime) {
  constexpr int kCalls = 100'000;
  const PromptTemplate all = TemplateOf(
      "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% "
      "endfor %}");
  const PromptTemplate but_last = TemplateOf(
      "{% for m in messages %}{% for c in m.tool_calls %}{% if not loop.last %}{{ c.function.arguments | "
      "tojson }}{% endif %}{% endfor %}{% endfor %}");
  Json calls = Json::array();
  for (int i = 0; i < kCalls; ++i) calls.push_back({{"function", {{"name", "f"}}}});
  const Json request = {{"messages", Json::array({Json{{"role", "assistant"}, {"tool_calls", calls}}})}};
  const std::clock_t start = std::clock();
  EXPECT_TRUE(Render(all, request).ok());
  EXPECT_THAT(Message(Render(but_last, request).status()),
              HasSubstr("leaves out tool call 100000 of 100000"));
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, base::Patient(30));
}

TEST(CallHistory, KeepsTheSentTextOfArguments) {
  const PromptTemplate objects = TemplateOf(
      "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% "
      "endfor %}");
  const PromptTemplate texts = TemplateOf(
      "{% for m in messages %}{% for c in m.tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}{% "
      "endfor %}");
  const char* sent = R"({"z": 1, "a": [1.50, 12345678901234567890123, -98765432109876543210987], "m": {}})";
  EXPECT_EQ(*Render(objects, Request("", One(sent))),
            R"({"z": 1, "a": [1.5, 12345678901234567890123, -98765432109876543210987], "m": {}})");
  EXPECT_EQ(*Render(texts, Request("", One(sent))), std::string("f") + sent);
  // Data sets have objects.
  const Json object = ParseJson(sent).value();
  EXPECT_EQ(*Render(texts, Request("", One(object))),
            R"(f{"z": 1, "a": [1.5, 12345678901234567890123, -98765432109876543210987], "m": {}})");
  EXPECT_EQ(*Render(texts, Request("", One(""))), "f{}");
  EXPECT_EQ(*Render(objects, Request("", One("no JSON"))), "\"no JSON\"");
  EXPECT_THAT(Message(Render(texts, Request("", One(7))).status()), HasSubstr("a string or an object"));
}

TEST(Variables, CannotReplaceTheRequestsOwnFields) {
  const PromptTemplate chat = TemplateOf("{{ messages[0].content }}{{ mood }}");
  Json request = {{"messages", Json::array({Json{{"role", "user"}, {"content", "hi"}}})},
                  {"chat_template_kwargs", {{"mood", "!"}}}};
  EXPECT_EQ(*Render(chat, request), "hi!");
  for (const char* name : {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}) {
    request["chat_template_kwargs"] = {{"mood", "!"}, {name, Json::array()}};
    const auto refused = Render(chat, request);
    EXPECT_EQ(ErrorOf(refused.status()).param, fmt::format("chat_template_kwargs.{}", name));
    EXPECT_THAT(Message(refused.status()), HasSubstr("reserved"));
  }
}

}  // namespace
}  // namespace moesaic::server
