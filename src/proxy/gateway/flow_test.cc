// Requests that one engine answers.
#include "proxy/gateway/flow.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "proxy/gateway/status_pages.h"
#include "proxy/gateway/test_flow.h"

namespace moesaic::proxy {
namespace {

constexpr std::string_view kTwo = "engine http://127.0.0.1:1;engine http://127.0.0.1:2;";

// --- The head of a stream ---

TEST_F(FlowTest, AStreamWhoseEngineEndsBeforeItsFirstTokenIsRetried) {
  Use(kTwo);
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true);
  Connection& first = Only();
  Connected(first);
  Data(first, kStreamHead);
  EXPECT_EQ(client.status, 0);
  Closed(first);
  Advance(kSecond);
  Connection& second = Only();
  EXPECT_NE(second.host, first.host);
  Connected(second);
  Data(second, kStreamHead);
  EXPECT_EQ(client.status, 0);
  Data(second, Event(kToken));
  EXPECT_EQ(client.status, 200);
  Data(second, Event("[DONE]") + "0\r\n\r\n");
  EXPECT_TRUE(client.whole);
  EXPECT_EQ(client.body, fmt::format("data: {}\n\ndata: [DONE]\n\n", kToken));
  EXPECT_EQ(flow.Detach().retries, 1U);
  Loop();
  ExpectIdle();
}

TEST_F(FlowTest, AHeadWithoutABodyDoesNotCloseTheBreaker) {
  Use(std::string(kTwo) + "breaker 2 1h 1h;retries 0;");
  for (int i = 0; i < 12; ++i) {
    FakeClient client;
    Flow& flow = Send(client, /*stream=*/true);
    Connection& c = Only();
    Connected(c);
    Data(c, kStreamHead);
    if (c.host == "127.0.0.1:1") {
      Closed(c);
    } else {
      Data(c, Event(kToken) + Event("[DONE]") + "0\r\n\r\n");
    }
    flow.Detach();
    Loop();
  }
  EXPECT_GT(state_.Instance(0)->closed_until, transport_.now_);
  EXPECT_EQ(state_.Instance(1)->closed_until, 0);
}

class RetryTest : public FlowTest {
 protected:
  // Fails the only connection. Returns the milliseconds until the request is sent to another engine.
  int FailAndWait() {
    Failed(Only());
    EXPECT_TRUE(Open().empty());
    int waited = 0;
    while (Open().empty() && waited < 10'000) {
      Advance(kMillisecond);
      ++waited;
    }
    return waited;
  }
};

TEST_F(RetryTest, TheDelayOfARetryHasJitterAndGrowsByHalf) {
  Use(std::string(kTwo) + "retries 2 1s;breaker 0;");
  std::vector<int> first, second;
  for (int i = 0; i < 40; ++i) {
    FakeClient client;
    Flow& flow = Send(client, /*stream=*/false);
    first.push_back(FailAndWait());
    second.push_back(FailAndWait());
    Connected(Only());
    Data(Only(), Answer(R"({"choices":[{"text":"a"}]})"));
    EXPECT_EQ(client.status, 200);
    flow.Detach();
    Loop();
  }
  const auto [least, most] = std::minmax_element(first.begin(), first.end());
  EXPECT_GE(*least, 800);
  EXPECT_LE(*most, 1201);
  EXPECT_GE(*most - *least, 200);  // half of the range; 40 delays miss it with a probability of 1e-10
  const auto [least_of_second, most_of_second] = std::minmax_element(second.begin(), second.end());
  EXPECT_GE(*least_of_second, 1200);
  EXPECT_LE(*most_of_second, 1801);
  EXPECT_GE(*most_of_second - *least_of_second, 300);
  ExpectIdle();
}

// --- Limits of the queue ---

TEST_F(FlowTest, ARequestWhosePredictedWaitIsTooLongGets429) {
  Use("engine http://127.0.0.1:1;queue 10 20ms;");
  EXPECT_EQ(settings_.scheduler.queue_limit, 10U);
  EXPECT_EQ(settings_.scheduler.queue_time_limit, 20 * kMillisecond);
  FakeClient first, second;
  Flow& one = Send(first, /*stream=*/false, /*tokens=*/4000);  // 84 ms by the first model
  Connection& c = Only();
  Connected(c);
  Flow& two = Send(second, /*stream=*/false);
  EXPECT_EQ(second.status, 429);
  EXPECT_EQ(second.retry_after, "1");
  EXPECT_NE(second.body.find("predicted waiting time"), std::string::npos) << second.body;
  Data(c, Answer(R"({"choices":[{"text":"a"}]})"));
  EXPECT_EQ(first.status, 200);
  End(one, two);
}

TEST_F(FlowTest, ARequestThatCannotMeetTheTargetGets429WithShed) {
  Use("engine http://127.0.0.1:1;slo 50ms;shed on;");
  FakeClient large, small;
  Flow& one = Send(large, /*stream=*/false, /*tokens=*/4000);  // 84 ms by the first model
  EXPECT_EQ(large.status, 429);
  EXPECT_EQ(large.retry_after, "1");
  EXPECT_NE(large.body.find("latency target"), std::string::npos) << large.body;
  EXPECT_EQ(one.Detach().outcome, Outcome::kRejected);
  Loop();
  ExpectIdle();
  Flow& two = Send(small, /*stream=*/false, /*tokens=*/100);
  Connected(Only());
  Data(Only(), Answer(R"({"choices":[{"text":"a"}]})"));
  EXPECT_EQ(small.status, 200);
  End(two);
}

// --- Timers ---

TEST_F(FlowTest, AnIdleWorkerHasNoTimer) {
  Use(std::string(kTwo) + "retries 2 10ms;");
  Advance(kSecond);
  EXPECT_EQ(transport_.due_, -1);
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true);
  EXPECT_GE(transport_.due_, 0);
  Failed(Only());
  Advance(kSecond);
  Connected(Only());
  Data(Only(), std::string(kStreamHead) + Event(kToken) + Event("[DONE]") + "0\r\n\r\n");
  End(flow);
  Advance(kSecond);
  EXPECT_EQ(transport_.due_, -1);
}

