#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "text/gguf_test_vocab.h"
#include "text/test_data.h"

namespace moesaic::text {
namespace {

using ::testing::HasSubstr;

std::filesystem::path Tokenizers() { return SharedData() / "tokenizers"; }

StatusOr<Tokenizer> LoadHf(const std::string& name) {
  return Tokenizer::FromJson(ReadMaybeGzip(Tokenizers() / "hf" / name / "tokenizer.json.gz"),
                             ReadMaybeGzip(Tokenizers() / "hf" / name / "tokenizer_config.json"));
}

StatusOr<Tokenizer> LoadGguf(const std::filesystem::path& path) {
  return Tokenizer::FromGguf(GgufTestReader(ReadMaybeGzip(path)).Read());
}

std::string Concatenated(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool skip_special) {
  StreamingDecoder decoder(tokenizer, skip_special);
  std::string text;
  for (const int32_t id : ids) text += *decoder.Push(id);
  return text + *decoder.Finish();
}

/// Encodes and checks an invariant of every tokenizer: streaming equals decoding all ids.
std::vector<int32_t> EncodeAndCheck(const Tokenizer& tokenizer, const std::string& text) {
  StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(text, false);
  if (!ids.ok()) {
    ADD_FAILURE() << Message(ids.status());
    return {};
  }
  for (const bool skip : {false, true}) {
    EXPECT_EQ(Concatenated(tokenizer, *ids, skip), *tokenizer.Decode(*ids, skip)) << text;
  }
  return *ids;
}

void CompareGoldens(const Tokenizer& tokenizer, const char* column, bool round_trips) {
  int compared = 0, came_back = 0;
  for (const auto& row : ReadRows(Tokenizers() / "goldens_dev.jsonl.gz")) {
    const std::string text = row["text"].get<std::string>();
    const auto ids = EncodeAndCheck(tokenizer, text);
    EXPECT_EQ(ids, row[column].get<std::vector<int32_t>>()) << text;
    if (row.contains("qwen3_decoded") && std::string_view(column) == "qwen3") {
      EXPECT_EQ(*tokenizer.Decode(ids, false), row["qwen3_decoded"].get<std::string>());
    } else if (round_trips) {
      EXPECT_EQ(*tokenizer.Decode(ids, false), text);
    } else {
      EXPECT_EQ(*tokenizer.Encode(*tokenizer.Decode(ids, false), false), ids);
    }
    came_back += *tokenizer.Decode(ids, false) == text ? 1 : 0;
    ++compared;
  }
  EXPECT_EQ(compared, 543);
  std::cout << compared << " texts compared, of which " << came_back << " come back as they were\n";
}

TEST(TokenizerGoldens, MatchQwen3) {
  SKIP_WITHOUT(Tokenizers());
  StatusOr<Tokenizer> tokenizer = LoadHf("qwen3");
  ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
  CompareGoldens(*tokenizer, "qwen3", false);  // it composes characters first
}

TEST(TokenizerGoldens, MatchDeepSeekV3) {
  SKIP_WITHOUT(Tokenizers());
  StatusOr<Tokenizer> tokenizer = LoadHf("deepseek-v3");
  ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
  CompareGoldens(*tokenizer, "deepseek_v3", true);
  EXPECT_EQ(*tokenizer->Encode("Who are you?", true), (std::vector<int32_t>{0, 18387, 477, 440, 33}));
}

TEST(TokenizerGoldens, MatchSmolLm2FromGguf) {
  SKIP_WITHOUT(Tokenizers());
  const auto gguf = std::filesystem::path(MOESAIC_SOURCE_DIR) / "models" / "moesaic-smol" / "build" /
                    "SmolLM2-135M-Instruct.Q4_1.gguf";
  SKIP_WITHOUT(gguf);
  StatusOr<Tokenizer> tokenizer = LoadGguf(gguf);
  ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
  CompareGoldens(*tokenizer, "smollm2", true);
}

// Qwen's tiktoken file has the ranks of Qwen3's vocabulary, which has more special tokens.
TEST(TokenizerGoldens, MatchQwenTiktoken) {
  SKIP_WITHOUT(Tokenizers());
  StatusOr<Tokenizer> tokenizer =
      Tokenizer::FromTiktoken(ReadMaybeGzip(Tokenizers() / "qwen.tiktoken.gz"), "", TiktokenStyle::kQwen);
  ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
  int compared = 0;
  for (const auto& row : ReadRows(Tokenizers() / "goldens_dev.jsonl.gz")) {
    const auto expected = row["qwen3"].get<std::vector<int32_t>>();
    if (std::ranges::any_of(expected, [](int32_t id) { return id > 151645; })) continue;
    EXPECT_EQ(EncodeAndCheck(*tokenizer, row["text"].get<std::string>()), expected);
    ++compared;
  }
  EXPECT_GT(compared, 500);
  EXPECT_EQ(tokenizer->TokenToId("<|extra_0|>"), 151646);
}

// Compares Kimi-K2's splitting rule with tiktoken itself on the available ranks.
TEST(TokenizerGoldens, MatchKimiTiktoken) {
  SKIP_WITHOUT(Tokenizers());
  const char* config =
      R"({"added_tokens_decoder":{"151643":{"content":"[BOS]","special":true}},"bos_token":"[BOS]"})";
  StatusOr<Tokenizer> tokenizer =
      Tokenizer::FromTiktoken(ReadMaybeGzip(Tokenizers() / "qwen.tiktoken.gz"), config, TiktokenStyle::kKimi);
  ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
  const auto expected = nlohmann::json::parse(ReadMaybeGzip(
      std::filesystem::path(MOESAIC_SOURCE_DIR) / "src" / "text" / "testdata" / "kimi_tiktoken.json"));
  EXPECT_EQ(EncodeAndCheck(*tokenizer, expected["mixed"].get<std::string>()),
            expected["mixed_ids"].get<std::vector<int32_t>>());
  size_t compared = 0;
  for (const auto& row : ReadRows(Tokenizers() / "goldens_dev.jsonl.gz")) {
    const std::string text = row["text"].get<std::string>();
    const auto ids = EncodeAndCheck(*tokenizer, text);
    const uLong crc = crc32(0, reinterpret_cast<const Bytef*>(ids.data()), static_cast<uInt>(ids.size() * 4));
    EXPECT_EQ(crc, expected["crc32"][compared].get<uint32_t>()) << text;
    ++compared;
  }
  EXPECT_EQ(compared, expected["crc32"].size());
}

class GgufVocabTest : public ::testing::TestWithParam<const char*> {};

// Uses llama.cpp's own inputs, with ids from the models' own tokenizers.
TEST_P(GgufVocabTest, EqualsRecordedIds) {
  const auto folder = Tokenizers() / "gguf-vocab";
  SKIP_WITHOUT(folder);
  const std::string name = std::string("ggml-vocab-") + GetParam() + ".gguf";
  StatusOr<Tokenizer> tokenizer = LoadGguf(folder / (name + ".gz"));
  ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
  std::istringstream expected(ReadMaybeGzip(folder / (name + ".out")));
  const std::string inputs = ReadMaybeGzip(folder / (name + ".inp"));
  constexpr std::string_view kEnd = "\n__ggml_vocab_test__\n";
  int compared = 0;
  for (size_t at = 0; at < inputs.size();) {
    const size_t end = std::min(inputs.find(kEnd, at), inputs.size());
    const std::string text = inputs.substr(at, end - at);
    at = end + kEnd.size();
    std::string line;
    ASSERT_TRUE(std::getline(expected, line));
    std::istringstream numbers(line);
    const std::vector<int32_t> ids{std::istream_iterator<int32_t>(numbers), {}};
    EXPECT_EQ(EncodeAndCheck(*tokenizer, text), ids) << text;
    ++compared;
  }
  EXPECT_GE(compared, 40);
}

INSTANTIATE_TEST_SUITE_P(LlamaCpp, GgufVocabTest,
                         ::testing::Values("deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "mpt",
                                           "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

/// Returns random text that is difficult for tokenizers: many scripts, combining marks, controls, white
/// space, digits.
std::string RandomText(std::mt19937* random) {
  constexpr uint32_t kRanges[][2] = {
      {0x20, 0x7f},     {0, 0x20},          {0xa0, 0x250},    {0x300, 0x370},   {0x400, 0x500},
      {0x600, 0x700},   {0x900, 0x980},     {0x2000, 0x2100}, {0x3040, 0x3100}, {0x4e00, 0x9fff},
      {0xac00, 0xd7a4}, {0x1f300, 0x1f700}, {0xe000, 0xe010}, {0xfff0, 0xffff}, {0x10fff0, 0x10ffff}};
  std::string text;
  const int length = static_cast<int>((*random)() % 60);
  for (int i = 0; i < length; ++i) {
    const auto& range = kRanges[(*random)() % std::size(kRanges)];
    const uint32_t code = range[0] + (*random)() % (range[1] - range[0]);
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else if (code < 0x800) {
      text += {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
    } else if (code < 0x10000) {
      text += {static_cast<char>(0xe0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 0x3f)),
               static_cast<char>(0x80 | (code & 0x3f))};
    } else {
      text += {static_cast<char>(0xf0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 0x3f)),
               static_cast<char>(0x80 | (code >> 6 & 0x3f)), static_cast<char>(0x80 | (code & 0x3f))};
    }
  }
  return text;
}

class TokenizerProperties : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(Tokenizers());
    const std::string name = GetParam();
    StatusOr<Tokenizer> made =
        name == "phi-3" ? LoadGguf(Tokenizers() / "gguf-vocab" / "ggml-vocab-phi-3.gguf.gz") : LoadHf(name);
    ASSERT_TRUE(made.ok()) << Message(made.status());
    tokenizer_ = *made;
  }
  std::optional<Tokenizer> tokenizer_;
};

TEST_P(TokenizerProperties, RandomTextRoundTrips) {
  std::mt19937 random(1);
  // Qwen3 normalizes: the decoded text is in composed form, so only ids are compared there.
  const bool normalises = std::string_view(GetParam()) == "qwen3";
  for (int i = 0; i < 2000; ++i) {
    const std::string text = RandomText(&random);
    const auto ids = EncodeAndCheck(*tokenizer_, text);
    const std::string decoded = *tokenizer_->Decode(ids, false);
    if (normalises) {
      EXPECT_EQ(*tokenizer_->Encode(decoded, false), ids);
    } else {
      EXPECT_EQ(decoded, text);
    }
  }
}

// For arbitrary ids in arbitrary order, streaming equals decoding, and every piece is complete UTF-8.
TEST_P(TokenizerProperties, RandomIdsStreamLikeDecode) {
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    std::vector<int32_t> ids(random() % 30);
    for (int32_t& id : ids) {
      // The low ids are single bytes, which form broken characters.
      id = static_cast<int32_t>(random() % (random() % 2 == 0 ? 300 : tokenizer_->vocab_size() + 10)) - 2;
    }
    for (const bool skip : {false, true}) {
      StreamingDecoder decoder(*tokenizer_, skip);
      std::string text;
      for (const int32_t id : ids) {
        const std::string piece = *decoder.Push(id);
        EXPECT_NO_THROW(static_cast<void>(nlohmann::json(piece).dump())) << "not UTF-8";
        text += piece;
      }
      text += *decoder.Finish();
      EXPECT_EQ(text, *tokenizer_->Decode(ids, skip));
    }
  }
}

