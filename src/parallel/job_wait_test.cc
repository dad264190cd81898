#include "parallel/job_wait.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/transport/local_transport.h"
#include "parallel/counted_transport.h"

namespace moesaic::parallel {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::StartsWith;

/// Rank 0 of a job, whose peers are as a test sets them.
class ObservedTransport : public CountedTransport {
 public:
  explicit ObservedTransport(comm::Transport& job)
      : CountedTransport(job), dead(job.size(), false), silent(job.size(), 0) {}
  bool failed(int peer) const override { return dead[peer]; }
  double SilentSeconds(int peer) const override { return silent[peer]; }

  std::vector<bool> dead;
  std::vector<double> silent;
};

class CauseOfTest : public testing::Test {
 protected:
  std::string Cause() const { return Message(CauseOf(late_, ranks_)); }

  const Status late_ = absl::DeadlineExceededError("waiting for rank 1");
  comm::LocalJob job_{4};
  ObservedTransport ranks_{job_.end(0)};
};

TEST_F(CauseOfTest, IsTheDeadRankEvenIfAnotherRankIsSilent) {
  ranks_.dead[2] = true;
  ranks_.silent[3] = 5;
  EXPECT_THAT(Cause(), StartsWith("rank 2 died"));
  EXPECT_EQ(CauseOf(late_, ranks_).code(), StatusCode::kUnavailable);
}

TEST_F(CauseOfTest, IsTheSilentRankAfterTheTimeLimit) {
  ranks_.silent = {0, 0.9, 0, 3.6};
  EXPECT_EQ(Cause(), "rank 3 did not answer for 3.6 s: waiting for rank 1");
  const Status other = InvalidArgument("rank 1 has another model");
  EXPECT_EQ(CauseOf(other, ranks_), other);
}

TEST_F(CauseOfTest, IsNoRankThatWasSilentForAMoment) {
  ranks_.silent = {0, 1.2, 0, 3.6};
  EXPECT_THAT(Cause(), StartsWith("rank 3 did not answer"));
  ranks_.silent = {0, 3.1, 0, 3.6};
  EXPECT_THAT(Cause(), StartsWith("rank 1 did not answer for 3.1 s, rank 3 did not answer for 3.6 s: "));
}

TEST_F(CauseOfTest, IsTheSilenceOfARankThatWasExcluded) {
  ranks_.dead[3] = true;
  ranks_.silent[3] = 4.25;
  EXPECT_THAT(Cause(), StartsWith("rank 3 did not answer for 4.2 s"));
}

TEST_F(CauseOfTest, IsTheFailureItselfIfNoRankIsKnown) { EXPECT_EQ(Cause(), "waiting for rank 1"); }

TEST(SilentRanks, AreComparedAmongThoseThatCount) {
  comm::LocalJob job(4);
  ObservedTransport ranks(job.end(0));
  ranks.silent = {0, 50, 2, 40};
  ranks.dead[3] = true;
  EXPECT_THAT(SilentRanks(ranks), ElementsAre(1));
  EXPECT_THAT(SilentRanks(ranks, std::vector<int>{1}), ElementsAre(2));
  EXPECT_THAT(SilentRanks(ranks, std::vector<int>{1, 2}), IsEmpty());
}

}  // namespace
}  // namespace moesaic::parallel
