#include "proxy/tokenize/prompt_renderer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "proxy/protocol/json_members.h"

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

std::string Escaped(std::string_view text) {
  std::string escaped;
  AppendJsonEscaped(text, &escaped);
  return escaped;
}

// Tests with the tokenizer of a model and the positions at which it lets texts be cut.
class SegmentCacheTest : public testing::Test {
 protected:
  const text::Tokenizer tokenizer_ = text::Tokenizer::FromFolder(kModel).value();
  const TextCutter cutter_ = TextCutter::Create(tokenizer_, /*byte_level=*/true).value();
};

// Ids of an escaped text in one piece.
StatusOr<std::vector<int32_t>> Encode(SegmentCache& cache, std::string_view escaped, bool special,
                                      size_t max_unknown = SIZE_MAX) {
  SegmentCache::Progress progress;
  RETURN_IF_ERROR(cache.Encode({&escaped, 1}, special, &progress, max_unknown));
  return std::move(progress.ids);
}

TEST_F(SegmentCacheTest, ReturnsTheIdsOfTheTokenizer) {
  SegmentCache cache(tokenizer_, cutter_, 1 << 20);
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
    const auto wanted = tokenizer_.Encode(text, special);
    ASSERT_TRUE(wanted.ok());
    // Pieces end between any two characters. Sometimes little may be tokenized at a time.
    std::vector<std::string> escaped;
    for (size_t begin = 0, end = 0; begin < text.size(); begin = end) {
      end = std::min(text.size(), begin + 1 + random() % (i % 7 == 0 ? 20'000 : 300));
      while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) ++end;
      escaped.push_back(Escaped(std::string_view(text).substr(begin, end - begin)));
    }
    const std::vector<std::string_view> pieces(escaped.begin(), escaped.end());
    SegmentCache::Progress progress;
    Status status = cache.Encode(pieces, special, &progress, i % 5 == 0 ? 100 : SIZE_MAX);
    if (status.code() == StatusCode::kResourceExhausted) status = cache.Encode(pieces, special, &progress);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(progress.ids, *wanted) << "prompt " << i << ": " << text;
  }
  const SegmentCacheStats stats = cache.stats();
  EXPECT_GT(stats.hits, 100u);
  EXPECT_LE(stats.bytes, size_t{1} << 20);
}

TEST_F(SegmentCacheTest, FindsCutsInLongTexts) {
  EXPECT_GT(cutter_.num_special(), 0u);
  std::string lines;
  for (int i = 0; i < 1000; ++i) lines += "Line number " + std::to_string(i) + " of a text.\n";
  EXPECT_TRUE(cutter_.cuts_lines());
  EXPECT_LT(cutter_.NextSegment(Escaped(lines), 1000), lines.size());
  // A longer text with the same beginning takes the ids of its long segments from the cache.
  SegmentCache cache(tokenizer_, cutter_, 1 << 20);
  ASSERT_TRUE(Encode(cache, Escaped(lines), false).ok());
  const std::string longer = lines + "One more.\n";
  const auto ids = Encode(cache, Escaped(longer), false), wanted = tokenizer_.Encode(longer, false);
  ASSERT_TRUE(ids.ok() && wanted.ok());
  EXPECT_EQ(*ids, *wanted);
  EXPECT_GE(cache.stats().hit_bytes, lines.size() - 2 * SegmentCache::kShortSegment);
}