TEST_P(TokenizerProperties, TokenBytesSpellTheText) {
  for (const std::string text :
       {"Hello, world! 1234\n\n  x", "日本語 ünïcödé 🙂🏽", "\t\ttabs  and   spaces "}) {
    std::string bytes;
    const std::vector<int32_t> ids = *tokenizer_->Encode(text, false);
    for (const int32_t id : ids) bytes += tokenizer_->TokenBytes(id);
    if (bytes.size() == text.size() + 1) bytes.erase(0, 1);  // SentencePiece's leading space
    EXPECT_EQ(bytes, text);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerProperties, ::testing::Values("qwen3", "deepseek-v3", "phi-3"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST(Tokenizer, HoldsBackIncompleteCharacters) {
  SKIP_WITHOUT(Tokenizers());
  StatusOr<Tokenizer> tokenizer = LoadHf("qwen3");
  ASSERT_TRUE(tokenizer.ok());
  const auto ids = *tokenizer->Encode("𓀀", false);
  ASSERT_GT(ids.size(), 1u);
  StreamingDecoder decoder(*tokenizer, false);
  for (size_t i = 0; i + 1 < ids.size(); ++i) EXPECT_EQ(*decoder.Push(ids[i]), "");
  EXPECT_EQ(*decoder.Push(ids.back()), "𓀀");
  EXPECT_EQ(*decoder.Push(ids[0]), "");
  EXPECT_EQ(*decoder.Finish(), "\xef\xbf\xbd") << "cut in the middle";
  EXPECT_EQ(*decoder.Push(ids[0]), "") << "a new text";
}

TEST(Tokenizer, HasSpecialTokens) {
  SKIP_WITHOUT(Tokenizers());
  StatusOr<Tokenizer> tokenizer = LoadHf("qwen3");
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ(tokenizer->special_tokens().eos->id, 151645);
  EXPECT_EQ(tokenizer->special_tokens().eos->text, "<|im_end|>");
  EXPECT_FALSE(tokenizer->special_tokens().bos.has_value());
  EXPECT_EQ(tokenizer->TokenToId("<|im_start|>"), 151644);
  EXPECT_EQ(tokenizer->IdToToken(151644), "<|im_start|>");
  EXPECT_TRUE(tokenizer->IsSpecial(151644));
  EXPECT_EQ(tokenizer->vocab_size(), 151669);
  EXPECT_EQ(*tokenizer->Encode("<|im_start|>a", false), (std::vector<int32_t>{151644, 64}));
  EXPECT_EQ(*tokenizer->Decode(std::vector<int32_t>{151644, 64}, true), "a");
  EXPECT_EQ(tokenizer->TokenToId("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer->IdToToken(-1), "");
}

TEST(Tokenizer, RejectsInvalidUtf8) {
  SKIP_WITHOUT(Tokenizers());
  StatusOr<Tokenizer> tokenizer = LoadHf("qwen3");
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_THAT(Message(tokenizer->Encode("ab\xff", false).status()), HasSubstr("not UTF-8 at byte 2"));
}

// A vocabulary of single bytes, enough to test the effect of a config.
std::string TinyJson(const std::string& post_processor) {
  return R"({"version":"1.0","added_tokens":[{"id":3,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,)"
         R"("normalized":false,"special":true}],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel",)"
         R"("add_prefix_space":false,"trim_offsets":true,"use_regex":true},"post_processor":)" +
         post_processor +
         R"(,"decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false},)"
         R"("model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}})";
}

