// Requests through a gateway whose event loop, clients and engines are objects of the test, in virtual time.
#include "proxy/gateway/flow.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <list>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "proxy/gateway/gateway.h"
#include "proxy/gateway/status_pages.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {
namespace {

struct Connection {
  Exchange* exchange = nullptr;  // null: it was released
  std::string host, sent;
  bool reuse = false;
};

class FakeTransport : public Transport {
 public:
  Nanos Now() override { return now_; }
  Connected Connect(Exchange& exchange, const EngineAddress& address, std::string_view head,
                    std::string_view body, bool reuse) override {
    connections_.push_back({&exchange, address.host, std::string(head) + std::string(body), reuse});
    return {.connection = &connections_.back()};
  }
  void Release(void* connection, bool) override { static_cast<Connection*>(connection)->exchange = nullptr; }
  void Pause(void*, bool) override {}
  void ArmTimer(Nanos delay, bool) override { due_ = delay < 0 ? -1 : now_ + delay; }
  void RunSoon() override { soon_ = true; }
  void Wake(int) override {}
  bool Send(uint64_t wake, std::string_view message) override {
    sent_.emplace_back(wake, message);
    return takes_messages_;
  }
  void* Watch(int, Watcher& watcher) override { return &watcher; }
  void Unwatch(void*) override {}
  void* Resolve(std::string_view, Lookup&) override { return nullptr; }
  void CancelResolve(void*) override {}
  void Log(bool, std::string_view) override {}

