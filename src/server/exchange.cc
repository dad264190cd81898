#include "server/exchange.h"

#include <boost/asio/post.hpp>
#include <utility>

#include "server/connection.h"

namespace moesaic::server {

Exchange::Exchange(std::shared_ptr<Connection> connection, uint64_t number)
    : connection_(std::move(connection)), number_(number) {}

// Drops tasks that arrive after this answer has ended, for example during a later request.
template <typename Task>
void Exchange::On(Task task) {
  boost::asio::post(connection_->executor(),
                    [connection = connection_, number = number_, task = std::move(task)]() mutable {
                      if (connection->Answers(number)) task(*connection);
                    });
}

Exchange::~Exchange() {
  On([](Connection& connection) { connection.Close(); });
}

void Exchange::Send(HttpResponse response) {
  On([response = std::move(response)](Connection& connection) { connection.SendWhole(response, false); });
}

void Exchange::Start(int status, Headers headers) {
  On([status, headers = std::move(headers)](Connection& connection) {
    connection.StartPieces(status, headers);
  });
}

void Exchange::Write(std::string piece) {
  if (piece.empty()) return;  // an empty chunk would end the body
  On([piece = std::move(piece)](Connection& connection) mutable { connection.WritePiece(std::move(piece)); });
}

void Exchange::End() {
  On([](Connection& connection) { connection.EndPieces(); });
}

void Exchange::OnClientLeft(std::function<void()> left) {
  {
    const std::lock_guard lock(mutex_);
    if (!client_left_) {
      left_ = std::move(left);
      return;
    }
  }
  left();
}

void Exchange::NotifyClientLeft() {
  std::function<void()> left;
  {
    const std::lock_guard lock(mutex_);
    if (client_left_) return;
    client_left_ = true;
    left = std::move(left_);
  }
  if (left) left();
}

bool Exchange::client_left() {
  const std::lock_guard lock(mutex_);
  return client_left_;
}

}  // namespace moesaic::server
