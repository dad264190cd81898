#include "proxy/tokenize/prompt_renderer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

namespace moesaic::proxy {
namespace {

const char* kModel = MOESAIC_SOURCE_DIR "/models/moesaic-tiny";

// Text of words, code, punctuation, other scripts and spelled special tokens.
std::string RandomText(std::mt19937& random, size_t pieces) {
  constexpr const char* kPieces[] = {"word",
                                     " the",
                                     " of",
                                     "\n",
                                     "\n\n",
                                     "  ",
                                     "\t",
                                     ".",
                                     ", ",
                                     "I'm",
                                     " don't",
                                     "123",
                                     " 3.14",
                                     "{\"a\": ",
                                     "}",
                                     "def f(x):\n    return x\n",
                                     "Stra\xC3\x9F"
                                     "e",
                                     "\xE4\xB8\xAD\xE6\x96\x87",
                                     "\xF0\x9F\x98\x80",
                                     "e\xCC\x81",
                                     "<|im_start|>",
                                     "<|im_end|>\n",
                                     "<|endoftext|>",
                                     "\r\n",
                                     "A",
                                     " B",
                                     "...\n",
                                     "https://x.y/z?q=1\n"};
  std::string text;
  for (size_t i = 0; i < pieces; ++i) text += kPieces[random() % std::size(kPieces)];
  return text;
}

TEST(SegmentCache, GivesTheIdsOfTheTokenizer) {
  auto tokenizer = text::Tokenizer::FromFolder(kModel);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  auto cutter = TextCutter::Create(*tokenizer, /*byte_level=*/true);
  ASSERT_TRUE(cutter.ok());
  SegmentCache cache(*tokenizer, *cutter, 1 << 20);
  std::mt19937 random(7);
  const std::string shared = RandomText(random, 600), conversation = RandomText(random, 5000);
  for (int i = 0; i < 1000; ++i) {
    std::string text;
    if (i % 50 == 49) {  // the conversation of several long segments grows
      size_t size = conversation.size() / 1000 * static_cast<size_t>(i);
      while ((static_cast<unsigned char>(conversation[size]) & 0xC0) == 0x80)
        ++size;  // inside of a character
      text = conversation.substr(0, size);
    } else if (i % 3 == 0) {
      text = shared;
    }
    text += RandomText(random, 1 + random() % 200);
    const bool special = i % 2 == 0;
    const auto ids = cache.Encode(text, special), wanted = tokenizer->Encode(text, special);
    ASSERT_TRUE(ids.ok() && wanted.ok());
    ASSERT_EQ(*ids, *wanted) << "prompt " << i << ": " << text;
  }
  const SegmentCacheStats stats = cache.stats();
  EXPECT_GT(stats.hits, 100u);
  EXPECT_LE(stats.bytes, size_t{1} << 20);
}

TEST(SegmentCache, FindsCutsInLongTexts) {
  auto tokenizer = text::Tokenizer::FromFolder(kModel);
  ASSERT_TRUE(tokenizer.ok());
  auto cutter = TextCutter::Create(*tokenizer, /*byte_level=*/true);
  ASSERT_TRUE(cutter.ok());
  EXPECT_GT(cutter->num_special(), 0u);
  std::string lines;
  for (int i = 0; i < 1000; ++i) lines += "Line number " + std::to_string(i) + " of a text.\n";
  EXPECT_TRUE(cutter->cuts_lines());
  EXPECT_LT(cutter->NextSegment(lines, 1000), lines.size());
  // A longer text with the same beginning takes the ids of its long segments from the cache.
  SegmentCache cache(*tokenizer, *cutter, 1 << 20);
  ASSERT_TRUE(cache.Encode(lines, false).ok());
  const std::string longer = lines + "One more.\n";
  const auto ids = cache.Encode(longer, false), wanted = tokenizer->Encode(longer, false);
  ASSERT_TRUE(ids.ok() && wanted.ok());
  EXPECT_EQ(*ids, *wanted);
  EXPECT_GE(cache.stats().hit_bytes, lines.size() - 2 * SegmentCache::kShortSegment);
}

TEST(SegmentCache, TokenizesNoMoreThanWasAllowed) {
  auto tokenizer = text::Tokenizer::FromFolder(kModel);
  ASSERT_TRUE(tokenizer.ok());
  auto cutter = TextCutter::Create(*tokenizer, /*byte_level=*/true);
  ASSERT_TRUE(cutter.ok());
  SegmentCache cache(*tokenizer, *cutter, 1 << 20);
  std::string lines;
  for (int i = 0; i < 2000; ++i) lines += "Line number " + std::to_string(i) + " of a text.\n";
  const std::string end = "<|end|><|assistant|>";
  EXPECT_EQ(cache.Encode(lines + end, false, 512).status().code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE(cache.Encode(lines + "Why?" + end, false).ok());
  // The template's end is known, so that only the question is tokenized.
  const std::string other = lines + "Where?" + end;
  const uint64_t before = cache.stats().miss_bytes;
  const auto ids = cache.Encode(other, false, 512), wanted = tokenizer->Encode(other, false);
  ASSERT_TRUE(ids.ok() && wanted.ok()) << ids.status();
  EXPECT_EQ(*ids, *wanted);
  EXPECT_EQ(cache.stats().miss_bytes - before, 6u);
  // Most of a text of several long segments is stored once.
  EXPECT_LT(cache.stats().bytes, 2 * (lines.size() + ids->size() * sizeof(int32_t)));
}

// Writes moesaic-tiny's tokenizer with one more token, which holds a line break and a letter.
TEST(SegmentCache, KeepsLinesTogetherThatATokenMayJoin) {
  std::ifstream file(std::filesystem::path(kModel) / "tokenizer.json");
  auto json = nlohmann::json::parse(file);
  json["model"]["vocab"]["\u010Aw"] = json["model"]["vocab"].size();
  const auto tokenizer = text::Tokenizer::FromJson(json.dump(), "");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto cutter = TextCutter::Create(*tokenizer, /*byte_level=*/true);
  ASSERT_TRUE(cutter.ok()) << cutter.status();
  EXPECT_FALSE(cutter->cuts_lines());
}

std::string Chat(const std::string& content) {
  return R"({"model":"m","messages":[{"role":"user","content":)" + JsonQuoted(content) + "}]}";
}

TEST(PromptRenderer, RendersChatsAndCompletions) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kMoesaic, 1 << 20);
  ASSERT_TRUE(renderer.ok()) << renderer.status();
  const std::string chat = Chat("What is the capital of France?");
  const auto prompt = (*renderer)->Render(*ReadRequestBody(Endpoint::kChat, chat));
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_TRUE(prompt->exact);
  EXPECT_EQ(prompt->ids.size(), 12u);  // docs/server.md shows this request's prompt_tokens

