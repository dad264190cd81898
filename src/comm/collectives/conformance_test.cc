#include "comm/collectives/conformance.h"

#include <gtest/gtest.h>

#include "comm/transport/local_transport.h"

namespace moesaic::comm {
namespace {

TEST(ConformanceTest, EveryCollectiveEqualsBruteForceOnThreads) {
  const RankRunner runner = [](int ranks, const std::function<void(Transport&)>& body) {
    RunRanks(ranks, body);
  };
  int64_t runs = 0;
  const Status status = CheckCollectivesOn(runner, 9, /*large_ranks=*/9, /*samples=*/2, &runs);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_GT(runs, 3000);
}

}  // namespace
}  // namespace moesaic::comm
