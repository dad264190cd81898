#include "text/grammar_pool.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

namespace moesaic::text {
namespace {

using ::testing::HasSubstr;
using Copies = StatusOr<std::vector<Grammar>>;

// Slow to compile: the first step of its lexer has about ten thousand branches.
constexpr const char* kSlow =
    "start: A\nA: /.*a1.*/ & /.*b2.*/ & /.*c3.*/ & /.*d4.*/ & /.*e5.*/ & /.*f6.*/ & /.*g7.*/ & /.*h8.*/ & "
    "/.*i9.*/ & /.*j10.*/ & /.*k11.*/ & /.*l12.*/\n";

class GrammarPoolTest : public ::testing::Test {
 protected:
  GrammarCompiler MakeCompiler(const GrammarLimits& limits = {}) {
    const auto tokenizer =
        Tokenizer::FromFolder(std::string(MOESAIC_SOURCE_DIR) + "/models/moesaic-tiny").value();
    return GrammarCompiler::Create(tokenizer, std::vector<int32_t>{2}, limits).value();
  }

  // Compiles and waits for the result.
  static Copies Compile(GrammarPool& pool, GrammarKind kind, std::string source, int copies = 1,
                        const char* client = "a") {
    std::promise<Copies> promise;
    auto ticket = pool.Start({kind, std::move(source), client, copies},
                             [&promise](Copies result) { promise.set_value(std::move(result)); });
    if (!ticket.ok()) return ticket.status();
    return promise.get_future().get();
  }
};

TEST_F(GrammarPoolTest, ReturnsIndependentCopies) {
  GrammarPool pool(MakeCompiler(), {});
  Copies copies = Compile(pool, GrammarKind::kRegex, "[0-9]{3}", 2);
  ASSERT_TRUE(copies.ok()) << Message(copies.status());
  ASSERT_EQ(copies->size(), 2);
  (*copies)[0].Cancel();
  EXPECT_FALSE((*copies)[0].ComputeFirstMask().ok());
  EXPECT_TRUE((*copies)[1].ComputeFirstMask().ok());
  Copies again = Compile(pool, GrammarKind::kRegex, "[0-9]{3}");
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE((*again)[0].ComputeFirstMask().ok()) << "the cached grammar is not the cancelled copy";
}

TEST_F(GrammarPoolTest, CacheStaysWithinLimit) {
  GrammarPool pool(MakeCompiler(), {.cache_bytes = 1 << 20});
  for (int i = 0; i < 64; ++i) {
    EXPECT_TRUE(Compile(pool, GrammarKind::kRegex, "[a-z]{3}" + std::to_string(i)).ok());
    EXPECT_LE(pool.stats().cached_bytes, 1 << 20);
  }
  EXPECT_GT(pool.stats().cached, 0);
  const int before = pool.stats().cached;
  EXPECT_TRUE(Compile(pool, GrammarKind::kRegex, "[a-z]{3}63").ok());
  EXPECT_EQ(pool.stats().cached, before);
}

TEST_F(GrammarPoolTest, CountsTheLexerStatesOfTheFirstMask) {
  constexpr const char* kRegex = "([a-z]{1,40}-){1,40}[0-9a-f]{8}";
  GrammarPool pool(MakeCompiler(), {});
  StatusOr<Grammar> alone = MakeCompiler().Compile(GrammarKind::kRegex, kRegex);
  ASSERT_TRUE(alone.ok()) << Message(alone.status());
  const size_t compiled = alone->bytes();
  ASSERT_TRUE(alone->ComputeFirstMask().ok());
  EXPECT_GT(alone->bytes(), compiled);
  EXPECT_EQ(alone->Fork()->bytes(), alone->bytes());
  ASSERT_TRUE(Compile(pool, GrammarKind::kRegex, kRegex).ok());
  EXPECT_GE(pool.stats().cached_bytes, alone->bytes());
}

TEST_F(GrammarPoolTest, RefusesGrammarsThatMatchNothing) {
  GrammarPool pool(MakeCompiler(), {});
  for (const char* schema :
       {R"({"$ref":"#"})", R"({"allOf":[{"$ref":"#"}]})",
        R"({"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"})"}) {
    const Copies copies = Compile(pool, GrammarKind::kJsonSchema, schema);
    EXPECT_EQ(copies.status().code(), StatusCode::kInvalidArgument) << schema;
    EXPECT_THAT(Message(copies.status()), HasSubstr("no finite text")) << schema;
  }
  EXPECT_FALSE(Compile(pool, GrammarKind::kLark, "start: a\na: a \"x\"\n").ok());
}

TEST_F(GrammarPoolTest, RefusesLoopsThatAnAnswerWouldReachLater) {
  GrammarPool pool(MakeCompiler(), {});
  for (const char* schema :
       {R"({"$ref":"#"})", R"({"type":"object","properties":{"a":{"$ref":"#/properties/a"}}})",
        R"({"type":"array","minItems":1,"items":{"$ref":"#"}})"}) {
    const std::string call = fmt::format("start: \"call \" arguments\narguments: %json {}\n", schema);
    const Copies copies = Compile(pool, GrammarKind::kToolCalls, call);
    EXPECT_EQ(copies.status().code(), StatusCode::kInvalidArgument) << schema;
    EXPECT_THAT(Message(copies.status()), HasSubstr("no finite text")) << schema;
  }
  for (const char* schema :
       {R"({"type":"object","properties":{"a":{"$ref":"#"}}})", R"({"type":"array","items":{"$ref":"#"}})",
        R"({"anyOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}],)"
        R"("$defs":{"a":{"anyOf":[{"$ref":"#/$defs/b"},{"type":"null"}]},"b":{"$ref":"#/$defs/a"}}})"}) {
    const Copies copies = Compile(pool, GrammarKind::kJsonSchema, schema);
    EXPECT_TRUE(copies.ok()) << schema << Message(copies.status());
  }
}

TEST_F(GrammarPoolTest, RefusesLargeSources) {
  GrammarPool pool(MakeCompiler({.regex_bytes = 10, .schema_bytes = 20, .lark_bytes = 30}), {});
  EXPECT_THAT(Message(Compile(pool, GrammarKind::kRegex, std::string(11, 'a')).status()),
              HasSubstr("the regex has 11 bytes; at most 10"));
  EXPECT_FALSE(Compile(pool, GrammarKind::kJsonSchema, std::string(21, ' ')).ok());
  EXPECT_FALSE(Compile(pool, GrammarKind::kLark, std::string(31, ' ')).ok());
  EXPECT_TRUE(Compile(pool, GrammarKind::kRegex, std::string(10, 'a')).ok());
}

TEST_F(GrammarPoolTest, RefusesCostlyGrammars) {
  GrammarPool pool(MakeCompiler(), {});
  std::string intersection = R"({"allOf":[)";
  for (int i = 0; i < 60; ++i) {
    intersection +=
        (i == 0 ? "" : ",") + std::string(R"({"type":"string","pattern":"x)") + std::to_string(i) + "\"}";
  }
  std::string optional;
  for (int i = 0; i < 4000; ++i) optional += "\\w?";
  EXPECT_THAT(Message(Compile(pool, GrammarKind::kJsonSchema, intersection + "]}").status()),
              HasSubstr("intersects"));
  EXPECT_FALSE(Compile(pool, GrammarKind::kJsonSchema, R"({"type":"integer","multipleOf":9999991})").ok());
  EXPECT_FALSE(Compile(pool, GrammarKind::kRegex, optional).ok());
  EXPECT_TRUE(Compile(pool, GrammarKind::kJsonSchema, R"({"type":"integer","multipleOf":5})").ok());
}

TEST_F(GrammarPoolTest, SurvivesDeepNesting) {
  GrammarPool pool(MakeCompiler({.regex_bytes = 1 << 20, .schema_bytes = 1 << 20, .lark_bytes = 1 << 20}),
                   {});
  const std::string open(30000, '('), close(30000, ')');
  EXPECT_FALSE(Compile(pool, GrammarKind::kRegex, open + "a" + close).ok());
  EXPECT_FALSE(Compile(pool, GrammarKind::kLark, "start: " + open + "\"a\"" + close).ok());
  std::string schema = R"({"type":"integer"})";
  for (int i = 0; i < 10000; ++i) schema = R"({"items":)" + schema + "}";
  EXPECT_FALSE(Compile(pool, GrammarKind::kJsonSchema, schema).ok());
}

TEST_F(GrammarPoolTest, DropsCompilationsWithoutWaiters) {
  GrammarPool pool(MakeCompiler(), {.cache_bytes = 0});
  std::promise<void> begun, release;
  bool dropped_ran = false;
  auto first = pool.Start({GrammarKind::kRegex, "a", "a"}, [&](const Copies&) {
    begun.set_value();
    release.get_future().wait();  // keeps the only thread busy
  });
  ASSERT_TRUE(first.ok());
  begun.get_future().wait();
  {
    auto dropped =
        pool.Start({GrammarKind::kRegex, "abc", "a"}, [&dropped_ran](const Copies&) { dropped_ran = true; });
    ASSERT_TRUE(dropped.ok());
    EXPECT_EQ(pool.stats().queued, 1);
  }
  EXPECT_EQ(pool.stats().queued, 0);
  release.set_value();
  EXPECT_TRUE(Compile(pool, GrammarKind::kRegex, "abc").ok());
  EXPECT_FALSE(dropped_ran);
}

TEST_F(GrammarPoolTest, ServesClientsRoundRobinAndBoundsQueues) {
  GrammarPool pool(MakeCompiler(), {.max_queued = 3, .max_queued_per_client = 2, .cache_bytes = 0});
  std::mutex mutex;
  std::vector<std::string> order;
  std::vector<GrammarPool::Ticket> tickets;
  std::promise<void> release, last;
  std::shared_future<void> released = release.get_future().share();
  const auto start = [&](const char* client, const char* regex) {
    auto ticket = pool.Start({GrammarKind::kRegex, regex, client}, [&, regex](const Copies&) {
      released.wait();
      const std::lock_guard lock(mutex);
      order.emplace_back(regex);
      if (order.size() == 4) last.set_value();
    });
    if (ticket.ok()) tickets.push_back(*std::move(ticket));
    return ticket.status().code();
  };
  EXPECT_EQ(start("a", "a1"), StatusCode::kOk);
  while (pool.stats().queued > 0) std::this_thread::yield();  // a1's callback blocks the only thread
  EXPECT_EQ(start("a", "a2"), StatusCode::kOk);
  EXPECT_EQ(start("a", "a3"), StatusCode::kOk);
  EXPECT_EQ(start("a", "a4"), StatusCode::kResourceExhausted) << "two of one client";
  EXPECT_EQ(start("b", "b1"), StatusCode::kOk);
  EXPECT_EQ(start("c", "c1"), StatusCode::kResourceExhausted) << "three in all";
  release.set_value();
  last.get_future().wait();
  EXPECT_THAT(order, testing::ElementsAre("a1", "b1", "a2", "a3"));
}

TEST_F(GrammarPoolTest, StopPreventsFurtherCallbacks) {
  GrammarPool pool(MakeCompiler(), {});
  bool ran_late = false;
  bool stopped = false;
  auto slow = pool.Start({GrammarKind::kLark, kSlow, "a"}, [&](const Copies&) { ran_late |= stopped; });
  auto queued = pool.Start({GrammarKind::kRegex, "abc", "a"}, [&](const Copies&) { ran_late |= stopped; });
  pool.Stop();
  stopped = true;
  EXPECT_FALSE(ran_late);
  EXPECT_EQ(pool.Start({GrammarKind::kRegex, "abc", "a"}, [](const Copies&) {}).status().code(),
            StatusCode::kUnavailable);
}

}  // namespace
}  // namespace moesaic::text
