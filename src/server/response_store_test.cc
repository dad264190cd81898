#include "server/response_store.h"

#include <gtest/gtest.h>

namespace moesaic::server {
namespace {

StoredResponse One(const std::string& id, const std::string& owner = "", size_t letters = 1) {
  return {id, owner, {{"id", id}}, Json::array({std::string(letters, 'x')})};
}

TEST(ResponseStore, KeepsTheNewest) {
  ResponseStore store({.most = 2});
  for (const char* id : {"a", "b", "c"}) store.Add(One(id));
  EXPECT_FALSE(store.Find("a", ""));
  ASSERT_TRUE(store.Find("c", ""));
  EXPECT_EQ(store.Find("c", "")->response["id"], "c");
  EXPECT_TRUE(store.Remove("b", ""));
  EXPECT_FALSE(store.Remove("b", ""));
  store.Add(One("d"));
  EXPECT_TRUE(store.Find("c", "")) << "the removed one made room";
}

TEST(ResponseStore, KeepsWithinItsBytes) {
  ResponseStore store({.most = 100, .bytes = 1000});
  store.Add(One("a", "", 600));
  store.Add(One("b", "", 600));
  EXPECT_FALSE(store.Find("a", ""));
  EXPECT_TRUE(store.Find("b", ""));
  store.Add(One("huge", "", 2000));
  EXPECT_TRUE(store.Find("b", "")) << "what is too large for all of the room drives nobody out";
  EXPECT_FALSE(store.Find("huge", ""));
}

TEST(ResponseStore, ShowsNobodyAnothersResponses) {
  ResponseStore store({});
  store.Add(One("a", "key one"));
  EXPECT_FALSE(store.Find("a", "key two"));
  EXPECT_FALSE(store.Remove("a", "key two"));
  EXPECT_TRUE(store.Find("a", "key one"));
}

TEST(ResponseStore, MayKeepNone) {
  ResponseStore store({.most = 0});
  store.Add(One("a"));
  EXPECT_FALSE(store.Find("a", ""));
}

}  // namespace
}  // namespace moesaic::server
