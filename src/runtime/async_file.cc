#include "runtime/async_file.h"

#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <thread>
#include <unordered_map>

namespace moesaic::runtime {
namespace {

// Disks reach their peak rate with a few requests of some hundred kilobytes in flight. Larger pieces only
// delay the last pieces of a batch.
constexpr size_t kPieceBytes = size_t{1} << 20;
// Maximum pieces in flight: 1 GiB, so that the kernel has work while the caller computes for seconds.
constexpr unsigned kRingEntries = 1024;
constexpr int kThreads = 4;

struct Piece {
  int fd;
  bool write;
  int64_t offset;
  std::byte* data;
  size_t bytes;
  int64_t optional;  // trailing bytes that may lie past the end of the file
  const std::string* path;
  uint64_t ticket;
};

struct Batch {
  int64_t pending = 0;
  Status failure;
};

std::vector<Piece> Cut(std::span<const Transfer> transfers, uint64_t ticket) {
  std::vector<Piece> pieces;
  for (const Transfer& transfer : transfers) {
    const auto total = static_cast<int64_t>(transfer.bytes.size());
    const int64_t needed = transfer.write ? total : transfer.needed;
    for (int64_t at = 0; at < total; at += kPieceBytes) {
      const int64_t bytes = std::min<int64_t>(kPieceBytes, total - at);
      pieces.push_back({transfer.fd, transfer.write, transfer.offset + at, transfer.bytes.data() + at,
                        static_cast<size_t>(bytes), std::clamp<int64_t>(at + bytes - needed, 0, bytes),
                        transfer.path, ticket});
    }
  }
  return pieces;
}

// Processes the result of a transfer (bytes, or a negative error). Returns true if the piece is complete.
bool Account(Piece& piece, int64_t result, Status* failure) {
  if (result == -EINTR || result == -EAGAIN) return false;
  if (result < 0) {
    *failure = IoError("{}: {} at byte {} failed: {}", *piece.path, piece.write ? "writing" : "reading",
                       piece.offset, std::strerror(static_cast<int>(-result)));
    return true;
  }
  const auto moved = static_cast<size_t>(result);
  piece.offset += result;
  piece.data += moved;
  piece.bytes -= moved;
  if (static_cast<int64_t>(piece.bytes) <= piece.optional) return true;
  if (result > 0) return false;
  *failure = piece.write
                 ? IoError("{}: writing at byte {} failed: no bytes were written", *piece.path, piece.offset)
                 : DataLoss("{}: the file ends at byte {}, {} more are needed", *piece.path, piece.offset,
                            static_cast<int64_t>(piece.bytes) - piece.optional);
  return true;
}

class Ring : public AsyncFiles {
 public:
  static StatusOr<std::unique_ptr<AsyncFiles>> Create() {
    auto ring = std::make_unique<Ring>();
    const int error = io_uring_queue_init(kRingEntries, &ring->ring_, 0);
    if (error < 0) return IoError("io_uring: {}", std::strerror(-error));
    ring->open_ = true;
    return std::unique_ptr<AsyncFiles>(std::move(ring));
  }
  ~Ring() override {
    if (!open_) return;
    waiting_.clear();
    while (free_.size() < kRingEntries) Reap();
    io_uring_queue_exit(&ring_);
  }

  const std::string& backend() const override { return name_; }

  Ticket Submit(std::span<const Transfer> transfers) override {
    const Ticket ticket = ++last_ticket_;
    const std::vector<Piece> pieces = Cut(transfers, ticket);
    batches_[ticket].pending = static_cast<int64_t>(pieces.size());
    waiting_.insert(waiting_.end(), pieces.begin(), pieces.end());
    Feed();
    return ticket;
  }

  Status Wait(Ticket ticket) override {
    Batch& batch = batches_.at(ticket);
    while (batch.pending > 0) Reap();
    Status failure = std::move(batch.failure);
    batches_.erase(ticket);
    return failure;
  }