// --- Timeouts ---

TEST_F(FlowTest, TheTimeOfAPrefillEndsWithTheFirstTokenAndNotWithTheHead) {
  Use(std::string(kTwo) + "prefill_timeout 20s;idle_timeout 5s;retries 1 10ms;");
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true);
  Connection& first = Only();
  Connected(first);
  Advance(kSecond);
  Data(first, kStreamHead);
  Advance(18 * kSecond);
  EXPECT_EQ(&Only(), &first);  // idle_timeout does not count yet
  Advance(2 * kSecond);
  Connection& second = Only();
  EXPECT_NE(second.host, first.host);
  Connected(second);
  Data(second, std::string(kStreamHead) + Event(kToken));
  Advance(4 * kSecond);
  Data(second, Event(kToken));
  Advance(4 * kSecond);
  EXPECT_FALSE(client.ended);
  Advance(2 * kSecond);
  EXPECT_TRUE(client.ended);
  EXPECT_NE(client.body.find("\"error\""), std::string::npos);
  EXPECT_EQ(client.body.find("[DONE]"), std::string::npos);
  End(flow);
}

TEST_F(FlowTest, AnEngineThatDoesNotAnswerInTimeIsReplacedAndThenReported) {
  Use(std::string(kTwo) + "prefill_timeout 20s;retries 1 10ms;");
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/false);
  Connected(Only());
  Advance(21 * kSecond);
  EXPECT_EQ(client.status, 0);
  Connected(Only());
  Advance(21 * kSecond);
  EXPECT_EQ(client.status, 504);
  End(flow);
}

TEST_F(FlowTest, ConnectingHasATimeLimit) {
  Use(std::string(kTwo) + "connect_timeout 3s;retries 1 10ms;");
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/false);
  const std::string first = Only().host;
  Advance(2 * kSecond);
  EXPECT_EQ(Only().host, first);
  Advance(2 * kSecond);
  Connection& second = Only();
  EXPECT_NE(second.host, first);
  Connected(second);
  Data(second, Answer(R"({"choices":[{"text":"a"}]})"));
  EXPECT_EQ(client.status, 200);
  End(flow);
}