  Nanos now_ = 1000 * kSecond, due_ = -1;
  bool soon_ = false, takes_messages_ = true;
  std::vector<std::pair<uint64_t, std::string>> sent_;
  std::list<Connection> connections_;
};

struct FakeClient : Client {
  void SendHead(int code, std::span<const Header>) override { status = code; }
  void SendBody(std::string_view bytes) override { body += bytes; }
  void End(bool complete) override { ended = true, whole = complete; }
  bool StartPrepare(Flow&) override { return false; }
  int status = 0;
  std::string body;
  bool ended = false, whole = false;
};

std::string Answer(std::string_view json, int status = 200) {
  return fmt::format("HTTP/1.1 {} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
                     status, json.size(), json);
}
constexpr std::string_view kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
std::string Event(std::string_view data) {
  return fmt::format("{:x}\r\ndata: {}\n\n\r\n", data.size() + 8, data);
}
constexpr std::string_view kToken = R"({"choices":[{"index":0,"text":"a"}]})";
constexpr std::string_view kPrefilled =
    R"({"choices":[{"text":"a"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1,2],)"
    R"("remote_request_id":"r1"}})";

class FlowTest : public testing::Test {
 protected:
  // `text` is the inside of a block of directives.
  void Use(std::string_view text) {
    for (const std::string_view line : Lines(text)) {
      std::vector<std::string_view> words = Words(line);
      if (words.empty()) continue;
      const Status status = ApplyDirective(settings_, words[0], std::span(words).subspan(1));
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE(ApplyDirective(settings_, "health", std::vector<std::string_view>{"off"}).ok());
    ASSERT_TRUE(FinishPool(settings_).ok());
    ASSERT_TRUE(state_.Configure(settings_.Instances(), transport_.now_).ok());
    gateway_ = std::make_unique<Gateway>(settings_, zone_.zone(), *board_, nullptr, transport_);
    ASSERT_TRUE(gateway_->Start(getpid(), 0).ok());
    Loop();
  }
  static std::vector<std::string_view> Split(std::string_view text, char at) {
    std::vector<std::string_view> parts;
    while (!text.empty()) {
      const size_t end = std::min(text.find(at), text.size());
      if (end > 0) parts.push_back(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    return parts;
  }
  static std::vector<std::string_view> Lines(std::string_view text) { return Split(text, ';'); }
  static std::vector<std::string_view> Words(std::string_view text) { return Split(text, ' '); }

  void Loop() {
    while (std::exchange(transport_.soon_, false)) gateway_->OnSoon();
  }
  void Advance(Nanos time) {
    const Nanos end = transport_.now_ + time;
    while (transport_.due_ >= 0 && transport_.due_ <= end) {
      transport_.now_ = std::max(transport_.now_, transport_.due_);
      transport_.due_ = -1;
      gateway_->OnTimer();
      Loop();
    }
    transport_.now_ = end;
  }

  Flow& Send(FakeClient& client, bool stream, int tokens = 300) {
    std::string ids;
    for (int i = 0; i < tokens; ++i)
      fmt::format_to(std::back_inserter(ids), "{}{}", i == 0 ? "" : ",", ++next_);
    Flow& flow = gateway_->NewFlow(client);
    flow.Start({.method = "POST",
                .target = "/v1/completions",
                .path = "/v1/completions",
                .headers = headers_,
                .body = std::make_shared<const std::string>(fmt::format(
                    R"({{"model":"m","prompt":[{}],"max_tokens":5,"stream":{}}})", ids, stream))});
    Loop();
    return flow;
  }
  // Connections that exchanges use, in the order of their begin.
  std::vector<Connection*> Open() {
    std::vector<Connection*> open;
    for (Connection& connection : transport_.connections_) {
      if (connection.exchange != nullptr) open.push_back(&connection);
    }
    return open;
  }
  // The only one.
  Connection& Only() {
    const std::vector<Connection*> open = Open();
    EXPECT_EQ(open.size(), 1U);
    static Connection none;
    return open.size() == 1 ? *open[0] : none;
  }
  void Connected(Connection& c) {
    c.exchange->OnConnected();
    Loop();
  }
  void Data(Connection& c, std::string_view bytes) {
    c.exchange->OnData(bytes);
    Loop();
  }
  void Closed(Connection& c) {
    c.exchange->OnClosed();
    Loop();
  }
  void Failed(Connection& c) {
    c.exchange->OnFailed("refused");
    Loop();
  }
  // P answers, and its request to D begins.
  void Prefill() {
    Connection& prefill = Only();
    EXPECT_NE(prefill.sent.find("do_remote_decode"), std::string::npos);
    Connected(prefill);
    Data(prefill, Answer(kPrefilled));
  }
  void ExpectIdle() {
    EXPECT_TRUE(Open().empty());
    EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
    EXPECT_EQ(state_.ReadTotals().slots_used, 0U);
    EXPECT_EQ(gateway_->body_bytes(), 0U);
    for (const InstanceRecord& e : state_.Instances()) {
      EXPECT_EQ(e.load.prefill_requests + e.load.decode_requests + e.load.references, 0U);
    }
  }

  PoolSettings settings_;
  TestZone zone_;
  State state_{zone_.zone()};
  std::unique_ptr<Board> board_ = std::make_unique<Board>();
  FakeTransport transport_;
  std::unique_ptr<Gateway> gateway_;
  std::vector<Header> headers_;
  int next_ = 0;
};

constexpr std::string_view kTwo = "engine http://127.0.0.1:1;engine http://127.0.0.1:2;";
constexpr std::string_view kPair =
    "skip_prefill 16;engine http://127.0.0.1:1 role=prefill;engine http://127.0.0.1:3 role=decode;"
    "engine http://127.0.0.1:4 role=decode;";

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
  flow.Detach();
  Loop();
  ExpectIdle();
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
  flow.Detach();
  Loop();
  ExpectIdle();
}

TEST_F(FlowTest, ConnectingHasALimit) {
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
  flow.Detach();
  Loop();
  ExpectIdle();
}

TEST_F(FlowTest, TheQueueHasALimitThatARetryDoesNotExtend) {
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
  for (Flow* flow : {&one, &two, &three}) flow->Detach();
  Loop();
  ExpectIdle();
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

TEST_F(FlowTest, ATraceHasRequestsThatEnded) {
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
  flow.Detach();
  Loop();
  ExpectIdle();
  Advance(kSecond);
  const std::string trace = TraceJson(*gateway_);
  for (const char* stage : {"prefill_waiting", "prefill_running", "decode_running"})
    EXPECT_NE(trace.find(fmt::format("\"name\":\"{}\"", stage)), std::string::npos) << trace;
  EXPECT_EQ(trace.find("\"dur\":-"), std::string::npos) << trace;
  EXPECT_EQ(trace.find("\"name\":\"done\""), std::string::npos) << trace;
}

// --- Blocks of P (NIXL) ---

TEST_F(FlowTest, AfterADecodeEngineThatMayHaveFetchedTheBlocksThePromptIsComputedAgain) {
  Use("transfer nixl;retries 2 10ms;" + std::string(kPair));
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/false);
  Prefill();
  Connection& decode = Only();
  EXPECT_NE(decode.sent.find("remote_block_ids"), std::string::npos);
  EXPECT_FALSE(decode.reuse);  // an engine that closes it may have read the request
  Connected(decode);
  Closed(decode);
  Advance(kSecond);
  Connection& prefill = Only();
  EXPECT_EQ(prefill.host, "127.0.0.1:1");
  EXPECT_EQ(prefill.sent.find("r1"), std::string::npos);
  Prefill();
  Connection& other = Only();
  EXPECT_NE(other.host, decode.host);
  Connected(other);
  Data(other, Answer(R"({"choices":[{"text":"a"}]})"));
  EXPECT_EQ(client.status, 200);
  flow.Detach();
  Loop();
  ExpectIdle();
}

TEST_F(FlowTest, ADecodeEngineThatIsNotReachedOrRefusesIsReplacedAlone) {
  Use("transfer nixl;retries 2 10ms;" + std::string(kPair) + "engine http://127.0.0.1:5 role=decode;");
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true);
  Prefill();
  Failed(Only());  // before it was connected
  Advance(kSecond);
  Connection& second = Only();
  EXPECT_NE(second.sent.find("r1"), std::string::npos);
  Connected(second);
  Data(second, Answer("{}", 429));
  Advance(kSecond);
  Connection& third = Only();
  EXPECT_NE(third.sent.find("r1"), std::string::npos);
  EXPECT_NE(third.host, second.host);
  Connected(third);
  Data(third, std::string(kStreamHead) + Event(kToken) + Event("[DONE]") + "0\r\n\r\n");
  EXPECT_TRUE(client.whole);
  flow.Detach();
  Loop();
  ExpectIdle();
}

// D would store what it reads under the hashes of the prompt.
TEST_F(FlowTest, BlocksThatMayHaveBeenFetchedAreNotFetchedToReleaseThem) {
  Use("transfer nixl;retries 0;" + std::string(kPair));
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/false);
  Prefill();
  Connected(Only());
  Closed(Only());
  EXPECT_EQ(client.status, 502);
  flow.Detach();
  Loop();
  ExpectIdle();
  EXPECT_EQ(board_->released_kv.load(), 0U);
}

TEST_F(FlowTest, BlocksThatNoDecodeEngineFetchedAreReleased) {
  Use("transfer nixl;retries 0;" + std::string(kPair));
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/false);
  Prefill();
  Failed(Only());
  EXPECT_EQ(client.status, 502);
  flow.Detach();
  Loop();
  Connection& release = Only();
  EXPECT_FALSE(release.reuse);
  EXPECT_NE(release.sent.find("r1"), std::string::npos);
  Connected(release);
  Data(release, Answer("{}"));
  ExpectIdle();
}

