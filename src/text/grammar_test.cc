#include "text/grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/test_data.h"

namespace moesaic::text {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kImEnd = 151645;

class GrammarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto folder = SharedData() / "tokenizers" / "hf" / "qwen3";
    SKIP_WITHOUT(folder);
    static const StatusOr<Tokenizer> tokenizer = Tokenizer::FromJson(
        ReadMaybeGzip(folder / "tokenizer.json.gz"), ReadMaybeGzip(folder / "tokenizer_config.json"));
    ASSERT_TRUE(tokenizer.ok()) << Message(tokenizer.status());
    static const StatusOr<GrammarCompiler> compiler =
        GrammarCompiler::Create(*tokenizer, std::vector<int32_t>{kImEnd});
    ASSERT_TRUE(compiler.ok()) << Message(compiler.status());
    tokenizer_ = &*tokenizer;
    compiler_ = &*compiler;
  }

  std::vector<int32_t> Encode(std::string_view text) const { return *tokenizer_->Encode(text, false); }

  std::vector<uint32_t> Mask(Grammar* grammar) const {
    std::vector<uint32_t> mask((static_cast<size_t>(tokenizer_->vocab_size()) + 31) / 32, 0xffffffff);
    EXPECT_TRUE(grammar->ComputeMask(mask).ok());
    return mask;
  }

  static bool Allows(const std::vector<uint32_t>& mask, int32_t id) { return mask[id / 32] >> (id % 32) & 1; }

  /// Returns whether the grammar accepts the whole text as complete.
  bool Accepts(Grammar grammar, std::string_view text) const {
    for (const int32_t id : Encode(text)) {
      if (*grammar.CountValid(std::vector<int32_t>{id}) == 0) return false;
      if (!grammar.Commit(id).ok()) return false;
    }
    return *grammar.IsAccepting();
  }

  const Tokenizer* tokenizer_ = nullptr;
  const GrammarCompiler* compiler_ = nullptr;
};

// Schemas with labelled instances, and the library's known result for each schema.
TEST_F(GrammarTest, JsonSchemasAcceptOnlyValidInstances) {
  const auto path = SharedData() / "structured" / "maskbench_dev.jsonl.gz";
  SKIP_WITHOUT(path);
  int refused = 0, accepted = 0, rejected = 0;
  for (const auto& row : ReadRows(path)) {
    SCOPED_TRACE(row["file"].get<std::string>());
    StatusOr<Grammar> grammar = compiler_->Compile(GrammarKind::kJsonSchema, row["schema"].dump());
    if (row["llguidance"].contains("json_error")) {
      EXPECT_FALSE(grammar.ok());
      ++refused;
      continue;
    }
    if (!grammar.ok()) {
      ADD_FAILURE() << Message(grammar.status());
      continue;
    }
    for (const auto& instance : row["tests"]) {
      const bool valid = instance["valid"].get<bool>();
      EXPECT_EQ(Accepts(*grammar->Fork(), instance["data"].dump()), valid) << instance["data"].dump();
      ++(valid ? accepted : rejected);
    }
  }
  EXPECT_GT(refused, 50);
  EXPECT_GT(accepted, 500);
  EXPECT_GT(rejected, 500);
}

TEST_F(GrammarTest, MaskAgreesWithCommit) {
  StatusOr<Grammar> grammar = compiler_->Compile(GrammarKind::kRegex, "(ab|cd)+[0-9]{2}");
  ASSERT_TRUE(grammar.ok()) << Message(grammar.status());
  for (const int32_t id : Encode("abcd42")) {
    EXPECT_FALSE(*grammar->IsAccepting());
    const auto mask = Mask(&*grammar);
    EXPECT_TRUE(Allows(mask, id));
    EXPECT_FALSE(Allows(mask, kImEnd));
    for (int32_t other = 0; other < 2000; ++other) {
      EXPECT_EQ(*grammar->CountValid(std::vector<int32_t>{other}) == 1, Allows(mask, other)) << other;
    }
    ASSERT_TRUE(grammar->Commit(id).ok());
  }
  EXPECT_TRUE(*grammar->IsAccepting());
  const auto mask = Mask(&*grammar);
  EXPECT_TRUE(Allows(mask, kImEnd)) << "complete, and cannot continue";
  EXPECT_FALSE(Allows(mask, Encode("a")[0]));
}

TEST_F(GrammarTest, StopsAfterEndOfText) {
  StatusOr<Grammar> grammar = compiler_->Compile(GrammarKind::kRegex, "a*");
  ASSERT_TRUE(grammar.ok());
  EXPECT_TRUE(*grammar->IsAccepting());
  EXPECT_FALSE(grammar->IsStopped());
  EXPECT_TRUE(grammar->Commit(kImEnd).ok());
  EXPECT_TRUE(grammar->IsStopped());
}

TEST_F(GrammarTest, RejectsTokensThatAreNotAllowed) {
  StatusOr<Grammar> grammar = compiler_->Compile(GrammarKind::kRegex, "a+");
  ASSERT_TRUE(grammar.ok());
  EXPECT_FALSE(grammar->Commit(Encode("b")[0]).ok());
}

TEST_F(GrammarTest, ForksIndependentState) {
  StatusOr<Grammar> grammar = compiler_->Compile(GrammarKind::kLark, "start: \"x\" (\"yy\" | \"zz\")");
  ASSERT_TRUE(grammar.ok()) << Message(grammar.status());
  ASSERT_TRUE(grammar->Commit(Encode("x")[0]).ok());
  const auto before = Mask(&*grammar);
  StatusOr<Grammar> fork = grammar->Fork();
  ASSERT_TRUE(fork.ok());
  ASSERT_TRUE(grammar->Commit(Encode("y")[0]).ok());
  EXPECT_NE(Mask(&*grammar), before);
  EXPECT_EQ(Mask(&*fork), before) << "the fork stays where it was";
}

TEST_F(GrammarTest, RejectsInvalidGrammars) {
  EXPECT_THAT(Message(compiler_->Compile(GrammarKind::kJsonSchema, "{").status()), HasSubstr("JSON schema"));
  EXPECT_FALSE(compiler_->Compile(GrammarKind::kJsonSchema, R"({"type":"martian"})").ok());
  EXPECT_THAT(Message(compiler_->Compile(GrammarKind::kJsonSchema, R"({"not":{}})").status()),
              HasSubstr("not"));
  EXPECT_FALSE(compiler_->Compile(GrammarKind::kRegex, "(").ok());
  EXPECT_FALSE(compiler_->Compile(GrammarKind::kLark, "start:: x").ok());
  EXPECT_FALSE(compiler_->Compile(GrammarKind::kRegex, "\xff").ok());
  EXPECT_FALSE(GrammarCompiler::Create(*tokenizer_, {}).ok());
  EXPECT_FALSE(GrammarCompiler::Create(*tokenizer_, std::vector<int32_t>{1 << 30}).ok());
  StatusOr<Grammar> grammar = compiler_->Compile(GrammarKind::kRegex, "a");
  ASSERT_TRUE(grammar.ok());
  std::vector<uint32_t> short_mask(3);
  EXPECT_FALSE(grammar->ComputeMask(short_mask).ok());
}

}  // namespace
}  // namespace moesaic::text
