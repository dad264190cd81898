// Tests the transport with hooks of the tests.
#include "server/http_server.h"
#include "base/test_patience.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "base/test_patience.h"
#include "server/router.h"
#include "server/test_client.h"

namespace moesaic::server {
namespace {

const HttpOptions kAnyPort{.port = 0, .threads = 2};

HttpHooks Answering(const std::function<std::string()>& body) {
  HttpHooks hooks;
  hooks.admit = [](const HttpRequest&) { return std::nullopt; };
  hooks.handle = [body](const HttpRequest&, const std::shared_ptr<ResponseWriter>& writer,
                        const std::shared_ptr<SerialExecutor>&) {
    writer->Send({.status = 200, .headers = {}, .body = body()});
  };
  hooks.refuse = [](const HttpRequest&, int status, const std::string&) {
    return HttpResponse{.status = status, .headers = {}, .body = {}};
  };
  return hooks;
}

// Hooks may use the server itself, so that none may run before Start.
TEST(HttpServer, AnswersClientsThatConnectedBeforeTheStart) {
  auto server = HttpServer::Listen(kAnyPort);
  ASSERT_TRUE(server.ok()) << Message(server.status());
  ASSERT_GT((*server)->port(), 0);
  TestClient early((*server)->port());
  early.Send("GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
  EXPECT_EQ((*server)->connections(), 0);
  HttpServer* started = server->get();
  started->Start(Answering([started] { return fmt::format("{} here", started->connections()); }));
  const std::string answer = early.ReadAll();
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_TRUE(answer.ends_with("\r\n\r\n1 here")) << answer;
}

TEST(HttpServer, Answers503WhileTheModelIsBeingLoaded) {
  auto server = HttpServer::Listen(kAnyPort);
  ASSERT_TRUE(server.ok()) << Message(server.status());
  (*server)->Start(LoadingHooks());
  TestClient stays((*server)->port());
  stays.Send("GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n");
  for (const char* path : {"/health", "/ready", "/nowhere"}) {
    const std::string answer = SendRequest((*server)->port(), "GET", path);
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 503 ")) << answer;
    EXPECT_NE(answer.find("retry-after: 1\r\n"), std::string::npos) << answer;
    EXPECT_NE(answer.find(R"({"error":{"message":"the model is still being loaded","type")"),
              std::string::npos)
        << answer;
  }
  const std::string said = SendRequest((*server)->port(), "POST", "/v1/messages", "{}");
  EXPECT_NE(said.find(R"({"type":"error","error":{"type":)"), std::string::npos) << said;
  (*server)->Switch(Answering([] { return "here"; }));
  stays.Send("GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
  const std::string both = stays.ReadAll();
  EXPECT_TRUE(both.starts_with("HTTP/1.1 503 ")) << both;
  EXPECT_TRUE(both.ends_with("\r\n\r\nhere")) << both;
}

// A server whose only request is open until the test answers it.
class HeldRequest {
 public:
  explicit HeldRequest(HttpOptions options = {}) {
    options.port = 0;
    options.threads = 2;
    options.half_close_grace = std::chrono::milliseconds(1);
    server_ = HttpServer::Listen(options).value();
    HttpHooks hooks = Answering([] { return ""; });
    hooks.handle = [this](const HttpRequest&, const std::shared_ptr<ResponseWriter>& writer,
                          const std::shared_ptr<SerialExecutor>&) {
      writer->OnClientLeft([this] { left_.set_value(); });
      writer_.set_value(writer);
    };
    server_->Start(std::move(hooks));
  }

  int port() const { return server_->port(); }
  std::shared_ptr<ResponseWriter> Writer() { return writer_.get_future().get(); }
  /// Waits until the client has left.
  bool Left() {
    return left_.get_future().wait_for(std::chrono::duration<double>(base::Patient(60))) ==
           std::future_status::ready;
  }

 private:
  std::promise<std::shared_ptr<ResponseWriter>> writer_;
  std::promise<void> left_;
  std::unique_ptr<HttpServer> server_;  // last, since its threads use the members above
};

constexpr std::string_view kGet = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

TEST(HttpServer, AnswersAClientThatSendsNoMore) {
  const auto server = HttpServer::Listen(kAnyPort).value();
  server->Start(Answering([] { return "here"; }));
  for (int i = 0; i < 200; ++i) {
    TestClient client(server->port());
    client.Send(kGet);
    client.EndSending();
    const std::string answer = client.ReadAll();
    ASSERT_TRUE(answer.ends_with("connection: close\r\n\r\nhere") ||
                answer.ends_with("connection: keep-alive\r\n\r\nhere"))
        << i << answer;
  }
  TestClient several(server->port());
  several.Send(std::string(kGet) + std::string(kGet) + std::string(kGet));
  several.EndSending();
  const std::string answers = several.ReadAll();
  size_t count = 0;
  for (size_t at = 0; (at = answers.find("200 OK", at)) != std::string::npos; ++at) ++count;
  EXPECT_EQ(count, 3U) << answers;
}

TEST(HttpServer, ProbesAClientThatSendsNoMoreAndAnswersIt) {
  HeldRequest request;
  TestClient client(request.port());
  client.Send(kGet);
  const auto writer = request.Writer();
  client.EndSending();
  EXPECT_EQ(client.ReadUntil(kContinue), kContinue);
  writer->Send({.status = 200, .headers = {}, .body = "late"});
  const std::string answer = client.ReadAll();
  EXPECT_NE(answer.find("HTTP/1.1 200 OK\r\n"), std::string::npos) << answer;
  EXPECT_TRUE(answer.ends_with("connection: close\r\n\r\nlate")) << answer;
}

TEST(HttpServer, NoticesAClosedClient) {
  HeldRequest request;
  std::shared_ptr<ResponseWriter> writer;
  {
    TestClient client(request.port());
    client.Send(kGet);
    writer = request.Writer();
  }
  EXPECT_TRUE(request.Left());
}

TEST(HttpServer, NoticesAClosedClientThatHadEndedItsSendingSide) {
  HeldRequest request;
  std::shared_ptr<ResponseWriter> writer;
  {
    TestClient client(request.port());
    client.Send(kGet);
    writer = request.Writer();
    client.EndSending();
    EXPECT_EQ(client.ReadUntil(kContinue), kContinue);
  }
  EXPECT_TRUE(request.Left());
}

TEST(HttpServer, TreatsTheEndOfSendingAsADisconnectInHttp10) {
  HeldRequest request;
  TestClient client(request.port());
  client.Send("GET / HTTP/1.0\r\n\r\n");
  const auto writer = request.Writer();
  client.EndSending();
  EXPECT_TRUE(request.Left());
  EXPECT_EQ(client.ReadAll(), "");
}

// The server reads bytes ahead of the answer up to a limit. When a client that has sent more leaves, no read
// is pending that would report it.
TEST(HttpServer, NoticesAClosedClientThatFilledThePipeline) {
  for (const size_t ahead : {200 << 10, 1 << 20}) {
    HeldRequest request;
    std::shared_ptr<ResponseWriter> writer;
    {
      TestClient client(request.port());
      client.Send(kGet);
      writer = request.Writer();
      client.Send(std::string(ahead, 'x'));
      EXPECT_EQ(client.ReadUntil(kContinue), kContinue) << "the server probes it";
    }
    EXPECT_TRUE(request.Left());
  }
}

TEST(HttpServer, NoticesAClosedClientThatSentBytesAfterItsLastRequest) {
  HeldRequest request;
  std::shared_ptr<ResponseWriter> writer;
  {
    TestClient client(request.port());
    client.Send("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    writer = request.Writer();
    client.Send(std::string(1 << 20, 'x'));
  }
  EXPECT_TRUE(request.Left());
}

TEST(HttpServer, AnswersAClientThatFilledThePipelineAndStays) {
  HeldRequest request;
  TestClient client(request.port());
  client.Send(kGet);
  const auto writer = request.Writer();
  client.Send(std::string(200 << 10, 'x'));
  EXPECT_EQ(client.ReadUntil(kContinue), kContinue);
  writer->Send({.status = 200, .headers = {}, .body = "late"});
  const std::string answer = client.ReadAll();
  EXPECT_NE(answer.find("\r\n\r\nlate"), std::string::npos) << answer;
}

// One connection is served. The hooks refuse further ones with a request id and a log line.
TEST(HttpServer, RefusesConnectionsAboveTheLimit) {
  auto server = HttpServer::Listen({.port = 0, .threads = 2, .max_connections = 1}).value();
  Metrics metrics("m");
  std::mutex mutex;
  std::vector<AccessRecord> records;
  Router router({}, metrics, [&](const AccessRecord& record) {
    const std::lock_guard lock(mutex);
    records.push_back(record);
  });
  router.Add("GET", "/", Router::Access::kOpen, [](Call& call) {
    SendJson(*call.writer, {{"it", "works"}});
    return OkStatus();
  });
  server->Start(router.Hooks());
  TestClient served(server->port());
  served.Send("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n");
  EXPECT_NE(served.ReadUntil("works\"}").find("200 OK"), std::string::npos);
  served.Send("GET / HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n");
  EXPECT_EQ(served.ReadUntil("\r\n\r\n"), kContinue);  // it is not idle
  for (int i = 0; i < 20; ++i) {
    TestClient refused(server->port());
    refused.Send("POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 300000\r\n\r\n" +
                 std::string(300'000, 'x'));
    const std::string answer = refused.ReadAll();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 503 ")) << i << answer;
    EXPECT_NE(answer.find("x-request-id: "), std::string::npos) << answer;
    EXPECT_NE(answer.find("retry-after: 1\r\n"), std::string::npos) << answer;
    EXPECT_NE(answer.find("1 connections are open, as many as --max-connections allows"), std::string::npos);
  }
  EXPECT_EQ(server->connections(), 1);
  served.Send("x");
  EXPECT_NE(served.ReadUntil("works\"}").find("200 OK"), std::string::npos);
  server.reset();  // before the router and the log, which its threads use
  const std::lock_guard lock(mutex);
  EXPECT_EQ(std::ranges::count(records, 503, &AccessRecord::status), 20);
  EXPECT_EQ(records.back().peer, "127.0.0.1");
}

// Asks until the answer begins with `expected`, since the server notices the events before it on other
// threads.
bool AnswersAtLast(int port, std::string_view expected, const std::string& body) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(base::Patient(60));
  while (!SendRequest(port, "POST", "/", body).starts_with(expected)) {
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

TEST(HttpServer, ClosesTheOldestIdleConnectionAtTheLimit) {
  const auto server = HttpServer::Listen({.port = 0, .threads = 2, .max_connections = 2}).value();
  server->Start(Answering([] { return "here"; }));
  TestClient oldest(server->port()), other(server->port());
  for (TestClient* client : {&oldest, &other}) {
    client->Send(kGet);
    EXPECT_TRUE(client->ReadUntil("here").ends_with("here"));
  }
  EXPECT_TRUE(AnswersAtLast(server->port(), "HTTP/1.1 200 OK", ""));
  EXPECT_EQ(oldest.ReadAll(), "");
}

// A client takes room for the bytes that it sent, not for those that it may send.
TEST(HttpServer, ReservesBytesThatArrived) {
  const auto server =
      HttpServer::Listen(
          {.port = 0, .threads = 2, .max_body_bytes = 100'000, .max_total_body_bytes = 150'000})
          .value();
  server->Start(Answering([] { return "here"; }));
  TestClient chunked(server->port()), announced(server->port());
  chunked.Send("POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n");
  announced.Send("POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100000\r\n\r\n");
  for (TestClient* client : {&chunked, &announced}) EXPECT_EQ(client->ReadUntil("\r\n\r\n"), kContinue);
  const std::string answer = SendRequest(server->port(), "POST", "/", std::string(60'000, 'x'));
  EXPECT_TRUE(answer.ends_with("here")) << answer;
}

TEST(HttpServer, LimitsTheBytesOfAllBodies) {
  const auto server =
      HttpServer::Listen({.port = 0, .threads = 2, .max_body_bytes = 100'000, .max_total_body_bytes = 50'000})
          .value();
  server->Start(Answering([] { return "here"; }));
  EXPECT_TRUE(
      SendRequest(server->port(), "POST", "/", std::string(60'000, 'x')).starts_with("HTTP/1.1 503 "));
  EXPECT_TRUE(SendRequest(server->port(), "POST", "/", std::string(40'000, 'x')).ends_with("here"));
  // Only POST has a body that is read.
  EXPECT_TRUE(SendRequest(server->port(), "GET", "/", std::string(70'000, 'x')).starts_with("HTTP/1.1 413 "));
}

TEST(HttpServer, FreesTheBodiesOfRunningAnswers) {
  std::promise<std::shared_ptr<ResponseWriter>> held;
  std::atomic<int> asked{0};
  const auto server =
      HttpServer::Listen({.port = 0, .threads = 2, .max_body_bytes = 60'000, .max_total_body_bytes = 60'000})
          .value();
  HttpHooks hooks = Answering([] { return ""; });
  hooks.handle = [&](const HttpRequest&, const std::shared_ptr<ResponseWriter>& writer,
                     const std::shared_ptr<SerialExecutor>&) {
    if (asked++ == 0) return held.set_value(writer);
    writer->Send({.status = 200, .headers = {}, .body = "here"});
  };
  server->Start(std::move(hooks));
  TestClient client(server->port());
  client.Send("POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 50000\r\n\r\n" +
              std::string(50'000, 'x'));
  std::shared_ptr<ResponseWriter> writer = held.get_future().get();
  EXPECT_TRUE(AnswersAtLast(server->port(), "HTTP/1.1 200 OK", std::string(50'000, 'x')));
  writer->Send({.status = 200, .headers = {}, .body = "first"});
  EXPECT_TRUE(client.ReadAll().ends_with("first"));
}

// Handlers of large requests may not use all threads.
TEST(HttpServer, AnswersSmallRequestsWhileLargeOnesAreHandled) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> running{0}, most{0};
  const auto server = HttpServer::Listen(kAnyPort).value();
  HttpHooks hooks = Answering([] { return ""; });
  hooks.handle = [&](const HttpRequest& request, const std::shared_ptr<ResponseWriter>& writer,
                     const std::shared_ptr<SerialExecutor>&) {
    if (!request.body.empty()) {
      most = std::max<int>(most, ++running);
      released.wait_for(std::chrono::minutes(1));
      --running;
    }
    writer->Send({.status = 200, .headers = {}, .body = "here"});
  };
  server->Start(std::move(hooks));
  std::vector<std::future<std::string>> large;
  for (int i = 0; i < 4; ++i) {
    large.push_back(std::async(std::launch::async, [&] {
      return SendRequest(server->port(), "POST", "/", std::string(100'000, 'x'));
    }));
  }
  while (running == 0) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(SendRequest(server->port(), "GET", "/").ends_with("here"));
  EXPECT_EQ(running, 1);
  release.set_value();
  for (auto& answer : large) EXPECT_TRUE(answer.get().ends_with("here"));
  EXPECT_EQ(most, 1);
}

TEST(HttpServer, ProbesAnEventStreamWithComments) {
  HeldRequest request({.ping_interval = std::chrono::milliseconds(0)});
  std::shared_ptr<ResponseWriter> writer;
  {
    TestClient client(request.port());
    client.Send(kGet);
    writer = request.Writer();
    writer->Start(200, {{"content-type", "text/event-stream"}});
    writer->Write("data: 1\n\n");
    client.ReadUntil("data: 1\n\n");
    client.EndSending();
    EXPECT_NE(client.ReadUntil(": ping\n\n").find(": ping\n\n"), std::string::npos);
    writer->Write("data: 2\n\n");
    EXPECT_NE(client.ReadUntil("data: 2\n\n").find("data: 2\n\n"), std::string::npos);
  }
  EXPECT_TRUE(request.Left());
}

TEST(HttpServer, Answers400ToARequestThatWasCutOff) {
  const auto server = HttpServer::Listen(kAnyPort).value();
  server->Start(Answering([] { return "here"; }));
  for (const char* part : {"GET / HT", "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab",
                           "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"}) {
    TestClient client(server->port());
    client.Send(part);
    client.EndSending();
    EXPECT_TRUE(client.ReadAll().starts_with("HTTP/1.1 400 ")) << part;
  }
}

TEST(HttpServer, NamesAnAddressThatIsTaken) {
  const auto first = HttpServer::Listen(kAnyPort);
  ASSERT_TRUE(first.ok()) << Message(first.status());
  const auto second = HttpServer::Listen({.port = (*first)->port()});
  EXPECT_EQ(second.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(Message(second.status()).find(fmt::format("127.0.0.1:{}: ", (*first)->port())),
            std::string::npos);
}

}  // namespace
}  // namespace moesaic::server
