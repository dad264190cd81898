#include "server/response_store.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace moesaic::server {
namespace {

using Updated = ResponseStore::Updated;

StoredResponse One(const std::string& id, const std::string& owner = "", size_t letters = 1) {
  return {.id = id,
          .owner = owner,
          .response = {{"id", id}},
          .messages = Json::array({std::string(letters, 'x')})};
}

StoredResponse Talk(const std::string& id, const std::string& owner = "") {
  return {
      .id = id, .owner = owner, .response = {{"id", id}}, .messages = Json::array(), .is_conversation = true};
}

TEST(ResponseStore, RemovesTheOldestEntryAtItsLimit) {
  ResponseStore store({.most = 2});
  for (const char* id : {"a", "b", "c"}) store.Add(One(id));
  EXPECT_FALSE(store.Find("a", ""));
  ASSERT_TRUE(store.Find("c", ""));
  EXPECT_EQ(store.Find("c", "")->response["id"], "c");
  EXPECT_TRUE(store.Remove("b", ""));
  EXPECT_FALSE(store.Remove("b", ""));
  store.Add(One("d"));
  EXPECT_TRUE(store.Find("c", "")) << "the removed entry made room";
}

TEST(ResponseStore, KeepsEntriesThatAreRead) {
  ResponseStore store({.most = 2});
  store.Add(One("a"));
  store.Add(One("b"));
  EXPECT_TRUE(store.Find("a", ""));
  store.Add(One("c"));
  EXPECT_TRUE(store.Find("a", "")) << "it was read after \"b\"";
  EXPECT_FALSE(store.Find("b", ""));
}

TEST(ResponseStore, StaysWithinItsByteLimit) {
  ResponseStore store({.most = 100, .bytes = 1000});
  store.Add(One("a", "", 600));
  store.Add(One("b", "", 600));
  EXPECT_FALSE(store.Find("a", ""));
  EXPECT_TRUE(store.Find("b", ""));
  store.Add(One("huge", "", 2000));
  EXPECT_TRUE(store.Find("b", "")) << "an entry that is too large evicts nothing";
  EXPECT_FALSE(store.Find("huge", ""));
}

// A request that continues an entry parses it whole.
TEST(ResponseStore, LimitsOneEntry) {
  ResponseStore store({.most = 100, .bytes = 10'000, .entry_bytes = 1000});
  EXPECT_FALSE(store.Add(One("large", "", 1000)));
  EXPECT_TRUE(store.Add(One("fits", "", 900)));
  store.Add(Talk("talk"));
  const Json item = Json::array({std::string(400, 'x')});
  for (const Updated expected : {Updated::kYes, Updated::kYes, Updated::kTooLarge})
    EXPECT_EQ(store.Append("talk", "", item), expected);
  EXPECT_EQ(store.Find("talk", "")->messages.size(), 2u);
}

TEST(ResponseStore, HidesEntriesOfOtherOwners) {
  ResponseStore store({});
  store.Add(One("a", "key one"));
  EXPECT_FALSE(store.Find("a", "key two"));
  EXPECT_FALSE(store.Remove("a", "key two"));
  EXPECT_TRUE(store.Find("a", "key one"));
}

TEST(ResponseStore, EvictsFromTheOwnerWithTheMostBytes) {
  ResponseStore store({.most = 1000, .bytes = 2000});
  store.Add(One("kept", "small", 200));
  for (int i = 0; i < 100; ++i) store.Add(One(std::to_string(i), "large", 200));
  EXPECT_TRUE(store.Find("kept", "small"));
  EXPECT_TRUE(store.Find("99", "large"));
  EXPECT_FALSE(store.Find("0", "large"));
  EXPECT_FALSE(store.Add(One("all", "large", 1900))) << "it would take the other owner's memory";
  EXPECT_TRUE(store.Find("99", "large")) << "a refused entry evicts nothing";
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(store.Add(One("small" + std::to_string(i), "small", 200)));
  EXPECT_TRUE(store.Find("kept", "small")) << "its owner holds less than the other";
}

TEST(ResponseStore, EvictsFromTheOwnerWithTheMostEntries) {
  ResponseStore store({.most = 4});
  store.Add(One("large", "one", 1000));
  for (const char* id : {"a", "b", "c", "d", "e"}) store.Add(One(id, "two"));
  EXPECT_TRUE(store.Find("large", "one"));
  EXPECT_FALSE(store.Find("b", "two"));
  EXPECT_TRUE(store.Find("e", "two"));
}

TEST(ResponseStore, UpdatesEntriesThatFit) {
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

TEST(ResponseStore, AppendsToConversations) {
  ResponseStore store({.most = 2, .bytes = 200});
  store.Add(Talk("talk", "key"));
  EXPECT_EQ(store.Append("talk", "key", Json::array()), Updated::kYes);
  EXPECT_EQ(store.Append("talk", "key", Json::array({"a", "b"})), Updated::kYes);
  EXPECT_EQ(store.Append("talk", "key", Json::array({"c"})), Updated::kYes);
  EXPECT_EQ(store.Find("talk", "key")->messages, Json::array({"a", "b", "c"}));
  EXPECT_EQ(store.Append("talk", "key", Json::array({std::string(300, 'x')})), Updated::kTooLarge);
  EXPECT_EQ(store.Find("talk", "key")->messages.size(), 3u);
  EXPECT_EQ(store.Append("talk", "", Json::array({"d"})), Updated::kUnknown) << "another owner's";
  store.Add(One("response", "key"));
  EXPECT_EQ(store.Append("response", "key", Json::array({"d"})), Updated::kUnknown) << "no conversation";
}

TEST(ResponseStore, CountsTheBytesOfAppendedItems) {
  ResponseStore store({.most = 1000, .bytes = 2000});
  store.Add(Talk("talk"));
  store.Add(One("old", "", 500));
  for (int i = 0; i < 15; ++i)
    EXPECT_EQ(store.Append("talk", "", Json::array({std::string(100, 'x')})), Updated::kYes);
  EXPECT_FALSE(store.Find("old", "")) << "the conversation needs its memory";
  EXPECT_EQ(store.Find("talk", "")->messages.size(), 15u);
  EXPECT_TRUE(store.Remove("talk", ""));
  EXPECT_TRUE(store.Add(One("a", "", 900)));
  EXPECT_TRUE(store.Add(One("b", "", 900)));
  EXPECT_TRUE(store.Find("a", "")) << "nothing is counted twice";
}

// An update parses outside the lock. Items that are appended meanwhile are not lost.
TEST(ResponseStore, RepeatsUpdatesOfEntriesThatChangedMeanwhile) {
  ResponseStore store({});
  store.Add(Talk("talk"));
  int calls = 0;
  EXPECT_EQ(store.Update("talk", "",
                         [&](StoredResponse& stored) {
                           if (++calls == 1) store.Append("talk", "", Json::array({"meanwhile"}));
                           stored.response["metadata"] = "changed";
                           return true;
                         }),
            Updated::kYes);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(store.Find("talk", "")->messages, Json::array({"meanwhile"}));
  EXPECT_EQ(store.Find("talk", "")->response["metadata"], "changed");
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&store] {
      for (int i = 0; i < 50; ++i) store.Append("talk", "", Json::array({"x"}));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store.Find("talk", "")->messages.size(), 201u);
}

TEST(ResponseStore, KeepsNoEntryAtALimitOfZero) {
  ResponseStore store({.most = 0});
  EXPECT_FALSE(store.Add(One("a")));
  EXPECT_FALSE(store.Find("a", ""));
}

}  // namespace
}  // namespace moesaic::server
