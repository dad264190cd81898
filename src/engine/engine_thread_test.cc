#include "engine/engine_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include "engine/fake_engine.h"
#include "kernels/kernel_table.h"

namespace moesaic::engine {
namespace {

using testing::HasSubstr;

// Collects one request's events and waits for its end.
class Listener {
 public:
  EngineThread::Sink sink() {
    return [this](std::span<TokenEvent> events) {
      const std::lock_guard lock(mutex_);
      for (TokenEvent& event : events) {
        EXPECT_FALSE(ended_) << "an event after the end";
        if (event.token) tokens_.push_back(*event.token);
        finish_ = event.finish;
        ended_ = event.finish != FinishReason::kNone;
      }
      changed_.notify_all();
    };
  }
  FinishReason Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_; });
    return finish_;
  }
  std::vector<int32_t> tokens() {
    const std::lock_guard lock(mutex_);
    return tokens_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int32_t> tokens_;
  FinishReason finish_ = FinishReason::kNone;
  bool ended_ = false;
};

class EngineThreadTest : public FakeEngineTest {
 protected:
  EngineThreadTest() : FakeEngineTest(512) {}

  std::unique_ptr<EngineThread> Make(const EngineThreadOptions& options = {}) {
    return std::make_unique<EngineThread>(
        FakeEngineTest::Make({.kv_bytes = 2 << 20, .max_sequences = 8, .max_batch_tokens = 64}), options);
  }
};

TEST_F(EngineThreadTest, ReportsTokensAndTheEndOfARequest) {
  auto thread = Make();
  Listener a, b;
  ASSERT_TRUE(thread->Submit(Greedy({1, 2, 3}, 20), a.sink()).ok());
  ASSERT_TRUE(thread->Submit(Greedy({1, 2, 3}, 20), b.sink()).ok());
  EXPECT_EQ(a.Wait(), FinishReason::kLength);
  EXPECT_EQ(b.Wait(), FinishReason::kLength);
  EXPECT_EQ(a.tokens().size(), 20U);
  EXPECT_EQ(a.tokens(), b.tokens());
}

TEST_F(EngineThreadTest, NamesTheReasonOfARefusal) {
  auto thread = Make();
  Listener never;
  const auto refused = thread->Submit(Greedy({}, 5), never.sink());
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Message(refused.status()), "the prompt is empty");
}

TEST_F(EngineThreadTest, RefusesRequestsWhenTheQueueIsFull) {
  auto thread = Make({.max_queued = 0});
  Listener never;
  const auto refused = thread->Submit(Greedy({1}, 5), never.sink());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(refused.status()), HasSubstr("too many requests wait"));
}

// Fills the queue in a sink: no request is admitted before it returns.
TEST_F(EngineThreadTest, OneClientLeavesRoomInTheQueue) {
  auto engine = FakeEngineTest::Make({.kv_bytes = 2 << 20, .max_sequences = 1, .max_batch_tokens = 64});
  EngineThread thread(std::move(engine), {.max_queued = 4});
  Listener running;
  std::vector<Listener> listeners(4);
  size_t used = 0;
  const auto submit = [&](const char* client) {
    Request request = Greedy({1, 2}, 2);
    request.client = client;
    const auto id = thread.Submit(std::move(request), listeners[used].sink());
    if (id.ok()) ++used;
    return id.ok() ? "" : Message(id.status());
  };
  const auto room = [&](const char* client, int64_t count) { return thread.CheckRoom(client, count).code(); };
  constexpr const char* kTooMany = "too many requests of this client wait: 2, with 2 of 4 places free";
  int steps = 0;
  const auto fill = [&](std::span<TokenEvent> events) {
    if (++steps == 1) {
      EXPECT_EQ(thread.CheckRoom("greedy", 2), OkStatus());
      EXPECT_EQ(submit("greedy"), "");
      EXPECT_EQ(room("greedy", 2), StatusCode::kResourceExhausted);
      EXPECT_EQ(room("other", 2), StatusCode::kOk);
      EXPECT_EQ(submit("greedy"), "");
      EXPECT_THAT(submit("greedy"), HasSubstr(kTooMany));
    } else if (steps == 2) {  // the requests wait in the engine now
      EXPECT_EQ(thread.stats().waiting, 2);
      EXPECT_THAT(submit("greedy"), HasSubstr(kTooMany));
      EXPECT_EQ(submit("other"), "");
      EXPECT_THAT(submit("other"), HasSubstr("wait: 1, with 1 of 4 places free"));
      EXPECT_EQ(submit("third"), "");
      EXPECT_EQ(submit("fourth"), "too many requests wait: 4 of 4");
    }
    running.sink()(events);
  };
  ASSERT_TRUE(thread.Submit(Greedy({1, 2}, 3), fill).ok());
  EXPECT_EQ(running.Wait(), FinishReason::kLength);
  for (Listener& listener : listeners) EXPECT_EQ(listener.Wait(), FinishReason::kLength);
  EXPECT_EQ(room("greedy", 2), StatusCode::kOk) << "none of its requests waits any more";
  EXPECT_EQ(thread.CheckRoom("greedy", 3),
            InvalidArgument("one client may have at most 2 waiting sequences, half of the queue; found 3"));
}

