// Messages by UCX: tag matching over shared memory, TCP or InfiniBand, as UCX_TLS and UCX_NET_DEVICES select.
// Ranks meet by rendezvous.h.
//
// Faults: a dead peer is an error of this rank's transfers with it, never the end of the process. A peer
// whose process ended is detected within kUcxDeathLimitSeconds while this rank calls Progress(); a host that
// is unreachable, by TCP's keepalive within the same limit. A process that is stopped is not dead: transfers
// with it run into their time limits, and SilentSeconds() reports it.
#pragma once

#include <memory>

#include "comm/transport/rendezvous.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

inline constexpr double kUcxDeathLimitSeconds = 5;

/// Returns when all ranks have met and exchanged a message; errors are those of Rendezvous(). UCX reads its
/// own variables from the environment. Destroying the transport ends its endpoints; peers see a rank that is
/// destroyed as dead.
StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const RendezvousOptions& options);

}  // namespace moesaic::comm
