// ZeroMQ sockets of the mock engine: publishes its KV events and answers requests for a replay.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <span>
#include <string>

#include "base/status.h"
#include "proxy/mock/engine.h"
#include "proxy/mock_server/mock_server.h"

namespace moesaic::proxy {

/// Used by the thread that runs `io`. `io`, `options` and `engine` outlive it.
class EventSockets {
 public:
  EventSockets(boost::asio::io_context& io, const MockServerOptions& options, const MockEngine& engine)
      : options_(options), engine_(engine), replay_fd_(io) {}
  ~EventSockets();
  EventSockets(const EventSockets&) = delete;
  EventSockets& operator=(const EventSockets&) = delete;

  /// Opens the sockets that the options name. IoError names the endpoint.
  Status Open();
  /// Endpoints of the open sockets, in which a port was chosen for "*"; empty without a socket.
  const std::string& endpoint() const { return endpoint_; }
  const std::string& replay_endpoint() const { return replay_endpoint_; }
  /// Sends the messages to the subscribers; does nothing without a PUB socket.
  void Publish(std::span<const MockMessage> messages);

 private:
  void AwaitReplay();
  void AnswerReplays();
  void SendReplay(const std::string& client, const std::string& sequence, const std::string& payload);
  std::string Payload(const MockMessage& message) const;

  const MockServerOptions& options_;
  const MockEngine& engine_;
  boost::asio::posix::stream_descriptor replay_fd_;
  std::string endpoint_, replay_endpoint_;
  void *context_ = nullptr, *publisher_ = nullptr, *replayer_ = nullptr;
};

}  // namespace moesaic::proxy
