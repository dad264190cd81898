#include "base/test_patience.h"

#include <gtest/gtest.h>

namespace moesaic::base {
namespace {

TEST(PatienceTest, LimitsGrowWithTheLoadAndTheSlownessOfTheMachine) {
  EXPECT_EQ(PatienceOf(kPatienceReferenceSeconds, 0, 2), 2);
  EXPECT_EQ(PatienceOf(kPatienceReferenceSeconds, 8, 2), 8);
  EXPECT_EQ(PatienceOf(5 * kPatienceReferenceSeconds, 8, 2), 10);
}

TEST(PatienceTest, FactorsAreBounded) {
  EXPECT_EQ(PatienceOf(0, 0, 2), 1);
  EXPECT_EQ(PatienceOf(1000, 0, 2), kMaxPatience);
  EXPECT_EQ(PatienceOf(0, 1000, 0), kMaxPatience);
}

TEST(PatienceTest, LimitsOfThisMachineNeverShrink) {
  const double limit = Patient(3);
  EXPECT_GE(limit, 3);
  EXPECT_GE(Patient(3), limit);
  EXPECT_LE(Patient(3), 3 * kMaxPatience);
}

}  // namespace
}  // namespace moesaic::base