TEST_F(SegmentCacheTest, TokenizesAtMostTheAllowedText) {
  SegmentCache cache(tokenizer_, cutter_, 1 << 20);
  std::string lines;
  for (int i = 0; i < 2000; ++i) lines += "Line number " + std::to_string(i) + " of a text.\n";
  const std::string end = "<|end|><|assistant|>";
  EXPECT_EQ(Encode(cache, Escaped(lines + end), false, 512).status().code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE(Encode(cache, Escaped(lines + "Why?" + end), false).ok());
  // The template's end is known. Two lookups miss: the line before the question, which the first prompt
  // tokenized together with other lines, and the question's word.
  const std::string other = lines + "Where?" + end;
  const uint64_t before = cache.stats().miss_bytes;
  const auto ids = Encode(cache, Escaped(other), false, 512), wanted = tokenizer_.Encode(other, false);
  ASSERT_TRUE(ids.ok() && wanted.ok()) << ids.status();
  EXPECT_EQ(*ids, *wanted);
  EXPECT_EQ(cache.stats().miss_bytes - before, 30u + 6u);
  // Most of a text of several long segments is stored once.
  EXPECT_LT(cache.stats().bytes, 2 * (lines.size() + ids->size() * sizeof(int32_t)));
}

// Known words of a new question are not tokenized again.
TEST_F(SegmentCacheTest, LearnsTheWordsOfQuestions) {
  SegmentCache cache(tokenizer_, cutter_, 1 << 20);
  for (const char* text : {"one two three four five six 7 8", "eight 7 six five 8 four three two one"}) {
    ASSERT_TRUE(Encode(cache, text, false).ok());
  }
  const std::string mixed = "one 7 eight two 8 three";
  const auto ids = Encode(cache, mixed, false, /*max_unknown=*/12), wanted = tokenizer_.Encode(mixed, false);
  ASSERT_TRUE(ids.ok() && wanted.ok()) << ids.status();
  EXPECT_EQ(*ids, *wanted);
  // Many new words at once are tokenized together.
  std::string many;
  for (int i = 0; i < 30; ++i) many += " word" + std::to_string(i);
  const auto more = Encode(cache, many, false), all = tokenizer_.Encode(many, false);
  ASSERT_TRUE(more.ok() && all.ok());
  EXPECT_EQ(*more, *all);
}

// Clients escape in different ways; a cut inside of an escape would change the text.
TEST_F(SegmentCacheTest, CutsNoEscape) {
  ASSERT_TRUE(cutter_.cuts_lines());
  const auto cut = [&](std::string_view escaped) { return cutter_.NextSegment(escaped, 2); };
  EXPECT_EQ(cut(R"(abc\nword)"), 5u);
  EXPECT_EQ(cut(R"(abc\\\nword)"), 7u);
  EXPECT_EQ(cut(R"(ab\"\nword)"), 6u);
  for (const char* whole : {R"(abc\\nword)", R"(abc\n\nword)", R"(abc \nword)", R"(abc\t\nword)",
                            R"(abc\r\nword)", R"(abc\u0020\nword)", R"(abc\n9ord)", R"(abc\n\u0061ord)"}) {
    EXPECT_EQ(cut(whole), std::string_view(whole).size()) << whole;
  }
  EXPECT_EQ(cut(R"(abc\n<|end|>)"), 5u);
  EXPECT_EQ(cut(R"(abc\u00e9<|end|>)"), 9u);
  SegmentCache cache(tokenizer_, cutter_, 1 << 20);
  constexpr const char* kPieces[] = {
      R"(\n)", R"(\\)", R"(\")", R"(\/)",   R"(\u00e9)", R"(\ud83d\ude00)", R"(\u000a)",
      "n",     "word",  " ",     "<|end|>", R"(\t)",     R"(\u003c|end|>)", "u00e9"};
  std::mt19937 random(11);
  for (int i = 0; i < 300; ++i) {
    std::string escaped;
    for (size_t k = 0; k < 1 + random() % 400; ++k) escaped += kPieces[random() % std::size(kPieces)];
    const auto ids = Encode(cache, escaped, false),
               wanted = tokenizer_.Encode(*JsonUnescaped(escaped), false);
    ASSERT_TRUE(ids.ok() && wanted.ok()) << ids.status();
    ASSERT_EQ(*ids, *wanted) << escaped;
  }
  EXPECT_EQ(Encode(cache, R"(a\ud83d)", false).status().code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(Encode(cache, "a\xff", false).ok());
}

nlohmann::json TokenizerJson() {
  std::ifstream file(std::filesystem::path(kModel) / "tokenizer.json");
  return nlohmann::json::parse(file);
}

// Writes moesaic-tiny's tokenizer with one more token, which holds a line break and a letter.
TEST(SegmentCache, KeepsLinesTogetherThatATokenMayJoin) {
  nlohmann::json json = TokenizerJson();
  json["model"]["vocab"]["\u010Aw"] = json["model"]["vocab"].size();
  const auto tokenizer = text::Tokenizer::FromJson(json.dump(), "");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto cutter = TextCutter::Create(*tokenizer, /*byte_level=*/true);
  ASSERT_TRUE(cutter.ok()) << cutter.status();
  EXPECT_FALSE(cutter->cuts_lines());
}

// The tests' tokenizer with one more special token.
StatusOr<TextCutter> CutterWithToken(const std::string& content, bool rstrip) {
  nlohmann::json json = TokenizerJson();
  json["added_tokens"].push_back({{"id", json["model"]["vocab"].size() + json["added_tokens"].size()},
                                  {"content", content},
                                  {"single_word", false},
                                  {"lstrip", false},
                                  {"rstrip", rstrip},
                                  {"normalized", false},
                                  {"special", true}});
  ASSIGN_OR_RETURN(const text::Tokenizer tokenizer, text::Tokenizer::FromJson(json.dump(), ""));
  return TextCutter::Create(tokenizer, /*byte_level=*/true);
}

TEST(SegmentCache, KeepsWordsTogetherThatASpecialTokenMayJoin) {
  EXPECT_TRUE(CutterWithToken("<|turn|>", false)->cuts_words());
  EXPECT_FALSE(CutterWithToken("<|end of turn|>", false)->cuts_words());
  EXPECT_TRUE(CutterWithToken("MASK", false)->cuts_words());
  EXPECT_FALSE(CutterWithToken("MASK", true)->cuts_words());  // absorbs the space before the next word
}

TEST(SegmentCache, LooksUpFewWordsWithinALimit) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kVllm, 1 << 20);
  ASSERT_TRUE(renderer.ok());
  std::string text = "a";
  for (int i = 0; i < 3000; ++i) text += " a";
  const std::string body = R"({"model":"m","prompt":")" + text + R"("})";
  const RequestBody read = *ReadRequestBody(Endpoint::kCompletions, body);
  const auto prompt = (*renderer)->Render(read);
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ((*renderer)->Tokenize(prompt->get(), 512).code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE((*renderer)->Tokenize(prompt->get()).ok());
  EXPECT_GT((*prompt)->progress.ids.size(), 3000U);
}

std::string Chat(const std::string& content) {
  return R"({"model":"m","messages":[{"role":"user","content":)" + JsonQuoted(content) + "}]}";
}

struct Ids {
  std::vector<int32_t> ids;
  bool exact;
};

StatusOr<Ids> IdsOf(PromptRenderer& renderer, Endpoint endpoint, const std::string& body) {
  ASSIGN_OR_RETURN(const RequestBody read, ReadRequestBody(endpoint, body));
  ASSIGN_OR_RETURN(const std::unique_ptr<RenderedPrompt> prompt, renderer.Render(read));
  RETURN_IF_ERROR(renderer.Tokenize(prompt.get()));
  return Ids{prompt->progress.ids, prompt->exact};
}

TEST(PromptRenderer, RendersChatsAndCompletions) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kMoesaic, 1 << 20);
  ASSERT_TRUE(renderer.ok()) << renderer.status();
  const auto prompt = IdsOf(**renderer, Endpoint::kChat, Chat("What is the capital of France?"));
  ASSERT_TRUE(prompt.ok()) << prompt.status();
  EXPECT_TRUE(prompt->exact);
  EXPECT_EQ(prompt->ids.size(), 12u);  // docs/server.md shows this request's prompt_tokens

  const auto ids = IdsOf(**renderer, Endpoint::kCompletions, R"({"prompt":[3,4]})");
  EXPECT_EQ(ids->ids, (std::vector<int32_t>{3, 4}));
  const auto text = IdsOf(**renderer, Endpoint::kCompletions, R"({"prompt":"na\u00efve\n"})");
  ASSERT_TRUE(text.ok());
  EXPECT_EQ(text->ids, *(*renderer)->tokenizer().Encode("na\xC3\xAFve\n", /*add_special=*/true));
}

