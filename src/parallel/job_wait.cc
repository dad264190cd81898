#include "parallel/job_wait.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>

namespace moesaic::parallel {

Status CheckRanks(const comm::Transport& job) {
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == job.rank() || !job.failed(rank)) continue;
    const double silent = job.SilentSeconds(rank);
    return absl::UnavailableError(
        silent > 0 ? fmt::format("rank {} did not answer for {:.1f} s; start the job again", rank, silent)
                   : fmt::format("rank {} died; start the job again", rank));
  }
  return OkStatus();
}

std::vector<int> SilentRanks(const comm::Transport& job, std::span<const int> without) {
  std::vector<double> silent(job.size(), 0);
  for (int rank = 0; rank < job.size(); ++rank) {
    const bool counts =
        rank != job.rank() && !job.failed(rank) && std::ranges::find(without, rank) == without.end();
    if (counts) silent[rank] = job.SilentSeconds(rank);
  }
  const double least = std::max(comm::kSilentSeconds, std::ranges::max(silent) / 2);
  std::vector<int> ranks;
  for (int rank = 0; rank < job.size(); ++rank) {
    if (silent[rank] >= least) ranks.push_back(rank);
  }
  return ranks;
}

Status CauseOf(const Status& failure, const comm::Transport& job) {
  if (Status dead = CheckRanks(job); !dead.ok()) return dead;
  if (failure.code() != StatusCode::kDeadlineExceeded) return failure;
  std::vector<std::string> silent;
  for (const int rank : SilentRanks(job)) {
    silent.push_back(fmt::format("rank {} did not answer for {:.1f} s", rank, job.SilentSeconds(rank)));
  }
  if (silent.empty()) return failure;
  return Annotate(failure, fmt::format("{}", fmt::join(silent, ", ")));
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
