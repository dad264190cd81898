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
  EXPECT_EQ(store.Find("a", ""), nullptr);
  ASSERT_NE(store.Find("c", ""), nullptr);
  EXPECT_EQ(store.Find("c", "")->response["id"], "c");
  EXPECT_TRUE(store.Remove("b", ""));
  EXPECT_FALSE(store.Remove("b", ""));
  store.Add(One("d"));
  EXPECT_NE(store.Find("c", ""), nullptr) << "the removed one made room";
}

TEST(ResponseStore, KeepsWithinItsBytes) {
  ResponseStore store({.most = 100, .bytes = 1000});
  store.Add(One("a", "", 600));
  store.Add(One("b", "", 600));
  EXPECT_EQ(store.Find("a", ""), nullptr);
  EXPECT_NE(store.Find("b", ""), nullptr);
  store.Add(One("huge", "", 2000));
  EXPECT_EQ(store.Find("huge", ""), nullptr);
}

TEST(ResponseStore, ShowsNobodyAnothersResponses) {
  ResponseStore store({});
  store.Add(One("a", "key one"));
  EXPECT_EQ(store.Find("a", "key two"), nullptr);
  EXPECT_FALSE(store.Remove("a", "key two"));
  EXPECT_NE(store.Find("a", "key one"), nullptr);
}

TEST(ResponseStore, MayKeepNone) {
  ResponseStore store({.most = 0});
  store.Add(One("a"));
  EXPECT_EQ(store.Find("a", ""), nullptr);
}

}  // namespace
}  // namespace moesaic::server
