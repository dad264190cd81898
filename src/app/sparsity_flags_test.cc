#include "app/sparsity_flags.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>

namespace moesaic::app {
namespace {

StatusOr<engine::SparsityOptions> Resolved(std::vector<std::string> words) {
  CLI::App app;
  Verb verb(&app);
  SparsityFlags flags;
  AddSparsityFlags(verb, flags, {"off", "dense", "decode", "all"});
  std::reverse(words.begin(), words.end());
  app.parse(words);
  return flags.Resolve();
}

TEST(SparsityFlagsTest, SparsityIsOffByDefault) {
  EXPECT_FALSE(Resolved({})->key_summaries);
  EXPECT_FALSE(Resolved({"--kv-sparsity", "off"})->key_summaries);
}

TEST(SparsityFlagsTest, SummariesAreBoxesByDefault) {
  EXPECT_EQ(Resolved({"--kv-sparsity", "dense"})->summary_kind, engine::KeySummaryKind::kBox);
  const auto sketches = Resolved({"--kv-sparsity-budget", "1024", "--kv-sparsity-summary", "sketch"});
  ASSERT_TRUE(sketches.ok()) << sketches.status();
  EXPECT_TRUE(sketches->key_summaries);
  EXPECT_EQ(sketches->summary_kind, engine::KeySummaryKind::kSketch);
  EXPECT_EQ(sketches->defaults.budget, 1024);
}

TEST(SparsityFlagsTest, ASummaryKindAloneIsRefused) {
  const auto alone = Resolved({"--kv-sparsity-summary", "sketch"});
  ASSERT_FALSE(alone.ok());
  EXPECT_NE(alone.status().message().find("need --kv-sparsity or --kv-sparsity-budget"), std::string::npos)
      << alone.status();
}

TEST(SparsityFlagsTest, OtherSummaryKindsAreRefused) {
  EXPECT_THROW((void)Resolved({"--kv-sparsity", "dense", "--kv-sparsity-summary", "auto"}),
               CLI::ValidationError);
}

}  // namespace
}  // namespace moesaic::app
