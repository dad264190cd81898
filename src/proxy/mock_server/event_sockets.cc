#include "proxy/mock_server/event_sockets.h"

#include <zmq.h>

#include <vector>

#include "proxy/events/kv_decode.h"
#include "proxy/events/kv_encode.h"
#include "proxy/events/sequence.h"
#include "proxy/events/zmq_ipv6.h"

namespace moesaic::proxy {
namespace {

std::string LastEndpoint(void* socket) {
  char text[1024];
  size_t size = sizeof text;  // with the terminating 0
  if (zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, text, &size) != 0 || size == 0) return "";
  return std::string(text, size - 1);
}

}  // namespace

EventSockets::~EventSockets() {
  if (replay_fd_.is_open()) replay_fd_.release();  // the descriptor belongs to the socket
  if (publisher_ != nullptr) zmq_close(publisher_);
  if (replayer_ != nullptr) zmq_close(replayer_);
  if (context_ != nullptr) zmq_ctx_term(context_);
}

Status EventSockets::Open() {
  if (options_.kv_endpoint.empty()) return OkStatus();
  context_ = zmq_ctx_new();
  publisher_ = zmq_socket(context_, ZMQ_PUB);
  const int linger = 0, water = 100'000;
  zmq_setsockopt(publisher_, ZMQ_LINGER, &linger, sizeof linger);
  zmq_setsockopt(publisher_, ZMQ_SNDHWM, &water, sizeof water);
  AllowIpv6(publisher_, options_.kv_endpoint);
  // As vLLM: wildcards, IPC and addresses with "::" are bound.
  const bool bind = options_.kv_endpoint.find('*') != std::string::npos ||
                    options_.kv_endpoint.find("::") != std::string::npos ||
                    options_.kv_endpoint.starts_with("ipc://");
  const char* endpoint = options_.kv_endpoint.c_str();
  if ((bind ? zmq_bind(publisher_, endpoint) : zmq_connect(publisher_, endpoint)) != 0) {
    return IoError("cannot open {}: {}", options_.kv_endpoint, zmq_strerror(zmq_errno()));
  }
  endpoint_ = LastEndpoint(publisher_);
  if (options_.kv_replay_endpoint.empty()) return OkStatus();
  replayer_ = zmq_socket(context_, ZMQ_ROUTER);
  zmq_setsockopt(replayer_, ZMQ_LINGER, &linger, sizeof linger);
  AllowIpv6(replayer_, options_.kv_replay_endpoint);
  if (zmq_bind(replayer_, options_.kv_replay_endpoint.c_str()) != 0) {
    return IoError("cannot bind {}: {}", options_.kv_replay_endpoint, zmq_strerror(zmq_errno()));
  }
  replay_endpoint_ = LastEndpoint(replayer_);
  int fd = -1;
  size_t size = sizeof fd;
  zmq_getsockopt(replayer_, ZMQ_FD, &fd, &size);
  replay_fd_.assign(fd);
  AwaitReplay();
  return OkStatus();
}

void EventSockets::AwaitReplay() {
  replay_fd_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this](auto error) {
    if (error) return;
    AnswerReplays();
    AwaitReplay();
  });
}

void EventSockets::AnswerReplays() {
  for (;;) {
    std::vector<std::string> frames;
    for (bool more = true; more;) {
      zmq_msg_t message;
      zmq_msg_init(&message);
      if (zmq_msg_recv(&message, replayer_, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&message);
        return;
      }
      frames.emplace_back(static_cast<const char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
      more = zmq_msg_more(&message) != 0;
      zmq_msg_close(&message);
    }
    const StatusOr<uint64_t> from = DecodeSequence(frames.back());
    if (frames.size() < 2 || !from.ok()) continue;
    for (const MockMessage& message : engine_.Replay(*from)) {
      SendReplay(frames[0], EncodeSequence(message.sequence), Payload(message));
    }
    SendReplay(frames[0], EncodeSequence(kReplayEnd), "");
  }
}

void EventSockets::SendReplay(const std::string& client, const std::string& sequence,
                              const std::string& payload) {
  zmq_send(replayer_, client.data(), client.size(), ZMQ_SNDMORE);
  zmq_send(replayer_, "", 0, ZMQ_SNDMORE);
  zmq_send(replayer_, sequence.data(), sequence.size(), ZMQ_SNDMORE);
  zmq_send(replayer_, payload.data(), payload.size(), 0);
}

std::string EventSockets::Payload(const MockMessage& message) const {
  return EncodeKvBatch(
      {.time = static_cast<double>(message.time) * 1e-9, .events = message.events, .dp_rank = 0},
      options_.kv_encoding);
}

void EventSockets::Publish(std::span<const MockMessage> messages) {
  if (publisher_ == nullptr) return;
  for (const MockMessage& message : messages) {
    const std::string sequence = EncodeSequence(message.sequence);
    std::string payload = Payload(message);
    if (message.truncated) payload.resize(payload.size() / 2);
    zmq_send(publisher_, options_.kv_topic.data(), options_.kv_topic.size(), ZMQ_SNDMORE);
    zmq_send(publisher_, sequence.data(), sequence.size(), ZMQ_SNDMORE);
    zmq_send(publisher_, payload.data(), payload.size(), 0);
  }
}

}  // namespace moesaic::proxy
