// Tests routes, and the answers to requests whose endpoints fail.
#include "server/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <sstream>
#include <stdexcept>

#include "server/http_server.h"
#include "server/test_client.h"

namespace moesaic::server {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class RouterTest : public testing::Test {
 protected:
  RouterTest() {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
    const auto add = [this](const char* method, const char* path, Router::Endpoint endpoint) {
      router_.Add(method, path, Router::Access::kGenerates, std::move(endpoint));
    };
    const auto throws = [](Call&) -> Status { throw std::runtime_error("the dog ate it"); };
    add("GET", "/throws", throws);
    add("POST", "/v1/messages", throws);
    add("GET", "/throws_a_number", [](Call&) -> Status { throw 7; });
    add("GET", "/throws_in_the_middle", [](Call& call) -> Status {
      call.writer->Start(200, {});
      call.writer->Write("so far");
      throw std::runtime_error("no further");
    });
    add("GET", "/throws_later", [](Call& call) {
      call.executor->Post([writer = call.writer] { throw std::runtime_error("too late"); });
      return OkStatus();
    });
    const auto tells = [](Call& call) {
      SendJson(*call.writer, call.path_values);
      return OkStatus();
    };
    add("GET", "/things/{thing}", tells);
    add("DELETE", "/things/{thing}", tells);
    add("GET", "/things/{thing}/parts/{part}", tells);
    add("GET", "/works", [](Call& call) {
      SendJson(*call.writer, {{"it", "works"}});
      return OkStatus();
    });
    auto server = HttpServer::Listen({.port = 0, .threads = 1});
    EXPECT_TRUE(server.ok()) << Message(server.status());
    server_ = *std::move(server);
    server_->Start(router_.Hooks());
  }
  ~RouterTest() override { spdlog::set_default_logger(before_); }

  std::string Get(const char* path) { return SendRequest(server_->port(), "GET", path); }

  // Stops the server, so that the log is complete.
  std::string Log() {
    server_.reset();
    return log_.str();
  }

  std::ostringstream log_;
  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
  Metrics metrics_{"m"};
  Router router_{{}, metrics_, nullptr};
  std::unique_ptr<HttpServer> server_;
};

TEST_F(RouterTest, AnswersAnEndpointsExceptionWith500) {
  const std::string answer = Get("/throws");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 500 "));
  EXPECT_THAT(
      answer,
      HasSubstr(R"({"error":{"message":"the server failed to process this request; its log has the reason",)"
                R"("type":"server_error","param":null,"code":null}})"));
  EXPECT_THAT(answer, Not(HasSubstr("dog")));
  EXPECT_THAT(Get("/throws_a_number"), StartsWith("HTTP/1.1 500 "));
  EXPECT_THAT(Get("/works"), HasSubstr(R"({"it":"works"})"));
  EXPECT_EQ(router_.generating(), 0);
  const std::string id = answer.substr(answer.find("x-request-id: ") + 14, 32);
  EXPECT_THAT(Log(), HasSubstr("GET /throws, request " + id + ": an exception escaped: the dog ate it"));
}

TEST_F(RouterTest, MatchesSegmentsOfPaths) {
  EXPECT_THAT(Get("/things/a"), HasSubstr(R"(["a"])"));
  EXPECT_THAT(Get("/things/a/parts/b"), HasSubstr(R"(["a","b"])"));
  for (const char* path : {"/things", "/things/", "/things/a/", "/things/a/parts", "/things/a/parts/",
                           "/things//parts/b", "/things/a/parts/b/c"}) {
    EXPECT_THAT(Get(path), StartsWith("HTTP/1.1 404 ")) << path;
  }
  const std::string refused = SendRequest(server_->port(), "POST", "/things/a", "{}");
  EXPECT_THAT(refused, StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(refused, HasSubstr("allow: GET, DELETE\r\n"));
}

TEST_F(RouterTest, AnswersExceptionsInTheFormatOfAnthropic) {
  const std::string answer = SendRequest(server_->port(), "POST", "/v1/messages", "{}");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 500 "));
  EXPECT_THAT(answer,
              HasSubstr(R"({"type":"error","error":{"type":"api_error","message":"the server failed)"));
}

TEST_F(RouterTest, ClosesTheConnectionOfAnAnswerThatHasBegun) {
  const std::string answer = Get("/throws_in_the_middle");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(answer, Not(HasSubstr("HTTP/1.1 500")));
  EXPECT_THAT(answer, Not(HasSubstr("\r\n0\r\n\r\n")));  // the last chunk would complete the answer
  EXPECT_THAT(Get("/works"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(RouterTest, ClosesOnlyTheConnectionOfALateException) {
  EXPECT_EQ(Get("/throws_later"), "");
  EXPECT_THAT(Get("/works"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Log(), HasSubstr("an exception escaped: too late"));
}

// The flags refuse an empty key. The router refuses it even if it is in the key ring.
TEST(RouterKeys, AreNeverEmpty) {
  Metrics metrics("m");
  RouterOptions options;
  options.keys = std::make_shared<KeyRing>(
      std::vector<KeyEntry>{UnnamedKey("empty", "", false), UnnamedKey("real", "real", false)});
  Router router(options, metrics, nullptr);
  router.Add("GET", "/works", Router::Access::kKey, [](Call& call) {
    SendJson(*call.writer, {{"it", "works"}});
    return OkStatus();
  });
  const HttpHooks hooks = router.Hooks();
  const auto status = [&hooks](Headers headers) {
    HttpRequest request;
    request.method = "GET";
    request.path = "/works";
    request.headers = std::move(headers);
    const auto refusal = hooks.admit(request);
    return refusal ? refusal->status : 200;
  };
  EXPECT_EQ(status({}), 401);
  EXPECT_EQ(status({{"authorization", "Bearer "}}), 401);
  EXPECT_EQ(status({{"x-api-key", ""}}), 401);
  EXPECT_EQ(status({{"authorization", "Bearer rea"}}), 401);
  EXPECT_EQ(status({{"authorization", "Bearer real"}}), 200);
  EXPECT_EQ(status({{"authorization", "bearer real"}}), 200);
  EXPECT_EQ(status({{"authorization", "BEARER  real"}}), 200);
  EXPECT_EQ(status({{"authorization", "Basic real"}}), 401);
  EXPECT_EQ(status({{"x-api-key", "real"}}), 200);
}

}  // namespace
}  // namespace moesaic::server