TEST(TokenizerConfig, WrapsTextAsConfigured) {
  const char* config =
      R"({"tokenizer_class":"PreTrainedTokenizerFast","bos_token":"<s>","add_bos_token":true,)"
      R"("added_tokens_decoder":{"4":{"content":"</s>","special":true}},"eos_token":"</s>",)"
      R"("add_eos_token":true})";
  StatusOr<Tokenizer> tokenizer = Tokenizer::FromJson(TinyJson("null"), config);
  ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
  EXPECT_EQ(*tokenizer->Encode("ab", true), (std::vector<int32_t>{3, 2, 4}));
  EXPECT_EQ(*tokenizer->Encode("ab", false), (std::vector<int32_t>{2}));
  EXPECT_EQ(tokenizer->special_tokens().bos->id, 3);
  EXPECT_EQ(tokenizer->special_tokens().eos->id, 4);
}

TEST(TokenizerConfig, RejectsInvalidConfigs) {
  EXPECT_FALSE(Tokenizer::FromJson("{}", "").ok());
  EXPECT_FALSE(Tokenizer::FromJson("[", "").ok());
  EXPECT_FALSE(Tokenizer::FromJson(TinyJson("null"), "[]").ok());
  EXPECT_THAT(
      Message(Tokenizer::FromJson(TinyJson("null"), R"({"added_tokens_decoder":{"9":{"content":"x"}}})")
                  .status()),
      HasSubstr("added_tokens_decoder"));
  EXPECT_THAT(
      Message(Tokenizer::FromJson(TinyJson("null"), R"({"added_tokens_decoder":{"a":{"content":"x"}}})")
                  .status()),
      HasSubstr("invalid entry \"a\""));
  EXPECT_EQ(Tokenizer::FromFolder("/nonexistent").status().code(), StatusCode::kNotFound);
}

