// Tests generations on a fake model, and answers that fail.
#include "server/generation.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/fake_model.h"
#include "server/test_context.h"

namespace moesaic::server {
namespace {

// Runs tasks inside Post, one at a time.
class InlineExecutor : public SerialExecutor {
 public:
  void Post(std::function<void()> task) override {
    const std::lock_guard lock(mutex_);
    task();
  }

 private:
  std::recursive_mutex mutex_;
};

enum class Throws { kNever, kAtStart, kAtText, kAtEnd };

// Throws in the chosen call, and reports the end of its answer: the error's status, or 0 for a complete
// answer.
class Sink : public AnswerSink {
 public:
  Sink(Throws throws, std::promise<int> end) : throws_(throws), end_(std::move(end)) {}
  void Started() override { ThrowAt(Throws::kAtStart); }
  void Delta(ChoiceDelta, const Usage&) override { ThrowAt(Throws::kAtText); }
  void Done(const Usage&) override {
    ThrowAt(Throws::kAtEnd);
    end_.set_value(0);
  }
  void Failed(const ApiError& error) override { end_.set_value(error.http_status); }

 private:
  void ThrowAt(Throws here) const {
    if (throws_ == here) throw std::runtime_error("a full disk, say");
  }
  const Throws throws_;
  std::promise<int> end_;
};

// Usage, tokens and finish reason of a complete answer.
struct Counted {
  Usage usage;
  std::vector<int32_t> ids;
  std::string finish_reason;
};

class CountingSink : public AnswerSink {
 public:
  explicit CountingSink(std::promise<Counted> end) : end_(std::move(end)) {}
  void Delta(ChoiceDelta delta, const Usage&) override {
    for (const GeneratedToken& token : delta.tokens) counted_.ids.push_back(token.id);
    if (!delta.finish_reason.empty()) counted_.finish_reason = delta.finish_reason;
  }
  void Done(const Usage& usage) override {
    counted_.usage = usage;
    end_.set_value(counted_);
  }
  void Failed(const ApiError&) override { end_.set_value({}); }

 private:
  Counted counted_;
  std::promise<Counted> end_;
};

class GenerationTest : public testing::Test {
 protected:
  std::unique_ptr<engine::EngineThread> MakeEngine() {
    auto engine = engine::Engine::Create(fake_, kernels_, *threads_,
                                         {.kv_bytes = 2 << 20, .max_sequences = 8, .max_batch_tokens = 64});
    EXPECT_TRUE(engine.ok()) << Message(engine.status());
    return std::make_unique<engine::EngineThread>(*std::move(engine), engine::EngineThreadOptions{});
  }

  // Returns the end of a generation whose sink throws, or an error when it did not begin.
  StatusOr<int> Generate(Throws throws) {
    GenerationSpec spec;
    spec.id = "test";
    spec.prompts = {{5, 6, 7}};
    spec.budgets = {8};
    spec.n = 3;
    std::promise<int> end;
    std::future<int> ended = end.get_future();
    Status started;
    executor_->Post([&] {
      started = StartGeneration(context_.Get(), std::move(spec), executor_, writer_,
                                std::make_unique<Sink>(throws, std::move(end)));
    });
    RETURN_IF_ERROR(started);
    return ended.get();
  }

  // Returns the usage of a greedy answer to a long prompt that ends at `stop_ids` or `deadline`.
  Counted Count(std::vector<int32_t> stop_ids,
                std::optional<engine::Clock::time_point> deadline = std::nullopt) {
    GenerationSpec spec;
    spec.id = "test";
    spec.prompts.emplace_back();
    for (int i = 0; i < 300; ++i) spec.prompts[0].push_back(i * 7 % 31);
    spec.budgets = {4};
    spec.sampling.temperature = 0;
    spec.sampling.stop_ids = std::move(stop_ids);
    spec.deadline = deadline;
    std::promise<Counted> end;
    std::future<Counted> ended = end.get_future();
    executor_->Post([&] {
      EXPECT_TRUE(StartGeneration(context_.Get(), std::move(spec), executor_, writer_,
                                  std::make_unique<CountingSink>(std::move(end)))
                      .ok());
    });
    return ended.get();
  }

  engine::FakeModel fake_{512};
  kernels::KernelTable kernels_;
  std::unique_ptr<runtime::ThreadPool> threads_ = runtime::ThreadPool::Create({.threads = 1}).value();
  TestContext context_;
  std::shared_ptr<SerialExecutor> executor_ = std::make_shared<InlineExecutor>();
  std::shared_ptr<ResponseWriter> writer_ = std::make_shared<NoWriter>();
  std::unique_ptr<engine::EngineThread> engine_ = MakeEngine();
};

// Reports the response that is sent.
class SentWriter : public NoWriter {
 public:
  explicit SentWriter(std::promise<HttpResponse> sent) : sent_(std::move(sent)) {}
  void Send(HttpResponse response) override { sent_.set_value(std::move(response)); }

