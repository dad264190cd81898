#include "comm/transport/local_transport.h"

#include <immintrin.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "comm/transport/limit_clock.h"
#include "comm/transport/transfer_errors.h"
#include "comm/transport/transfer_pool.h"
#include "comm/transport/virtual_clock.h"

namespace moesaic::comm {
namespace {

// A rank spins for about 20 us before it yields: longer than a peer on another core needs for a small
// message.
constexpr int kPausesPerIdle = 8;  // a pause is 40 to 140 cycles
constexpr int kSpinningIdles = 100;

enum class LocalState : uint8_t {
  kPosted,   // queued, without a partner
  kMatched,  // the other side copies, or virtual time passes
  kEnded,
};
enum class LocalResult : uint8_t { kOk, kDead, kSize };

struct LocalTransfer {
  uint32_t slot = 0, generation = 0;
  Tag tag = 0;
  int peer = 0;
  bool is_send = false;
  std::byte* data = nullptr;  // of a send: only read
  size_t bytes = 0;
  LocalTransfer* next = nullptr;
  LocalTransfer* partner = nullptr;  // of transfers in PairQueues::offered, and their sends
  int ticket = -1;                   // of the virtual clock
  // Written by the side that copies, before `state` becomes kEnded.
  LocalResult result = LocalResult::kOk;
  size_t sent_bytes = 0;  // of kSize
  int dead = -1;          // of kDead
  std::atomic<LocalState> state = LocalState::kPosted;
};

class SpinLock {
 public:
  void lock() {
    for (int spins = 0; held_.test_and_set(std::memory_order_acquire); ++spins) {
      if (spins < kSpinningIdles) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }
  void unlock() { held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag held_;
};

// Transfers in the order in which they were posted.
class TransferQueue {
 public:
  void Append(LocalTransfer& added) {
    added.next = nullptr;
    *end_ = &added;
    end_ = &added.next;
  }
  // Removes the first transfer that satisfies `match`, or returns null.
  template <typename Match>
  LocalTransfer* Remove(const Match& match) {
    for (LocalTransfer** at = &first_; *at != nullptr; at = &(*at)->next) {
      LocalTransfer* const found = *at;
      if (!match(*found)) continue;
      *at = found->next;
      if (end_ == &found->next) end_ = at;
      return found;
    }
    return nullptr;
  }

 private:
  LocalTransfer* first_ = nullptr;
  LocalTransfer** end_ = &first_;
};

// A message from this size on is copied by its receiver, whose cache needs it, even if the sender comes
// second. Two ranks that exchange messages then copy at the same time. Ranks without a core of their own gain
// nothing from this.
constexpr size_t kOfferBytes = 1024;

// Transfers from one rank to another that have no partner yet. No tag is in both queues. `offered` has
// receives whose send has come second: the receiver copies in Progress().
struct alignas(64) PairQueues {
  SpinLock lock;
  TransferQueue sends, receives, offered;
};

// Number of transfers that are offered to a rank.
struct alignas(64) OfferCount {
  std::atomic<int> value = 0;
};

void End(LocalTransfer& transfer, LocalResult result, int dead = -1) {
  transfer.result = result;
  transfer.dead = dead;
  transfer.state.store(LocalState::kEnded, std::memory_order_release);
}

}  // namespace

struct LocalShared {
  explicit LocalShared(int count)
      : ranks(count),
        pairs(new PairQueues[static_cast<size_t>(count) * count]),
        offers(new OfferCount[count]),
        dead(new std::atomic<bool>[count] {}) {}

  PairQueues& pair(int from, int to) { return pairs[static_cast<size_t>(from) * ranks + to]; }
  // The dead one of two ranks, or -1.
  int DeadOf(int a, int b) const { return dead[a].load() ? a : dead[b].load() ? b : -1; }
  // Removes the offered receive from the queue of `to`, or any one for null; returns null when none is left.
  // The caller holds the lock and ends both sides.
  LocalTransfer* Claim(int from, int to, const LocalTransfer* receive = nullptr) {
    LocalTransfer* const found = pair(from, to).offered.Remove(
        [&](const LocalTransfer& other) { return receive == nullptr || &other == receive; });
    if (found != nullptr) offers[to].value.fetch_sub(1, std::memory_order_relaxed);
    return found;
  }
  void Kill(int rank);

  const int ranks;
  const std::unique_ptr<PairQueues[]> pairs;
  const std::unique_ptr<OfferCount[]> offers;
  const std::unique_ptr<std::atomic<bool>[]> dead;
  std::unique_ptr<VirtualClock> clock;  // null: real time
};

void LocalShared::Kill(int rank) {
  dead[rank].store(true);
  const auto fail = [&](TransferQueue& queue) {
    while (LocalTransfer* const found = queue.Remove([](const LocalTransfer&) { return true; })) {
      End(*found, LocalResult::kDead, rank);
    }
  };
  const auto fail_pair = [&](int from, int to) {
    PairQueues& queues = pair(from, to);
    const std::lock_guard lock(queues.lock);
    fail(queues.sends);
    fail(queues.receives);
    while (LocalTransfer* const receive = Claim(from, to)) {
      End(*receive->partner, LocalResult::kDead, rank);
      End(*receive, LocalResult::kDead, rank);
    }
  };
  for (int peer = 0; peer < ranks; ++peer) {
    fail_pair(rank, peer);
    fail_pair(peer, rank);
  }
  if (clock != nullptr) clock->NotifyAll();
}

class LocalEnd final : public Transport {
 public:
  LocalEnd(LocalShared& shared, int rank)
      : shared_(shared),
        rank_(rank),
        spinning_idles_(shared.ranks <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpinningIdles
                                                                                              : 0) {}

