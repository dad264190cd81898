// Builds the response object of /v1/responses and sends the events of its stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "server/answer.h"
#include "server/call.h"

namespace moesaic::server {

struct ResponseShape {
  std::string id = NewId("resp_");
  std::string model;
  int64_t created = UnixNow();
  Json echo;                                       // members of the request that the response repeats
  int top_logprobs = -1;                           // number of likeliest tokens; -1 for no logprobs
  std::function<void(const Json& response)> keep;  // stores the complete response; may be empty
};

struct ResponseStatus {
  const char* name = "in_progress";
  const char* incomplete_reason = nullptr;  // of "incomplete_details"; null unless the name is "incomplete"
};

Json ResponseJson(const ResponseShape& shape, const ResponseStatus& status, Json output, Json usage,
                  Json error);

Json ReasoningItem(const std::string& id, const std::string& text, const char* status);
Json TextPart(const std::string& text, Json logprobs);
Json MessageItem(const std::string& id, Json content, const char* status);
Json CallItem(const std::string& id, const AnsweredCall& call, const char* status);

/// Numbers and sends the events of one response. Output items come one after another: reasoning, a message,
/// calls.
class ResponseEvents {
 public:
  enum class Item { kNone, kReasoning, kMessage, kCall };

  /// Sends the events whose sequence number is above `after`.
  explicit ResponseEvents(std::shared_ptr<ResponseWriter> writer, int64_t after = -1)
      : stream_(std::move(writer)), after_(after) {}

  void Begin() { stream_.Begin(); }
  void End() { stream_.End(); }

  void Event(const std::string& type, Json members);

  /// Closes the open item as completed and begins a reasoning item or a message.
  void Open(Item item, std::string id);
  /// Closes the open item as completed and begins a function call, without its arguments.
  void OpenCall(std::string id, AnsweredCall call);
  /// Sends a piece of the open item's text. `logprobs` are those of a message's tokens.
  void Text(const std::string& piece, Json logprobs);
  /// Sends a piece of the open call's arguments.
  void Arguments(const std::string& piece);
  /// Ends the open item, if there is one.
  void Close(const char* status);

  Item open() const { return open_; }
  /// Returns the closed items.
  const Json& output() const { return output_; }

 private:
  Json Placed(Json members) const;
  Json ItemJson(const char* status) const;
  void BeginItem(Item item, std::string id);

  EventStream stream_;
  const int64_t after_;
  int64_t sequence_ = 0;
  Json output_ = Json::array();
  Json logprobs_ = Json::array();
  Item open_ = Item::kNone;
  std::string item_id_, text_;
  AnsweredCall call_;
};

/// Sends the events of a stored response as its stream would have sent them, with each text in one piece.
void ReplayResponse(const Json& response, ResponseEvents* events);

}  // namespace moesaic::server
