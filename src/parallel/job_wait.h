// Waits inside a job whose ranks all depend on each other.
#pragma once

#include "base/status.h"
#include "comm/transport/transport.h"

namespace moesaic::parallel {

/// Returns Unavailable if a rank of the job is known to be dead; the message names it.
Status CheckRanks(const comm::Transport& job);

/// Like comm::Wait, but also cancels the transfer and returns when any rank of the job has died, because the
/// peer may wait for that rank and never send.
Status WaitInJob(comm::Transport& job, comm::TransferId id, double limit_s);

}  // namespace moesaic::parallel
