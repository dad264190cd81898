// Messages of a rank to itself, for transports between processes. Open MPI 4.1 writes beyond a receive buffer
// that is too short for such a message, so they do not go through a library.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/transport/transfer_errors.h"

namespace moesaic::comm {

/// Matches transfers of type T, which has the members tag, bytes, data, is_send, ended and result.
template <typename T>
class SelfMessages {
 public:
  explicit SelfMessages(int rank) : rank_(rank) {}

  /// Copies the message and ends both sides if the partner was posted before; otherwise keeps the transfer.
  void Post(T& posted) {
    const auto partner = std::ranges::find_if(waiting_, [&](const T* other) {
      return other->tag == posted.tag && other->is_send != posted.is_send;
    });
    if (partner == waiting_.end()) {
      waiting_.push_back(&posted);
      return;
    }
    T& send = posted.is_send ? posted : **partner;
    T& receive = posted.is_send ? **partner : posted;
    waiting_.erase(partner);
    send.ended = receive.ended = true;
    if (send.bytes != receive.bytes) {
      receive.result = WrongSize(rank_, rank_, send.tag, receive.bytes, send.bytes);
    } else if (send.bytes > 0) {
      std::memcpy(receive.data, send.data, send.bytes);
    }
  }
  void Remove(const T& removed) { std::erase(waiting_, &removed); }

 private:
  const int rank_;
  std::vector<T*> waiting_;  // in the order of posts
};

}  // namespace moesaic::comm
