#include "engine/stop_strings.h"

#include <gtest/gtest.h>

namespace moesaic::engine {
namespace {

TEST(StopStringsTest, EmitsTextThatCannotBeginAStop) {
  StopStrings stops({"###"});
  EXPECT_EQ(stops.Feed("abc"), "abc");
  EXPECT_FALSE(stops.matched());
}

TEST(StopStringsTest, HoldsBackAPossibleStopUntilItIsDecided) {
  StopStrings stops({"###"});
  EXPECT_EQ(stops.Feed("a#"), "a");
  EXPECT_EQ(stops.Feed("#b"), "##b");
  EXPECT_EQ(stops.Feed("##"), "");
  EXPECT_EQ(stops.Finish(), "##");
}

TEST(StopStringsTest, CutsAtTheEarliestStopAcrossPieces) {
  StopStrings stops({"END", "\n\n"});
  EXPECT_EQ(stops.Feed("one E"), "one ");
  EXPECT_EQ(stops.Feed("N\n\nEND"), "EN");
  EXPECT_TRUE(stops.matched());
  EXPECT_EQ(stops.match(), "\n\n");
  EXPECT_EQ(stops.Feed("more"), "");
  EXPECT_EQ(stops.Finish(), "");
}

TEST(StopStringsTest, FindsAStopThatOverlapsItsOwnBeginning) {
  StopStrings stops({"aab"});
  EXPECT_EQ(stops.Feed("aa"), "");
  EXPECT_EQ(stops.Feed("a"), "a");
  EXPECT_EQ(stops.Feed("b!"), "");
  EXPECT_TRUE(stops.matched());
}

TEST(StopStringsTest, IgnoresEmptyStops) {
  StopStrings stops({""});
  EXPECT_EQ(stops.Feed("x"), "x");
  EXPECT_FALSE(stops.matched());
}

TEST(StopStringsTest, AStopEndsInAPieceThatIsSearched) {
  StopStrings stops({"ab", "xaby"});
  EXPECT_EQ(stops.Feed("xab", /*searched=*/false), "") << "may begin the other one";
  EXPECT_EQ(stops.Feed("c"), "xabc");
  EXPECT_EQ(stops.Feed("a", /*searched=*/false), "");
  EXPECT_EQ(stops.Feed("b"), "");
  EXPECT_EQ(stops.match(), "ab");
}

// The output is the same for every division into pieces.
TEST(StopStringsTest, OutputDoesNotDependOnThePieces) {
  const std::string text = "abcabcabdab<|end|>abc";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    StopStrings stops({"<|end|>", "abdx"});
    std::string out;
    for (size_t at = 0; at < text.size(); at += piece) out += stops.Feed(text.substr(at, piece));
    out += stops.Finish();
    EXPECT_EQ(out, "abcabcabdab") << piece;
  }
}

}  // namespace
}  // namespace moesaic::engine
