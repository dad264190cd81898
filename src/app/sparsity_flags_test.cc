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

TEST(SparsityFlagsTest, OffUnlessAskedFor) {
  EXPECT_FALSE(Resolved({})->digests);
  EXPECT_FALSE(Resolved({"--kv-sparsity", "off"})->digests);
}

TEST(SparsityFlagsTest, BoxesUnlessSketchesAreAskedFor) {
  EXPECT_EQ(Resolved({"--kv-sparsity", "dense"})->digest, engine::DigestKind::kBox);
  const auto sketches = Resolved({"--kv-sparsity-budget", "1024", "--kv-sparsity-digest", "sketch"});
  ASSERT_TRUE(sketches.ok()) << sketches.status();
  EXPECT_TRUE(sketches->digests);
  EXPECT_EQ(sketches->digest, engine::DigestKind::kSketch);
  EXPECT_EQ(sketches->defaults.budget, 1024);
}

TEST(SparsityFlagsTest, ADigestAloneIsRefused) {
  const auto alone = Resolved({"--kv-sparsity-digest", "sketch"});
  ASSERT_FALSE(alone.ok());
  EXPECT_NE(alone.status().message().find("need --kv-sparsity or --kv-sparsity-budget"), std::string::npos)
      << alone.status();
}

TEST(SparsityFlagsTest, OtherDigestsAreRefused) {
  EXPECT_THROW((void)Resolved({"--kv-sparsity", "dense", "--kv-sparsity-digest", "auto"}),
               CLI::ValidationError);
}

}  // namespace
}  // namespace moesaic::app
