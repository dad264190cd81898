#include "comm/transport/mpi_transport.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/transport/limit_clock.h"
#include "comm/transport/poll_limit.h"
#include "comm/transport/self_messages.h"
#include "comm/transport/transfer_errors.h"
#include "comm/transport/transfer_pool.h"

namespace moesaic::comm {
namespace {

// Under SMPI, the time of MPI_Wtime() is simulated and passes in calls of MPI alone.
#ifdef SMPI_H
constexpr bool kSimulated = true;
#else
constexpr bool kSimulated = false;
#endif

constexpr int kMinTagLimit = 1 << 20;  // leads to at most 1024 duplicates of the communicator

// Sends of this size end in MPI_Isend: the eager limit of Open MPI in shared memory.
constexpr size_t kEagerBytes = 4096;
// MPI_Test of each request is faster than MPI_Testsome for so few.
constexpr size_t kMaxSingleTests = 2;
// A rank polls for about 10 us before it yields: longer than a peer on another core needs for a small
// message.
constexpr int kSpinningIdles = 100;

struct MpiTransfer {
  uint32_t slot = 0, generation = 0;
  int peer = 0;
  Tag tag = 0;
  size_t bytes = 0;
  bool is_send = false;
  bool ended = false;
  std::byte* data = nullptr;  // of messages to itself; of a send: only read
  size_t request = 0;         // index in MpiTransport::requests_ of a transfer that has not ended
  Status result;
};

std::string MpiErrorText(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "code " + std::to_string(code);
  return {text.data(), static_cast<size_t>(length)};
}

Status MpiFault(int rank, const std::string& operation, int code) {
  const std::string text = MpiErrorText(code);
  return FormatStatus(StatusCode::kUnavailable, "rank {}: {} failed; MPI reports: {}",
                      fmt::make_format_args(rank, operation, text));
}

int RankIn(MPI_Comm communicator) {
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  return rank;
}

int ErrorClass(int code) {
  int error_class = MPI_ERR_UNKNOWN;
  MPI_Error_class(code, &error_class);
  return error_class;
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::vector<MPI_Comm> communicators, Tag tags_per_communicator, Tag tag_limit)
      : communicators_(std::move(communicators)),
        tags_per_communicator_(tags_per_communicator),
        tag_limit_(tag_limit),
        rank_(RankIn(communicators_[0])),
        self_(rank_) {
    MPI_Comm_size(communicators_[0], &size_);
  }

