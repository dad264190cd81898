// Waits inside a job whose ranks all depend on each other.
#pragma once

#include "base/status.h"
#include "comm/transport/transport.h"

namespace moesaic::parallel {

/// Unavailable if a rank of the job is known to be dead; the message names it.
Status CheckRanks(const comm::Transport& job);

/// Like comm::Wait, but also ends when any rank of the job has died: the peer may wait for that rank and
/// would never send. The transfer is cancelled then.
Status WaitInJob(comm::Transport& job, comm::TransferId id, double limit_s);

}  // namespace moesaic::parallel