  std::string_view name() const override { return "local"; }
  int rank() const override { return rank_; }
  int size() const override { return shared_.ranks; }
  bool failed(int peer) const override { return shared_.dead[peer].load(std::memory_order_relaxed); }
  void Progress() override {
    if (shared_.offers[rank_].value.load(std::memory_order_relaxed) > 0) TakeOffers();
  }

  StatusOr<TransferId> Send(int peer, Tag tag, std::span<const std::byte> data) override {
    if (sends_++ == kill_at_send_) shared_.Kill(rank_);
    // The buffer of a send is only read.
    return Post(true, peer, tag, const_cast<std::byte*>(data.data()), data.size());  // NOLINT
  }
  StatusOr<TransferId> Receive(int peer, Tag tag, std::span<std::byte> data) override {
    return Post(false, peer, tag, data.data(), data.size());
  }

  bool Test(TransferId id, Status* result) override {
    LocalTransfer& transfer = pool_.At(id);
    if (transfer.state.load(std::memory_order_acquire) != LocalState::kEnded) return false;
    idles_ = 0;
    *result = StatusOf(transfer);
    pool_.Return(transfer);
    return true;
  }

  void Cancel(TransferId id) override {
    LocalTransfer& transfer = pool_.At(id);
    const int from = transfer.is_send ? rank_ : transfer.peer;
    const int to = transfer.is_send ? transfer.peer : rank_;
    PairQueues& queues = shared_.pair(from, to);
    {
      const std::lock_guard lock(queues.lock);
      if (transfer.state.load(std::memory_order_acquire) == LocalState::kPosted) {
        TransferQueue& queue = transfer.is_send ? queues.sends : queues.receives;
        MOESAIC_CHECK(queue.Remove([&](const LocalTransfer& other) { return &other == &transfer; }) !=
                      nullptr);
        transfer.state.store(LocalState::kEnded, std::memory_order_relaxed);
      } else if (transfer.partner != nullptr) {
        LocalTransfer* const receive = transfer.is_send ? transfer.partner : &transfer;
        if (shared_.Claim(from, to, receive) != nullptr) {
          LocalTransfer& send = transfer.is_send ? transfer : *transfer.partner;
          // A message whose send is cancelled still arrives; one whose receive is cancelled is dropped.
          if (transfer.is_send) Copy(send, *receive);
          const LocalResult result = receive->result;
          End(send, LocalResult::kOk);
          End(*receive, result);
        }
      }
    }
    if (shared_.clock != nullptr) {
      // The message was copied when it was matched; only the arrival is outstanding.
      if (transfer.ticket >= 0) shared_.clock->Detach(transfer.ticket, &transfer);
    } else {
      while (transfer.state.load(std::memory_order_acquire) != LocalState::kEnded) sched_yield();
    }
    pool_.Return(transfer);
  }

  double Now() const override { return shared_.clock != nullptr ? shared_.clock->now() : clock_.Now(); }

  void Idle() override {
    if (shared_.clock != nullptr) {
      shared_.clock->Idle(rank_);
    } else if (idles_ < spinning_idles_) {
      ++idles_;
      for (int i = 0; i < kPausesPerIdle; ++i) _mm_pause();
    } else {
      sched_yield();
    }
  }

  void KillAtSend(int64_t sends) { kill_at_send_ = sends; }

