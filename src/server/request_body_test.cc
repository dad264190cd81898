#include "server/request_body.h"

#include <gtest/gtest.h>

#include <string>

namespace moesaic::server {
namespace {

constexpr int64_t kLimit = 1 << 20;

RequestHead Chunked() { return {.request = {}, .framing = BodyFraming::kChunked}; }
RequestHead OfLength(uint64_t length) {
  return {.request = {}, .framing = BodyFraming::kLength, .length = length};
}

struct Taken {
  std::string body, rest;
  int refused = 0;
  bool complete = false;
};

// Feeds the input in pieces of `size` bytes, as long as the body takes some.
Taken Take(const RequestHead& head, const std::string& input, size_t size, int64_t limit = kLimit) {
  RequestBody body(head, limit);
  Taken taken;
  size_t at = 0;
  while (at < input.size() && !body.complete() && !body.refusal()) {
    taken.rest += input.substr(at, size);
    at += size;
    body.Take(taken.rest);
  }
  taken.rest += input.substr(std::min(at, input.size()));
  taken.body = body.bytes();
  taken.complete = body.complete();
  if (body.refusal()) taken.refused = body.refusal()->status;
  return taken;
}

TEST(RequestBody, LeavesTheBytesOfTheNextRequest) {
  for (const size_t size : {1, 2, 3, 7, 100}) {
    Taken taken = Take(OfLength(5), "helloGET /", size);
    EXPECT_EQ(taken.body + "|" + taken.rest, "hello|GET /");
    EXPECT_TRUE(taken.complete);
    taken = Take(
        Chunked(),
        "5\r\nhello\r\n00a;a=\"b;\\\"\" ; c = d\r\n0123456789\r\n0;x\r\nTrailer: y\r\nZ:\r\n\r\nGET /", size);
    EXPECT_EQ(taken.body + "|" + taken.rest, "hello0123456789|GET /");
    EXPECT_TRUE(taken.complete);
    EXPECT_EQ(taken.refused, 0);
  }
}

TEST(RequestBody, IsIncompleteBeforeItsLastByte) {
  const std::string whole = "3\r\nabc\r\n0\r\na: b\r\n\r\n";
  for (size_t size = 0; size < whole.size(); ++size) {
    const Taken taken = Take(Chunked(), whole.substr(0, size), 100);
    EXPECT_FALSE(taken.complete) << size;
    EXPECT_EQ(taken.refused, 0) << size;
  }
}

TEST(RequestBody, RefusesMalformedChunks) {
  for (const char* input : {"x\r\n",
                            "\r\n",
                            "5\nhello\r\n",
                            "5\r\nhello!\r\n",
                            "5\r\nhello\n",
                            "5 \r\nhello",
                            " 5\r\n",
                            "-5\r\n",
                            "0x5\r\n",
                            "+5\r\n",
                            "5;\r\n",
                            "5;=a\r\n",
                            "5;a=\r\n",
                            "5;a b\r\n",
                            "5;a=\"b\r\n",
                            "5;a=\"b\r\n\"\r\n",
                            "5;a=\x01\r\n",
                            "5;a\rb\r\n",
                            "00000000000000005\r\nhello\r\n",
                            "0\r\nx\r\n\r\n",
                            "0\r\n x: y\r\n\r\n",
                            "0\r\nx : y\r\n\r\n",
                            "0\r\nx: \x01\r\n\r\n",
                            "0\r\nx: y\n\r\n",
                            "0\r\nx: y\r\n z\r\n\r\n",
                            "0\r\n: y\r\n"}) {
    for (const size_t size : {1, 100}) EXPECT_EQ(Take(Chunked(), input, size).refused, 400) << input;
  }
}

TEST(RequestBody, LimitsBodiesChunkHeadersAndTrailers) {
  EXPECT_EQ(Take(OfLength(6), "x", 1, 5).refused, 413);
  EXPECT_EQ(Take(OfLength(UINT64_MAX), "x", 1, 5).refused, 413);
  EXPECT_EQ(Take(Chunked(), "6\r\nhello!\r\n", 100, 5).refused, 413);
  EXPECT_EQ(Take(Chunked(), "3\r\nabc\r\n3\r\n", 100, 5).refused, 413);
  EXPECT_EQ(Take(Chunked(), "ffffffffffffffff\r\n", 100).refused, 413);
  EXPECT_EQ(Take(Chunked(), "3;" + std::string(5000, 'a'), 100).refused, 400);
  std::string input;
  for (int i = 0; i < 100; ++i) input += "1;" + std::string(1000, 'a') + "\r\nx\r\n";
  EXPECT_EQ(Take(Chunked(), input, 100).refused, 400);
  input = "0\r\n";
  for (int i = 0; i < 100; ++i) input += "a: " + std::string(1000, 'a') + "\r\n";
  EXPECT_EQ(Take(Chunked(), input, 100).refused, 431);
}

}  // namespace
}  // namespace moesaic::server
