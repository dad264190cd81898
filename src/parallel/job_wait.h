// Waits inside a job whose ranks all depend on each other.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "comm/transport/transport.h"

namespace moesaic::parallel {

/// Returns Unavailable if a rank of the job is known to be dead; the message names it.
Status CheckRanks(const comm::Transport& job);

/// Returns the living ranks other than `without` that have been silent for comm::kSilentSeconds and half as
/// long as the most silent of them, ascending: a rank whose process waits for a processor is silent for a
/// moment.
std::vector<int> SilentRanks(const comm::Transport& job, std::span<const int> without = {});

/// Returns the error of a step, which begins with the rank that caused `failure` where the transport knows
/// one: a rank that has died, or, after a time limit, a silent one. Ranks that wait for it are no cause.
Status CauseOf(const Status& failure, const comm::Transport& job);

/// Like comm::Wait, but also cancels the transfer and returns when any rank of the job has died, because the
/// peer may wait for that rank and never send.
Status WaitInJob(comm::Transport& job, comm::TransferId id, double limit_s);

}  // namespace moesaic::parallel
