#include "server/kv_events.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <zmq.hpp>

namespace moesaic::server {
namespace {

using Json = nlohmann::json;

struct Message {
  std::vector<std::string> frames;
  Json payload() const { return Json::from_msgpack(frames.back()); }
};

// Empty frames when nothing comes in time.
Message Receive(zmq::socket_t& socket) {
  Message message;
  for (bool more = true; more;) {
    zmq::message_t frame;
    if (!socket.recv(frame)) return {};
    message.frames.push_back(frame.to_string());
    more = frame.more();
  }
  return message;
}

TEST(KvPublisher, SpeaksAsVllm) {
  auto publisher =
      KvPublisher::Create(
          {.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = "tcp://127.0.0.1:*", .topic = "kv@me"})
          .value();
  zmq::context_t context;
  zmq::socket_t subscriber(context, zmq::socket_type::sub);
  subscriber.set(zmq::sockopt::rcvtimeo, 200);
  subscriber.set(zmq::sockopt::subscribe, "kv@");
  subscriber.connect(publisher->endpoint());

  std::vector<int32_t> tokens(128);
  std::iota(tokens.begin(), tokens.end(), 0);
  const std::vector<uint64_t> hashes = {7, ~uint64_t{0}};
  // A subscription takes its time to arrive: tell until one is heard.
  Message heard;
  for (int tries = 0; tries < 50 && heard.frames.empty(); ++tries) {
    publisher->Stored(hashes, std::nullopt, tokens, "salt");
    heard = Receive(subscriber);
  }
  ASSERT_EQ(heard.frames.size(), 3u);
  EXPECT_EQ(heard.frames[0], "kv@me");
  EXPECT_EQ(heard.frames[1].size(), 8u);
  const Json batch = heard.payload();
  ASSERT_EQ(batch.size(), 3u);
  EXPECT_TRUE(batch[0].is_number_float());
  EXPECT_EQ(batch[1][0], Json::array({"BlockStored", hashes, nullptr, tokens, 64, nullptr, "CPU", nullptr,
                                      Json::array({Json::array({"salt"}), nullptr})}));
  EXPECT_EQ(batch[2], 0);

  publisher->Stored(std::vector<uint64_t>{9}, 7, std::vector<int32_t>(64, 5), "");
  EXPECT_EQ(Receive(subscriber).payload()[1][0],
            Json::array(
                {"BlockStored", {9}, 7, std::vector<int32_t>(64, 5), 64, nullptr, "CPU", nullptr, nullptr}));
  publisher->Removed(hashes);
  EXPECT_EQ(Receive(subscriber).payload()[1][0], Json::array({"BlockRemoved", hashes, "CPU"}));

  // Everything from the first message on, then the end's mark.
  zmq::socket_t asker(context, zmq::socket_type::req);
  asker.set(zmq::sockopt::rcvtimeo, 2000);
  asker.connect(publisher->replay_endpoint());
  asker.send(zmq::buffer(std::string(8, '\0')));
  const Message first = Receive(asker);
  ASSERT_EQ(first.frames.size(), 2u);
  EXPECT_EQ(first.frames[0], std::string(8, '\0'));
  EXPECT_EQ(first.payload()[1][0][0], "BlockStored");
}

TEST(KvPublisher, SaysWhenAnEndpointIsTaken) {
  const auto one =
      KvPublisher::Create({.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = {}, .topic = {}}).value();
  const auto two = KvPublisher::Create({.endpoint = one->endpoint(), .replay_endpoint = {}, .topic = {}});
  EXPECT_EQ(two.status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace moesaic::server
