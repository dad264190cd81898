// Tests that reads of stored conversations and responses parse nothing, by the memory that they take.
#include "server/conversations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/test_memory.h"
#include "server/test_context.h"

namespace moesaic::server {
namespace {

using testing::StartsWith;

// Keeps the body of an answer.
class BodyWriter : public NoWriter {
 public:
  void Send(HttpResponse response) override { body = std::move(response.body); }

  std::string body;
};

class StoredTest : public testing::Test {
 protected:
  // Items of 2 MiB. Parsed, their small values take many times as much.
  StoredTest() {
    Json large = {{"id", "large"}, {"values", Json::array()}};
    for (int i = 0; i < 1 << 20; ++i) large["values"].push_back(7);
    items_ = Json::array({Json{{"id", "first"}}, std::move(large), Json{{"id", "last"}, {"content", "x"}}});
    EXPECT_TRUE(context_.responses.Add({.id = "talk",
                                        .owner = "",
                                        .response = {{"id", "talk"}},
                                        .messages = items_,
                                        .is_conversation = true}));
    EXPECT_TRUE(context_.responses.Add({.id = "answer",
                                        .owner = "",
                                        .response = {{"id", "answer"}},
                                        .messages = Json::array(),
                                        .input = items_}));
  }

  // Returns the body of the answer, or the error's message. The call may take less memory than the items'
  // text.
  std::string AnswerOf(Status (*endpoint)(const GenerationContext&, Call&),
                       std::vector<std::string> path_values, const char* query = "") {
    const auto writer = std::make_shared<BodyWriter>();
    Call call;
    call.path_values = std::move(path_values);
    call.request.query = query;
    call.writer = writer;
    const int64_t before = base::live_bytes;
    base::peak_bytes = before;
    const Status status = endpoint(context_.Get(), call);
    EXPECT_LT(base::peak_bytes - before, 1 << 20) << call.path_values[0];
    return status.ok() ? writer->body : Message(status);
  }

  TestContext context_;
  Json items_;
};

TEST_F(StoredTest, ReadsDoNotParseStoredItems) {
  const std::string last = R"({"id":"last","content":"x"})";
  const std::string page =
      R"({"object":"list","data":[)" + last + R"(],"first_id":"last","last_id":"last","has_more":true})";
  EXPECT_EQ(AnswerOf(GetConversation, {"talk"}), R"({"id":"talk"})");
  EXPECT_EQ(AnswerOf(ListItems, {"talk"}, "limit=1"), page);
  EXPECT_EQ(AnswerOf(GetItem, {"talk", "last"}), last);
  EXPECT_EQ(AnswerOf(GetResponse, {"answer"}), R"({"id":"answer"})");
  EXPECT_EQ(AnswerOf(ListInputItems, {"answer"}, "limit=1"), page);
  EXPECT_THAT(AnswerOf(CancelResponse, {"answer"}), StartsWith("Cannot cancel"));
  for (const auto endpoint : {GetItem, DeleteItem}) {
    EXPECT_EQ(AnswerOf(endpoint, {"talk", "none"}), "Item with id 'none' not found in conversation 'talk'.");
  }
  EXPECT_EQ(AnswerOf(ListItems, {"talk"}, "limit=0"),
            "Invalid 'limit': must be between 1 and 100, found '0'");
  for (const auto endpoint : {GetConversation, ListItems, DeleteConversation}) {
    EXPECT_EQ(AnswerOf(endpoint, {"answer"}), "Conversation with id 'answer' not found.");
  }
  for (const auto endpoint : {GetResponse, ListInputItems, DeleteResponse}) {
    EXPECT_EQ(AnswerOf(endpoint, {"talk"}), "Response with id 'talk' not found.");
  }
  EXPECT_EQ(*ConversationItems(context_.Get(), Call(), "talk"), items_);
  EXPECT_THAT(AnswerOf(DeleteResponse, {"answer"}), StartsWith(R"({"id":"answer",)"));
  EXPECT_EQ(AnswerOf(GetResponse, {"answer"}), "Response with id 'answer' not found.");
}

}  // namespace
}  // namespace moesaic::server
