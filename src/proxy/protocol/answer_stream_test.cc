#include "proxy/protocol/answer_stream.h"

#include <gtest/gtest.h>

namespace moesaic::proxy {
namespace {

// Every event that a client sees must be whole, wherever the engine's answer breaks off.
TEST(AnswerStream, AbandoningAStreamEndsItsLastEvent) {
  const std::string text =
      "data: {\"choices\":[{\"text\":\"a\"}]}\n\nevent: x\r\ndata: {\"choices\":[]}\r\n\r\n";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    AnswerStream stream({.stream = true});
    std::string out;
    stream.Push(std::string_view(text).substr(0, cut), &out);
    stream.Abandon(&out);
    EXPECT_TRUE(out.empty() || out.ends_with("\n\n") || out.ends_with("\n\r\n") || out.ends_with("\r\n\n"))
        << cut << ": " << out;
    EXPECT_EQ(out.find("{\"choi\n"), std::string::npos) << cut;
    std::string rest = out;
    for (size_t at = 0; (at = rest.find("data: ", at)) != std::string::npos; at += 6) {
      EXPECT_EQ(rest[rest.find_first_of("\r\n", at) - 1], '}') << cut << ": " << out;
    }
  }
}

const std::string kStream =
    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
    ": comment\r\n"
    "data: {\"choices\":[{\"delta\":{\"content\":\" a\"}}]}\r\n\r\n"
    "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"b\"}}]}\n\n"
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,\"prompt_tokens_details\":"
    "{\"cached_tokens\":8}}}\n\n"
    "data: [DONE]\n\n";

std::string Passed(AnswerStream& stream, std::string_view text, size_t step) {
  std::string out;
  for (size_t at = 0; at < text.size(); at += step) stream.Push(text.substr(at, step), &out);
  stream.Finish(&out);
  return out;
}

TEST(AnswerStream, PassesStreamsUnchangedInPiecesOfAnySize) {
  for (size_t step = 1; step < kStream.size(); step += 7) {
    AnswerStream stream({.stream = true});
    EXPECT_EQ(Passed(stream, kStream, step), kStream);
    EXPECT_EQ(stream.chunks(), 2);
    EXPECT_EQ(stream.usage().prompt_tokens, 9);
    EXPECT_EQ(stream.usage().cached_tokens, 8);
    EXPECT_EQ(stream.usage().completion_tokens, 2);
    EXPECT_TRUE(stream.saw_end());
  }
}

TEST(AnswerStream, ReportsTheFirstTokenAtOnce) {
  AnswerStream stream({.stream = true});
  std::string out;
  stream.Push("data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n", &out);
  EXPECT_FALSE(stream.first_token());
  stream.Push("data: {\"choices\":[{\"text\":\"x\"}]}\n", &out);
  EXPECT_TRUE(stream.first_token());
  EXPECT_TRUE(out.ends_with("x\"}]}\n"));
}

TEST(AnswerStream, ReportsTheCachedTokensOfTheOtherEngine) {
  AnswerStream stream({.stream = true, .cached_tokens = 3});
  std::string wanted = kStream;
  wanted.replace(wanted.find("\"cached_tokens\":8"), 17, "\"cached_tokens\":3");
  EXPECT_EQ(Passed(stream, kStream, 50), wanted);
  EXPECT_EQ(stream.usage().cached_tokens, 3);

  AnswerStream json({.cached_tokens = 3});
  EXPECT_EQ(
      Passed(json, R"({"id":"a","choices":[{}],"usage":{"prompt_tokens":4}})", 10),
      R"({"id":"a","choices":[{}],"usage":{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":3}}})");
}

TEST(AnswerStream, PassesMalformedJsonUnchanged) {
  AnswerStream json({.cached_tokens = 3});
  EXPECT_EQ(Passed(json, "not json", 3), "not json");
  AnswerStream stream({.stream = true, .cached_tokens = 3});
  EXPECT_EQ(Passed(stream, "data: {broken\n\ndata:", 4), "data: {broken\n\ndata:");
}

TEST(PrefillAnswer, KeepsTheTextOfTheParameters) {
  const auto answer = ReadPrefillAnswer(
      R"({"choices":[],"kv_transfer_params": { "remote_port" : 1 },"usage":{"prompt_tokens_details":{"cached_tokens":5}}})");
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->transfer_params, R"({ "remote_port" : 1 })");
  EXPECT_EQ(answer->usage.cached_tokens, 5);
  EXPECT_EQ(ReadPrefillAnswer(R"({"kv_transfer_params":null})")->transfer_params, "");
  EXPECT_FALSE(ReadPrefillAnswer("oops").ok());
}

}  // namespace
}  // namespace moesaic::proxy