// --- Exchanges that outlive their request ---

TEST_F(FlowTest, APrefillWhoseClientLeftKeepsItsChargeAndItsBytesUntilItsEnd) {
  Use("transfer nixl;body_memory 4k;" + std::string(kPair));
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true);
  Connection& prefill = Only();
  Connected(prefill);
  EXPECT_EQ(flow.Detach().outcome, Outcome::kAborted);
  Loop();
  EXPECT_EQ(state_.Instance(0)->load.prefill_requests, 1U);
  EXPECT_GT(gateway_->body_bytes(), 1000U);
  std::vector<std::unique_ptr<FakeClient>> clients;
  for (int i = 0; i < 5; ++i) {
    clients.push_back(std::make_unique<FakeClient>());
    Flow& other = Send(*clients.back(), /*stream=*/true);
    other.Detach();
    Loop();
  }
  EXPECT_EQ(clients.back()->status, 503);  // the storm is bounded
  while (!Open().empty()) {
    Connection& c = *Open().back();
    if (!c.exchange->connected()) Connected(c);
    Data(c, c.sent.find("do_remote_decode\":true") != std::string::npos ? Answer(kPrefilled) : Answer("{}"));
  }
  ExpectIdle();
  EXPECT_GT(board_->released_kv.load(), 0U);
  EXPECT_EQ(board_->failed_releases.load(), 0U);
}

