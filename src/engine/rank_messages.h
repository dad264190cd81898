// Messages of any length between the driver and the other ranks of a model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "comm/transport/transport.h"

namespace moesaic::engine {

/// A message has a first part of fixed size, which holds the length, and a second part if it is longer. Ranks
/// that receive it need not know its length.
inline constexpr size_t kFirstPartBytes = 1024;

/// Tags of messages; groups of ranks use tags from parallel::kFirstGroupTag on.
enum class RankTag : uint32_t { kCommand = 0, kReply = 2, kLogits = 4, kHidden = 5 };

/// Sends a message; kDeadlineExceeded when the receiver takes longer than `limit_s`.
Status SendMessage(comm::Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s);
/// Receives one. InvalidArgument: the length is more than 1 GiB.
StatusOr<std::string> ReceiveMessage(comm::Transport& job, int peer, RankTag tag, double limit_s);
/// Waits without limit for the first part, at a low rate after a while, and then receives the message.
/// Cancelled when `stop`, which is polled, returns true.
StatusOr<std::string> AwaitMessage(comm::Transport& job, int peer, RankTag tag,
                                   const std::function<bool()>& stop, double limit_s);

}  // namespace moesaic::engine
