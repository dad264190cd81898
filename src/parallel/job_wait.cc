#include "parallel/job_wait.h"

#include <utility>

namespace moesaic::parallel {

Status CheckRanks(const comm::Transport& job) {
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == job.rank() || !job.failed(rank)) continue;
    return absl::UnavailableError(fmt::format("rank {} died; start the job again", rank));
  }
  return OkStatus();
}

Status WaitInJob(comm::Transport& job, comm::TransferId id, double limit_s) {
  // A transfer whose peer lives usually ends within microseconds. The look at all ranks costs about as much
  // as a poll, so it is rare among polls.
  constexpr int kPollsPerCheck = 64;
  const double end = job.Now() + limit_s;
  for (int polls = 0;; ++polls) {
    Status result;
    job.Progress();
    if (job.Test(id, &result)) {
      Status dead = result.ok() ? OkStatus() : CheckRanks(job);
      return dead.ok() ? result : dead;
    }
    if (polls % kPollsPerCheck == kPollsPerCheck - 1) {
      if (Status dead = CheckRanks(job); !dead.ok()) {
        job.Cancel(id);
        return dead;
      }
    }
    if (job.Now() >= end) {
      job.Cancel(id);
      return absl::DeadlineExceededError(
          fmt::format("a message between ranks took longer than {} s{}", limit_s, comm::SilentPeers(job)));
    }
    job.Idle();
  }
}

}  // namespace moesaic::parallel
