// Tests the split of tokens into reasoning, calls and content.
#include "server/choice_text.h"

#include <gtest/gtest.h>

#include <utility>

#include "server/test_model.h"

namespace moesaic::server {
namespace {

// Pushes the tokens of `text` one by one and returns the collected answer.
ChoiceDelta Answer(const std::string& text, bool parallel_calls = true) {
  const ServedModel model = TinyModel();
  GenerationSpec spec;
  spec.tools = text::ToolFormat::kHermes;
  spec.parallel_calls = parallel_calls;
  spec.reasoning = text::ReasoningFormat::kThink;
  ChoiceText choice(model, spec);
  ChoiceDelta delta;
  const std::vector<int32_t> ids = model.tokenizer.Encode(text, /*add_special=*/false).value();
  for (const int32_t id : ids) {
    EXPECT_TRUE(choice.Push(id, &delta).ok());
  }
  EXPECT_TRUE(choice.Finish(&delta).ok());
  return delta;
}

TEST(ChoiceText, FindsACallInsideAThoughtThatIsNotClosed) {
  const ChoiceDelta delta =
      Answer("<think>I ask. <tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>");
  EXPECT_EQ(delta.reasoning, "I ask.");
  EXPECT_EQ(delta.content, "");
  ASSERT_FALSE(delta.calls.empty());
  EXPECT_EQ(delta.calls[0].name, "f");
  std::string arguments;
  for (const text::ToolCallDelta& call : delta.calls) arguments += call.arguments;
  EXPECT_EQ(arguments, R"({"x": 1})");
}

TEST(ChoiceText, KeepsAThoughtAboutCallsAThought) {
  const ChoiceDelta closed =
      Answer("<think>Say <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>?</think>No.");
  EXPECT_EQ(closed.reasoning, "Say <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>?");
  EXPECT_EQ(closed.content, "No.");
  EXPECT_TRUE(closed.calls.empty());
  const ChoiceDelta open = Answer("<think>The mark is <tool_call> and then");
  EXPECT_EQ(open.reasoning, "The mark is <tool_call> and then");
  EXPECT_EQ(open.content, "");
}

TEST(ChoiceText, KeepsTheFirstCallWithoutParallelCalls) {
  const std::string call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>";
  for (const bool parallel : {true, false}) {
    std::string arguments[2];
    const ChoiceDelta delta = Answer(call + call + "Done", parallel);
    for (const text::ToolCallDelta& piece : delta.calls) arguments[piece.index] += piece.arguments;
    EXPECT_EQ(arguments[0], R"({"x": 1})");
    EXPECT_EQ(arguments[1], parallel ? R"({"x": 1})" : "");
    EXPECT_EQ(delta.content, "Done");
  }
}

// As in vLLM.
TEST(ChoiceText, StopStringsThatEndInTheFirstTokensAreText) {
  const ServedModel model = TinyModel();
  const std::vector<int32_t> ids = model.tokenizer.Encode("a b a b a b", /*add_special=*/false).value();
  const auto count = static_cast<int>(ids.size());
  for (const auto& [min_tokens, content] : std::initializer_list<std::pair<int, const char*>>{
           {0, "a "}, {count - 1, "a b a b a "}, {count, "a b a b a b"}}) {
    GenerationSpec spec;
    spec.stop = {"b"};
    spec.sampling.min_tokens = min_tokens;
    ChoiceText choice(model, spec);
    ChoiceDelta delta;
    for (const int32_t id : ids) {
      if (*choice.Push(id, &delta)) break;
    }
    EXPECT_TRUE(choice.Finish(&delta).ok());
    EXPECT_EQ(delta.content, content);
    EXPECT_EQ(choice.stop(), min_tokens == count ? "" : "b");
  }
}

}  // namespace
}  // namespace moesaic::server
