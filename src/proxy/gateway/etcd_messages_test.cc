#include "proxy/gateway/etcd_messages.h"

#include <gtest/gtest.h>

namespace moesaic::proxy {
namespace {

TEST(EtcdMessages, RequestsNameTheRangeOfAPrefix) {
  EXPECT_EQ(EtcdRangeRequest("/e/"), R"({"key":"L2Uv","range_end":"L2Uw"})");  // "/e/", "/e0"
  EXPECT_EQ(EtcdRangeRequest("a\xFF"), R"({"key":"Yf8=","range_end":"Yg=="})");
  EXPECT_EQ(EtcdRangeRequest(""), R"({"key":"AA==","range_end":"AA=="})");
  EXPECT_EQ(EtcdWatchRequest("/e/", 7),
            R"({"create_request":{"key":"L2Uv","range_end":"L2Uw","start_revision":"7"}})");
}

TEST(EtcdMessages, ReadsLists) {
  const auto list = ReadEtcdRange(
      R"({"header":{"cluster_id":"1","revision":"42"},"kvs":[{"key":"L2Uv","value":"aHR0cDovL2E=","lease":"1"}],"count":"1"})");
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(list->revision, 42);
  ASSERT_EQ(list->changes.size(), 1U);
  EXPECT_EQ(list->changes[0].key, "/e/");
  EXPECT_EQ(list->changes[0].value, "http://a");
  EXPECT_TRUE(ReadEtcdRange(R"({"header":{"revision":"42"}})")->changes.empty());
}

TEST(EtcdMessages, ReadsChanges) {
  const auto changes = ReadEtcdWatch(
      R"({"result":{"header":{"revision":"43"},"events":[{"kv":{"key":"YQ==","value":"Yg=="}},{"type":"DELETE","kv":{"key":"YQ=="}}]}})");
  ASSERT_TRUE(changes.ok()) << changes.status();
  ASSERT_EQ(changes->changes.size(), 2U);
  EXPECT_FALSE(changes->changes[0].deleted);
  EXPECT_EQ(changes->changes[0].value, "b");
  EXPECT_TRUE(changes->changes[1].deleted);
  EXPECT_TRUE(
      ReadEtcdWatch(R"({"result":{"header":{"revision":"9"},"canceled":true,"compact_revision":"8"}})")
          ->canceled);
}

TEST(EtcdMessages, RefusesDamagedAnswers) {
  for (const char* text : {"", "[]", "{}", R"({"header":{}})", R"({"header":{"revision":"x"}})",
                           R"({"header":{"revision":"1"},"kvs":[{"key":"?"}]})"}) {
    EXPECT_FALSE(ReadEtcdRange(text).ok()) << text;
  }
  EXPECT_FALSE(ReadEtcdWatch(R"({"error":{"grpc_code":14,"message":"no leader"}})").ok());
}

}  // namespace
}  // namespace moesaic::proxy
