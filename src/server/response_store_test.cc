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

TEST(ResponseStore, UpdatesWhatFits) {
  using Updated = ResponseStore::Updated;
  ResponseStore store({.most = 2, .bytes = 1000});
  EXPECT_TRUE(store.Add(One("a", "key")));
  EXPECT_TRUE(store.Add(One("b")));
  const auto append = [](size_t letters) {
    return [letters](StoredResponse& stored) {
      stored.messages.push_back(std::string(letters, 'y'));
      return true;
    };
  };
  EXPECT_EQ(store.Update("a", "key", append(10)), Updated::kYes);
  EXPECT_EQ(store.Find("a", "key")->messages.size(), 2u);
  EXPECT_EQ(store.Update("a", "", append(10)), Updated::kUnknown) << "another owner's";
  EXPECT_EQ(store.Update("a", "key", append(2000)), Updated::kTooLarge);
  EXPECT_EQ(store.Find("a", "key")->messages.size(), 2u);
  EXPECT_EQ(store.Update("a", "key",
                         [](StoredResponse& stored) {
                           stored.messages.clear();
                           return false;
                         }),
            Updated::kYes);
  EXPECT_EQ(store.Find("a", "key")->messages.size(), 2u) << "the change was withdrawn";
  store.Add(One("c"));
  EXPECT_TRUE(store.Find("a", "key")) << "an update makes an entry the newest";
  EXPECT_FALSE(store.Find("b", ""));
}

TEST(ResponseStore, MayKeepNone) {
  ResponseStore store({.most = 0});
  EXPECT_FALSE(store.Add(One("a")));
  EXPECT_FALSE(store.Find("a", ""));
}

}  // namespace
}  // namespace moesaic::server
