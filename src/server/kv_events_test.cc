#include "server/kv_events.h"

#include <gtest/gtest.h>

#include <deque>
#include <nlohmann/json.hpp>
#include <numeric>
#include <zmq.hpp>

namespace moesaic::server {
namespace {

using Json = nlohmann::json;

struct KvMessage {
  std::vector<std::string> frames;
  Json payload() const { return Json::from_msgpack(frames.back()); }
};

// Empty frames when nothing comes in time.
KvMessage Receive(zmq::socket_t& socket) {
  KvMessage message;
  for (bool more = true; more;) {
    zmq::message_t frame;
    if (!socket.recv(frame)) return {};
    message.frames.push_back(frame.to_string());
    more = frame.more();
  }
  return message;
}

// The event that a subscriber waits for until its subscription has arrived.
const std::vector<uint64_t> kHello = {1};

// Events one by one, whichever messages they come in.
class Listener {
 public:
  explicit Listener(KvPublisher& publisher) {
    socket_.set(zmq::sockopt::subscribe, "kv@");
    socket_.connect(publisher.endpoint());
    socket_.set(zmq::sockopt::rcvtimeo, 20);
    while (first_.frames.empty()) {
      publisher.Removed(kHello);
      first_ = Receive(socket_);
    }
    socket_.set(zmq::sockopt::rcvtimeo, 60'000);
  }

  const KvMessage& first() const { return first_; }

  // The next that is no hello.
  Json Next() {
    for (;;) {
      if (events_.empty()) {
        const KvMessage message = Receive(socket_);
        if (message.frames.empty()) return "nothing came";
        const Json payload = message.payload();
        for (const Json& event : payload[1]) events_.push_back(event);
      }
      Json event = events_.front();
      events_.pop_front();
      if ((event.is_array() ? event[1] : event["block_hashes"]) != kHello) return event;
    }
  }

 private:
  zmq::context_t context_;
  zmq::socket_t socket_{context_, zmq::socket_type::sub};
  KvMessage first_;
  std::deque<Json> events_;
};

TEST(KvPublisher, EncodesMessagesLikeVllm) {
  auto publisher =
      KvPublisher::Create(
          {.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = "tcp://127.0.0.1:*", .topic = "kv@me"})
          .value();
  Listener listener(*publisher);
  const KvMessage& hello = listener.first();
  ASSERT_EQ(hello.frames.size(), 3u);
  EXPECT_EQ(hello.frames[0], "kv@me");
  EXPECT_EQ(hello.frames[1].size(), 8u);
  const Json batch = hello.payload();
  ASSERT_EQ(batch.size(), 3u);
  EXPECT_TRUE(batch[0].is_number_float());
  EXPECT_EQ(batch[1][0], Json::array({"BlockRemoved", kHello, "CPU"}));
  EXPECT_EQ(batch[2], 0);

  std::vector<int32_t> tokens(128);
  std::iota(tokens.begin(), tokens.end(), 0);
  const std::vector<uint64_t> hashes = {7, ~uint64_t{0}};
  publisher->Stored(hashes, std::nullopt, tokens, "salt");
  EXPECT_EQ(listener.Next(), Json::array({"BlockStored", hashes, nullptr, tokens, 64, nullptr, "CPU", nullptr,
                                          Json::array({Json::array({"salt"}), nullptr})}));
  publisher->Stored(std::vector<uint64_t>{9}, 7, std::vector<int32_t>(64, 5), "");
  EXPECT_EQ(listener.Next(),
            Json::array(
                {"BlockStored", {9}, 7, std::vector<int32_t>(64, 5), 64, nullptr, "CPU", nullptr, nullptr}));
  publisher->Removed(hashes);
  EXPECT_EQ(listener.Next(), Json::array({"BlockRemoved", hashes, "CPU"}));

  // Everything from the first message on, then the end's mark.
  zmq::context_t context;
  zmq::socket_t asker(context, zmq::socket_type::req);
  asker.set(zmq::sockopt::rcvtimeo, 60'000);
  asker.connect(publisher->replay_endpoint());
  asker.send(zmq::buffer(std::string(8, '\0')));
  const KvMessage first = Receive(asker);
  ASSERT_EQ(first.frames.size(), 2u);
  EXPECT_EQ(first.frames[0], std::string(8, '\0'));
  EXPECT_EQ(first.payload()[1][0], Json::array({"BlockRemoved", kHello, "CPU"}));
}

TEST(KvPublisher, SendsMapsInTheMapFormat) {
  auto publisher =
      KvPublisher::Create(
          {.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = {}, .topic = "kv@me", .format = "map"})
          .value();
  Listener listener(*publisher);
  const std::vector<int32_t> tokens(64, 5);
  publisher->Stored(std::vector<uint64_t>{9}, std::nullopt, tokens, "salt");
  EXPECT_EQ(listener.Next(), Json({{"type", "BlockStored"},
                                   {"block_hashes", {9}},
                                   {"parent_block_hash", nullptr},
                                   {"token_ids", tokens},
                                   {"block_size", 64},
                                   {"lora_id", nullptr},
                                   {"medium", "CPU"},
                                   {"lora_name", nullptr},
                                   {"extra_keys", Json::array({Json::array({"salt"})})}}));
  publisher->Removed(std::vector<uint64_t>{9});
  EXPECT_EQ(listener.Next(), Json({{"type", "BlockRemoved"}, {"block_hashes", {9}}, {"medium", "CPU"}}));
}

TEST(KvPublisher, ReportsAnEndpointInUse) {
  const auto one =
      KvPublisher::Create({.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = {}, .topic = {}}).value();
  const auto two = KvPublisher::Create({.endpoint = one->endpoint(), .replay_endpoint = {}, .topic = {}});
  EXPECT_EQ(two.status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace moesaic::server
