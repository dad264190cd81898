// Tests the events of stored responses.
#include "server/response_events.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/test_context.h"

namespace moesaic::server {
namespace {

// Collects the events that are written.
class EventWriter : public NoWriter {
 public:
  void Start(int status, Headers) override { started_ = status; }
  void Write(std::string piece) override {
    const std::string mark = "\ndata: ";
    const size_t at = piece.find(mark);
    ASSERT_NE(at, std::string::npos) << piece;
    events_.push_back(*ParseJson(std::string_view(piece).substr(at + mark.size())));
  }
  void End() override { ended_ = true; }

  std::vector<Json> events_;
  int started_ = 0;
  bool ended_ = false;
};

Json Stored() {
  return *ParseJson(R"({"id": "resp_1", "object": "response", "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"}, "usage": {"input_tokens": 3},
    "output": [
      {"id": "rs_1", "type": "reasoning", "summary": [],
       "content": [{"type": "reasoning_text", "text": "Hmm."}], "status": "completed"},
      {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "f",
       "arguments": "{\"a\": 1}"},
      {"id": "msg_1", "type": "message", "status": "incomplete", "role": "assistant",
       "content": [{"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}]}]})");
}

std::shared_ptr<EventWriter> Replay(const Json& response, int64_t after) {
  const auto writer = std::make_shared<EventWriter>();
  ResponseEvents events(writer, after);
  ReplayResponse(response, &events);
  EXPECT_EQ(writer->started_, 200);
  EXPECT_TRUE(writer->ended_);
  return writer;
}

TEST(ResponseEvents, ReplayEachItemOfAStoredResponse) {
  const Json stored = Stored();
  const auto writer = Replay(stored, -1);
  std::vector<std::string> types;
  Json items = Json::array();
  for (const Json& event : writer->events_) {
    EXPECT_EQ(event["sequence_number"], types.size());
    types.push_back(event["type"]);
    if (types.back() == "response.output_item.done") items.push_back(event["item"]);
  }
  const std::vector<std::string> expected = {
      "response.created",
      "response.in_progress",
      "response.output_item.added",
      "response.content_part.added",
      "response.reasoning_text.delta",
      "response.reasoning_text.done",
      "response.content_part.done",
      "response.output_item.done",
      "response.output_item.added",
      "response.function_call_arguments.delta",
      "response.function_call_arguments.done",
      "response.output_item.done",
      "response.output_item.added",
      "response.content_part.added",
      "response.output_text.delta",
      "response.output_text.done",
      "response.content_part.done",
      "response.output_item.done",
      "response.incomplete",
  };
  EXPECT_EQ(types, expected);
  EXPECT_EQ(items, stored["output"]);
  EXPECT_EQ(writer->events_.front()["response"]["status"], "in_progress");
  EXPECT_EQ(writer->events_.front()["response"]["output"], Json::array());
  EXPECT_EQ(writer->events_.back()["response"], stored);
}

TEST(ResponseEvents, ReplayBeginsAfterASequenceNumber) {
  const auto writer = Replay(Stored(), 16);
  ASSERT_EQ(writer->events_.size(), 2u);
  EXPECT_EQ(writer->events_[0]["sequence_number"], 17);
  EXPECT_EQ(writer->events_[0]["type"], "response.output_item.done");
}

}  // namespace
}  // namespace moesaic::server
