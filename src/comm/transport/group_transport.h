// The ranks of one group of a job, numbered from 0, over the job's transport.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "comm/transport/transport.h"

namespace moesaic::comm {

/// Borrows the job's transport, whose thread rules and faults it has: messages of errors name ranks of the
/// job. Two groups with a pair of ranks in common need different tags.
class GroupTransport : public Transport {
 public:
  /// `ranks[i]` is the job's rank of member i; the list contains the caller's rank. All members pass equal
  /// lists. InvalidArgument: a rank is out of range, named twice, or the caller's is missing.
  static StatusOr<std::unique_ptr<GroupTransport>> Create(Transport& job, std::vector<int> ranks);

  std::string_view name() const override { return job_.name(); }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }

  StatusOr<TransferId> Send(int peer, Tag tag, std::span<const std::byte> data) override;
  StatusOr<TransferId> SendAhead(int peer, Tag tag, std::span<const std::byte> data) override;
  StatusOr<TransferId> Receive(int peer, Tag tag, std::span<std::byte> data) override;
  Status Exchange(int peer, Tag tag, std::span<const std::byte> data, std::span<std::byte> received,
                  double limit_s) override;
  void Progress() override { job_.Progress(); }
  bool Test(TransferId id, Status* result) override { return job_.Test(id, result); }
  void Cancel(TransferId id) override { job_.Cancel(id); }
  size_t EagerBytes() const override { return job_.EagerBytes(); }
  bool failed(int peer) const override { return job_.failed(ranks_[peer]); }
  double SilentSeconds(int peer) const override { return job_.SilentSeconds(ranks_[peer]); }
  double Now() const override { return job_.Now(); }
  void EndJob() override { job_.EndJob(); }
  void Idle() override { job_.Idle(); }

 private:
  GroupTransport(Transport& job, std::vector<int> ranks, int rank)
      : job_(job), ranks_(std::move(ranks)), rank_(rank) {}
  Status CheckPeer(int peer) const;

  Transport& job_;
  std::vector<int> ranks_;
  int rank_;
};

}  // namespace moesaic::comm
