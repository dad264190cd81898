#include "server/api_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::server {
namespace {

using testing::HasSubstr;

TEST(ParseKeyFile, ReadsNamesRolesAndLimits) {
  const auto entries = ParseKeyFile(
      "# the team\n\nalice  secret-a  requests_per_minute=60 tokens_per_minute=9000\n"
      "ops\tsecret#o role=admin  # on call\r\n");
  ASSERT_TRUE(entries.ok()) << Message(entries.status());
  ASSERT_EQ(entries->size(), 2u);
  EXPECT_EQ((*entries)[0].name, "alice");
  EXPECT_FALSE((*entries)[0].admin);
  EXPECT_EQ((*entries)[0].limits, (RateLimits{.requests = 60, .tokens = 9000}));
  EXPECT_TRUE((*entries)[1].admin);
  const KeyRing ring(*entries);
  EXPECT_TRUE(ring.has_admin());
  EXPECT_EQ(ring.Find("secret-a")->tenant->name, "alice");
  EXPECT_EQ(ring.Find("secret#o")->tenant->name, "ops");
  EXPECT_FALSE(ring.Find("secret"));
  EXPECT_FALSE(ring.Find(""));
}

TEST(ParseKeyFile, NamesTheLineAndTheFault) {
  for (const auto& [text, fault] : std::vector<std::pair<const char*, const char*>>{
           {"", "the file has no key"},
           {"# only\n", "the file has no key"},
           {"a k\nalice\n", "line 2: \"alice\" has no key"},
           {"al/ice k\n", "line 1: a name has letters"},
           {"api-key-1 k\n", "line 1: names that begin with \"api-key-\""},
           {"a k role=root\n", "line 1: role must be admin or user, found \"root\""},
           {"a k requests_per_minute=0\n",
            "requests_per_minute must be a whole number of at least 1, found \"0\""},
           {"a k tokens_per_minute=many\n", "tokens_per_minute must be a whole number"},
           {"a k limit=3\n", "line 1: there is no setting \"limit\""},
           {"a k\nb k\n", "line 2: the key is used by line 1 already"},
           {"a k\na l role=admin\n", "line 2: \"a\" has another role or other limits than in line 1"}}) {
    EXPECT_THAT(Message(ParseKeyFile(text).status()), HasSubstr(fault)) << text;
  }
}

TEST(KeyRing, KeepsTenantsOverAReload) {
  const auto entries = ParseKeyFile("alice old\nbob b\n");
  ASSERT_TRUE(entries.ok());
  KeyRing ring(*entries);
  const auto alice = ring.Find("old")->tenant;
  ++alice->requests;
  ring.Replace(*ParseKeyFile("alice old\nalice new\n"));  // while her key is rotated
  EXPECT_EQ(ring.Find("new")->tenant, alice);
  ring.Replace(*ParseKeyFile("alice new requests_per_minute=2\n"));
  EXPECT_FALSE(ring.Find("old"));
  EXPECT_FALSE(ring.Find("b"));
  EXPECT_EQ(ring.Find("new")->tenant->requests, 1);
  EXPECT_EQ(alice->request_bucket.Look().limit, 2);
  EXPECT_THAT(KeyMetricsText(&ring), HasSubstr("moesaic:key_requests_total{key=\"bob\"} 0\n"));
}

TEST(UnnamedKey, BelongsToTheSameTenantInAnyOrderOfFlags) {
  EXPECT_EQ(UnnamedKey("api-key-1", "k", false).id, UnnamedKey("api-key-2", "k", true).id);
  EXPECT_NE(UnnamedKey("api-key-1", "k", false).id, UnnamedKey("api-key-1", "l", false).id);
  EXPECT_EQ(UnnamedKey("x", "a", false).id.find('/'), std::string::npos);
}

TEST(CacheNamespace, NoSaltFindsAnotherTenantsBlocks) {
  EXPECT_EQ(CacheNamespace("", ""), "");
  EXPECT_EQ(CacheNamespace("", "salt"), "salt");
  const std::string alice = CacheNamespace("alice", "s");
  EXPECT_NE(CacheNamespace("bob", "s"), alice);
  EXPECT_NE(CacheNamespace("", alice), alice);  // shared, or without keys
  EXPECT_NE(CacheNamespace("", CacheNamespace("", alice)), CacheNamespace("", alice));
  EXPECT_NE(CacheNamespace("bob", alice), alice);
  EXPECT_NE(CacheNamespace("alice", ""), alice);
}

}  // namespace
}  // namespace moesaic::server