 private:
  std::promise<HttpResponse> sent_;
};

TEST_F(GenerationTest, ARefusedGrammarIsTheClientsError) {
  context_.model.engine = engine_.get();
  for (int round = 0; round < 2; ++round) {  // first compiled, then from the cache
    GenerationSpec spec;
    spec.id = "test";
    spec.prompts = {{5, 6, 7}};
    spec.budgets = {8};
    spec.grammar = GrammarText{text::GrammarKind::kJsonSchema, R"({"$ref":"#"})", "guided_json"};
    std::promise<HttpResponse> sent;
    std::future<HttpResponse> response = sent.get_future();
    Status started;
    executor_->Post([&] {
      started = StartGeneration(context_.Get(), std::move(spec), executor_,
                                std::make_shared<SentWriter>(std::move(sent)),
                                std::make_unique<Sink>(Throws::kNever, std::promise<int>()));
    });
    ASSERT_TRUE(started.ok()) << Message(started);
    const HttpResponse answer = response.get();
    EXPECT_EQ(answer.status, 400);
    EXPECT_NE(answer.body.find("Invalid 'guided_json': "), std::string::npos) << answer.body;
  }
  const std::string text = context_.metrics.Text({}, {});
  EXPECT_NE(text.find(R"(moesaic:request_failures_total{cause="grammar_refused",model_name="m"} 2)"),
            std::string::npos)
      << text;
}

TEST_F(GenerationTest, AFailureOfTheModelHasItsOwnCounter) {
  context_.model.engine = engine_.get();
  fake_.fail_next = true;
  EXPECT_EQ(Generate(Throws::kNever).value(), 500);
  EXPECT_EQ(Generate(Throws::kNever).value(), 0);
  // The step fails for one to three choices, those that were submitted before it. The others are cancelled.
  const std::string text = context_.metrics.Text({}, {});
  const std::string counter = R"(moesaic:request_failures_total{cause="model",model_name="m"} )";
  const size_t at = text.find(counter);
  ASSERT_NE(at, std::string::npos) << text;
  const char failures = text[at + counter.size()];
  EXPECT_TRUE(failures >= '1' && failures <= '3') << failures;
  EXPECT_EQ(text.find(R"(cause="grammar")"), std::string::npos);
  EXPECT_EQ(text.find(R"(cause="engine")"), std::string::npos);
}

TEST(FailureOf, NamesTheModelOrTheEngine) {
  engine::TokenEvent event;
  event.status = absl::InternalError("NaN in layer 3");
  event.finish = engine::FinishReason::kError;
  const ApiError model = ErrorOf(FailureOf(event));
  EXPECT_EQ(model.http_status, 500);
  EXPECT_EQ(model.code, "model_failed");
  EXPECT_EQ(model.message, "the model failed: NaN in layer 3");
  event.finish = engine::FinishReason::kInternal;
  const ApiError engine = ErrorOf(FailureOf(event));
  EXPECT_EQ(engine.http_status, 500);
  EXPECT_EQ(engine.code, "engine_failed");
  EXPECT_EQ(engine.message, "the engine failed: NaN in layer 3");
}

// Check accepts a prompt that only a replica which has failed can hold, and Add refuses it.
TEST(FailureOf, APromptThatNoReplicaHoldsIsTheClientsError) {
  engine::TokenEvent event;
  event.finish = engine::FinishReason::kInternal;
  event.status = InvalidArgument("too long");
  const ApiError refused = ErrorOf(FailureOf(event));
  EXPECT_EQ(refused.http_status, 400);
  EXPECT_EQ(refused.message, "too long");
  event.finish = engine::FinishReason::kLength;
  EXPECT_TRUE(FailureOf(event).ok());
}

TEST_F(GenerationTest, AnAnswerThatThrowsFailsItsRequestAlone) {
  context_.model.engine = engine_.get();
  EXPECT_EQ(Generate(Throws::kNever).value(), 0);
  EXPECT_EQ(Generate(Throws::kAtText).value(), 500);
  EXPECT_EQ(Generate(Throws::kAtEnd).value(), 500);
  EXPECT_EQ(Generate(Throws::kAtStart).status().code(), StatusCode::kInternal);
  EXPECT_EQ(Generate(Throws::kNever).value(), 0);
  engine_.reset();  // ends all choices in the engine
}

TEST_F(GenerationTest, CountsCachedTokensOfAnAnswerThatEndsAtOnce) {
  context_.model.engine = engine_.get();
  const Counted first = Count({});
  ASSERT_FALSE(first.ids.empty());
  EXPECT_EQ(first.usage.cached_tokens, 0);
  const Counted whole = Count({});
  EXPECT_GE(whole.usage.cached_tokens, 128);
  const Counted ended = Count({first.ids[0]});
  EXPECT_LE(ended.ids.size(), 1u);
  EXPECT_EQ(ended.usage.cached_tokens, whole.usage.cached_tokens);
  engine_.reset();
}

TEST_F(GenerationTest, NamesTheDeadlineAsTheReasonOfItsEnd) {
  context_.model.engine = engine_.get();
  EXPECT_EQ(Count({}, engine::Clock::now() - std::chrono::seconds(1)).finish_reason, "deadline");
  engine_.reset();
}

}  // namespace
}  // namespace moesaic::server
