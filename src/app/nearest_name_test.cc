#include "app/nearest_name.h"

#include <gtest/gtest.h>

namespace moesaic::app {
namespace {

TEST(NearestName, FindsTheIntendedName) {
  const std::vector<std::string> names = {"--max-sequences", "--max-queue", "--top-k", "--top-p", "--seed"};
  EXPECT_EQ(NearestName("--max-sequnces", names), "--max-sequences");
  EXPECT_EQ(NearestName("--max_queue", names), "--max-queue");
  EXPECT_EQ(NearestName("-seed", names), "--seed");
  EXPECT_EQ(NearestName("--esed", names), "--seed");
  EXPECT_EQ(NearestName("--topp", names), "--top-p");
  EXPECT_EQ(NearestName("--colour", names), "");
  EXPECT_EQ(NearestName("--", names), "");
  EXPECT_EQ(NearestName("--seed", {}), "");
}

TEST(NearestName, ReturnsTheFirstOfEquallyNearNames) { EXPECT_EQ(NearestName("cat", {"bat", "rat"}), "bat"); }

}  // namespace
}  // namespace moesaic::app
