// Requests whose KV moves from a prefill engine, P, to a decode engine, D.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proxy/gateway/flow.h"
#include "proxy/gateway/test_flow.h"

namespace moesaic::proxy {
namespace {

constexpr std::string_view kPair =
    "skip_prefill 16;engine http://127.0.0.1:1 role=prefill;engine http://127.0.0.1:3 role=decode;"
    "engine http://127.0.0.1:4 role=decode;";
constexpr std::string_view kPrefilled =
    R"({"choices":[{"text":"a"}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1,2],)"
    R"("remote_request_id":"r1"}})";

class TransferTest : public FlowTest {
 protected:
  // P answers, and its request to D begins.
  void Prefill() {
    Connection& prefill = Only();
    EXPECT_NE(prefill.sent.find("do_remote_decode"), std::string::npos);
    Connected(prefill);
    Data(prefill, Answer(kPrefilled));
  }
};

// --- Blocks of P (NIXL) ---

TEST_F(TransferTest, AfterADecodeEngineThatMayHaveFetchedTheBlocksThePromptIsComputedAgain) {
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
  End(flow);
}

TEST_F(TransferTest, ADecodeEngineThatIsNotReachedOrRefusesIsReplacedAlone) {
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
  End(flow);
}

// D would store what it reads under the hashes of the prompt.
TEST_F(TransferTest, BlocksThatMayHaveBeenFetchedAreNotFetchedToReleaseThem) {
  Use("transfer nixl;retries 0;" + std::string(kPair));
  FakeClient client;
  Flow& flow = Send(client, /*stream=*/false);
  Prefill();
  Connected(Only());
  Closed(Only());
  EXPECT_EQ(client.status, 502);
  End(flow);
  EXPECT_EQ(board_->released_kv.load(), 0U);
}

TEST_F(TransferTest, BlocksThatNoDecodeEngineFetchedAreReleased) {
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

TEST_F(TransferTest, APrefillWhoseClientLeftKeepsItsChargeAndItsBytesUntilItsEnd) {
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
  End(*flow);
}

TEST_P(ParallelTest, APrefillIsCancelledWhenDecodeFails) {
  FakeClient client;
  Flow* flow = nullptr;
  const auto [prefill, decode] = Begin(client, &flow, "retries 0;");
  Closed(*decode);
  EXPECT_EQ(prefill->exchange, nullptr);
  EXPECT_EQ(client.status, 502);
  End(*flow);
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

TEST_F(TransferTest, SglangsDecodeEngineFindsTheBlocksOfAnyRank) {
  Use("transfer sglang;api sglang;policy round-robin;skip_prefill 16;"
      "engine http://127.0.0.1:1 role=prefill dp_ranks=3;engine http://127.0.0.1:3 role=decode;");
  const auto number = [](const std::string& sent, std::string_view name) -> int64_t {
    const size_t at = sent.find(name);
    return at == std::string::npos ? -1 : std::stoll(sent.substr(at + name.size()));
  };
  std::set<int64_t> ranks;
  for (int i = 0; i < 6; ++i) {
    FakeClient client;
    Flow& flow = Send(client, /*stream=*/false);
    const std::vector<Connection*> open = Open();
    ASSERT_EQ(open.size(), 2U);
    Connection& prefill = *open[open[0]->host == "127.0.0.1:1" ? 0 : 1];
    Connection& decode = *open[open[0]->host == "127.0.0.1:1" ? 1 : 0];
    const int64_t rank = number(prefill.sent, "X-data-parallel-rank: ");
    const int64_t room = number(prefill.sent, "\"bootstrap_room\":");
    EXPECT_GE(room, 0) << prefill.sent;
    EXPECT_EQ(room % 3, rank);
    EXPECT_EQ(number(prefill.sent, "\"disagg_prefill_dp_rank\":"), -1);
    EXPECT_EQ(number(decode.sent, "\"bootstrap_room\":"), room);
    EXPECT_EQ(number(decode.sent, "\"disagg_prefill_dp_rank\":"), rank);
    EXPECT_EQ(number(decode.sent, "X-data-parallel-rank: "), -1);
    ranks.insert(rank);
    Connected(prefill);
    Connected(decode);
    Data(prefill, Answer("{}"));
    Data(decode, Answer(R"({"choices":[{"text":"a"}]})"));
    EXPECT_EQ(client.status, 200);
    flow.Detach();
    Loop();
  }
  EXPECT_EQ(ranks, (std::set<int64_t>{0, 1, 2}));
  ExpectIdle();
}

// As in an upgrade of the binary: the decode engine's message may reach a worker of either zone.
TEST_F(TransferTest, BlocksReachARequestOfAnotherZone) {
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
  End(flow);
}

TEST_F(TransferTest, ABootstrapIdIdentifiesTheEngineAndNotItsNumber) {
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
