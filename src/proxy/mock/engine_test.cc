#include "proxy/mock/engine.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

namespace moesaic::proxy {
namespace {

constexpr uint32_t kSize = 16;

MockEngineOptions Small() {
  MockEngineOptions options;
  options.block_size = kSize;
  options.num_blocks = 64;
  options.max_batch_tokens = 256;
  options.time = {
      .base = 1e6, .per_token = 1e3, .per_pair = 0, .step_base = 1e6, .per_sequence = 1e4, .per_kv_token = 1};
  return options;
}

MockRequest Request(uint64_t id, uint32_t prompt, uint32_t output, uint64_t first_key = 0) {
  MockRequest request;
  request.id = id;
  request.prompt_tokens = prompt;
  request.output_tokens = output;
  for (uint32_t i = 0; i < prompt / kSize && first_key != 0; ++i) request.keys.push_back(first_key + i);
  return request;
}

// Advances until nothing happens any more; returns all outputs.
std::vector<MockOutput> RunAll(MockEngine& engine) {
  std::vector<MockOutput> outputs;
  while (engine.NextEvent() != kNever) {
    engine.Advance(engine.NextEvent());
    engine.TakeOutputs(outputs);
  }
  return outputs;
}

TEST(MockEngine, TimesFollowThePolynomial) {
  MockEngine engine(Small());
  ASSERT_TRUE(engine.Submit(Request(1, 100, 3), 1000).ok());
  const auto outputs = RunAll(engine);
  ASSERT_EQ(outputs.size(), 3U);
  EXPECT_EQ(outputs[0].time, 1000 + 1'000'000 + 100'000);
  EXPECT_EQ(outputs[1].time - outputs[0].time, 1'000'000 + 10'000 + 100);
  EXPECT_EQ(outputs[2].kind, MockOutput::Kind::kFinished);
  EXPECT_EQ(outputs[2].tokens, 3U);
}

TEST(MockEngine, LongPromptsAreComputedInChunks) {
  MockEngine engine(Small());
  ASSERT_TRUE(engine.Submit(Request(1, 600, 1), 0).ok());
  RunAll(engine);
  EXPECT_EQ(engine.stats().steps, 3U);  // 256 + 256 + 88
  EXPECT_EQ(engine.stats().prefill_tokens, 600U);
}

TEST(MockEngine, ReusesPrefixesAndAnnouncesBlocks) {
  MockEngine engine(Small());
  ASSERT_TRUE(engine.Submit(Request(1, 100, 1, 10), 0).ok());
  RunAll(engine);
  std::vector<MockMessage> messages;
  engine.TakeMessages(messages);
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_EQ(messages[0].sequence, 0U);
  EXPECT_EQ(messages[0].events[0].block_hashes, (std::vector<uint64_t>{10, 11, 12, 13, 14, 15}));
  EXPECT_FALSE(messages[0].events[0].parent.has_value());
  ASSERT_TRUE(engine.Submit(Request(2, 100, 1, 10), 1'000'000'000).ok());
  EXPECT_EQ(RunAll(engine)[0].cached_tokens, 96U);
  // The whole prompt is known, and its last token is computed all the same.
  ASSERT_TRUE(engine.Submit(Request(3, 96, 1, 10), 2'000'000'000).ok());
  EXPECT_EQ(RunAll(engine)[0].cached_tokens, 80U);
}

TEST(MockEngine, EvictsTheLeastRecentlyUsedBlocksFirst) {
  MockEngine engine(Small());  // 64 blocks
  Nanos now = 0;
  for (const uint64_t first : {100, 200, 300}) {  // 20 blocks each
    ASSERT_TRUE(engine.Submit(Request(first, 20 * kSize, 1, first), now += kSecond).ok());
    RunAll(engine);
  }
  ASSERT_TRUE(engine.Submit(Request(1, 20 * kSize, 1, 100), now += kSecond).ok());  // touches the first
  RunAll(engine);
  ASSERT_TRUE(engine.Submit(Request(2, 20 * kSize, 1, 400), now += kSecond).ok());
  RunAll(engine);
  const auto keys = [](uint64_t first) {
    std::vector<uint64_t> all(20);
    std::iota(all.begin(), all.end(), first);
    return all;
  };
  EXPECT_GE(engine.CachedBlocks(keys(100)), 19U);
  EXPECT_LT(engine.CachedBlocks(keys(200)), 10U);  // the leaves are evicted before the root
  EXPECT_GT(engine.CachedBlocks(keys(200)), 0U);
  EXPECT_EQ(engine.CachedBlocks(keys(300)), 20U);
  EXPECT_EQ(engine.CachedBlocks(keys(400)), 20U);
}

TEST(MockEngine, EventsDescribeTheCacheExactly) {
  MockEngineOptions options = Small();
  options.num_blocks = 24;
  options.max_sequences = 3;
  MockEngine engine(options);
  std::set<uint64_t> known;
  uint64_t id = 1;
  for (int round = 0; round < 60; ++round) {
    const uint64_t first = 1000 * static_cast<uint64_t>(round % 7 + 1);
    const auto prompt = static_cast<uint32_t>(40 + round * 37 % 200);
    ASSERT_TRUE(engine.Submit(Request(id++, prompt, 1 + round % 5, first), round * kMillisecond / 2).ok());
  }
  RunAll(engine);
  std::vector<MockMessage> messages;
  engine.TakeMessages(messages);
  uint64_t sequence = 0;
  for (const MockMessage& message : messages) {
    EXPECT_EQ(message.sequence, sequence++);
    for (const KvEvent& event : message.events) {
      for (const uint64_t key : event.block_hashes) {
        if (event.type == KvEvent::Type::kStored) {
          EXPECT_TRUE(known.insert(key).second) << key;
        } else {
          EXPECT_EQ(known.erase(key), 1U) << key;
        }
      }
    }
  }
  for (uint64_t key = 1000; key < 8100; ++key)
    EXPECT_EQ(engine.CachedBlocks(std::vector<uint64_t>{key}) == 1, known.contains(key)) << key;
  EXPECT_EQ(engine.stats().free_blocks, 24U);
  EXPECT_EQ(engine.Replay(sequence - 2).size(), 2U);
}

TEST(MockEngine, PreemptsTheYoungestWhenBlocksRunOut) {
  MockEngineOptions options = Small();
  options.num_blocks = 8;
  MockEngine engine(options);
  ASSERT_TRUE(engine.Submit(Request(1, 48, 60), 0).ok());
  ASSERT_TRUE(engine.Submit(Request(2, 48, 60), 0).ok());
  std::map<uint64_t, uint32_t> produced;
  for (const MockOutput& output : RunAll(engine)) produced[output.id] = output.tokens;
  EXPECT_EQ(produced[1], 60U);
  EXPECT_EQ(produced[2], 60U);
  EXPECT_GT(engine.stats().preemptions, 0U);
  EXPECT_EQ(engine.stats().free_blocks, 8U);
}

TEST(MockEngine, MovesPrefillsToAnotherEngine) {
  MockEngine prefill(Small()), decode(Small());
  MockRequest first = Request(7, 96, 5, 50);
  MockRequest second = first;
  first.prefill_only = true;
  ASSERT_TRUE(prefill.Submit(first, 0).ok());
  const auto answer = RunAll(prefill);
  ASSERT_EQ(answer.size(), 1U);
  EXPECT_EQ(answer[0].kind, MockOutput::Kind::kFinished);
  EXPECT_EQ(prefill.stats().free_blocks, 58U);  // pinned until the decode side has read them
  second.remote_prefill = true;
  second.remote_ready = answer[0].time;
  ASSERT_TRUE(decode.Submit(second, answer[0].time).ok());
  const auto outputs = RunAll(decode);
  ASSERT_EQ(outputs.size(), 6U);
  EXPECT_EQ(outputs[0].kind, MockOutput::Kind::kTransferred);
  EXPECT_EQ(outputs[0].time, answer[0].time + 96'000 + 2 * kMillisecond);
  EXPECT_TRUE(prefill.ReleaseRemote(7, outputs[0].time));
  EXPECT_EQ(prefill.stats().free_blocks, 64U);
  EXPECT_EQ(decode.CachedBlocks(second.keys), 6U);
}

TEST(MockEngine, WaitsForARemotePrefillInParallelMode) {
  MockEngine engine(Small());
  MockRequest request = Request(1, 64, 2);
  request.remote_prefill = true;
  request.remote_ready = kNever;
  ASSERT_TRUE(engine.Submit(request, 0).ok());
  EXPECT_EQ(engine.NextEvent(), kNever);
  EXPECT_EQ(engine.stats().free_blocks, 60U);  // allocated in advance
  EXPECT_TRUE(engine.RemoteReady(1, 5 * kMillisecond, 5 * kMillisecond));
  EXPECT_EQ(RunAll(engine).back().kind, MockOutput::Kind::kFinished);
}

TEST(MockEngine, CancelAtAnyTimeFreesAllBlocks) {
  for (int steps = 0; steps < 6; ++steps) {
    MockEngine engine(Small());
    ASSERT_TRUE(engine.Submit(Request(1, 600, 8, 3), 0).ok());
    ASSERT_TRUE(engine.Submit(Request(2, 100, 8), 0).ok());
    for (int i = 0; i < steps; ++i) engine.Advance(engine.NextEvent());
    EXPECT_TRUE(engine.Cancel(1, engine.NextEvent() == kNever ? 0 : engine.NextEvent() - 1));
    EXPECT_FALSE(engine.Cancel(1, kSecond));
    RunAll(engine);
    EXPECT_EQ(engine.stats().free_blocks, 64U);
  }
}

TEST(MockEngine, FaultsAreDrawnFromTheSeed) {
  MockEngineOptions options = Small();
  options.faults = {.fail_request = 0.3, .drop_message = 0.2, .duplicate_message = 0.2, .swap_messages = 0.2};
  const auto run = [&] {
    MockEngine engine(options);
    for (uint64_t i = 1; i <= 40; ++i)
      EXPECT_TRUE(engine.Submit(Request(i, 64, 1, i * 100), i * 10 * kMillisecond).ok());
    const auto outputs = RunAll(engine);
    std::vector<MockMessage> messages;
    engine.TakeMessages(messages);
    std::string text;
    for (const MockOutput& output : outputs) text += output.kind == MockOutput::Kind::kFailed ? 'x' : '.';
    for (const MockMessage& message : messages) text += " " + std::to_string(message.sequence);
    return text;
  };
  const std::string first = run();
  EXPECT_EQ(first, run());
  EXPECT_NE(first.find('x'), std::string::npos);
}

TEST(MockEngine, RequestsContinueWhenAStallEndsEarly) {
  MockEngine engine(Small());
  ASSERT_TRUE(engine.Submit(Request(1, 100, 3), 0).ok());
  MockFaults faults;
  faults.stall_until = 1000 * kSecond;
  engine.SetFaults(faults, 1);
  ASSERT_TRUE(engine.Submit(Request(2, 100, 3), 2).ok());
  engine.Advance(kSecond);
  EXPECT_EQ(engine.NextEvent(), faults.stall_until);
  std::vector<MockOutput> outputs;
  engine.TakeOutputs(outputs);
  ASSERT_EQ(outputs.size(), 1U);  // of the step that had begun
  engine.SetFaults({}, 2 * kSecond);
  outputs = RunAll(engine);
  ASSERT_EQ(outputs.size(), 5U);
  EXPECT_LT(outputs.back().time, 3 * kSecond);
}

TEST(MockEngine, ASlowdownDelaysTheRestOfAStep) {
  MockEngine engine(Small());
  MockFaults slow;
  slow.slowdown = 1000;
  engine.SetFaults(slow, 0);
  ASSERT_TRUE(engine.Submit(Request(1, 100, 1), 0).ok());
  EXPECT_EQ(engine.NextEvent(), 1000 * 1'100'000);
  engine.SetFaults({}, 500 * 1'100'000);
  EXPECT_EQ(engine.NextEvent(), 500 * 1'100'000 + 550'000);
  EXPECT_EQ(RunAll(engine).size(), 1U);
}

TEST(MockEngine, RefusesRequestsThatContradictThemselves) {
  MockEngine engine(Small());
  EXPECT_FALSE(engine.Submit(Request(1, 0, 1), 0).ok());
  EXPECT_FALSE(engine.Submit(Request(1, 10, 0), 0).ok());
  EXPECT_EQ(engine.Submit(Request(1, 64 * kSize, 1), 0).code(), StatusCode::kResourceExhausted);
  MockRequest both = Request(2, 10, 1);
  both.prefill_only = both.remote_prefill = true;
  EXPECT_FALSE(engine.Submit(both, 0).ok());
  ASSERT_TRUE(engine.Submit(Request(3, 10, 1), 0).ok());
  EXPECT_FALSE(engine.Submit(Request(3, 10, 1), 0).ok());
}

TEST(MockEngine, RestartClearsRequestsAndCache) {
  MockEngine engine(Small());
  ASSERT_TRUE(engine.Submit(Request(1, 100, 1, 10), 0).ok());
  RunAll(engine);
  ASSERT_TRUE(engine.Submit(Request(2, 100, 9, 10), kSecond).ok());
  engine.Restart(kSecond + 1);
  std::vector<MockOutput> outputs;
  engine.TakeOutputs(outputs);
  ASSERT_EQ(outputs.size(), 1U);
  EXPECT_EQ(outputs[0].kind, MockOutput::Kind::kFailed);
  EXPECT_EQ(engine.stats().free_blocks, 64U);
  EXPECT_EQ(engine.CachedBlocks(std::vector<uint64_t>{10}), 0U);
  ASSERT_TRUE(engine.Submit(Request(3, 32, 1, 10), 2 * kSecond).ok());
  RunAll(engine);
  std::vector<MockMessage> messages;
  engine.TakeMessages(messages);
  ASSERT_FALSE(messages.empty());
  EXPECT_EQ(messages.front().sequence, 0U);
}

}  // namespace
}  // namespace moesaic::proxy
