// A gateway whose event loop, clients and engines are objects of the test, in virtual time.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proxy/gateway/flow.h"
#include "proxy/gateway/gateway.h"
#include "proxy/state/test_zone.h"

namespace moesaic::proxy {

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
  void SendHead(int code, std::span<const Header> headers) override {
    status = code;
    for (const Header& header : headers) {
      if (header.name == "retry-after") retry_after = header.value;
    }
  }
  void SendBody(std::string_view bytes) override { body += bytes; }
  void End(bool complete) override { ended = true, whole = complete; }
  bool StartPrepare(Flow&) override { return false; }
  int status = 0;
  std::string body, retry_after;
  bool ended = false, whole = false;
};

inline std::string Answer(std::string_view json, int status = 200) {
  return fmt::format("HTTP/1.1 {} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
                     status, json.size(), json);
}
inline constexpr std::string_view kStreamHead =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
inline std::string Event(std::string_view data) {
  return fmt::format("{:x}\r\ndata: {}\n\n\r\n", data.size() + 8, data);
}
inline constexpr std::string_view kToken = R"({"choices":[{"index":0,"text":"a"}]})";

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

  // `more`: further members of the body, each after a comma.
  Flow& Send(FakeClient& client, bool stream, int tokens = 300, std::string_view more = "") {
    std::string ids;
    for (int i = 0; i < tokens; ++i)
      fmt::format_to(std::back_inserter(ids), "{}{}", i == 0 ? "" : ",", ++next_);
    Flow& flow = gateway_->NewFlow(client);
    flow.Start({.method = "POST",
                .target = "/v1/completions",
                .path = "/v1/completions",
                .headers = headers_,
                .body = std::make_shared<const std::string>(fmt::format(
                    R"({{"model":"m","prompt":[{}],"max_tokens":5,"stream":{}{}}})", ids, stream, more))});
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
  void ExpectIdle() {
    EXPECT_TRUE(Open().empty());
    EXPECT_TRUE(state_.CheckInvariants().ok()) << state_.CheckInvariants();
    EXPECT_EQ(state_.ReadTotals().slots_used, 0U);
    EXPECT_EQ(gateway_->body_bytes(), 0U);
    for (const InstanceRecord& e : state_.Instances()) {
      EXPECT_EQ(e.load.prefill_requests + e.load.decode_requests + e.load.references, 0U);
    }
  }
  // Detaches the flows of all clients, and expects that nothing of any request is left.
  template <typename... Flows>
  void End(Flows&... flows) {
    (flows.Detach(), ...);
    Loop();
    ExpectIdle();
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

}  // namespace moesaic::proxy