  ~MpiTransport() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0) return;
    while (!active_.empty()) Cancel(pool_.Id(*active_.back()));
    for (MPI_Comm& communicator : communicators_) MPI_Comm_free(&communicator);
  }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool failed(int) const override { return false; }

  StatusOr<TransferId> Send(int peer, Tag tag, std::span<const std::byte> data) override {
    return Start(true, peer, tag, const_cast<std::byte*>(data.data()),
                 data.size());  // NOLINT: it is only read
  }
  StatusOr<TransferId> Receive(int peer, Tag tag, std::span<std::byte> data) override {
    return Start(false, peer, tag, data.data(), data.size());
  }

  // Uses two requests on the stack, because the pool's bookkeeping takes most of the time of small messages.
  Status Exchange(int peer, Tag tag, std::span<const std::byte> data, std::span<std::byte> received,
                  double limit_s) override {
    if (kSimulated || peer == rank_ || std::max(data.size(), received.size()) > kEagerBytes) {
      return Transport::Exchange(peer, tag, data, received, limit_s);
    }
    RETURN_IF_ERROR(Check(peer, tag));
    MPI_Request receive = MPI_REQUEST_NULL, send = MPI_REQUEST_NULL;
    RETURN_IF_ERROR(
        Post(true, peer, tag, const_cast<std::byte*>(data.data()), data.size(), &send));  // NOLINT: read only
    if (Status posted = Post(false, peer, tag, received.data(), received.size(), &receive); !posted.ok()) {
      Withdraw(&send, true);
      return posted;
    }
    MPI_Status status;
    PollLimit limit(*this, limit_s);
    while (true) {
      const bool receives = receive != MPI_REQUEST_NULL;
      int ended = 0;
      const int code = MPI_Test(receives ? &receive : &send, &ended, receives ? &status : MPI_STATUS_IGNORE);
      if (code != MPI_SUCCESS || ended != 0) {
        Status result =
            ResultOf(!receives, peer, tag, receives ? received.size() : data.size(), status, code);
        if (!receives) return result;
        if (!result.ok()) {
          Withdraw(&send, true);
          return result;
        }
        continue;
      }
      if (limit.polls() >= kSpinningIdles) Transport::Idle();
      if (!limit.Passed()) continue;
      if (receives) Withdraw(&receive, false);
      Withdraw(&send, true);
      return Expired(*this, limit_s);
    }
  }

  size_t EagerBytes() const override { return kEagerBytes; }
  void EndJob() override { MPI_Abort(MPI_COMM_WORLD, 1); }
  void Idle() override {
    if (kSimulated) {
      WaitForAny();
    } else if (idles_ < kSpinningIdles) {
      ++idles_;
    } else {
      Transport::Idle();
    }
  }

  void Progress() override {
    if (kSimulated) return TestAny();
    if (requests_.empty()) return;
    if (requests_.size() <= kMaxSingleTests) return TestEach();
    int ended = 0;
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &ended,
                                  indices_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return FailAll(code);
    if (ended == MPI_UNDEFINED || ended == 0) return;
    idles_ = 0;
    // A successful call does not set the errors of statuses.
    for (int i = 0; i < ended; ++i) {
      SetResult(*active_[indices_[i]], statuses_[i],
                code == MPI_SUCCESS ? MPI_SUCCESS : statuses_[i].MPI_ERROR);
    }
    DropEnded();
  }

  bool Test(TransferId id, Status* result) override {
    MpiTransfer& transfer = pool_.At(id);
    if (!transfer.ended) return false;
    *result = std::move(transfer.result);
    transfer.result = OkStatus();
    pool_.Return(transfer);
    return true;
  }

  void Cancel(TransferId id) override {
    MpiTransfer& transfer = pool_.At(id);
    if (!transfer.ended && transfer.peer == rank_) {
      self_.Remove(transfer);
    } else if (!transfer.ended) {
      Withdraw(&requests_[transfer.request], transfer.is_send);
      transfer.ended = true;
      DropEnded();
    }
    transfer.result = OkStatus();
    pool_.Return(transfer);
  }

  double Now() const override { return kSimulated ? MPI_Wtime() : clock_.Now(); }

 private:
  Status Check(int peer, Tag tag) const {
    RETURN_IF_ERROR(CheckTransfer(*this, peer, tag));
    if (tag < tag_limit_) return OkStatus();
    return InvalidArgument("rank {}: tags of this transport are below {}, found {}", rank_, tag_limit_, tag);
  }

  StatusOr<TransferId> Start(bool is_send, int peer, Tag tag, std::byte* data, size_t bytes) {
    RETURN_IF_ERROR(Check(peer, tag));
    if (bytes > static_cast<size_t>(std::numeric_limits<int>::max())) {
      return InvalidArgument("rank {}: MPI sends at most 2^31-1 bytes at once; send parts; found {} bytes",
                             rank_, bytes);
    }
    MPI_Request made = MPI_REQUEST_NULL;
    if (peer != rank_) RETURN_IF_ERROR(Post(is_send, peer, tag, data, bytes, &made));
    MpiTransfer& transfer = pool_.Take();
    transfer.peer = peer;
    transfer.tag = tag;
    transfer.data = data;
    transfer.bytes = bytes;
    transfer.is_send = is_send;
    transfer.ended = false;
    if (peer == rank_) {
      self_.Post(transfer);
      ended_since_idle_ = true;
      return pool_.Id(transfer);
    }
    if (is_send && bytes <= kEagerBytes) {
      int ended = 0;
      if (const int code = MPI_Test(&made, &ended, MPI_STATUS_IGNORE); code != MPI_SUCCESS || ended != 0) {
        SetResult(transfer, MPI_Status(), code);
        return pool_.Id(transfer);
      }
    }
    transfer.request = requests_.size();
    requests_.push_back(made);
    active_.push_back(&transfer);
    if (indices_.size() < requests_.size()) {
      indices_.resize(2 * requests_.size());
      statuses_.resize(2 * requests_.size());
    }
    return pool_.Id(transfer);
  }

  // Starts a message with another rank.
  Status Post(bool is_send, int peer, Tag tag, std::byte* data, size_t bytes, MPI_Request* request) const {
    const int count = static_cast<int>(bytes), mpi_tag = static_cast<int>(tag % tags_per_communicator_);
    MPI_Comm communicator = communicators_[tag / tags_per_communicator_];
    const int code = is_send ? MPI_Isend(data, count, MPI_BYTE, peer, mpi_tag, communicator, request)
                             : MPI_Irecv(data, count, MPI_BYTE, peer, mpi_tag, communicator, request);
    if (code == MPI_SUCCESS) return OkStatus();
    return MpiFault(rank_, fmt::format("{} rank {}", Verb(is_send), peer), code);
  }

  // Ends transfers one by one: SMPI makes an event of the simulation of each test of a request, and
  // MPI_Testsome tests all of them.
  void TestAny() {
    while (!requests_.empty()) {
      int index = MPI_UNDEFINED, ended = 0;
      MPI_Status status;
      const int code =
          MPI_Testany(static_cast<int>(requests_.size()), requests_.data(), &index, &ended, &status);
      if (code != MPI_SUCCESS && index == MPI_UNDEFINED) return FailAll(code);
      if ((code == MPI_SUCCESS && ended == 0) || index == MPI_UNDEFINED) return;
      End(static_cast<size_t>(index), status, code);
    }
  }

  // Lets simulated time pass until a transfer ends, unless the caller has not yet looked at one that has.
  void WaitForAny() {
    if (std::exchange(ended_since_idle_, false)) return;
    if (requests_.empty()) {
      usleep(1);  // simulated
      return;
    }
    int index = MPI_UNDEFINED;
    MPI_Status status;
    const int code = MPI_Waitany(static_cast<int>(requests_.size()), requests_.data(), &index, &status);
    if (index == MPI_UNDEFINED) return FailAll(code);
    End(static_cast<size_t>(index), status, code);
    ended_since_idle_ = false;
  }

  void TestEach() {
    for (size_t i = requests_.size(); i-- > 0;) {
      int ended = 0;
      MPI_Status status;
      const int code = MPI_Test(&requests_[i], &ended, &status);
      if (code == MPI_SUCCESS && ended == 0) continue;
      End(i, status, code);
      idles_ = 0;
    }
  }

  // Ends the transfer of requests_[i]. The last request takes its place.
  void End(size_t i, const MPI_Status& status, int code) {
    SetResult(*active_[i], status, code);
    if (i + 1 < active_.size()) {
      active_[i] = active_.back();
      active_[i]->request = i;
      requests_[i] = requests_.back();
    }
    active_.pop_back();
    requests_.pop_back();
  }

  static void Withdraw(MPI_Request* request, bool is_send) {
    MPI_Cancel(request);
    if (!is_send) {
      MPI_Wait(request, MPI_STATUS_IGNORE);
      return;
    }
    int ended = 0;
    MPI_Test(request, &ended, MPI_STATUS_IGNORE);
    if (ended == 0) MPI_Request_free(request);
  }

  static const char* Verb(bool is_send) { return is_send ? "send to" : "receive from"; }

  void SetResult(MpiTransfer& transfer, const MPI_Status& status, int error) {
    transfer.ended = true;
    ended_since_idle_ = true;
    transfer.result = ResultOf(transfer.is_send, transfer.peer, transfer.tag, transfer.bytes, status, error);
  }

  Status ResultOf(bool is_send, int peer, Tag tag, size_t bytes, const MPI_Status& status, int error) const {
    if (error != MPI_SUCCESS && ErrorClass(error) == MPI_ERR_TRUNCATE) {
      return TooLong(rank_, peer, tag, bytes);
    }
    if (error != MPI_SUCCESS) {
      return MpiFault(rank_, fmt::format("{} rank {}", Verb(is_send), peer), error);
    }
    if (is_send) return OkStatus();
    int received = 0;
    MPI_Get_count(&status, MPI_BYTE, &received);
    if (static_cast<size_t>(received) == bytes) return OkStatus();
    return WrongSize(rank_, peer, tag, bytes, static_cast<size_t>(received));
  }

  void FailAll(int code) {
    for (MpiTransfer* transfer : active_) {
      transfer->ended = true;
      transfer->result =
          MpiFault(rank_, fmt::format("{} rank {}", Verb(transfer->is_send), transfer->peer), code);
    }
    DropEnded();
  }

  void DropEnded() {
    size_t kept = 0;
    for (size_t i = 0; i < active_.size(); ++i) {
      if (active_[i]->ended) continue;
      active_[kept] = active_[i];
      requests_[kept] = requests_[i];
      active_[kept]->request = kept;
      ++kept;
    }
    active_.resize(kept);
    requests_.resize(kept);
  }

  std::vector<MPI_Comm> communicators_;
  const Tag tags_per_communicator_, tag_limit_;
  const int rank_;
  int size_ = 1;
  TransferPool<MpiTransfer> pool_;
  SelfMessages<MpiTransfer> self_;
  // Transfers that have not ended, and their requests, as MPI_Testsome wants them.
  std::vector<MpiTransfer*> active_;
  std::vector<MPI_Request> requests_;
  int idles_ = 0;                  // since a transfer ended
  bool ended_since_idle_ = false;  // a transfer, since the last Idle()
  // Scratch of MPI_Testsome.
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  mutable LimitClock clock_;
};

}  // namespace

