#include "app/rank_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace moesaic::app {
namespace {

TEST(CoresOfRank, RanksWithOneMaskDivideIt) {
  // Host a did not bind its ranks; on host b, a launcher has bound two ranks to each socket.
  const std::vector<std::string> hosts = {"a", "a", "b", "b", "b", "b", "a"};
  const std::vector<std::string> masks = {"0-7", "0-7", "0-3", "0-3", "4-7", "4-7", "0-7"};
  EXPECT_EQ(CoresOfRank(0, hosts, masks), (CoreShare{0, 3}));
  EXPECT_EQ(CoresOfRank(6, hosts, masks), (CoreShare{2, 3}));
  EXPECT_EQ(CoresOfRank(2, hosts, masks), (CoreShare{0, 2}));
  EXPECT_EQ(CoresOfRank(3, hosts, masks), (CoreShare{1, 2}));
  EXPECT_EQ(CoresOfRank(5, hosts, masks), (CoreShare{1, 2}));
}

TEST(CoresOfRank, ARankThatIsBoundKeepsItsCores) {
  const std::vector<std::string> hosts = {"a", "a"}, masks = {"0-3", "4-7"};
  EXPECT_EQ(CoresOfRank(1, hosts, masks), (CoreShare{0, 1}));
}

TEST(LayoutOf, ExpertsThatMoveStartInEqualNumbers) {
  RankFlags flags;
  flags.degrees.data = 2;
  flags.expert_parallel = true;
  flags.rebalance_s = 5;
  EXPECT_TRUE(LayoutOf(flags).ok());
  const auto refused =
      testing::HasSubstr("--rebalance-experts excludes --expert-split and --expert-placement");
  flags.experts = "9,7";
  EXPECT_THAT(LayoutOf(flags).status().message(), refused);
  flags.experts.clear();
  flags.placement = "placement.json";
  EXPECT_THAT(LayoutOf(flags).status().message(), refused);
}

TEST(LayoutOf, ALayoutExcludesSizes) {
  RankFlags flags;
  flags.layout = "tp=2,pp=2";
  EXPECT_EQ(LayoutOf(flags)->degrees(), (parallel::Degrees{.tensor = 2, .pipeline = 2}));
  flags.degrees.data = 3;
  EXPECT_EQ(LayoutOf(flags).status().message(),
            "--layout tp=2,pp=2 excludes sizes, found DP3; remove the layout or the sizes");
  flags.degrees.data = 1;
  flags.expert_parallel = true;
  EXPECT_THAT(LayoutOf(flags).status().message(), testing::HasSubstr("found --enable-expert-parallel;"));
  flags.expert_parallel = false;
  flags.layers = "1,3";
  EXPECT_THAT(LayoutOf(flags).status().message(), testing::HasSubstr("found --layer-split 1,3;"));
}

}  // namespace
}  // namespace moesaic::app
