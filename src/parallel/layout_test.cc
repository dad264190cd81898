#include "parallel/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::parallel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Layout, NumbersRanksByReplicaStageAndShard) {
  const Layout layout = *Layout::Create({.tensor = 2, .pipeline = 3, .data = 2});
  ASSERT_EQ(layout.ranks(), 12);
  EXPECT_EQ(layout.At(9), (Coordinates{.replica = 1, .stage = 1, .shard = 1}));
  for (int rank = 0; rank < 12; ++rank) EXPECT_EQ(layout.RankAt(layout.At(rank)), rank);
  EXPECT_THAT(layout.TensorGroup(9), ElementsAre(8, 9));
  EXPECT_THAT(layout.ExpertGroup(9), ElementsAre(2, 3, 8, 9));
}

TEST(Layout, DividesExpertsAmongTheExpertGroup) {
  const Layout whole = *Layout::Create({.tensor = 2, .data = 2, .expert = 4});
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(whole.ExpertPart(rank), rank);
    EXPECT_EQ(whole.ExpertSlice(rank), 0);
  }
  const Layout sliced = *Layout::Create({.tensor = 4, .expert = 2});
  EXPECT_EQ(sliced.expert_slices(), 2);
  EXPECT_EQ(sliced.ExpertPart(3), 1);
  EXPECT_EQ(sliced.ExpertSlice(3), 1);
  // Replicas without expert parallelism have all experts each.
  const Layout replicas = *Layout::Create({.tensor = 2, .data = 2});
  EXPECT_EQ(replicas.expert_slices(), 2);
  EXPECT_EQ(replicas.ExpertPart(3), 0);
  EXPECT_EQ(replicas.ExpertSlice(3), 1);
}

TEST(Layout, RefusesImpossibleDegrees) {
  EXPECT_THAT(Message(Layout::Create({.tensor = 0}).status()), HasSubstr("tensor parallel size"));
  EXPECT_THAT(Message(Layout::Create({.tensor = 2, .expert = 3}).status()), HasSubstr("must divide"));
  EXPECT_THAT(Message(Layout::Create({.tensor = 2, .data = 2, .expert = 2}).status()), HasSubstr("1 or 4"));
  EXPECT_THAT(Message(Layout::Create({.tensor = 1 << 10, .pipeline = 1 << 10}).status()),
              HasSubstr("at most 65536 ranks"));
}

TEST(Layout, NamesDegreesAboveOne) {
  EXPECT_EQ(Name({}), "1 rank");
  EXPECT_EQ(Name({.tensor = 2, .pipeline = 4, .expert = 2}), "TP2 x PP4 x EP2");
}

TEST(Layout, ParsesSizesAndSplits) {
  const Layout layout = *Layout::Parse("pp=2,tp=2,ep=2,layers=20+28,experts=3+5");
  EXPECT_EQ(layout.degrees(), (Degrees{.tensor = 2, .pipeline = 2, .expert = 2}));
  EXPECT_THAT(layout.split().layers, ElementsAre(20, 28));
  EXPECT_EQ(layout.PartsText(), "tp=2,pp=2,ep=2,layers=20+28,experts=3+5");
  EXPECT_EQ(layout.Name(), "TP2 x PP2 x EP2, layers 20+28, experts 3+5");
  EXPECT_EQ(Layout::Parse(layout.PartsText())->split(), layout.split());
  EXPECT_EQ(Layout().PartsText(), "tp=1");
  EXPECT_EQ(Layout::Parse("dp=2,tp=2")->PartsText(), "tp=2") << "replicas have equal parts";
  EXPECT_EQ(Layout::Parse("ep=4,dp=2,tp=2")->PartsText(), "tp=2,dp=2,ep=4");
  const auto message = [](const char* text) { return Message(Layout::Parse(text).status()); };
  EXPECT_THAT(message(""), HasSubstr("positive numbers"));
  EXPECT_THAT(message("tp=0"), HasSubstr("positive numbers, found \"0\""));
  EXPECT_THAT(message("tp=2+2"), HasSubstr("as in"));
  EXPECT_THAT(message("tp=2,tp=2"), HasSubstr("tp twice"));
  EXPECT_THAT(message("cp=2"), HasSubstr("found \"cp=2\""));
  EXPECT_THAT(message("pp=2,layers=5"), HasSubstr("2 pipeline stages, found 1 numbers: 5"));
  EXPECT_THAT(message("pp=2,layers=5+"), HasSubstr("missing after \"5+\""));
  EXPECT_THAT(message("tp=2,"), HasSubstr("missing after \"tp=2,\""));
}

}  // namespace
}  // namespace moesaic::parallel
