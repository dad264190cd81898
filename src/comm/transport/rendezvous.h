// Start of a job whose ranks know one address: rank 0 listens there, the other ranks connect, and each rank
// obtains the contact data of all others. Both sides prove that they have the job's secret, which is not
// transmitted.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "comm/transport/socket.h"

namespace moesaic::comm {

/// Largest number of ranks, and of bytes of contact data per rank.
inline constexpr int kMaxRendezvousRanks = 16384;
inline constexpr size_t kMaxContactBytes = 16384;

/// Called when the process of a rank has not answered for `silent_s` seconds, and with 0 s when it answers
/// again.
using SilenceReport = std::function<void(int rank, double silent_s)>;

struct RendezvousOptions {
  std::string host;  ///< name or address of rank 0's host; rank 0 listens on it
  uint16_t port = 0;
  int rank = 0, size = 1;
  std::string secret;  ///< of the job; must not be empty
  /// Rank 0 only: a non-blocking socket that listens on the address already; borrowed. -1: none.
  int listener = -1;
  /// Polled by rank 0, at least once per second, while ranks are missing; an error ends the wait. May be
  /// empty.
  std::function<Status()> check = {};
  /// The transport watches the ranks (rank_watch.h) if all of them have a report, of which that of rank 0 is
  /// called, by another thread. Empty: it does not.
  SilenceReport on_silence = {};
  double time_limit_s = 60;  ///< in (0, 1e9]
  /// Tests only: processes of one host with different numbers, below 128, take each other for processes of
  /// different hosts.
  int test_host = 0;
};

/// Returns the contact data of all ranks, by rank. It blocks until all have arrived. Errors:
///   kDeadlineExceeded  time limit; names the ranks that are missing
///   kPermissionDenied  this rank's secret is not that of rank 0, or rank 0's is not that of the job
///   InvalidArgument    options; a rank that is present already; a size that differs from rank 0's
///   kUnavailable       the address cannot be used, rank 0 ended, or it may not open enough files
/// Connections of peers without the secret are refused, and do not disturb the others. If `kept` is set, it
/// receives connections by rank, which stay open: rank 0 has those of all other ranks, and they that to
/// rank 0.
StatusOr<std::vector<std::string>> Rendezvous(const RendezvousOptions& options, std::string_view contact,
                                              std::vector<Socket>* kept = nullptr);

}  // namespace moesaic::comm
