// Requests whose outputs follow a grammar.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <regex>
#include <string>

#include "engine/byte_tokenizer.h"
#include "engine/fake_engine.h"

namespace moesaic::engine {
namespace {

using EngineGrammarTest = FakeEngineTest;

// Twelve requests run at once, each with its own grammar. Some of them are preempted.
TEST_F(EngineGrammarTest, OutputsFollowTheirGrammars) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  FakeModel model(512, 95);
  auto made = Engine::Create(
      model, kernels_, *threads_,
      {.kv_bytes = 6 * kBlockBytes, .max_sequences = 4, .max_batch_tokens = 40, .eos_ids = {94}});
  ASSERT_TRUE(made.ok()) << made.status();
  std::map<RequestId, std::string> patterns;
  for (uint32_t i = 0; i < 12; ++i) {
    Request request = MakeRequest(RandomPrompt(30 + static_cast<int>(i), i), 150, i % 2 == 0 ? 0.0f : 1.0f);
    for (int32_t& token : request.prompt) token %= 94;
    const std::string pattern = i % 3 == 0 ? "[a-c]{70}x" : i % 3 == 1 ? "(no|yes)" : "[0-9]{1,40}";
    request.grammar = std::make_shared<text::Grammar>(*compiler->Compile(text::GrammarKind::kRegex, pattern));
    request.sampling.min_tokens = i == 1 ? 50 : 0;  // the end of the grammar has precedence
    patterns[*(*made)->Add(request)] = pattern;
  }
  const auto results = Drain(**made);
  for (const auto& [id, pattern] : patterns) {
    std::string said;
    for (const int32_t token : results.at(id).tokens) said += static_cast<char>('!' + token);
    EXPECT_TRUE(std::regex_match(said, std::regex(pattern))) << said << " is not " << pattern;
    EXPECT_EQ(results.at(id).finish, FinishReason::kStop);
  }
}

// A request ends if its masks fail or are too slow. The outputs of other requests do not change.
TEST_F(EngineGrammarTest, AFailedGrammarEndsOnlyItsRequest) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  FakeModel model(512, 95);
  auto made = Engine::Create(model, kernels_, *threads_,
                             {.kv_bytes = 64 * kBlockBytes, .max_sequences = 8, .eos_ids = {94}});
  ASSERT_TRUE(made.ok()) << made.status();
  const auto grammar = [&](const std::string& pattern) {
    return std::make_shared<text::Grammar>(*compiler->Compile(text::GrammarKind::kRegex, pattern));
  };
  Request free = MakeRequest({1, 2, 3}, 60, 0);
  const RequestId alone = *(*made)->Add(free);
  const std::vector<int32_t> said = Drain(**made)[alone].tokens;

  Request failing = MakeRequest({5, 6, 7}, 100, 0);
  failing.grammar = grammar("[a-z]{50}");
  failing.grammar->Cancel();
  Request costly = MakeRequest({8, 9}, 400, 1);
  costly.sampling.min_tokens = 400;
  const auto strict =
      text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94}, {.mask_fuel = 20'000});
  ASSERT_TRUE(strict.ok()) << Message(strict.status());
  costly.grammar = std::make_shared<text::Grammar>(
      *strict->Compile(text::GrammarKind::kRegex, "(([a-z]{1,1000}){1,1000}){1,1000}"));
  Request ordinary = MakeRequest({4, 4, 4}, 100, 0);
  ordinary.grammar = grammar("[a-c]{40}");
  const RequestId failed = *(*made)->Add(failing), cost = *(*made)->Add(costly);
  const RequestId beside = *(*made)->Add(free), fine = *(*made)->Add(ordinary);
  std::map<RequestId, Result> results = Drain(**made);
  EXPECT_EQ(results[failed].finish, FinishReason::kGrammar);
  EXPECT_FALSE(results[failed].status.ok());
  EXPECT_TRUE(results[failed].tokens.empty());
  EXPECT_EQ(results[cost].finish, FinishReason::kGrammar);
  EXPECT_GT(results[cost].tokens.size(), 1U);
  EXPECT_EQ(results[beside].tokens, said);
  EXPECT_EQ(results[fine].finish, FinishReason::kStop);
  EXPECT_EQ(results[fine].tokens.size(), 40U);
}

// Requests are cancelled while their masks are computed.
TEST_F(EngineGrammarTest, CancelsRequestsWhoseMasksArePending) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  FakeModel model(512, 95);
  auto made = Engine::Create(model, kernels_, *threads_,
                             {.kv_bytes = 64 * kBlockBytes, .max_sequences = 4, .eos_ids = {94}});
  ASSERT_TRUE(made.ok()) << made.status();
  for (int round = 0; round < 12; ++round) {
    Request costly = MakeRequest({8, 9}, 400, 1);
    costly.sampling.seed = round;
    costly.grammar = std::make_shared<text::Grammar>(
        *compiler->Compile(text::GrammarKind::kRegex, "(([a-z]{1,1000}){1,1000}){1,1000}"));
    const RequestId id = *(*made)->Add(costly);
    std::map<RequestId, Result> results;
    for (int step = 0; step <= round; ++step) {
      std::vector<TokenEvent> events;
      ASSERT_TRUE((*made)->Step(&events).ok());
      Collect(events, &results);
    }
    (*made)->Cancel(id);
    const std::map<RequestId, Result> rest = Drain(**made);
    EXPECT_EQ(results[id].ends + (rest.contains(id) ? rest.at(id).ends : 0), 1);
  }
}

// The last row of the prompt is used neither for a log-probability nor for a draw, and waits for no mask.
TEST_F(EngineGrammarTest, AGrammarNeedsNoMaskIfOnlyThePromptIsRead) {
  const text::Tokenizer tokenizer = ByteTokenizer();
  const auto compiler = text::GrammarCompiler::Create(tokenizer, std::vector<int32_t>{94});
  ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
  FakeModel model(512, 95);
  auto made = Engine::Create(model, kernels_, *threads_, {.kv_bytes = 16 * kBlockBytes, .eos_ids = {94}});
  ASSERT_TRUE(made.ok()) << made.status();
  const auto grammar = [&](const char* pattern) {
    return std::make_shared<text::Grammar>(*compiler->Compile(text::GrammarKind::kRegex, pattern));
  };
  Request reader = MakeRequest({1, 2, 3, 4}, 0, 0);
  reader.prompt_logprobs = true;
  reader.sampling.logprobs = 0;
  reader.grammar = grammar("(no|yes)");
  Request writer = MakeRequest({5, 6, 7}, 20, 0);
  writer.grammar = grammar("[a-c]{5}");
  const RequestId alone = *(*made)->Add(reader);
  const Result read = Drain(**made)[alone];
  EXPECT_EQ(read.prompt_logprobs.size(), 3U);
  EXPECT_EQ(read.finish, FinishReason::kLength);
  const RequestId beside = *(*made)->Add(reader), writing = *(*made)->Add(writer);
  std::map<RequestId, Result> results = Drain(**made);
  EXPECT_EQ(results[beside].finish, FinishReason::kLength);
  EXPECT_EQ(results[writing].finish, FinishReason::kStop);
  EXPECT_EQ(results[writing].tokens.size(), 5U);
}

}  // namespace
}  // namespace moesaic::engine
