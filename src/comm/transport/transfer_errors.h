// Errors that all transports report in the same words.
#pragma once

#include "comm/transport/transport.h"

namespace moesaic::comm {

/// InvalidArgument for a peer or tag out of range.
Status CheckTransfer(const Transport& transport, int peer, Tag tag);

/// kUnavailable: `dead` is the peer, or the rank itself when a test killed it.
Status DeadPeer(int rank, int dead);
/// kInvalidArgument: the size of a message differs from that of its receive buffer.
Status WrongSize(int rank, int peer, Tag tag, size_t expected_bytes, size_t sent_bytes);
/// The same where the transport does not know the size of a message that is longer.
Status TooLong(int rank, int peer, Tag tag, size_t expected_bytes);
/// kDeadlineExceeded: a transfer took longer than its limit.
Status Expired(const Transport& transport, double limit_s);

}  // namespace moesaic::comm