TEST_F(FlowTest, TheQueueHasATimeLimitThatARetryDoesNotExtend) {
  Use("engine http://127.0.0.1:1 max_requests=1;queue_timeout 10s;retries 2 10ms;breaker 0;");
  FakeClient first, second, third;  // of one engine that serves one request
  Flow& one = Send(first, /*stream=*/true);
  Connection& c = Only();
  Connected(c);
  Data(c, std::string(kStreamHead) + Event(kToken));
  Flow& two = Send(second, /*stream=*/true);
  Advance(9 * kSecond);
  EXPECT_EQ(second.status, 0);
  Advance(2 * kSecond);
  EXPECT_EQ(second.status, 503);
  // Eight seconds before its first attempt, and two after it.
  Flow& three = Send(third, /*stream=*/true);
  Advance(8 * kSecond);
  Data(c, Event("[DONE]") + "0\r\n\r\n");
  Connection& attempt = Only();
  Connected(attempt);
  ASSERT_TRUE(state_.SetInstanceState(0, InstanceState::kDraining).ok());
  Closed(attempt);
  Advance(kSecond);
  EXPECT_EQ(third.status, 0);
  Advance(2 * kSecond);
  EXPECT_EQ(third.status, 503);
  End(one, two, three);
}

// --- The index ---

TEST_F(FlowTest, BlocksOfAClearedInstanceAreRemovedOverSeveralTurns) {
  Use(kTwo);
  std::vector<uint64_t> keys(3000);
  std::iota(keys.begin(), keys.end(), 1);
  ASSERT_EQ(gateway_->index().Add(0, Tier::kDevice, keys), keys.size());
  ASSERT_EQ(gateway_->index().MapEngineHashes(0, keys, keys), keys.size());
  gateway_->index().Clear(0);
  gateway_->ScheduleSoon();
  Loop();
  EXPECT_EQ(gateway_->index().Stats().memberships, keys.size());
  Advance(kMillisecond);
  EXPECT_TRUE(gateway_->index().SweepWanted());  // the tables are larger than one slice
  Advance(kSecond);
  EXPECT_FALSE(gateway_->index().SweepWanted());
  EXPECT_EQ(gateway_->index().Stats().memberships, 0U);
  EXPECT_EQ(gateway_->index().Stats().engine_blocks, 0U);
}

// Sends a request for model m to engines that have blocks of the same tokens: the first those of the base
// model, the second those of adapter m.
class AdapterTest : public FlowTest {
 protected:
  // Returns the engine that got the request.
  std::string Chosen(std::string_view directives) {
    Use(std::string(kTwo) + std::string(directives));
    std::vector<int32_t> tokens(300);
    std::iota(tokens.begin(), tokens.end(), 1);  // as Send numbers them
    for (const int engine : {0, 1}) {
      std::vector<uint64_t> keys;
      gateway_->keys().Append(tokens, {.salt = {}, .adapter = engine == 0 ? "" : "m"}, settings_.block_size,
                              keys);
      gateway_->index().Add(engine, Tier::kDevice, keys);
    }
    FakeClient client;
    Flow& flow = Send(client, /*stream=*/false, static_cast<int>(tokens.size()));
    Connection& c = Only();
    const std::string host = c.host;
    Connected(c);
    Data(c, Answer(R"({"choices":[{"text":"a"}]})"));
    EXPECT_EQ(flow.Detach().matched_tokens, 288);  // 18 blocks
    Loop();
    ExpectIdle();
    return host;
  }
};

TEST_F(AdapterTest, ANameInTheListHasBlocksOfItsOwn) {
  EXPECT_EQ(Chosen("adapters other m;"), "127.0.0.1:2");
}

TEST_F(AdapterTest, OtherNamesHaveTheBlocksOfTheBaseModel) {
  EXPECT_EQ(Chosen("adapters other;"), "127.0.0.1:1");
}

// --- Keys, sessions, ranks ---

