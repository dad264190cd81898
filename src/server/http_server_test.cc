// The transport alone, under hooks of the tests' own.
#include "server/http_server.h"

#include <gtest/gtest.h>

#include "server/router.h"
#include "server/test_client.h"

namespace moesaic::server {
namespace {

const HttpOptions kAnyPort{.port = 0, .threads = 2};

HttpHooks Answering(const std::function<std::string()>& body) {
  HttpHooks hooks;
  hooks.admit = [](const HttpRequest&) { return std::nullopt; };
  hooks.handle = [body](const HttpRequest&, const std::shared_ptr<ResponseWriter>& writer,
                        const std::shared_ptr<Lane>&) {
    writer->Send({.status = 200, .headers = {}, .body = body()});
  };
  hooks.refuse = [](const HttpRequest&, int status, const std::string&) {
    return HttpResponse{.status = status, .headers = {}, .body = {}};
  };
  return hooks;
}

// Hooks tell of the server itself, so none may run before its owner has it and has started it.
TEST(HttpServer, AnswersWhoCameBeforeTheStart) {
  auto server = HttpServer::Listen(kAnyPort);
  ASSERT_TRUE(server.ok()) << Message(server.status());
  ASSERT_GT((*server)->port(), 0);
  TestClient early((*server)->port());
  early.Send("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
  EXPECT_EQ((*server)->connections(), 0);
  HttpServer* started = server->get();
  started->Start(Answering([started] { return fmt::format("{} here", started->connections()); }));
  const std::string answer = early.ReadAll();
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_TRUE(answer.ends_with("\r\n\r\n1 here")) << answer;
}

TEST(HttpServer, SaysThatTheModelIsBeingLoadedUntilItIsThere) {
  auto server = HttpServer::Listen(kAnyPort);
  ASSERT_TRUE(server.ok()) << Message(server.status());
  (*server)->Start(LoadingHooks());
  TestClient stays((*server)->port());
  stays.Send("GET /health HTTP/1.1\r\nhost: x\r\n\r\n");
  for (const char* path : {"/health", "/ready", "/nowhere"}) {
    const std::string answer = Ask((*server)->port(), "GET", path);
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 503 ")) << answer;
    EXPECT_NE(answer.find("retry-after: 1\r\n"), std::string::npos) << answer;
    EXPECT_NE(answer.find(R"({"error":{"message":"the model is still being loaded","type")"),
              std::string::npos)
        << answer;
  }
  const std::string said = Ask((*server)->port(), "POST", "/v1/messages", "{}");
  EXPECT_NE(said.find(R"({"type":"error","error":{"type":)"), std::string::npos) << said;
  (*server)->Switch(Answering([] { return "here"; }));
  stays.Send("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
  const std::string both = stays.ReadAll();
  EXPECT_TRUE(both.starts_with("HTTP/1.1 503 ")) << both;
  EXPECT_TRUE(both.ends_with("\r\n\r\nhere")) << both;
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