 private:
  // Submits waiting pieces to the kernel while the ring has room.
  void Feed() {
    while (!waiting_.empty() && !free_.empty()) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      const unsigned slot = free_.back();
      free_.pop_back();
      Piece& piece = slots_[slot];
      piece = waiting_.front();
      waiting_.pop_front();
      const auto bytes = static_cast<unsigned>(piece.bytes);
      if (piece.write) {
        io_uring_prep_write(entry, piece.fd, piece.data, bytes, piece.offset);
      } else {
        io_uring_prep_read(entry, piece.fd, piece.data, bytes, piece.offset);
      }
      // IOSQE_ASYNC keeps page-cache copies off this thread; otherwise they would delay the caller's
      // computation.
      io_uring_sqe_set_flags(entry, IOSQE_ASYNC);
      entry->user_data = slot;
    }
    // The kernel may accept only some entries, or none; the next call submits the rest.
    if (io_uring_sq_ready(&ring_) > 0) io_uring_submit(&ring_);
  }

  void Reap() {
    Feed();
    io_uring_cqe* done = nullptr;
    if (io_uring_peek_cqe(&ring_, &done) != 0) {
      // Submits while waiting. Otherwise it would block for ever if the kernel had accepted nothing.
      io_uring_submit_and_wait(&ring_, 1);
      if (io_uring_peek_cqe(&ring_, &done) != 0) return;  // interrupted: the caller repeats the call
    }
    const auto slot = static_cast<unsigned>(done->user_data);
    const int64_t result = done->res;
    io_uring_cqe_seen(&ring_, done);
    free_.push_back(slot);
    Piece& piece = slots_[slot];
    Status failure;
    if (!Account(piece, result, &failure)) {
      waiting_.push_front(piece);
      return;
    }
    Batch& batch = batches_[piece.ticket];
    --batch.pending;
    if (!failure.ok() && batch.failure.ok()) batch.failure = std::move(failure);
  }

  io_uring ring_ = {};
  bool open_ = false;
  std::string name_ = "io_uring";
  Ticket last_ticket_ = 0;
  std::deque<Piece> waiting_;
  std::vector<Piece> slots_ = std::vector<Piece>(kRingEntries);  // pieces in flight
  std::vector<unsigned> free_ = [] {
    std::vector<unsigned> all(kRingEntries);
    std::iota(all.begin(), all.end(), 0U);
    return all;
  }();
  std::unordered_map<Ticket, Batch> batches_;
};

class Threads : public AsyncFiles {
 public:
  explicit Threads(const std::string& reason) : name_(fmt::format("{} threads{}", kThreads, reason)) {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Threads() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const std::string& backend() const override { return name_; }

  Ticket Submit(std::span<const Transfer> transfers) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Ticket ticket = ++last_ticket_;
    const std::vector<Piece> pieces = Cut(transfers, ticket);
    batches_[ticket].pending = static_cast<int64_t>(pieces.size());
    waiting_.insert(waiting_.end(), pieces.begin(), pieces.end());
    work_.notify_all();
    return ticket;
  }

  Status Wait(Ticket ticket) override {
    std::unique_lock<std::mutex> lock(mutex_);
    Batch& batch = batches_.at(ticket);
    done_.wait(lock, [&] { return batch.pending == 0; });
    Status failure = std::move(batch.failure);
    batches_.erase(ticket);
    return failure;
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Piece piece = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      Status failure;
      while (true) {
        const ssize_t moved = piece.write ? pwrite(piece.fd, piece.data, piece.bytes, piece.offset)
                                          : pread(piece.fd, piece.data, piece.bytes, piece.offset);
        if (Account(piece, moved < 0 ? -errno : moved, &failure)) break;
      }
      lock.lock();
      Batch& batch = batches_[piece.ticket];
      if (!failure.ok() && batch.failure.ok()) batch.failure = std::move(failure);
      if (--batch.pending == 0) done_.notify_all();
    }
  }

  std::string name_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Piece> waiting_;
  std::unordered_map<Ticket, Batch> batches_;
  Ticket last_ticket_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

StatusOr<std::unique_ptr<AsyncFiles>> AsyncFiles::Create(Backend backend) {
  std::string reason;
  if (backend == Backend::kBest) {
    StatusOr<std::unique_ptr<AsyncFiles>> ring = Ring::Create();
    if (ring.ok()) return ring;
    reason = fmt::format(" ({})", Message(ring.status()));
  }
  return std::unique_ptr<AsyncFiles>(std::make_unique<Threads>(reason));
}

}  // namespace moesaic::runtime
