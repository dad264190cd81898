#include "proxy/protocol/response_reader.h"

#include <gtest/gtest.h>

namespace moesaic::proxy {
namespace {

// Feeds `text` in pieces of `step` bytes; returns the body.
StatusOr<std::string> ReadAll(ResponseReader& reader, std::string_view text, size_t step) {
  std::string body;
  for (size_t at = 0; at < text.size(); at += step) {
    if (Status status = reader.Consume(text.substr(at, step), &body); !status.ok()) return status;
  }
  return body;
}

TEST(ResponseReader, ReadsLengthsChunksAndBodiesUntilTheEnd) {
  for (size_t step = 1; step < 40; ++step) {
    ResponseReader length;
    EXPECT_EQ(*ReadAll(length, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b \r\n\r\nhello", step), "hello");
    EXPECT_TRUE(length.done() && length.keep_alive());
    EXPECT_EQ(length.Header("x-a"), "b");

    ResponseReader chunks;
    EXPECT_EQ(*ReadAll(chunks, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: 1\r\n\r\n", step),
              "abc0123456789");
    EXPECT_TRUE(chunks.done() && chunks.keep_alive());

    ResponseReader open;
    EXPECT_EQ(*ReadAll(open, "HTTP/1.0 200 OK\n\nrest", step), "rest");
    EXPECT_FALSE(open.done());
    EXPECT_TRUE(open.Close().ok() && open.done());
    EXPECT_FALSE(open.keep_alive());
  }
}

TEST(ResponseReader, SkipsInterimResponses) {
  ResponseReader reader;
  EXPECT_EQ(*ReadAll(reader, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", 9), "");
  EXPECT_TRUE(reader.done());
  EXPECT_EQ(reader.status(), 204);
}

TEST(ResponseReader, RefusesAmbiguousFraming) {
  for (const char* text : {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
                           "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
                           "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
                           "HTTP/2 200\r\n\r\n", "HTTP/1.1 2x0 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
                           "HTTP/1.1 101 Switching\r\n\r\n",
                           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
                           "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n"}) {
    ResponseReader reader;
    EXPECT_FALSE(ReadAll(reader, text, 1000).ok()) << text;
  }
}

TEST(ResponseReader, ReportsTruncationAndExtraBytes) {
  ResponseReader cut;
  ASSERT_TRUE(ReadAll(cut, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", 100).ok());
  EXPECT_FALSE(cut.Close().ok());
  ResponseReader extra;
  ASSERT_TRUE(ReadAll(extra, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nhe", 100).ok());
  EXPECT_TRUE(extra.done());
  EXPECT_FALSE(extra.keep_alive());
}

}  // namespace
}  // namespace moesaic::proxy
