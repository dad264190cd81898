// Asynchronous file reads and writes that overlap with the caller's computation. They use io_uring where the
// kernel allows it, otherwise a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::runtime {

/// Maximum alignment that O_DIRECT requires of offsets, lengths and memory, in bytes.
inline constexpr int64_t kDirectBlock = 4096;

/// One contiguous copy between an open file and memory. Both must stay valid until Wait() has returned for
/// the transfer.
struct Transfer {
  int fd = -1;
  bool write = false;
  int64_t offset = 0;  // byte offset in the file
  std::span<std::byte> bytes;
  const std::string* path = nullptr;  // for error messages
  /// Number of bytes that a read must return. The file may end after them, because a direct read covers whole
  /// blocks.
  int64_t needed = 0;
};

/// Submits transfers and waits for them. Must be used by one thread.
class AsyncFiles {
 public:
  enum class Backend { kBest, kThreads };

  /// kBest uses io_uring and falls back to threads where the kernel refuses it; see backend().
  static StatusOr<std::unique_ptr<AsyncFiles>> Create(Backend backend);
  virtual ~AsyncFiles() = default;  // waits for pending transfers

  /// Returns "io_uring", or "4 threads (io_uring: Operation not permitted)".
  virtual const std::string& backend() const = 0;

  using Ticket = uint64_t;  // identifies the transfers of one Submit()
  /// Returns immediately. Transfers are split into pieces, which run in any order.
  virtual Ticket Submit(std::span<const Transfer> transfers) = 0;
  /// Blocks until every transfer of `ticket` is complete. Returns the first failure, whose message names the
  /// file. Each ticket must be waited for exactly once.
  virtual Status Wait(Ticket ticket) = 0;
};

}  // namespace moesaic::runtime