TEST(Tiktoken, RejectsInvalidVocabularies) {
  const auto message = [](const char* ranks) {
    return Message(Tokenizer::FromTiktoken(ranks, "", TiktokenStyle::kKimi).status());
  };
  EXPECT_THAT(message(""), HasSubstr("empty"));
  EXPECT_THAT(message("YQ== 0\nYg== x\n"), HasSubstr("line 2"));
  EXPECT_THAT(message("YQ== 0\nYg== 0\n"), HasSubstr("rank 0 occurs twice"));
  EXPECT_THAT(message("YQ== 0\nYQ== 1\n"), HasSubstr("twice"));
  EXPECT_THAT(message("?? 0\n"), HasSubstr("line 1"));
}

GgufVocab TinyGguf() {
  GgufVocab vocab;
  vocab.model = "gpt2";
  vocab.pre = "qwen2";
  vocab.tokens = {"a", "b", "ab", "<s>"};
  vocab.token_types = {1, 1, 1, 3};
  vocab.merges = {"a b"};
  vocab.bos_id = 3;
  return vocab;
}

TEST(GgufVocab, AddsBosIfConfigured) {
  GgufVocab vocab = TinyGguf();
  EXPECT_EQ(*Tokenizer::FromGguf(vocab)->Encode("ab<s>", true), (std::vector<int32_t>{2, 3}));
  vocab.add_bos = true;
  EXPECT_EQ(*Tokenizer::FromGguf(vocab)->Encode("ab<s>", true), (std::vector<int32_t>{3, 2, 3}));
}

