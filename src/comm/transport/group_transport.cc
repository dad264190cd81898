#include "comm/transport/group_transport.h"

#include <algorithm>

namespace moesaic::comm {

StatusOr<std::unique_ptr<GroupTransport>> GroupTransport::Create(Transport& job, std::vector<int> ranks) {
  std::vector<bool> named(job.size());
  for (const int rank : ranks) {
    if (rank < 0 || rank >= job.size()) {
      return InvalidArgument("the ranks of a group must be in [0, {}), found {}", job.size(), rank);
    }
    if (named[rank]) return InvalidArgument("a group names rank {} twice", rank);
    named[rank] = true;
  }
  const auto own = std::find(ranks.begin(), ranks.end(), job.rank());
  if (own == ranks.end()) return InvalidArgument("a group must contain its caller, rank {}", job.rank());
  const auto rank = static_cast<int>(own - ranks.begin());
  return std::unique_ptr<GroupTransport>(new GroupTransport(job, std::move(ranks), rank));
}

Status GroupTransport::CheckPeer(int peer) const {
  if (peer >= 0 && peer < size()) return OkStatus();
  return InvalidArgument("peers of the group must be in [0, {}), found {}", size(), peer);
}

StatusOr<TransferId> GroupTransport::Send(int peer, Tag tag, std::span<const std::byte> data) {
  RETURN_IF_ERROR(CheckPeer(peer));
  return job_.Send(ranks_[peer], tag, data);
}

StatusOr<TransferId> GroupTransport::SendAhead(int peer, Tag tag, std::span<const std::byte> data) {
  RETURN_IF_ERROR(CheckPeer(peer));
  return job_.SendAhead(ranks_[peer], tag, data);
}

StatusOr<TransferId> GroupTransport::Receive(int peer, Tag tag, std::span<std::byte> data) {
  RETURN_IF_ERROR(CheckPeer(peer));
  return job_.Receive(ranks_[peer], tag, data);
}

Status GroupTransport::Exchange(int peer, Tag tag, std::span<const std::byte> data,
                                std::span<std::byte> received, double limit_s) {
  RETURN_IF_ERROR(CheckPeer(peer));
  return job_.Exchange(ranks_[peer], tag, data, received, limit_s);
}

}  // namespace moesaic::comm