TEST_F(EngineThreadTest, CancelEndsTheRequestAndFreesItsBlocks) {
  auto thread = Make();
  Listener listener;
  const EngineThread::Sink tell = listener.sink();
  EngineThread* const engine = thread.get();
  RequestId id = 1;  // the first id that Submit returns
  const auto cancelling = [&, engine](std::span<TokenEvent> events) {
    engine->Cancel(id);
    tell(events);
  };
  EXPECT_EQ(*thread->Submit(Greedy({1, 2}, 400), cancelling), id);
  EXPECT_EQ(listener.Wait(), FinishReason::kCancelled);
  EXPECT_LE(listener.tokens().size(), 1U);
  thread->Cancel(id);
  const EngineStats stats = thread->stats();
  EXPECT_EQ(stats.free_blocks + stats.cached_blocks, stats.total_blocks);
  EXPECT_EQ(stats.running, 0);
}

TEST_F(EngineThreadTest, DrainRefusesNewRequestsAndFinishesOthers) {
  auto thread = Make();
  Listener listener, never;
  ASSERT_TRUE(thread->Submit(Greedy({1, 2}, 100), listener.sink()).ok());
  thread->Drain();
  EXPECT_EQ(thread->Submit(Greedy({1, 2}, 5), never.sink()).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(listener.Wait(), FinishReason::kLength);
}

TEST_F(EngineThreadTest, DestructorReportsTheEndOfAllRequests) {
  std::vector<Listener> listeners(20);
  model_.row_time = std::chrono::milliseconds(10);  // no request reaches 500 tokens before the destructor
  auto thread = Make();
  for (Listener& listener : listeners) ASSERT_TRUE(thread->Submit(Greedy({1}, 500), listener.sink()).ok());
  thread.reset();
  for (Listener& listener : listeners) EXPECT_EQ(listener.Wait(), FinishReason::kCancelled);
}

TEST_F(EngineThreadTest, RunsNewRequestsAfterAFailedStep) {
  auto thread = Make();
  Listener first, second;
  model_.fail_next = true;  // read by the engine's thread after Submit's lock
  ASSERT_TRUE(thread->Submit(Greedy({1}, 5), first.sink()).ok());
  EXPECT_EQ(first.Wait(), FinishReason::kError);
  ASSERT_TRUE(thread->Submit(Greedy({1}, 5), second.sink()).ok());
  EXPECT_EQ(second.Wait(), FinishReason::kLength);
}

// A rank that does not answer would make each step take the time limit.
TEST_F(EngineThreadTest, AModelThatFailedForGoodIsNotRunAgain) {
  auto thread = Make({.fails_for_good = true});
  Listener first, second;
  model_.fail_next = true;
  ASSERT_TRUE(thread->Submit(Greedy({1}, 5), first.sink()).ok());
  EXPECT_EQ(first.Wait(), FinishReason::kError);
  ASSERT_TRUE(thread->Submit(Greedy({1}, 5), second.sink()).ok());
  EXPECT_EQ(second.Wait(), FinishReason::kError);
  EXPECT_TRUE(second.tokens().empty());
}

TEST_F(EngineThreadTest, AFailedStepReportsPendingCancellations) {
  model_.row_time = std::chrono::milliseconds(10);  // keeps the other request running
  auto thread = Make();
  Listener cancelled, other;
  const EngineThread::Sink tell = cancelled.sink();
  EngineThread* const engine = thread.get();
  const RequestId id = 2;  // the second id that Submit returns
  const auto cancelling = [&, engine](std::span<TokenEvent> events) {
    engine->Cancel(id);
    model_.fail_next = true;  // runs on the engine's thread
    tell(events);
  };
  ASSERT_TRUE(thread->Submit(Greedy({1, 2}, 400), other.sink()).ok());
  EXPECT_EQ(*thread->Submit(Greedy({3, 4}, 400), cancelling), id);
  EXPECT_EQ(other.Wait(), FinishReason::kError);
  for (int waited = 0; waited < 60000 && !thread->idle(); ++waited) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_TRUE(thread->idle());
  EXPECT_EQ(cancelled.Wait(), FinishReason::kCancelled);
}

// Threads submit requests, cancel them at random times and read the counters. This test is mainly for
// ThreadSanitizer.
TEST_F(EngineThreadTest, ManyThreadsSubmitAndCancel) {
  auto thread = Make();
  std::atomic<int> ends = 0, taken = 0;
  std::vector<std::thread> callers;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    callers.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<RequestId> mine;
      for (int i = 0; i < 40; ++i) {
        std::vector<int32_t> prompt(1 + random() % 150, static_cast<int32_t>(random() % 3));
        auto id = thread->Submit(Greedy(std::move(prompt), 1 + static_cast<int>(random() % 30)),
                                 [&](std::span<TokenEvent> events) {
                                   if (events.back().finish != FinishReason::kNone) ++ends;
                                 });
        ASSERT_TRUE(id.ok()) << Message(id.status());
        ++taken;
        mine.push_back(*id);
        if (random() % 2 == 0) thread->Cancel(mine[random() % mine.size()]);
        EXPECT_LE(thread->stats().free_blocks, thread->stats().total_blocks);
        if (random() % 10 == 0) thread->ClearCache();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  while (!thread->idle()) std::this_thread::yield();
  EXPECT_EQ(ends, taken);
  const EngineStats stats = thread->stats();
  EXPECT_EQ(stats.free_blocks + stats.cached_blocks, stats.total_blocks);
}

}  // namespace
}  // namespace moesaic::engine
