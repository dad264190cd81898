#include "engine/even_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::engine {
namespace {

using testing::Each;
using testing::ElementsAre;

TEST(EvenLimits, OneReplicaWithRowsHasTheFullLimit) {
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{3, 5000}, {0, 0}, {0, 0}}, 512), Each(512));
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{0, 0}, {0, 0}}, 512), Each(512));
}

TEST(EvenLimits, ReplicasWithPromptsHaveTheFullLimit) {
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{3, 5000}, {0, 700}}, 512), Each(512));
}

TEST(EvenLimits, APromptAmongDecodesIsReadAtTheMean) {
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{0, 5000}, {8, 0}}, 512), Each(260));
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{0, 5000}, {8, 300}, {0, 0}}, 512), Each(410));
}

TEST(EvenLimits, NeitherSmallChunksNorDecodesAreCut) {
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{0, 150}, {2, 0}}, 512), Each(kMinStepRows));
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{300, 0}, {2, 0}}, 512), ElementsAre(300, 151));
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{0, 50}, {20, 0}}, 64), Each(64));
}

TEST(EvenLimits, AReplicaWithTheMostDecodesReadsItsPrompts) {
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{200, 20}, {10, 0}}, 512), ElementsAre(220, 128));
  EXPECT_THAT(EvenLimits(std::vector<StepDemand>{{200, 190}, {10, 0}}, 512), ElementsAre(232, 200));
}

}  // namespace
}  // namespace moesaic::engine
