// A transport that counts the bytes which this rank sends, and does not report the failure of some ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/transport/transport.h"

namespace moesaic::parallel {

/// Forwards all calls to a borrowed transport.
class CountedTransport : public comm::Transport {
 public:
  explicit CountedTransport(comm::Transport& job) : job_(job), ignored_(job.size(), false) {}

  /// Returns the bytes of all sends that were started.
  int64_t sent_bytes() const { return sent_bytes_; }
  /// Makes failed() return false for this rank, with which the caller exchanges no messages any more. So
  /// waits that check all ranks of a job continue without it.
  void Ignore(int rank) { ignored_[rank] = true; }

  std::string_view name() const override { return job_.name(); }
  int rank() const override { return job_.rank(); }
  int size() const override { return job_.size(); }
  StatusOr<comm::TransferId> Send(int peer, comm::Tag tag, std::span<const std::byte> data) override {
    sent_bytes_ += std::ssize(data);
    return job_.Send(peer, tag, data);
  }
  StatusOr<comm::TransferId> SendAhead(int peer, comm::Tag tag, std::span<const std::byte> data) override {
    sent_bytes_ += std::ssize(data);
    return job_.SendAhead(peer, tag, data);
  }
  StatusOr<comm::TransferId> Receive(int peer, comm::Tag tag, std::span<std::byte> data) override {
    return job_.Receive(peer, tag, data);
  }
  Status Exchange(int peer, comm::Tag tag, std::span<const std::byte> data, std::span<std::byte> received,
                  double limit_s) override {
    sent_bytes_ += std::ssize(data);
    return job_.Exchange(peer, tag, data, received, limit_s);
  }
  void Progress() override { job_.Progress(); }
  bool Test(comm::TransferId id, Status* result) override { return job_.Test(id, result); }
  void Cancel(comm::TransferId id) override { job_.Cancel(id); }
  size_t EagerBytes() const override { return job_.EagerBytes(); }
  bool failed(int peer) const override { return !ignored_[peer] && job_.failed(peer); }
  double SilentSeconds(int peer) const override { return ignored_[peer] ? 0 : job_.SilentSeconds(peer); }
  double Now() const override { return job_.Now(); }
  void EndJob() override { job_.EndJob(); }
  void Idle() override { job_.Idle(); }

 private:
  comm::Transport& job_;
  std::vector<bool> ignored_;  // [ranks]
  int64_t sent_bytes_ = 0;
};

}  // namespace moesaic::parallel