TEST_F(FlowTest, AKeyHasItsOwnRateAndPriority) {
  Use("engine http://127.0.0.1:1 max_requests=1;tenant_rate 1000000;key a A b rate=1 burst=400;key b "
      "priority=5;");
  EXPECT_EQ(settings_.keys[0].name, "A b");
  const auto send = [this](FakeClient& client, std::string_view key) -> Flow& {
    headers_ = {{"authorization", fmt::format("Bearer {}", key)}};
    return Send(client, /*stream=*/false);
  };
  FakeClient first, limited, low, high;
  Flow& one = send(first, "a");
  Connection& c = Only();
  Connected(c);
  Flow& two = send(limited, "a");
  EXPECT_EQ(limited.status, 429);
  Advance(400 * kSecond);
  Flow& three = send(low, "a");
  Flow& four = send(high, "b");
  EXPECT_EQ(low.status + high.status, 0);
  Data(c, Answer(R"({"choices":[{"text":"a"}]})"));
  Connection& next = Only();  // the one of higher priority
  Connected(next);
  Data(next, Answer(R"({"choices":[{"text":"a"}]})"));
  EXPECT_EQ(high.status, 200);
  EXPECT_EQ(low.status, 0);
  EXPECT_EQ(one.Detach().key_name, "A b");
  for (Flow* flow : {&two, &three, &four}) flow->Detach();
  Loop();
  for (const char* wrong : {"rate=x", "burst=5", "priority=-1"}) {
    PoolSettings other;
    const std::string_view words[] = {"k", wrong};
    EXPECT_FALSE(ApplyDirective(other, "key", words).ok()) << wrong;
  }
}

// A folder of its own, since tests of other builds may run at the same time.
class KeyFileTest : public FlowTest {
 protected:
  void SetUp() override {
    std::string folder = testing::TempDir() + "keys_XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_;
};

TEST_F(KeyFileTest, AFileHasKeysWithTheirNamesRatesAndPriorities) {
  const std::string path = folder_ / "keys.txt";
  std::ofstream(path)
      << "# team A\nsecret-1 Alice Smith rate=10 burst=20 priority=3\n\n  \t\nsecret-2\t Bob \r\nsecret-3\n";
  Use(std::string(kTwo) + "key_file " + path + ";key secret-4 Eve;");
  ASSERT_EQ(settings_.keys.size(), 4U);
  EXPECT_EQ(settings_.keys[0].key, "secret-1");
  EXPECT_EQ(settings_.keys[0].name, "Alice Smith");
  ASSERT_TRUE(settings_.keys[0].limit.has_value());
  EXPECT_EQ(settings_.keys[0].limit->tokens_per_second, 10);
  EXPECT_EQ(settings_.keys[0].limit->burst_tokens, 20);
  EXPECT_EQ(settings_.keys[0].priority, 3);
  EXPECT_EQ(settings_.keys[1].key, "secret-2");
  EXPECT_EQ(settings_.keys[1].name, "Bob");
  EXPECT_FALSE(settings_.keys[1].limit.has_value());
  EXPECT_EQ(settings_.keys[2].key, "secret-3");
  EXPECT_EQ(settings_.keys[3].key, "secret-4");
  for (const char* key : {"secret-2", "secret-3", "secret-4", "secret", "secret-2 Bob", ""}) {
    headers_ = {{"authorization", fmt::format("Bearer {}", key)}};
    FakeClient client;
    Flow& flow = Send(client, /*stream=*/false);
    const bool known = std::string_view(key).starts_with("secret-") && std::string_view(key).size() == 8;
    EXPECT_EQ(client.status, known ? 0 : 401) << key;
    EXPECT_EQ(Open().size(), known ? 1U : 0U) << key;
    flow.Detach();
    Loop();
  }
  ExpectIdle();
  std::ofstream(path) << "# no key\n\n";
  PoolSettings other;
  const std::string_view empty[] = {path};
  EXPECT_NE(Message(ApplyDirective(other, "key_file", empty)).find("has no key"), std::string::npos);
  std::ofstream(path) << "secret-1 rate=fast\n";
  EXPECT_NE(Message(ApplyDirective(other, "key_file", empty)).find("rate"), std::string::npos);
  std::remove(path.c_str());
  EXPECT_NE(Message(ApplyDirective(other, "key_file", empty)).find("cannot open"), std::string::npos);
}

TEST_F(FlowTest, ThePriorityOfABodyCountsUpToTheBoundOfThePool) {
  Use("engine http://127.0.0.1:1 max_requests=1;client_priority 3;key k K priority=10;");
  headers_ = {{"authorization", "Bearer k"}};
  FakeClient first, late, middle, urgent;
  Flow& one = Send(first, /*stream=*/false);
  Connection& c = Only();
  Connected(c);
  EXPECT_EQ(state_.Request(one.id())->facts.priority, 10);
  const auto send = [this](FakeClient& client, int priority) -> Flow& {
    return Send(client, /*stream=*/false, /*tokens=*/300, fmt::format(R"(,"priority":{})", priority));
  };
  Flow& two = send(late, 9);
  EXPECT_EQ(state_.Request(two.id())->facts.priority, 10 - 3);
  Flow& three = send(middle, -2);  // vLLM: a smaller number is more urgent
  EXPECT_EQ(state_.Request(three.id())->facts.priority, 10 + 2);
  Flow& four = send(urgent, -9);
  EXPECT_EQ(state_.Request(four.id())->facts.priority, 10 + 3);
  Data(c, Answer(R"({"choices":[{"text":"a"}]})"));
  for (const FakeClient* next : {&urgent, &middle, &late}) {
    EXPECT_EQ(next->status, 0);
    Connection& connection = Only();
    Connected(connection);
    Data(connection, Answer(R"({"choices":[{"text":"a"}]})"));
    EXPECT_EQ(next->status, 200);
  }
  End(one, two, three, four);
}

TEST_F(FlowTest, ThePriorityOfABodyDoesNotCountWithoutABound) {
  Use(kTwo);
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true, /*tokens=*/300, R"(,"priority":-9)");
  EXPECT_EQ(state_.Request(flow.id())->facts.priority, 0);
  End(flow);
}