// The text that the template gives, tokenized as a whole.
TEST(PromptRenderer, ReturnsTheIdsOfTheRenderedText) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kVllm, 1 << 20);
  ASSERT_TRUE(renderer.ok()) << renderer.status();
  const auto chat = text::ChatTemplate::FromFolder(kModel);
  ASSERT_TRUE(chat.ok());
  std::mt19937 random(5);
  for (int i = 0; i < 60; ++i) {
    nlohmann::json messages;
    for (size_t turn = 0; turn < 1 + random() % 4; ++turn) {
      const std::string role = turn == 0 && i % 2 == 0 ? "system" : turn % 2 == 0 ? "user" : "assistant";
      messages.push_back({{"role", role}, {"content", RandomText(random, random() % 2000)}});
    }
    if (i % 3 == 0)
      messages.push_back(
          {{"role", "user"}, {"content", {{{"type", "text"}, {"text", RandomText(random, 500)}}}}});
    nlohmann::json body = {{"messages", messages}};
    const auto ids =
        IdsOf(**renderer, Endpoint::kChat, body.dump(i % 4 == 0 ? 2 : -1, ' ', /*ensure_ascii=*/i % 5 == 0));
    ASSERT_TRUE(ids.ok()) << ids.status();
    if (i % 3 == 0) messages.back()["content"] = messages.back()["content"][0]["text"];
    text::ChatInput input;
    input.messages_json = messages.dump();
    input.add_generation_prompt = true;
    const auto text = chat->Render(input);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(ids->ids, *(*renderer)->tokenizer().Encode(*text, /*add_special=*/false)) << *text;
  }
}

