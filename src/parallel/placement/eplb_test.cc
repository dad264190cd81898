#include "parallel/placement/eplb.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "parallel/placement/random.h"

namespace moesaic::parallel {
namespace {

struct Case {
  LoadMatrix load;
  EplbSizes sizes;
};

double Value(int kind, uint64_t random) {
  switch (kind) {
    case 0:
      return static_cast<double>(random % 4);
    case 1:
      return static_cast<double>(random % 100000);
    case 2:
      return static_cast<double>(random >> 11) / 9007199254740992.0;
    case 3:
      return static_cast<double>(random >> 40) / 7.0;
    case 4:
      return 5;
    default:
      return random >> 62 ? static_cast<double>(random % 1000) : 0;
  }
}

// The generator of tests/golden/eplb_goldens.py.
Case CaseOf(int number) {
  Random random(number);
  Case result;
  result.load.layers = 1 + random.Below(3);
  result.sizes.nodes = 1 + random.Below(4);
  result.sizes.gpus = result.sizes.nodes * (1 + random.Below(6));
  result.sizes.groups = result.sizes.nodes * (1 + random.Below(4));
  const int group_size = random.Below(8) ? 1 + random.Below(12) : 32 + random.Below(100);
  const int experts = result.load.experts = result.sizes.groups * group_size;
  const int gpus = result.sizes.gpus;
  result.sizes.replicas = (experts + gpus - 1) / gpus * gpus;
  result.sizes.replicas += gpus * random.Below(4);
  const int kind = random.Below(6);
  for (int i = 0; i < result.load.layers * experts; ++i)
    result.load.tokens.push_back(Value(kind, random.Next()));
  if (random.Below(4) == 0 && result.sizes.nodes > 1) ++result.sizes.groups;
  return result;
}

uint32_t Hash(const EplbPlan& plan) {
  uint64_t value = 0xCBF29CE484222325;
  for (const std::vector<int64_t>* array : {&plan.phy2log, &plan.log2phy, &plan.logcnt}) {
    for (const int64_t number : *array) value = (value ^ static_cast<uint64_t>(number)) * 0x100000001B3;
  }
  return static_cast<uint32_t>(value ^ (value >> 32));
}

TEST(Eplb, EqualsThePublishedFileOnTenThousandInputs) {
  std::ifstream file(MOESAIC_SOURCE_DIR "/tests/golden/eplb_hashes.npy", std::ios::binary);
  const std::string npy{std::istreambuf_iterator<char>(file), {}};
  constexpr int kCases = 10000;
  ASSERT_GT(npy.size(), kCases * sizeof(uint32_t));
  const char* hashes = npy.data() + npy.size() - kCases * sizeof(uint32_t);
  std::map<bool, int> policies;  // by whether the policy is hierarchical
  for (int number = 0; number < kCases; ++number) {
    const Case input = CaseOf(number);
    const auto plan = PlanEplb(input.load, input.sizes);
    ASSERT_TRUE(plan.ok()) << number << ": " << plan.status();
    uint32_t golden = 0;
    std::memcpy(&golden, hashes + number * sizeof(golden), sizeof(golden));
    ASSERT_EQ(Hash(*plan), golden) << "case " << number;
    ++policies[input.sizes.groups % input.sizes.nodes == 0];
  }
  EXPECT_GT(policies[false], 1000);
  EXPECT_GT(policies[true], 1000);
}

// README.md of EPLB.
TEST(Eplb, ReproducesTheExampleOfTheReadme) {
  const LoadMatrix load{2, 12, {90, 132, 40,  61, 104, 165, 39,  4,   73,  56, 183, 86,
                                20, 107, 104, 64, 19,  197, 187, 157, 172, 86, 16,  27}};
  const auto plan = PlanEplb(load, {.replicas = 16, .groups = 4, .nodes = 2, .gpus = 8});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::vector<int64_t> expected = {5, 6,  5, 7, 8, 4,  3, 4, 10, 9, 10, 2, 0, 1, 11, 1,
                                         7, 10, 6, 8, 6, 11, 8, 9, 2,  4, 5,  1, 5, 0, 3,  1};
  EXPECT_EQ(plan->phy2log, expected);
}

// https://github.com/vllm-project/vllm/pull/18343 reports such plans.
TEST(Eplb, KeepsTheDefectOfTwoReplicasOnOneRank) {
  const LoadMatrix load{1, 4, {100, 1, 1, 1}};
  const auto plan = PlanEplb(load, {.replicas = 8, .gpus = 2});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(std::count(plan->phy2log.begin(), plan->phy2log.begin() + 4, 0) > 1, true);
}

TEST(Eplb, RefusesSizesThatThePublishedFileRefuses) {
  const LoadMatrix load{1, 12, std::vector<double>(12, 1)};
  EXPECT_EQ(PlanEplb(load, {.replicas = 13, .gpus = 4}).status().message(),
            "replicas must be a multiple of the 4 GPUs, found 13");
  EXPECT_EQ(PlanEplb(load, {.replicas = 8, .gpus = 4}).status().message(),
            "replicas must be at least the 12 experts, found 8");
  EXPECT_EQ(PlanEplb(load, {.replicas = 16, .groups = 8, .nodes = 4, .gpus = 4}).status().message(),
            "groups must divide the 12 experts, found 8");
  EXPECT_EQ(PlanEplb(load, {.replicas = 15, .groups = 4, .nodes = 2, .gpus = 5}).status().message(),
            "nodes must divide the 5 GPUs, found 2");
}

// One expert with thousands of copies makes log2phy large.
TEST(Eplb, RefusesResultsThatNeedTooMuchMemory) {
  LoadMatrix load{1, 8192, std::vector<double>(8192, 0)};
  load.tokens[5] = 1;
  EXPECT_EQ(
      PlanEplb(load, {.replicas = 8192 + 4096, .gpus = 1}).status().message(),
      "log2phy of 1 layers, 8192 experts and 4097 copies of an expert must have at most 33554432 values");
  EXPECT_TRUE(PlanEplb(load, {.replicas = 8192 + 1024, .gpus = 1}).ok());
}

}  // namespace
}  // namespace moesaic::parallel