  const auto ids = (*renderer)->Render(*ReadRequestBody(Endpoint::kCompletions, R"({"prompt":[3,4]})"));
  EXPECT_EQ(ids->ids, (std::vector<int32_t>{3, 4}));
}

TEST(PromptRenderer, LeavesToTheEngineWhatItCannotRender) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kVllm, 1 << 20);
  ASSERT_TRUE(renderer.ok());
  for (const char* body :
       {R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]})",
        R"({"messages":[{"role":"user","content":"a"}],"chat_template":"{{ 1 }}"})",
        R"({"messages":[{"role":"user","content":"a"}],"continue_final_message":true})",
        R"({"messages":["x"]})"}) {
    EXPECT_FALSE((*renderer)->Render(*ReadRequestBody(Endpoint::kChat, body)).ok()) << body;
  }
  EXPECT_FALSE((*renderer)->Render(*ReadRequestBody(Endpoint::kCompletions, R"({"prompt":["a","b"]})")).ok());
}

TEST(PromptRenderer, DoesNotForwardWhatEnginesRenderInDifferentWays) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kVllm, 1 << 20);
  ASSERT_TRUE(renderer.ok());
  const auto parts = (*renderer)->Render(*ReadRequestBody(
      Endpoint::kChat,
      R"({"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]})"));
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_FALSE(parts->exact);
}

}  // namespace
}  // namespace moesaic::proxy