TEST(PromptRenderer, ContinuesAfterALimitOfUnknownText) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kVllm, 1 << 20);
  ASSERT_TRUE(renderer.ok());
  std::string lines;
  for (int i = 0; i < 1000; ++i) lines += "Line number " + std::to_string(i) + " of a text.\n";
  const std::string body = Chat(lines);
  const RequestBody read = *ReadRequestBody(Endpoint::kChat, body);
  const auto prompt = (*renderer)->Render(read);
  ASSERT_TRUE(prompt.ok());
  EXPECT_EQ((*renderer)->Tokenize(prompt->get(), 512).code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE((*renderer)->Tokenize(prompt->get()).ok());
  EXPECT_EQ((*prompt)->progress.ids, IdsOf(**renderer, Endpoint::kChat, body)->ids);
}

TEST(PromptRenderer, LeavesRequestsThatItCannotRenderToTheEngine) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kVllm, 1 << 20);
  ASSERT_TRUE(renderer.ok());
  for (const char* body :
       {R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]})",
        R"({"messages":[{"role":"user","content":"a"}],"chat_template":"{{ 1 }}"})",
        R"({"messages":[{"role":"user","content":"a"}],"continue_final_message":true})",
        R"({"messages":[{"role":"user","content":"\ud800"}]})", R"({"messages":["x"]})"}) {
    EXPECT_FALSE(IdsOf(**renderer, Endpoint::kChat, body).ok()) << body;
  }
  for (const char* body : {R"({"prompt":["a","b"]})", R"({"prompt":"\udc00"})"})
    EXPECT_FALSE(IdsOf(**renderer, Endpoint::kCompletions, body).ok()) << body;
}

TEST(PromptRenderer, DoesNotForwardPromptsThatEnginesRenderDifferently) {
  auto renderer = PromptRenderer::Open(kModel, Dialect::kVllm, 1 << 20);
  ASSERT_TRUE(renderer.ok());
  const auto parts = IdsOf(
      **renderer, Endpoint::kChat,
      R"({"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]})");
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_FALSE(parts->exact);
}

}  // namespace
}  // namespace moesaic::proxy
