#include "comm/transport/transfer_errors.h"

namespace moesaic::comm {
namespace {

template <typename... Args>
Status Fault(StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(code, format, fmt::make_format_args(args...));
}

}  // namespace

Status CheckTransfer(const Transport& transport, int peer, Tag tag) {
  if (peer < 0 || peer >= transport.size()) {
    return InvalidArgument("rank {}: peer must be between 0 and {}, found {}", transport.rank(),
                           transport.size() - 1, peer);
  }
  if (tag >= kTagLimit)
    return InvalidArgument("rank {}: tag must be below 2^30, found {}", transport.rank(), tag);
  return OkStatus();
}

Status DeadPeer(int rank, int dead) {
  if (rank == dead) return Fault(StatusCode::kUnavailable, "rank {} was killed; end its thread", dead);
  return Fault(StatusCode::kUnavailable,
               "rank {}: a peer is dead; continue without it or restart the job; peer: rank {}", rank, dead);
}

Status WrongSize(int rank, int peer, Tag tag, size_t expected_bytes, size_t sent_bytes) {
  return InvalidArgument(
      "rank {}: message from rank {} with tag {} must have {} bytes, as its receive buffer; found {}", rank,
      peer, tag, expected_bytes, sent_bytes);
}

Status TooLong(int rank, int peer, Tag tag, size_t expected_bytes) {
  return InvalidArgument(
      "rank {}: message from rank {} with tag {} must have {} bytes, as its receive buffer; found more", rank,
      peer, tag, expected_bytes);
}

Status Expired(const Transport& transport, double limit_s) {
  return Fault(
      StatusCode::kDeadlineExceeded,
      "rank {}: a transfer did not end in time; its peer is slow, or runs another operation; limit: {} s{}",
      transport.rank(), limit_s, SilentPeers(transport));
}

}  // namespace moesaic::comm