TEST_F(FlowTest, ARequestNamesTheRankOfItsEngine) {
  Use("engine http://127.0.0.1:1 dp_ranks=2;");
  std::vector<std::string> ranks;
  for (int i = 0; i < 2; ++i) {
    FakeClient client;
    Flow& flow = Send(client, /*stream=*/false);
    Connection& c = Only();
    const size_t at = c.sent.find("X-data-parallel-rank: ");
    ASSERT_NE(at, std::string::npos) << c.sent;
    ranks.push_back(c.sent.substr(at + 22, 1));
    Connected(c);
    Data(c, Answer(R"({"choices":[{"text":"a"}]})"));
    flow.Detach();
    Loop();
    Advance(kSecond);
  }
  std::sort(ranks.begin(), ranks.end());
  EXPECT_EQ(ranks, (std::vector<std::string>{"0", "1"}));
}

TEST_F(FlowTest, ASessionReturnsToItsEngine) {
  Use(kTwo);
  headers_ = {{"x-session-id", "s"}};
  std::string host;
  for (int i = 0; i < 6; ++i) {
    FakeClient client;
    Flow& flow = Send(client, /*stream=*/false);
    Connection& c = Only();
    if (i == 0) host = c.host;
    EXPECT_EQ(c.host, host);
    Connected(c);
    Data(c, Answer(R"({"choices":[{"text":"a"}]})"));
    flow.Detach();
    Loop();
    Advance(kSecond);
  }
}

TEST_F(FlowTest, ATraceHasCompletedRequests) {
  Use(std::string(kTwo) + "retries 2 10ms;");
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true);
  Connected(Only());
  Advance(kSecond);
  Data(Only(), kStreamHead);
  Closed(Only());
  Advance(kSecond);
  Connected(Only());
  Data(Only(), std::string(kStreamHead) + Event(kToken) + Event("[DONE]") + "0\r\n\r\n");
  End(flow);
  Advance(kSecond);
  const std::string trace = TraceJson(*gateway_);
  for (const char* stage : {"prefill_waiting", "prefill_running", "decode_running"})
    EXPECT_NE(trace.find(fmt::format("\"name\":\"{}\"", stage)), std::string::npos) << trace;
  EXPECT_EQ(trace.find("\"dur\":-"), std::string::npos) << trace;
  EXPECT_EQ(trace.find("\"name\":\"done\""), std::string::npos) << trace;
}

}  // namespace
}  // namespace moesaic::proxy