// --- Pairs that run at once ---

class ParallelTest : public FlowTest, public testing::WithParamInterface<std::string_view> {
 protected:
  // Begins a request, and returns the connections to P and D.
  std::pair<Connection*, Connection*> Begin(FakeClient& client, Flow** flow, std::string_view more = "") {
    const std::string_view transfer = GetParam();
    Use(fmt::format("transfer {};api {};metaserver http://127.0.0.1:9/v1/metaserver;{}{}", transfer,
                    transfer == "sglang" ? "sglang" : "vllm", more, kPair));
    *flow = &Send(client, /*stream=*/true);
    if (transfer == "mooncake") {
      Connection& query = Only();
      EXPECT_NE(query.sent.find("GET /query"), std::string::npos);
      Connected(query);
      Data(query, Answer(R"({"0":{"engine_id":"e"}})"));
    }
    if (transfer == "ascend") {
      const std::string& sent = Only().sent;
      const size_t id = sent.find("moesaic-");
      EXPECT_NE(id, std::string::npos);
      EXPECT_EQ(gateway_->Metaserver(fmt::format(R"({{"request_id":"chatcmpl-{}","remote_host":"h"}})",
                                                 sent.substr(id, sent.find_first_of("\r\",", id) - id))),
                200);
      Loop();
    }
    std::pair<Connection*, Connection*> pair{};
    for (Connection* c : Open()) (c->host == "127.0.0.1:1" ? pair.first : pair.second) = c;
    EXPECT_TRUE(pair.first != nullptr && pair.second != nullptr);
    Connected(*pair.first);
    Connected(*pair.second);
    Data(*pair.second, kStreamHead);
    return pair;
  }
};

TEST_P(ParallelTest, APrefillIsNotCancelledWhenDecodeEndsFirst) {
  FakeClient client;
  Flow* flow = nullptr;
  const auto [prefill, decode] = Begin(client, &flow);
  Data(*decode, Event(kToken) + Event("[DONE]") + "0\r\n\r\n");
  EXPECT_TRUE(client.whole);
  flow->Detach();
  Loop();
  EXPECT_EQ(&Only(), prefill);
  EXPECT_GT(gateway_->body_bytes(), 0U);
  Data(*prefill, Answer("{}"));
  ExpectIdle();
}

TEST_P(ParallelTest, DecodeIsCancelledWhenPrefillFails) {
  FakeClient client;
  Flow* flow = nullptr;
  const auto [prefill, decode] = Begin(client, &flow, "retries 0;");
  Data(*prefill, Answer("{}", 500));
  EXPECT_EQ(decode->exchange, nullptr);
  EXPECT_EQ(client.status, 502);  // the head of D's answer was not passed on
  flow->Detach();
  Loop();
  ExpectIdle();
}

