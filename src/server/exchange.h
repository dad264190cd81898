// The writer of one request's answer, which the layer above holds. For the transport's own files only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "server/http.h"

namespace moesaic::server {

class Connection;

/// Calls travel to the connection's strand.
class Exchange final : public ResponseWriter {
 public:
  /// `number` is that of the request in its connection.
  Exchange(std::shared_ptr<Connection> connection, uint64_t number);
  ~Exchange() override;

  void Send(HttpResponse response) override;
  void Start(int status, Headers headers) override;
  void Write(std::string piece) override;
  void End() override;
  void OnClientLeft(std::function<void()> left) override;

  /// The client has left before the answer ended. Once.
  void Gone();

 private:
  template <typename Task>
  void On(Task task);

  const std::shared_ptr<Connection> connection_;
  const uint64_t number_;
  std::mutex mutex_;
  std::function<void()> left_;
  bool gone_ = false;
};

}  // namespace moesaic::server
