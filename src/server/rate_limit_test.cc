#include "server/rate_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::server {
namespace {

using std::chrono::seconds;

TEST(TokenBucket, RefillsEvenlyUpToItsLimit) {
  const TokenBucket::Clock::time_point start{seconds(1000)};
  TokenBucket bucket;
  EXPECT_TRUE(bucket.TryTake(start));  // the limit is removed
  bucket.SetLimit(2, start);
  EXPECT_TRUE(bucket.TryTake(start));
  EXPECT_TRUE(bucket.TryTake(start));
  EXPECT_FALSE(bucket.TryTake(start));
  EXPECT_DOUBLE_EQ(bucket.Look(start).wait, 30);
  EXPECT_DOUBLE_EQ(bucket.Look(start).reset, 60);
  EXPECT_FALSE(bucket.TryTake(start + seconds(29)));
  EXPECT_TRUE(bucket.TryTake(start + seconds(31)));
  EXPECT_EQ(bucket.Look(start + seconds(1000)).remaining, 2);
}

TEST(TokenBucket, BecomesNegativeByUsedUnits) {
  const TokenBucket::Clock::time_point start{seconds(1000)};
  TokenBucket bucket;
  bucket.SetLimit(60, start);
  bucket.Charge(100, start);
  EXPECT_EQ(bucket.Look(start).remaining, 0);
  EXPECT_DOUBLE_EQ(bucket.Look(start).wait, 41);
  EXPECT_FALSE(bucket.TryTake(start + seconds(40)));
  EXPECT_TRUE(bucket.TryTake(start + seconds(41)));
}

TEST(TokenBucket, ANewLimitNeverRefills) {
  const TokenBucket::Clock::time_point start{seconds(1000)};
  TokenBucket bucket;
  bucket.SetLimit(10, start);
  bucket.Charge(8, start);
  bucket.SetLimit(100, start);
  EXPECT_EQ(bucket.Look(start).remaining, 2);
  bucket.SetLimit(1, start);
  EXPECT_EQ(bucket.Look(start).remaining, 1);
}

TEST(RateLimitHeaders, EqualThoseOfOpenAi) {
  const TokenBucket::State requests{.limit = 60, .remaining = 59, .reset = 0.25, .wait = 0};
  const TokenBucket::State tokens{.limit = 9000, .remaining = 0, .reset = 64.5, .wait = 1};
  EXPECT_THAT(RateLimitHeaders(requests, {}),
              testing::ElementsAre(testing::Pair("x-ratelimit-limit-requests", "60"),
                                   testing::Pair("x-ratelimit-remaining-requests", "59"),
                                   testing::Pair("x-ratelimit-reset-requests", "250ms")));
  EXPECT_EQ(RateLimitHeaders({}, tokens)[2].second, "1m5s");
}

}  // namespace
}  // namespace moesaic::server
