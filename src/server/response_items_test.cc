// Tests the check, the stored form and the pages of items.
#include "server/response_items.h"

#include <gtest/gtest.h>

#include "server/api_error.h"
#include "server/query.h"

namespace moesaic::server {
namespace {

TEST(ResponseItems, AreStoredWithIdsStatusAndContentParts) {
  const Json items = *KeptItems(*ParseJson(R"([{"role": "user", "content": "hi"},
      {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
      {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "c", "output": "1"}, {"type": "reasoning", "id": "rs_x"}])"),
                                "items");
  ASSERT_EQ(items.size(), 5u);
  const char* prefixes[] = {"msg_", "msg_", "fc_", "fco_", "rs_"};
  for (size_t i = 0; i < items.size(); ++i) {
    EXPECT_TRUE(items[i]["id"].get<std::string>().starts_with(prefixes[i])) << items[i];
    EXPECT_EQ(items[i]["status"], "completed");
  }
  EXPECT_EQ(Dump(items[0]["content"]), R"([{"type":"input_text","text":"hi"}])");
  EXPECT_EQ(Dump(items[1]["content"]), R"([{"type":"output_text","text":"yes","annotations":[]}])");
  EXPECT_EQ(*InputItems(Json()), Json::array());
  const Json bare = *KeptItems(
      *ParseJson(R"([{"type": null, "id": null, "role": "user", "content": [{"type": null, "text": "a"}]}])"),
      "items");
  EXPECT_EQ(bare[0]["type"], "message");
  EXPECT_EQ(Dump(bare[0]["content"]), R"([{"type":"input_text","text":"a"}])");
  EXPECT_EQ((*InputItems("hi"))[0]["role"], "user");
}

// Pages end only if no two items have the same id.
TEST(ResponseItems, WithEqualIdsAreRenamed) {
  const Json items = *KeptItems(
      *ParseJson(
          R"([{"id": "msg_1", "role": "user", "content": "a"}, {"id": "msg_1", "role": "user", "content": "b"}])"),
      "items");
  EXPECT_NE(items[0]["id"], items[1]["id"]);
  const auto page = [kept = StoredItems(items)](const std::string& query) {
    return ParseDumped(*ItemPage(kept, "order=asc&limit=1" + query));
  };
  const Json first = page("");
  const Json second = page("&after=" + first["last_id"].get<std::string>());
  EXPECT_EQ(second["data"][0]["content"][0]["text"], "b");
  EXPECT_EQ(second["has_more"], false);
}

TEST(ResponseItems, ErrorsNameTheField) {
  const auto param = [](const char* text) {
    return ErrorOf(KeptItems(*ParseJson(text), "items").status()).param;
  };
  EXPECT_EQ(param(R"([{"role": "user", "content": "a"}, {"role": "king", "content": "b"}])"),
            "items[1].role");
  EXPECT_EQ(param(R"([{"type": "image"}])"), "items[0].type");
  EXPECT_EQ(param(R"([{"type": "reasoning", "id": 7}])"), "items[0].id");
}

TEST(ResponseItems, AreListedInPages) {
  Json array = Json::array();
  for (int i = 0; i < 30; ++i) array.push_back({{"id", fmt::format("i{}", i)}});
  const StoredItems items(array);
  const auto page = [&items](const char* query) {
    const Json page = ParseDumped(*ItemPage(items, query));
    return fmt::format("{} {} {} {}", page["data"].size(), page["first_id"].dump(), page["last_id"].dump(),
                       page["has_more"].get<bool>());
  };
  EXPECT_EQ(page(""), R"(20 "i29" "i10" true)");
  EXPECT_EQ(page("order=asc&limit=5"), R"(5 "i0" "i4" true)");
  EXPECT_EQ(page("order=asc&limit=5&after=i24"), R"(5 "i25" "i29" false)");
  EXPECT_EQ(page("after=i0"), R"(0 null null false)");
  for (const char* query : {"limit=0", "limit=101", "limit=x", "order=up", "after=none"}) {
    EXPECT_FALSE(ItemPage(items, query).ok()) << query;
  }
}

TEST(StoredItems, AreFoundByIndexAndId) {
  StoredItems items;
  EXPECT_EQ(items.json(), "[]");
  for (const char* more :
       {"[]", R"([{"id":"a","text":"],{\"id\":\"b\""}])", "[]", R"([7,{"id":"b"},{"x":1,"id":"c"}])"}) {
    const StoredItems added(*ParseJson(more));
    EXPECT_EQ(added.json(), more);
    const size_t before = items.json().size(), growth = items.GrowthBy(added);
    items.Append(added);
    EXPECT_EQ(items.json().size(), before + growth) << more;
  }
  EXPECT_EQ(items.json(), R"([{"id":"a","text":"],{\"id\":\"b\""},7,{"id":"b"},{"x":1,"id":"c"}])");
  ASSERT_EQ(items.size(), 4u);
  EXPECT_EQ(items[1], "7");
  EXPECT_EQ(items.Find("b"), items[2]);
  EXPECT_EQ(IdOf(items[0]), "a");
  EXPECT_EQ(items.Find("c"), "") << "an id is the first member";
  EXPECT_EQ(items.Find(""), "");
}

TEST(Query, DecodesEscapesAndTypes) {
  EXPECT_EQ(QueryValue("a=1&b%5B%5D=x+y%26&a=2&c", "a"), "1");
  EXPECT_EQ(QueryValue("a=1&b%5B%5D=x+y%26&a=2&c", "b[]"), "x y&");
  EXPECT_EQ(QueryValue("a=1&c", "c"), "");
  EXPECT_EQ(QueryValue("a=%zz%", "a"), "%zz%");
  EXPECT_EQ(QueryInt("n=7", "n", 1, 9, 3).value(), 7);
  EXPECT_EQ(QueryInt("", "n", 1, 9, 3).value(), 3);
  EXPECT_TRUE(QueryBool("stream=true", "stream").value());
  EXPECT_FALSE(QueryBool("stream=false", "stream").value());
  EXPECT_FALSE(QueryBool("", "stream").value());
  EXPECT_EQ(ErrorOf(QueryBool("stream=yes", "stream").status()).param, "stream");
}

}  // namespace
}  // namespace moesaic::server