TEST(GgufVocab, ConvertsToHubFiles) {
  for (const char* name : {"qwen2", "phi-3"}) {
    const auto path = Tokenizers() / "gguf-vocab" / (std::string("ggml-vocab-") + name + ".gguf.gz");
    SKIP_WITHOUT(path);
    const GgufVocab vocab = GgufTestReader(ReadMaybeGzip(path)).Read();
    StatusOr<HubFiles> files = HubFilesFromGguf(vocab, "{{ messages }}");
    ASSERT_TRUE(files.ok()) << Message(files.status());
    StatusOr<Tokenizer> there = Tokenizer::FromJson(files->tokenizer_json, files->tokenizer_config_json);
    StatusOr<Tokenizer> here = Tokenizer::FromGguf(vocab);
    ASSERT_TRUE(there.ok() && here.ok());
    const std::string text = "Hello, wörld! <|endoftext|> 1234";
    EXPECT_EQ(*there->Encode(text, true), *here->Encode(text, true));
    EXPECT_EQ(there->special_tokens().eos->id, here->special_tokens().eos->id);
  }
}

TEST(GgufVocab, ErrorNamesInvalidEntry) {
  const auto message = [](void (*change)(GgufVocab*)) {
    GgufVocab vocab = TinyGguf();
    change(&vocab);
    return Message(Tokenizer::FromGguf(vocab).status());
  };
  EXPECT_THAT(message([](GgufVocab* v) { v->pre = "martian"; }), HasSubstr("\"martian\""));
  EXPECT_THAT(message([](GgufVocab* v) { v->model = "t5"; }), HasSubstr("\"t5\""));
  EXPECT_THAT(message([](GgufVocab* v) { v->tokens.clear(); }), HasSubstr("tokens is empty"));
  EXPECT_THAT(message([](GgufVocab* v) { v->token_types.pop_back(); }), HasSubstr("token_type has 3"));
  EXPECT_THAT(message([](GgufVocab* v) { v->bos_id = 99; }), HasSubstr("bos_token_id"));
  EXPECT_THAT(message([](GgufVocab* v) { v->merges = {"a"}; }), HasSubstr("not two tokens"));
  EXPECT_THAT(message([](GgufVocab* v) { v->merges = {"a x"}; }), HasSubstr("joins an unknown token"));
  EXPECT_THAT(message([](GgufVocab* v) { v->model = "llama"; }), HasSubstr("scores has 0"));
}

// As DeepSeek's folders: transformers gives texts a BOS, and so do our GGUF files of the same models.
TEST(TokenizerConfig, LlamaClassesAddBosAlsoWithAPostProcessor) {
  const char* byte_level =
      R"({"type":"ByteLevel","add_prefix_space":true,"trim_offsets":false,"use_regex":true})";
  for (const char* name : {"LlamaTokenizer", "LlamaTokenizerFast"}) {
    const std::string config =
        R"({"bos_token":"<s>","add_bos_token":true,"add_eos_token":false,"tokenizer_class":")" +
        std::string(name) + "\"}";
    StatusOr<Tokenizer> tokenizer = Tokenizer::FromJson(TinyJson(byte_level), config);
    ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
    EXPECT_EQ(*tokenizer->Encode("ab", true), (std::vector<int32_t>{3, 2}));
    EXPECT_EQ(*tokenizer->Encode("ab", false), (std::vector<int32_t>{2}));
  }
}

}  // namespace
}  // namespace moesaic::text