TEST_P(ParallelTest, APrefillIsCancelledWhenDecodeFails) {
  FakeClient client;
  Flow* flow = nullptr;
  const auto [prefill, decode] = Begin(client, &flow, "retries 0;");
  Closed(*decode);
  EXPECT_EQ(prefill->exchange, nullptr);
  EXPECT_EQ(client.status, 502);
  flow->Detach();
  Loop();
  ExpectIdle();
}

TEST_P(ParallelTest, BothAreCancelledWhenTheClientLeaves) {
  FakeClient client;
  Flow* flow = nullptr;
  const auto [prefill, decode] = Begin(client, &flow);
  flow->Detach();
  Loop();
  EXPECT_EQ(prefill->exchange, nullptr);
  EXPECT_EQ(decode->exchange, nullptr);
  ExpectIdle();
}

INSTANTIATE_TEST_SUITE_P(All, ParallelTest, testing::Values("mooncake", "sglang", "ascend"),
                         [](const auto& info) { return std::string(info.param); });

// As in an upgrade of the binary: the decode engine's message may reach a worker of either zone.
TEST_F(FlowTest, BlocksReachARequestOfAnotherZone) {
  Use("transfer ascend;metaserver http://127.0.0.1:9/v1/metaserver;" + std::string(kPair));
  const std::string other = "moesaic-0-1-1-00000000000000ab-0123456789abcdef";
  const std::string message = fmt::format(R"({{"request_id":"chatcmpl-{}-0","remote_host":"h"}})", other);
  EXPECT_EQ(gateway_->Metaserver(message), 200);
  ASSERT_EQ(transport_.sent_.size(), 1U);
  EXPECT_EQ(transport_.sent_[0].first, 0xabU);
  EXPECT_EQ(transport_.sent_[0].second, other +
                                            "\n"
                                            R"({"remote_host":"h"})");
  transport_.takes_messages_ = false;  // that worker has ended
  EXPECT_EQ(gateway_->Metaserver(message), 404);

  FakeClient client;
  Flow& flow = Send(client, /*stream=*/true);
  const std::string& sent = Only().sent;
  const size_t at = sent.find("moesaic-");
  ASSERT_NE(at, std::string::npos);
  std::string name = sent.substr(at, sent.find_first_of("\r\",", at) - at);
  const auto opened = [&] { return Open().size(); };
  for (const std::string& wrong :
       {std::string(), name, other + "\n{}", name.substr(0, name.size() - 1) + "\n{}"}) {
    gateway_->OnMessage(wrong);
    EXPECT_EQ(opened(), 1U) << wrong;
  }
  gateway_->OnMessage(name +
                      "\n"
                      R"({"remote_host":"h"})");
  Loop();
  ASSERT_EQ(opened(), 2U);
  const std::vector<Connection*> open = Open();
  const auto prefill = std::ranges::find(open, "127.0.0.1:1", &Connection::host);
  ASSERT_NE(prefill, open.end());
  EXPECT_NE((*prefill)->sent.find(R"("remote_host":"h")"), std::string::npos) << (*prefill)->sent;
  flow.Detach();
  Loop();
  ExpectIdle();
}

TEST_F(FlowTest, ABootstrapIdIsThatOfTheEngineAndNotOfItsNumber) {
  Use("transfer mooncake;" + std::string(kPair));
  gateway_->SetBootstrapId(0, "old");
  EXPECT_EQ(gateway_->BootstrapId(0), "old");
  std::vector<InstanceConfig> engines = settings_.Instances();
  engines[0].url = "http://127.0.0.1:7";
  ASSERT_TRUE(state_.Configure(engines, transport_.now_).ok());
  ASSERT_EQ(state_.FindInstance("http://127.0.0.1:7", 0), 0);
  EXPECT_EQ(gateway_->BootstrapId(0), "");
}

}  // namespace
}  // namespace moesaic::proxy
