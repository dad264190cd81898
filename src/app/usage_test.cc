#include "app/usage.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace moesaic::app {
namespace {

// Returns the usage line for `words` after "moesaic", for a verb with some flags.
std::string LineFor(std::vector<std::string> words) {
  CLI::App root{"", "moesaic"};
  root.require_subcommand(1);
  CLI::App* verb = root.add_subcommand("run", "");
  std::string model, kind;
  int count = 0;
  std::vector<int> ids;
  verb->add_option("MODEL", model, "")->required();
  verb->add_option("--count,--number", count, "");
  verb->add_option("--ids", ids, "")->delimiter(',');
  verb->add_option("--kind", kind, "")->check(CLI::IsMember({"a", "b"}));
  std::reverse(words.begin(), words.end());
  try {
    root.parse(words);
  } catch (const CLI::ParseError& error) {
    return UsageLine(root, error);
  }
  return "";
}

TEST(UsageLine, NamesTheFlagTheFaultAndTheHelp) {
  const std::string help = "; see moesaic run --help\n";
  EXPECT_EQ(LineFor({"run", "m", "--count", "3"}), "");
  EXPECT_EQ(LineFor({"run"}), "moesaic run: MODEL is required" + help);
  EXPECT_EQ(LineFor({"run", "m", "--count"}), "moesaic run: --count needs a value" + help);
  EXPECT_EQ(LineFor({"run", "m", "--count", "x"}),
            "moesaic run: --count must be a number, found \"x\"" + help);
  EXPECT_EQ(LineFor({"run", "m", "--count", "3", "--number", "4"}),
            "moesaic run: --count or --number may be given once" + help);
  EXPECT_EQ(LineFor({"run", "m", "--kind", "c"}), "moesaic run: --kind: c not in {a,b}" + help);
  EXPECT_EQ(LineFor({"run", "m", "--colour", "red"}), "moesaic run: there is no flag --colour" + help);
  EXPECT_EQ(LineFor({"run", "m", "again"}), "moesaic run: unexpected argument \"again\"" + help);
  EXPECT_EQ(LineFor({"run", "--hlep"}), "moesaic run: there is no flag --hlep (did you mean --help?)" + help);
  EXPECT_EQ(LineFor({"run", "m", "--cuont=3"}),
            "moesaic run: there is no flag --cuont (did you mean --count?)" + help);
  EXPECT_EQ(LineFor({"--colour"}), "moesaic: there is no flag --colour; see moesaic --help\n");
}

TEST(UnknownVerbLine, NamesTheNearestVerb) {
  CLI::App root{"", "moesaic"};
  root.add_subcommand("chat", "");
  root.add_subcommand("serve", "");
  EXPECT_EQ(UnknownVerbLine(root, "chta"),
            "moesaic: there is no verb \"chta\" (did you mean chat?); moesaic --help lists them\n");
  EXPECT_EQ(UnknownVerbLine(root, "frobnicate"),
            "moesaic: there is no verb \"frobnicate\"; moesaic --help lists them\n");
}

}  // namespace
}  // namespace moesaic::app
