#include "app/familiar_flags.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace moesaic::app {
namespace {

using Words = std::vector<std::string>;

// A verb that serves a model.
FlagKind Lookup(std::string_view name) {
  static const std::map<std::string_view, FlagKind> kKnown = {{"MODEL", FlagKind::kValue},
                                                              {"--threads", FlagKind::kValue},
                                                              {"-t", FlagKind::kValue},
                                                              {"--dtype", FlagKind::kValue},
                                                              {"--ctx-size", FlagKind::kValue},
                                                              {"--max-sequences", FlagKind::kValue},
                                                              {"--kv-dtype", FlagKind::kValue},
                                                              {"--tool-format", FlagKind::kValue},
                                                              {"--system", FlagKind::kValue},
                                                              {"--data-parallel-size", FlagKind::kValue},
                                                              {"--reasoning-format", FlagKind::kValue},
                                                              {"--prefix-cache", FlagKind::kSwitch}};
  const auto found = kKnown.find(name);
  return found == kKnown.end() ? FlagKind::kUnknown : found->second;
}

FlagKind OnlyAModel(std::string_view name) { return name == "MODEL" ? FlagKind::kValue : FlagKind::kUnknown; }

Words Translated(const Words& words) {
  const auto result = TranslateFlags(words, Lookup);
  EXPECT_TRUE(result.ok()) << Message(result.status());
  return result.ok() ? result->words : Words();
}

std::string Refused(const Words& words) { return Message(TranslateFlags(words, Lookup).status()); }

TEST(FamiliarFlags, RenamesFlagsWithTheirValues) {
  EXPECT_EQ(Translated({"m", "--max-model-len", "4096", "--max-num-seqs=8", "--enable-prefix-caching"}),
            (Words{"m", "--ctx-size", "4096", "--max-sequences", "8", "--prefix-cache"}));
  for (const char* flag : {"-m", "--model", "-hf"}) {
    EXPECT_EQ(Translated({"-t", "4", flag, "org/name"}), (Words{"org/name", "-t", "4"})) << flag;
  }
  EXPECT_EQ(Translated({"--dtype", "bfloat16", "--dtype=float32"}),
            (Words{"--dtype", "bf16", "--dtype=f32"}));
}

TEST(FamiliarFlags, RenamesSizesOfLayouts) {
  EXPECT_EQ(Translated({"m", "-dp", "2", "--dp-size=3"}),
            (Words{"m", "--data-parallel-size", "2", "--data-parallel-size", "3"}));
}

TEST(FamiliarFlags, MapsValuesOrRejectsThemByName) {
  EXPECT_EQ(Translated({"--tool-call-parser", "qwen3_coder", "--reasoning-parser", "deepseek_r1"}),
            (Words{"--tool-format", "qwen3-coder", "--reasoning-format", "think"}));
  EXPECT_EQ(Translated({"--kv-cache-dtype", "auto"}), (Words{"--kv-dtype", "auto"}));
  EXPECT_EQ(Refused({"--kv-cache-dtype", "fp8"}),
            "--kv-cache-dtype fp8 is not supported; supported: auto, bfloat16, bf16, f32, float32, int8");
  EXPECT_TRUE(Refused({"--tool-call-parser", "pythonic"}).starts_with("--tool-call-parser pythonic is not"));
  EXPECT_TRUE(
      Refused({"--quantization=awq"}).starts_with("--quantization awq is not supported; supported: "));
}

TEST(FamiliarFlags, DropsFlagsWithoutMeaningAndAddsANote) {
  const auto result = TranslateFlags(
      {"m", "-ngl", "99", "--gpu-memory-utilization=0.9", "--trust-remote-code", "--quantization", "fp8"},
      Lookup);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->words, Words{"m"});
  ASSERT_EQ(result->notes.size(), 4U);
  EXPECT_EQ(result->notes[0], "-ngl has no effect: Moesaic computes on the CPU");
}

TEST(FamiliarFlags, KeepsOtherWords) {
  const Words words = {"m",      "--nonsense", "-x", "--system", "-ngl", "--max-model-len",
                       "--temp", "1",          "--", "-ngl"};
  EXPECT_EQ(Translated(words),
            (Words{"m", "--nonsense", "-x", "--system", "-ngl", "--ctx-size", "--temp", "1", "--", "-ngl"}));
  EXPECT_EQ(Translated({"--system"}), Words{"--system"});  // the parser reports the missing value
  EXPECT_EQ(Translated({"--kv-cache-dtype"}), Words{"--kv-cache-dtype"});
  EXPECT_EQ(Refused({"-m"}), "-m needs a value");
  EXPECT_EQ(TranslateFlags({"-ngl", "9", "--max-model-len", "9"}, OnlyAModel)->words,
            (Words{"-ngl", "9", "--max-model-len", "9"}));
}

TEST(FamiliarFlags, ListsFlagsThatTheVerbAccepts) {
  const Words names = FamiliarNames(Lookup);
  for (const char* name : {"--max-model-len", "-m", "--gpu-memory-utilization", "--kv-cache-dtype"}) {
    EXPECT_TRUE(std::ranges::binary_search(names, name)) << name;
  }
  EXPECT_FALSE(std::ranges::binary_search(names, "--temp"));  // the verb has no --temperature
  EXPECT_FALSE(std::ranges::binary_search(FamiliarNames(OnlyAModel), "-ngl"));
}

}  // namespace
}  // namespace moesaic::app
