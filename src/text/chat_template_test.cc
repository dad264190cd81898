#include "text/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>

#include "text/test_data.h"

namespace moesaic::text {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

std::string RenderOr(std::string_view source, const Json& variables, const RenderOptions& options = {}) {
  StatusOr<ChatTemplate> made = ChatTemplate::FromSource(source);
  if (!made.ok()) return "ERROR " + Message(made.status());
  StatusOr<std::string> text = made->RenderVariables(variables.dump(), options);
  return text.ok() ? *text : "ERROR " + Message(text.status());
}

// Renders every template of the collection with every context. The bytes must equal transformers', or there
// must be an error where it raises.
TEST(ChatTemplateGoldens, RenderLikeTransformers) {
  const auto folder = SharedData() / "templates";
  SKIP_WITHOUT(folder);
  const Json contexts = Json::parse(ReadMaybeGzip(folder / "contexts.json"));
  int compared = 0, raised = 0;
  for (const Json& row : ReadRows(folder / "goldens_dev.jsonl.gz")) {
    const std::string name = row["template"].get<std::string>();
    const std::string source = ReadMaybeGzip(folder / "jinja" / name);
    const Json& context = contexts[row["context"].get<std::string>()];
    SCOPED_TRACE(name + ", " + row["context"].get<std::string>());
    StatusOr<ChatTemplate> made = ChatTemplate::FromSource(source);
    ChatInput input;
    Json variables = Json::object();
    for (const auto& [key, value] : context.items()) {
      if (key == "messages")
        input.messages_json = value.dump();
      else if (key == "tools")
        input.tools_json = value.is_null() ? "" : value.dump();
      else
        variables[key] = value;
    }
    input.variables_json = variables.dump();
    RenderOptions options;
    const bool mutable_sandbox = row.value("env", "") == "mutable-sandbox";
    options.mutation = mutable_sandbox ? Mutation::kAllowed : Mutation::kForbidden;
    StatusOr<std::string> text = made.ok() ? made->Render(input, options) : made.status();
    if (row.contains("raises")) {
      ++raised;
      EXPECT_FALSE(text.ok()) << "should raise " << row["raises"];
    } else if (text.ok()) {
      EXPECT_EQ(*text, row["output"].get<std::string>());
    } else {
      ADD_FAILURE() << Message(text.status());
    }
    if (mutable_sandbox) {
      EXPECT_FALSE(made->Render(input, {Mutation::kForbidden, {}}).ok()) << "the sandbox allows list.append";
    }
    ++compared;
  }
  EXPECT_EQ(compared, 470);
  std::cout << compared - raised << " renderings and " << raised << " errors compared\n";
}

TEST(ChatTemplateGoldens, EqualJinjaUnitCases) {
  const auto path = SharedData() / "templates" / "jinja_unit_llamacpp.json";
  SKIP_WITHOUT(path);
  int compared = 0;
  for (const Json& unit : Json::parse(ReadMaybeGzip(path))) {
    if (!unit["jinja2_agrees"].get<bool>()) continue;
    SCOPED_TRACE(unit["name"].get<std::string>());
    EXPECT_EQ(RenderOr(unit["template"].get<std::string>(), unit["vars"]),
              unit["expected"].get<std::string>());
    ++compared;
  }
  EXPECT_EQ(compared, 302);
  std::cout << compared << " cases compared\n";
}

struct Case {
  const char* source;
  const char* expected;
};

// Expected texts were computed with jinja2 3.1.6 in transformers' environment; "ERROR" where it raises.
TEST(ChatTemplate, ComputesWithPythonValues) {
  const Json variables = {
      {"t", true}, {"n", nullptr}, {"s", "it's"}, {"l", {1, 2.0, "x"}}, {"d", {{"a", 1}, {"items", 2}}}};
  const Case cases[] = {
      {"{{ t }} {{ n }} {{ t ~ n }}", "True None TrueNone"},
      {"{{ ' a  b c '.split(none, 1) }} {{ ' a b  c '.rsplit(none, 1) }}", "['a', 'b c '] [' a b', 'c']"},
      {"{{ l }} {{ d }}", "[1, 2.0, 'x'] {'a': 1, 'items': 2}"},
      {"{{ [s, 'a\"b'] }}", "[\"it's\", 'a\"b']"},
      {"{{ (1,) }} {{ () }} {{ (1, 2) }}", "(1,) () (1, 2)"},
      {"{{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 7 / 2 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }}",
       "1e+16 1000000000000000.0 0.0001 1e-05 3.5 3 2 1024"},
      {"{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }}", "True False"},
      {"{{ d['items'] }} {{ d.a }} {{ d.get('z', 5) }} {{ d.items() | list }}",
       "2 1 5 [('a', 1), ('items', 2)]"},
      {"{{ '%05.1f|%-4d|%x|%s' % (3.14159, 7, 255, n) }}", "003.1|7   |ff|None"},
      {"{{ '{:>5}|{:<5}|{:^5}|{:+d}|{:,}|{:.2f}'.format('a', 'b', 'c', 3, 1234567, 2.5) }}",
       "    a|b    |  c  |+3|1,234,567|2.50"},
      {"{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'x'.center(4, '*') }}|{{ 'abc'[::-1] }}",
       "['a', 'b', '', 'c'] ['a', 'b'] *x**|cba"},
      {"{{ l | tojson }} {{ d | tojson(indent=1) }} {{ 'é<' | tojson }}",
       "[1, 2.0, \"x\"] {\n \"a\": 1,\n \"items\": 2\n} \"é<\""},
      {"{{ '<a>' | e }} {{ ('<' | e) + '<' }} {{ ('<' | e) ~ '<' }}", "&lt;a&gt; &lt;&lt; &lt;<"},
      {"{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
       "3"},
      {"{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}", "2 3 1"},
      {"{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 3, 4, k=5) }}",
       "13(4,){'k': 5}"},
      {"{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}", "123"},
      {"{% set g = l | map('string') %}{{ g | list }}{{ g | list }}", "['1', '2.0', 'x'][]"},
      {"{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}", "aFalse"},
      {"{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"},
      {"  {% if t %}\n  a\n  {% endif %}\nb", "  a\nb"},
      {"{% raw %}{{ x }}{% endraw %}{# c #}\n!", "{{ x }}!"},
      {"{{ missing }}|{{ missing is defined }}|{{ d.missing | default('z') }}", "|False|z"},
      {"{{ 'ab' is sequence }} {{ n is iterable }} {{ 3 is number }} {{ t is number }} {{ d is mapping }}",
       "True False True True True"},
      {"{{ [3, 1, 2] | sort }} {{ ['b', 'A'] | sort }} {{ l | length }} {{ [1, 2, 3] | sum }} {{ 'a b' | "
       "title }}",
       "[1, 2, 3] ['A', 'b'] 3 6 A B"},
      {"{{ 'a\nb' | indent(2) }}|{{ 42.567 | round(1) }}|{{ '3.7' | int }}|{{ 'x' | int(9) }}",
       "a\n  b|42.6|3|9"},
  };
  for (const Case& c : cases) EXPECT_EQ(RenderOr(c.source, variables), c.expected) << c.source;
}

TEST(ChatTemplate, RaisesWherePythonDoes) {
  const Json variables = {{"d", {{"a", 1}}}, {"l", {1}}, {"n", nullptr}};
  const Case cases[] = {
      {"{{ raise_exception('no ' ~ 'system') }}", "no system"},
      {"{{ missing.x }}", "'missing' is undefined"},
      {"{{ d.b.c }}", "'dict object' has no attribute 'b'"},
      {"{{ 'a' + d.b }}", "'dict object' has no attribute 'b'"},
      {"{{ 'a' + 1 }}", "can only concatenate str (not \"int\") to str"},
      {"{{ n | length }}", "object of type 'NoneType' has no len()"},
      {"{{ l | map('string') | tojson }}", "Object of type generator is not JSON serializable"},
      {"{{ d.b | tojson }}", "Object of type Undefined is not JSON serializable"},
      {"{{ 'a' < 1 }}", "'<' not supported between instances of 'str' and 'int'"},
      {"{{ 'x' | nothing }}", "No filter named 'nothing' found."},
      {"{% for a in n %}{% endfor %}", "'NoneType' object is not iterable"},
      {"{% for a, b in [[1]] %}{% endfor %}", "not enough values to unpack (expected 2, got 1)"},
      {"{% unknown %}", "Encountered unknown tag 'unknown'."},
      {"{{ 1 +", "unexpected"},
      {"{% if true %}", "endif"},
      {"{{ range(1000000) | list }}", "Range too big"},
      {"{{ ''.__class__ }}{{ ''.__class__.x }}", "unsafe"},
  };
  for (const Case& c : cases) {
    const std::string text = RenderOr(c.source, variables);
    EXPECT_THAT(text, HasSubstr("ERROR")) << c.source;
    EXPECT_THAT(text, HasSubstr(c.expected)) << c.source;
  }
  EXPECT_EQ(RenderOr("{{ 'y' if true else 'x' | nothing }}", variables), "y")
      << "under a condition only when reached";
}

TEST(ChatTemplate, AllowsMutationOnlyIfEnabled) {
  const char* source = "{% set l = [] %}{% set _ = l.append(1) %}{{ l }}";
  EXPECT_EQ(RenderOr(source, Json::object()), "[1]");
  EXPECT_THAT(RenderOr(source, Json::object(), {Mutation::kForbidden, {}}), HasSubstr("unsafe"));
}

TEST(ChatTemplate, FormatsTheGivenTime) {
  const RenderOptions options{Mutation::kForbidden, 86400 * 365};
  EXPECT_EQ(RenderOr("{{ strftime_now('%Y-%j %%') }}", Json::object(), options), "1971-001 %");
}

// Hostile templates must not exhaust the stack, the memory or the time.
TEST(ChatTemplate, LimitsStackMemoryAndTimeOfTemplates) {
  const std::string deep = std::string(5000, '(') + "1" + std::string(5000, ')');
  EXPECT_THAT(RenderOr("{{ " + deep + " }}", Json::object()), HasSubstr("nested"));
  EXPECT_THAT(RenderOr("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", Json::object()),
              HasSubstr("RecursionError"));
  EXPECT_THAT(RenderOr("{{ 'a' * 10000000000 }}", Json::object()), HasSubstr("MemoryError"));
  EXPECT_THAT(RenderOr("{{ '%999999999999d' % 1 }}", Json::object()), HasSubstr("ERROR"));
  EXPECT_THAT(RenderOr("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
                       Json::object()),
              HasSubstr("steps"));
  const char* nest =
      "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}ok";
  EXPECT_EQ(RenderOr(nest, Json::object()), "ok");
  EXPECT_THAT(RenderOr("{% set l = [] %}{% set _ = l.append(l) %}{{ l }}", Json::object()),
              HasSubstr("RecursionError"));
}

// Values that contain themselves must be freed; LeakSanitizer checks this test.
TEST(ChatTemplate, FreesCycles) {
  for (const char* source : {
           "{% set l = [] %}{% set _ = l.append(l) %}",
           "{% set d = {} %}{% set _ = d.update(me=d) %}",
           "{% set ns = namespace() %}{% set ns.me = ns %}",
           "{% macro m() %}{% endmacro %}{% set ns = namespace(m=m) %}",
           "{% for i in [1] recursive %}{% set _ = loop.changed(loop) %}{% endfor %}",
           R"({% set ns = namespace() %}{% for i in [1] recursive %}{% set ns.loop = loop %}{% endfor %}
              {%- set _ = ns.loop.changed(ns.loop) %}{{ raise_exception('out') }})",
       }) {
    RenderOr(source, Json::object());
  }
}