StatusOr<std::unique_ptr<Transport>> MakeMpiTransport(MPI_Comm communicator,
                                                      const MpiTransportOptions& options) {
  int ready = 0;
  MPI_Initialized(&ready);
  if (ready == 0) return InvalidArgument("MPI is not initialized; call MPI_Init first");
  int* limit = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &found);
  const int max_tag = std::min(options.max_tag, found != 0 ? *limit : 32767);
  if (max_tag < kMinTagLimit - 1) {
    return Unimplemented("MPI must support tags up to 2^20-1; found a limit of {}", max_tag);
  }
  if (options.tag_limit == 0) return InvalidArgument("tag_limit must be at least 1, found 0");
  const Tag tags = std::min(static_cast<Tag>(max_tag) + 1, kTagLimit);
  std::vector<MPI_Comm> communicators;
  const Tag tag_limit = std::min(options.tag_limit, kTagLimit);
  for (Tag first = 0; first < tag_limit; first += tags) {
    MPI_Comm made = MPI_COMM_NULL;
    if (const int code = MPI_Comm_dup(communicator, &made); code != MPI_SUCCESS) {
      for (MPI_Comm& each : communicators) MPI_Comm_free(&each);
      return FormatStatus(StatusCode::kUnavailable, "MPI_Comm_dup failed; MPI reports: {}",
                          fmt::make_format_args(MpiErrorText(code)));
    }
    MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    communicators.push_back(made);
  }
  return std::make_unique<MpiTransport>(std::move(communicators), tags, tag_limit);
}

}  // namespace moesaic::comm