 private:
  StatusOr<TransferId> Post(bool is_send, int peer, Tag tag, std::byte* data, size_t bytes) {
    RETURN_IF_ERROR(CheckTransfer(*this, peer, tag));
    const int from = is_send ? rank_ : peer;
    const int to = is_send ? peer : rank_;
    PairQueues& queues = shared_.pair(from, to);
    LocalTransfer* partner = nullptr;
    LocalTransfer& transfer = pool_.Take();
    transfer.tag = tag;
    transfer.peer = peer;
    transfer.is_send = is_send;
    transfer.data = data;
    transfer.bytes = bytes;
    transfer.ticket = -1;
    transfer.partner = nullptr;
    transfer.result = LocalResult::kOk;
    bool is_offered = false;
    {
      const std::lock_guard lock(queues.lock);
      if (const int dead = shared_.DeadOf(from, to); dead >= 0) {
        pool_.Return(transfer);
        return DeadPeer(rank_, dead);
      }
      partner = (is_send ? queues.receives : queues.sends).Remove([&](const LocalTransfer& other) {
        return other.tag == tag;
      });
      if (partner == nullptr) {
        transfer.state.store(LocalState::kPosted, std::memory_order_relaxed);
        (is_send ? queues.sends : queues.receives).Append(transfer);
      } else {
        transfer.state.store(LocalState::kMatched, std::memory_order_relaxed);
        partner->state.store(LocalState::kMatched, std::memory_order_relaxed);
        // Under the lock, so that messages of one tag start in their order.
        is_offered = from != to && bytes >= kOfferBytes && spinning_idles_ > 0 && shared_.clock == nullptr;
        if (is_offered) {
          transfer.partner = partner;
          partner->partner = &transfer;
          queues.offered.Append(is_send ? *partner : transfer);
          shared_.offers[to].value.fetch_add(1, std::memory_order_relaxed);
        } else if (shared_.clock != nullptr) {
          StartVirtual(is_send ? transfer : *partner, is_send ? *partner : transfer);
        }
      }
    }
    if (partner != nullptr && shared_.clock == nullptr && !is_offered) {
      LocalTransfer& receive = is_send ? *partner : transfer;
      Copy(is_send ? transfer : *partner, receive);
      const LocalResult result = receive.result;
      End(is_send ? transfer : *partner, LocalResult::kOk);
      End(receive, result);
    }
    return pool_.Id(transfer);
  }

  void TakeOffers() {
    for (int from = 0; from < shared_.ranks; ++from) {
      for (;;) {
        LocalTransfer* receive = nullptr;
        {
          const std::lock_guard lock(shared_.pair(from, rank_).lock);
          receive = shared_.Claim(from, rank_);
        }
        if (receive == nullptr) break;
        Copy(*receive->partner, *receive);
        const LocalResult result = receive->result;
        End(*receive->partner, LocalResult::kOk);
        End(*receive, result);
      }
    }
  }

  static void Copy(const LocalTransfer& send, LocalTransfer& receive) {
    receive.sent_bytes = send.bytes;
    receive.result = send.bytes == receive.bytes ? LocalResult::kOk : LocalResult::kSize;
    if (receive.result == LocalResult::kOk && send.bytes > 0)
      std::memcpy(receive.data, send.data, send.bytes);
  }

  void StartVirtual(LocalTransfer& send, LocalTransfer& receive) {
    Copy(send, receive);
    send.ticket = receive.ticket =
        shared_.clock->Start(receive.peer, send.peer, send.tag, send.bytes, &send, &receive);
  }

  Status StatusOf(const LocalTransfer& transfer) const {
    switch (transfer.result) {
      case LocalResult::kOk:
        return OkStatus();
      case LocalResult::kDead:
        return DeadPeer(rank_, transfer.dead);
      case LocalResult::kSize:
        return WrongSize(rank_, transfer.peer, transfer.tag, transfer.bytes, transfer.sent_bytes);
    }
    return OkStatus();
  }

  LocalShared& shared_;
  const int rank_;
  const int spinning_idles_;
  TransferPool<LocalTransfer> pool_;
  int idles_ = 0;
  mutable LimitClock clock_;
  int64_t sends_ = 0;
  int64_t kill_at_send_ = -1;
};

LocalJob::LocalJob(int ranks, LocalOptions options) : shared_(std::make_unique<LocalShared>(ranks)) {
  MOESAIC_CHECK_LT(0, ranks);
  if (options.topology != nullptr) {
    MOESAIC_CHECK_EQ(options.topology->ranks(), ranks);
    shared_->clock = std::make_unique<VirtualClock>(
        *options.topology, options.quantum_s, ranks, [](void* sender, void* receiver) {
          for (void* side : {sender, receiver}) {
            if (side == nullptr) continue;
            auto& transfer = *static_cast<LocalTransfer*>(side);
            transfer.state.store(LocalState::kEnded, std::memory_order_release);
          }
        });
  }
  for (int rank = 0; rank < ranks; ++rank) ends_.push_back(std::make_unique<LocalEnd>(*shared_, rank));
}
LocalJob::~LocalJob() = default;

int LocalJob::ranks() const { return shared_->ranks; }
Transport& LocalJob::end(int rank) { return *ends_.at(rank); }
void LocalJob::Kill(int rank) { shared_->Kill(rank); }
void LocalJob::KillAtSend(int rank, int64_t sends) { ends_.at(rank)->KillAtSend(sends); }
void LocalJob::Compute(int rank, double seconds) {
  MOESAIC_CHECK(shared_->clock != nullptr);
  shared_->clock->Sleep(rank, seconds);
}
void LocalJob::Leave(int rank) {
  if (shared_->clock != nullptr) shared_->clock->Leave(rank);
}

void RunRanks(LocalJob& job, const std::function<void(Transport&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < job.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      body(job.end(rank));
      job.Leave(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void RunRanks(int ranks, const std::function<void(Transport&)>& body, LocalOptions options) {
  LocalJob job(ranks, options);
  RunRanks(job, body);
}

}  // namespace moesaic::comm
