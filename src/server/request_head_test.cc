#include "server/request_head.h"

#include <gtest/gtest.h>

#include <string>

#include "base/percent.h"

namespace moesaic::server {
namespace {

struct Read {
  RequestHead head;
  int refused = 0;  // status of the refusal, or 0
};

// Scans and then reads, as a connection does.
Read ReadAll(const std::string& bytes) {
  Read read;
  HeadScanner scanner;
  const size_t size = scanner.Scan(bytes);
  if (scanner.refusal()) {
    read.refused = scanner.refusal()->status;
    return read;
  }
  EXPECT_EQ(size, bytes.size()) << bytes;
  if (const auto refusal = ReadRequestHead(bytes, read.head)) read.refused = refusal->status;
  return read;
}

Read WithFields(const std::string& fields) {
  return ReadAll("POST /x HTTP/1.1\r\nHost: a\r\n" + fields + "\r\n");
}

TEST(RequestHead, ReadsALineAndItsFields) {
  const Read read = ReadAll(
      "POST /v1/chat?a=b?c HTTP/1.1\r\nHost: [::1]:80\r\nX-Empty:\r\nX-Text:\t a  b \xc3\xa9 "
      "\r\ncontent-length: 007\r\n\r\n");
  EXPECT_EQ(read.refused, 0);
  EXPECT_EQ(read.head.request.method, "POST");
  EXPECT_EQ(read.head.request.path, "/v1/chat");
  EXPECT_EQ(read.head.request.query, "a=b?c");
  const Headers expected = {
      {"host", "[::1]:80"}, {"x-empty", ""}, {"x-text", "a  b \xc3\xa9"}, {"content-length", "007"}};
  EXPECT_EQ(read.head.request.headers, expected);
  EXPECT_EQ(read.head.framing, BodyFraming::kLength);
  EXPECT_EQ(read.head.length, 7U);
  EXPECT_TRUE(read.head.keep_alive);
}

TEST(RequestHead, FindsTheEndInPieces) {
  const std::string bytes = "GET / HTTP/1.1\r\nhost: a\r\n\r\nrest";
  HeadScanner scanner;
  for (size_t size = 0; size <= bytes.size(); ++size) {
    const size_t end = bytes.size() - 4;
    if (size > end) break;
    EXPECT_EQ(scanner.Scan(std::string_view(bytes).substr(0, size)), size < end ? 0 : end) << size;
    EXPECT_EQ(scanner.has_line(), size >= 16) << size;
  }
  EXPECT_FALSE(scanner.refusal());
}

TEST(RequestHead, RefusesBytesThatCannotBecomeAHead) {
  for (const char* bytes :
       {"\x16\x03\x01", " GET", "\nGET", "GET / HTTP/1.1\n", "GET / HTTP/1.1\rX", "\r\r"}) {
    HeadScanner scanner;
    EXPECT_EQ(scanner.Scan(bytes), 0U);
    ASSERT_TRUE(scanner.refusal()) << bytes;
    EXPECT_EQ(scanner.refusal()->status, 400);
    EXPECT_EQ(scanner.Scan(std::string(bytes) + "more"), 0U);
  }
}

TEST(RequestHead, RefusesOtherRequestLines) {
  const auto refused = [](const std::string& line) { return ReadAll(line + "\r\nhost: a\r\n\r\n").refused; };
  for (const char* line : {"GET /",
                           "GET",
                           "GET  / HTTP/1.1",
                           "GET / HTTP/1.1 ",
                           "GET / x HTTP/1.1",
                           "GET\t/ HTTP/1.1",
                           "GET / http/1.1",
                           "GET / HTTP/1",
                           "GET / HTTP/11",
                           "GET / HTTP/1.10",
                           "GET / HTTP/x.1",
                           "G(T / HTTP/1.1",
                           "GET /\x7f HTTP/1.1",
                           "GET /\xc3\xa9 HTTP/1.1",
                           "GET /#a HTTP/1.1",
                           "GET x HTTP/1.1",
                           "GET * HTTP/1.1",
                           "POST * HTTP/1.1",
                           "GET ftp://a/ HTTP/1.1",
                           "GET http:///x HTTP/1.1",
                           "GET http://u@a/ HTTP/1.1",
                           "GET http://a:x/ HTTP/1.1",
                           "GET http://a HTTP/1.1 HTTP/1.1",
                           "GET /%0 HTTP/1.1",
                           "GET /%zz HTTP/1.1",
                           "GET /%00 HTTP/1.1",
                           "GET /a%0d%0a HTTP/1.1"}) {
    EXPECT_EQ(refused(line), 400) << line;
  }
  for (const char* line : {"PRI * HTTP/2.0", "GET / HTTP/0.9", "GET / HTTP/3.0"})
    EXPECT_EQ(refused(line), 505) << line;
  EXPECT_EQ(refused("CONNECT a:443 HTTP/1.1"), 501);
  EXPECT_EQ(refused("GET / HTTP/1.7"), 0);  // read as 1.1
}

TEST(RequestHead, NormalizesThePath) {
  const auto path = [](const std::string& target) {
    return ReadAll("GET " + target + " HTTP/1.1\r\nhost: a\r\n\r\n").head.request.path;
  };
  EXPECT_EQ(path("/%68ealth%7e%2D"), "/health~-");
  EXPECT_EQ(path("/v1/models/a%2fb%20c%C3%a9"), "/v1/models/a%2Fb%20c%C3%A9");
  EXPECT_EQ(base::PercentDecoded("/a%2Fb%20%C3%A9%"), "/a/b \xc3\xa9%");
  EXPECT_EQ(path("/a/../b//"), "/a/../b//");  // no route has such a path
}

TEST(RequestHead, ReadsTheHostOfAnAbsoluteUri) {
  Read read = ReadAll("GET HTTP://b.example:81/x?y HTTP/1.1\r\nhost: a\r\n\r\n");
  EXPECT_EQ(read.refused, 0);
  EXPECT_EQ(read.head.request.path, "/x");
  EXPECT_EQ(read.head.request.query, "y");
  EXPECT_EQ(read.head.request.headers, (Headers{{"host", "b.example:81"}}));
  EXPECT_EQ(ReadAll("GET https://b?q HTTP/1.0\r\n\r\n").head.request.Header("host"), "b");
  EXPECT_EQ(ReadAll("GET http://b HTTP/1.1\r\nhost: b\r\n\r\n").head.request.path, "/");
  EXPECT_EQ(ReadAll("OPTIONS http://b HTTP/1.1\r\nhost: b\r\n\r\n").head.request.path, "*");
  EXPECT_EQ(ReadAll("OPTIONS * HTTP/1.1\r\nhost: b\r\n\r\n").head.request.path, "*");
  EXPECT_EQ(ReadAll("GET http://b/ HTTP/1.1\r\n\r\n").refused, 400);  // the Host field is required too
}

TEST(RequestHead, NeedsOneValidHost) {
  const auto refused = [](const std::string& fields) {
    return ReadAll("GET / HTTP/1.1\r\n" + fields + "\r\n").refused;
  };
  for (const char* host :
       {"a", "a.example:8000", "127.0.0.1", "[::1]", "[2001:db8::1]:80", "a:", "", "a_b", "%61"}) {
    EXPECT_EQ(refused("Host: " + std::string(host) + "\r\n"), 0) << host;
  }
  for (const char* host : {"a b", "a@b", "a/b", "a?b", "a#b", "a:b", "a:65536", "a:1:2", "[::1", "[::1]a",
                           "[g]", "::1", "%6", "a\x7f", "\xc3\xa9"}) {
    EXPECT_EQ(refused("Host: " + std::string(host) + "\r\n"), 400) << host;
  }
  EXPECT_EQ(refused(""), 400);
  EXPECT_EQ(refused("Host: a\r\nHost: a\r\n"), 400);
  EXPECT_EQ(ReadAll("GET / HTTP/1.0\r\n\r\n").refused, 0);
  EXPECT_EQ(ReadAll("GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n").refused, 400);
}

TEST(RequestHead, RefusesMalformedFields) {
  for (const char* fields :
       {"a : b\r\n", " a: b\r\n", "a: b\r\n c\r\n", "a: b\r\n\tc\r\n", ": b\r\n", "a\r\n", "a b: c\r\n",
        "a: \x01\r\n", "a: \x7f\r\n", "a(: b\r\n", "\xc3\xa9: b\r\n"}) {
    EXPECT_EQ(WithFields(fields).refused, 400) << fields;
  }
  EXPECT_EQ(WithFields(std::string("a: b\0c\r\n", 8)).refused, 400);
}

TEST(RequestHead, RefusesTwoWaysToDelimitABody) {
  EXPECT_EQ(WithFields("transfer-encoding: chunked\r\n").head.framing, BodyFraming::kChunked);
  EXPECT_EQ(WithFields("Transfer-Encoding: \tCHUNKED \r\n").head.framing, BodyFraming::kChunked);
  EXPECT_EQ(WithFields("content-length: 0\r\n").head.framing, BodyFraming::kNone);
  EXPECT_EQ(WithFields("content-length: 99999999999999999999999\r\n").head.length, UINT64_MAX);
  for (const char* coding : {"xchunked", "chunked, deflate", "identity", "", "chunked, chunked", "gzip",
                             "chunked;q=1", "\"chunked\"", "chunked x", ", chunked", "chunked,",
                             "identity, \x0b"
                             "chunked"}) {
    EXPECT_EQ(WithFields("transfer-encoding: " + std::string(coding) + "\r\n").refused, 400) << coding;
  }
  EXPECT_EQ(WithFields("transfer-encoding: gzip, chunked\r\n").refused, 501);
  EXPECT_EQ(WithFields("transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n").refused, 501);
  EXPECT_EQ(WithFields("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n").refused, 400);
  EXPECT_EQ(WithFields("transfer-encoding: chunked\r\ncontent-length: 3\r\n").refused, 400);
  EXPECT_EQ(WithFields("content-length: 3\r\ntransfer-encoding: gzip\r\n").refused, 400);
  EXPECT_EQ(ReadAll("POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n").refused, 400);
  for (const char* length : {"-1", "+1", "0x1", "1, 1", "1,2", "", "1 1", "1.0"}) {
    EXPECT_EQ(WithFields("content-length: " + std::string(length) + "\r\n").refused, 400) << length;
  }
  EXPECT_EQ(WithFields("content-length: 1\r\ncontent-length: 1\r\n").refused, 400);
}

TEST(RequestHead, KeepsAConnectionOpenByTheRuleOfItsVersion) {
  EXPECT_FALSE(WithFields("connection: x, Close\r\n").head.keep_alive);
  EXPECT_FALSE(ReadAll("GET / HTTP/1.0\r\n\r\n").head.keep_alive);
  EXPECT_TRUE(ReadAll("GET / HTTP/1.0\r\nconnection: Keep-Alive\r\n\r\n").head.keep_alive);
}

TEST(RequestHead, AcceptsOnlyExpect100Continue) {
  EXPECT_TRUE(WithFields("expect: 100-Continue\r\n").head.expects_continue);
  EXPECT_FALSE(ReadAll("GET / HTTP/1.0\r\nexpect: 100-continue\r\n\r\n").head.expects_continue);
  EXPECT_EQ(WithFields("expect: 200-ok\r\n").refused, 417);
  EXPECT_EQ(WithFields("expect: 100-continue, x\r\n").refused, 417);
}

}  // namespace
}  // namespace moesaic::server