TEST(ChatTemplate, ReadsConfigsOfEveryShape) {
  const ChatInput input{R"([{"role":"user","content":"hi"}])", "", "", "", false};
  StatusOr<ChatTemplate> one = ChatTemplate::FromConfig(
      R"({"chat_template":"{{ bos_token }}{{ messages[0].content }}","bos_token":{"content":"<s>"}})");
  ASSERT_TRUE(one.ok()) << Message(one.status());
  EXPECT_EQ(*one->Render(input), "<s>hi");
  StatusOr<ChatTemplate> named = ChatTemplate::FromConfig(
      R"({"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"{{ tools | length }}"}]})");
  ASSERT_TRUE(named.ok()) << Message(named.status());
  EXPECT_EQ(*named->Render(input), "d");
  ChatInput with_tools = input;
  with_tools.tools_json = "[{}]";
  EXPECT_EQ(*named->Render(with_tools), "1");
  EXPECT_EQ(ChatTemplate::FromConfig("{}").status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(ChatTemplate::FromConfig("[]").ok());
  EXPECT_FALSE(ChatTemplate::FromConfig(R"({"chat_template":5})").ok());
}

TEST(ChatTemplate, RejectsInputThatIsNotJson) {
  StatusOr<ChatTemplate> made = ChatTemplate::FromSource("{{ messages }}{{ x }}");
  ASSERT_TRUE(made.ok());
  EXPECT_THAT(Message(made->Render({"[", "", "", "", false}).status()), HasSubstr("messages is not JSON"));
  EXPECT_FALSE(made->Render({R"([],"x":1)", "", "", "", false}).ok());
  EXPECT_FALSE(made->Render({"[]", "", "", "[1]", false}).ok());
  EXPECT_EQ(*made->Render({"[]", "", "", R"( {"x": 7} )", false}), "[]7");
}

TEST(ChatTemplate, ProvidesReasoningUnderAllNames) {
  StatusOr<ChatTemplate> made =
      ChatTemplate::FromSource("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}");
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(*made->Render({R"([{"reasoning":"r"}])", "", "", "", false}), "rr");
}

}  // namespace
}  // namespace moesaic::text
