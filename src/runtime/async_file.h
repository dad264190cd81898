// Reads and writes of files that go on while the caller computes: by io_uring where the kernel allows it,
// else by a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::runtime {

/// What O_DIRECT asks of offsets, lengths and memory, at most.
inline constexpr int64_t kDirectBlock = 4096;

/// One run of bytes between an open file and memory, which must both stay until the transfer was waited for.
struct Transfer {
  int fd = -1;
  bool write = false;
  int64_t offset = 0;  // in the file
  std::span<std::byte> bytes;
  const std::string* path = nullptr;  // for messages
  /// Bytes of a read that must arrive; the file may end behind them (a direct read asks for whole blocks).
  int64_t needed = 0;
};

/// Submits transfers and waits for them. Used by one thread.
class AsyncFiles {
 public:
  enum class Backend { kBest, kThreads };

  /// kBest takes io_uring and falls back to threads where the kernel refuses it; backend() tells.
  static StatusOr<std::unique_ptr<AsyncFiles>> Create(Backend backend);
  virtual ~AsyncFiles() = default;  // waits for what is under way

  /// "io_uring", or "4 threads (io_uring: Operation not permitted)".
  virtual const std::string& backend() const = 0;

  using Ticket = uint64_t;  // of transfers submitted together
  /// Returns at once. Transfers are cut into pieces, which go on in any order.
  virtual Ticket Submit(std::span<const Transfer> transfers) = 0;
  /// Returns when no transfer of `ticket` is under way any more, with the first failure, which names the
  /// file. Each ticket is waited for once.
  virtual Status Wait(Ticket ticket) = 0;
};

}  // namespace moesaic::runtime
