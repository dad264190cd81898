// A client for tests that sends bytes unchanged to a server on this machine and reads its bytes.
#pragma once

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <string_view>

namespace moesaic::server {

class TestClient {
 public:
  explicit TestClient(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ~TestClient() { ::close(socket_); }
  TestClient(const TestClient&) = delete;
  TestClient& operator=(const TestClient&) = delete;

  void Send(std::string_view bytes) {
    EXPECT_EQ(::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }

  /// Ends the sending side. The client can still receive.
  void EndSending() { ::shutdown(socket_, SHUT_WR); }

  /// Reads until `text` has arrived or the server closes, and returns all bytes.
  std::string ReadUntil(std::string_view text) {
    std::string all;
    char piece;
    while (all.find(text) == std::string::npos && ::recv(socket_, &piece, 1, 0) == 1) all += piece;
    return all;
  }

  /// Reads until the server closes.
  std::string ReadAll() {
    std::string all;
    char piece[4096];
    for (ssize_t got; (got = ::recv(socket_, piece, sizeof(piece), 0)) > 0;) {
      all.append(piece, static_cast<size_t>(got));
    }
    return all;
  }

 private:
  const int socket_;
};

/// Sends one request on a connection of its own and returns all bytes of the answer.
inline std::string SendRequest(int port, std::string_view method, std::string_view path,
                               std::string_view body = "") {
  TestClient client(port);
  client.Send(
      fmt::format("{} {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: "
                  "close\r\ncontent-length: {}\r\n\r\n{}",
                  method, path, body.size(), body));
  return client.ReadAll();
}

}  // namespace moesaic::server
