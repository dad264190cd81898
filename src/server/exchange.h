// Writes one request's answer to its connection. Only the transport includes it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "server/http.h"

namespace moesaic::server {

class Connection;

/// Posts each call to the connection's strand.
class Exchange final : public ResponseWriter {
 public:
  /// `number` is the request's number in its connection.
  Exchange(std::shared_ptr<Connection> connection, uint64_t number);
  ~Exchange() override;

  void Send(HttpResponse response) override;
  void Start(int status, Headers headers) override;
  void Write(std::string piece) override;
  void End() override;
  void OnClientLeft(std::function<void()> left) override;

  /// Reports that the client has left before the answer ended. Only the first call has an effect.
  void NotifyClientLeft();
  /// Returns true if the client has left before the answer ended.
  bool client_left();

 private:
  template <typename Task>
  void On(Task task);

  const std::shared_ptr<Connection> connection_;
  const uint64_t number_;
  std::mutex mutex_;
  std::function<void()> left_;
  bool client_left_ = false;
};

}  // namespace moesaic::server
