#include "comm/transport/ucx_transport.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/transport/idle_backoff.h"
#include "comm/transport/limit_clock.h"
#include "comm/transport/process_name.h"
#include "comm/transport/rank_watch.h"
#include "comm/transport/self_messages.h"
#include "comm/transport/transfer_errors.h"
#include "comm/transport/transfer_pool.h"
#include "comm/transport/ucx_handles.h"

namespace moesaic::comm {
namespace {

// A peer that does not answer for this long while a transfer with it is cancelled is disconnected. UCX cannot
// cancel sends, nor receives that have begun, and their buffers must not be touched any more.
constexpr double kWithdrawSeconds = 1;
constexpr double kCloseSeconds = 1;
// A transport that is destroyed waits this long for the requests in flight. Then it closes its endpoints.
constexpr double kSendSeconds = 0.2;
constexpr int kMaxProgressSteps = 64;  // of one call of Progress()
// A rank whose transfers have not advanced for this long asks all others whether they call Progress().
constexpr double kAskSeconds = 0.5;
constexpr int kPollsBetweenClocks = 64;

// UCX 1.13 never ends the receive of an eager message whose sender dies or stops between two fragments, and
// writes to its buffer when the sender continues; over shared memory (fragments of MM_SEG_SIZE), it may not
// end the send either. Such transfers pass through memory of the transport, which is abandoned this long
// after the death: messages over kMaxFragmentBytes between ranks of one host, and all receives from others.
constexpr size_t kMaxFragmentBytes = 8000;
constexpr double kAbandonSeconds = 0.1;
// Transfers from and to buffers of the caller end when UCX closes the connection, so sends to other hosts are
// not copied. The process ends with a check if one does not within this time: its caller could neither wait
// longer nor reuse the buffer.
constexpr double kForcedEndSeconds = 5;

constexpr unsigned kControlId = 1;  // of active messages

enum class ControlType : uint32_t {
  kHello,     // the connection works
  kWithdraw,  // messages of this tag that have no receive are to be dropped
  kQuestion,  // the receiver replies with an answer
  kAnswer,
};
struct Control {
  ControlType type = ControlType::kHello;
  uint32_t rank = 0;  // of the sender
  Tag tag = 0;
};

// A control message of which UCX may read the header until it is sent.
struct SentControl {
  Control header;
  bool ended = false;
};

struct UcxTransfer {
  uint32_t slot = 0, generation = 0;
  int peer = 0;
  Tag tag = 0;
  size_t bytes = 0;
  std::byte* data = nullptr;  // of a send: only read
  bool is_send = false;
  bool ended = false;
  void* request = nullptr;  // of UCX, while it has not ended
  struct StagedMessage* staged = nullptr;
  Status result;
  class UcxTransport* owner = nullptr;
};

// Memory from which UCX sends a message, or into which it receives one.
struct StagedMessage {
  std::vector<std::byte> buffer;
  UcxTransfer* transfer = nullptr;  // null: abandoned
};

// A message without a receiver.
struct Dropped {
  std::vector<std::byte> buffer;
  bool ended = false;
};

struct UcxPeer {
  class UcxTransport* owner = nullptr;
  int rank = 0;
  ucp_ep_h endpoint = nullptr;  // null: the rank itself, or closed
  void* closing = nullptr;      // request that closes the endpoint, while it has not ended
  bool dead = false;
  double died = 0;    // time of its detection
  double silent = 0;  // seconds without an answer after which it was given up; 0: its process has ended
  ProcessName process;
  bool is_local = false;      // on this host
  bool is_present = false;    // its hello has arrived
  bool has_question = false;  // of the peer, without an answer
  double asked = -1;          // time of the question that the peer has not answered; negative: none
  double answered = 0;        // time of its last answer
  double checked = 0;         // time of the last look at its process
};

ucp_tag_t WireTag(int sender, Tag tag) { return static_cast<uint64_t>(sender) << 32 | tag; }

class UcxTransport final : public Transport {
 public:
  UcxTransport(int rank, int size, UcxContext context, UcxWorker worker)
      : rank_(rank), context_(std::move(context)), worker_(std::move(worker)), peers_(size), self_(rank) {
    for (int peer = 0; peer < size; ++peer) {
      peers_[peer].owner = this;
      peers_[peer].rank = peer;
      peers_[peer].is_present = peer == rank;
    }
  }
  ~UcxTransport() override;
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  // Opens the endpoints and waits for the hello of every rank. A contact is a ProcessName and a UCX address.
  Status Connect(const ProcessName& own, const std::vector<std::string>& contacts, double limit_s);
  void KeepWatch(std::unique_ptr<RankWatch> watch) { watch_ = std::move(watch); }

  std::string_view name() const override { return "ucx"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  bool failed(int peer) const override { return peers_[peer].dead; }
  double SilentSeconds(int peer) const override { return SilentSeconds(peers_[peer]); }
  double Now() const override { return clock_.Now(); }

  StatusOr<TransferId> Send(int peer, Tag tag, std::span<const std::byte> data) override {
    return StartSend(peer, tag, data, 0);
  }
  // UCX sends messages up to RNDV_SEND_NBR_THRESH eagerly then.
  StatusOr<TransferId> SendAhead(int peer, Tag tag, std::span<const std::byte> data) override {
    return StartSend(peer, tag, data, UCP_OP_ATTR_FLAG_FAST_CMPL);
  }
  StatusOr<TransferId> Receive(int peer, Tag tag, std::span<std::byte> data) override;
  void Idle() override {
    if (std::exchange(ended_idle_, ended_) != ended_) backoff_.Reset();
    backoff_.Wait();
  }
  void Progress() override;
  bool Test(TransferId id, Status* result) override {
    UcxTransfer& transfer = pool_.At(id);
    if (!transfer.ended) return false;
    *result = std::move(transfer.result);
    Release(transfer);
    return true;
  }
  void Cancel(TransferId id) override;

 private:
  StatusOr<TransferId> StartSend(int peer, Tag tag, std::span<const std::byte> data, uint32_t flags);
  UcxTransfer& Take(bool is_send, int peer, Tag tag, std::byte* data, size_t bytes);
  void Release(UcxTransfer& transfer) {
    transfer.result = OkStatus();
    pool_.Return(transfer);
    ++ended_;
  }
  StagedMessage& TakeStaged(UcxTransfer& transfer);
  void ReturnStaged(UcxTransfer& transfer);
  bool IsStaged(const UcxTransfer& transfer) const {
    return peers_[transfer.peer].is_local ? transfer.bytes > kMaxFragmentBytes : !transfer.is_send;
  }
  void EndTransfer(UcxTransfer& transfer, ucs_status_t code, size_t received_bytes);
  Status SendControl(UcxPeer& peer, const Control& control);
  void MarkDead(UcxPeer& peer);
  double SilentSeconds(const UcxPeer& peer) const {
    if (peer.dead) return peer.silent;
    return peer.asked < 0 ? 0 : Now() - peer.asked;
  }
  void BuryDead();
  void DropWithdrawn();
  // Waits until UCX does not touch the buffer of a transfer any more; a peer that does not help is dead. The
  // process ends if UCX does not end the transfer within kForcedEndSeconds of the death.
  void AwaitCancelled(const UcxTransfer& transfer);
  void AnswerQuestions();
  // Asks the peers if no transfer has ended for kAskSeconds.
  void AskPeers(double now);
  // Ends transfers with dead peers that UCX does not end.
  void AbandonStaged(double now);
  // Returns for each peer whether a send to it has not ended.
  std::vector<bool> SendingPeers() const;
  void Close(UcxPeer& peer, bool force);
  // Whether UCX has ended all requests of this rank.
  bool IsIdle() const {
    return receives_.empty() && sent_controls_.empty() && dropped_.empty() &&
           std::ranges::count(SendingPeers(), true) == 0;
  }
  void KeepForever();
  // Calls Progress() until `done`, or for at most `limit_s`.
  template <typename Done>
  bool ProgressUntil(double limit_s, const Done& done) {
    const double end = Now() + limit_s;
    while (!done()) {
      if (Now() >= end) return false;
      Progress();
      Idle();
    }
    return true;
  }

  static void OnSent(void* request, ucs_status_t code, void* transfer);
  static void OnReceived(void* request, ucs_status_t code, const ucp_tag_recv_info_t* info, void* transfer);
  static void OnStagedSent(void* request, ucs_status_t code, void* staged);
  static void OnStagedReceived(void* request, ucs_status_t code, const ucp_tag_recv_info_t* info,
                               void* staged);
  static void OnControlSent(void* request, ucs_status_t code, void* sent);
  static void OnDropped(void* request, ucs_status_t code, const ucp_tag_recv_info_t* info, void* dropped);
  static void OnClosed(void* request, ucs_status_t code, void* peer);
  static void OnError(void* peer, ucp_ep_h endpoint, ucs_status_t code);
  static ucs_status_t OnControl(void* owner, const void* header, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param);

  const int rank_;
  UcxContext context_;
  UcxWorker worker_;
  std::vector<UcxPeer> peers_;
  TransferPool<UcxTransfer> pool_;
  SelfMessages<UcxTransfer> self_;
  std::vector<UcxTransfer*> receives_;  // receives that have not ended
  std::deque<StagedMessage> staged_;
  // By the bits of the largest message, so that small messages do not keep the memory of large ones.
  std::array<std::vector<StagedMessage*>, std::numeric_limits<size_t>::digits + 1> idle_staged_;
  std::vector<UcxPeer*> newly_dead_;
  std::vector<Control> withdrawn_;
  std::list<Dropped> dropped_;
  std::list<SentControl> sent_controls_;
  bool has_errors_ = false;  // an endpoint was closed by force, or could not be closed
  bool has_questions_ = false;
  uint64_t polls_ = 0;
  uint64_t ended_ = 0, ended_before_ = 0;  // transfers, now and when AskPeers() ran last
  uint64_t ended_idle_ = 0;                // and when Idle() ran last
  IdleBackoff backoff_;
  mutable LimitClock clock_;
  double quiet_since_ = 0;  // when a transfer ended, or none was in flight
  std::unique_ptr<RankWatch> watch_;
};

// ---- callbacks of UCX

void UcxTransport::OnSent(void* request, ucs_status_t code, void* transfer) {
  auto& ended = *static_cast<UcxTransfer*>(transfer);
  ended.owner->EndTransfer(ended, code, ended.bytes);
  Ucx().request_free(request);
}

void UcxTransport::OnReceived(void* request, ucs_status_t code, const ucp_tag_recv_info_t* info,
                              void* transfer) {
  auto& ended = *static_cast<UcxTransfer*>(transfer);
  const bool is_started = ended.request != nullptr;
  if (is_started) std::erase(ended.owner->receives_, &ended);
  ended.owner->EndTransfer(ended, code, info == nullptr ? 0 : info->length);
  if (is_started) Ucx().request_free(request);
}

// UCX may touch the memory of an abandoned message until its callback is called.

void UcxTransport::OnStagedSent(void* request, ucs_status_t code, void* staged) {
  auto& memory = *static_cast<StagedMessage*>(staged);
  UcxTransfer* const ended = memory.transfer;
  if (ended == nullptr) return Ucx().request_free(request);
  ended->owner->ReturnStaged(*ended);
  OnSent(request, code, ended);
}

void UcxTransport::OnStagedReceived(void* request, ucs_status_t code, const ucp_tag_recv_info_t* info,
                                    void* staged) {
  auto& memory = *static_cast<StagedMessage*>(staged);
  UcxTransfer* const ended = memory.transfer;
  if (ended == nullptr) return Ucx().request_free(request);
  ended->owner->ReturnStaged(*ended);
  if (code == UCS_OK && info->length > 0) {
    std::memcpy(ended->data, memory.buffer.data(), info->length);
  }
  OnReceived(request, code, info, ended);
}

void UcxTransport::OnControlSent(void* request, ucs_status_t, void* sent) {
  static_cast<SentControl*>(sent)->ended = true;
  Ucx().request_free(request);
}

void UcxTransport::OnDropped(void* request, ucs_status_t, const ucp_tag_recv_info_t*, void* dropped) {
  static_cast<Dropped*>(dropped)->ended = true;
  Ucx().request_free(request);
}

void UcxTransport::OnClosed(void* request, ucs_status_t code, void* peer) {
  auto& closed = *static_cast<UcxPeer*>(peer);
  if (code != UCS_OK) closed.owner->has_errors_ = true;
  // Null: the destructor did not wait any longer, and has released the request.
  if (std::exchange(closed.closing, nullptr) != nullptr) Ucx().request_free(request);
}

void UcxTransport::OnError(void* peer, ucp_ep_h, ucs_status_t) {
  auto& failed = *static_cast<UcxPeer*>(peer);
  failed.owner->MarkDead(failed);
}

ucs_status_t UcxTransport::OnControl(void* owner, const void* header, size_t header_bytes, void*, size_t,
                                     const ucp_am_recv_param_t*) {
  auto& self = *static_cast<UcxTransport*>(owner);
  Control control;
  if (header_bytes != sizeof(control)) return UCS_OK;
  std::memcpy(&control, header, sizeof(control));
  if (control.rank >= self.peers_.size()) return UCS_OK;
  UcxPeer& peer = self.peers_[control.rank];
  if (control.type == ControlType::kHello) peer.is_present = true;
  if (control.type == ControlType::kQuestion) peer.has_question = self.has_questions_ = true;
  if (control.type == ControlType::kAnswer) {
    peer.asked = -1;
    peer.answered = self.Now();
  }
  if (control.type == ControlType::kWithdraw) self.withdrawn_.push_back(control);
  return UCS_OK;
}

// ---- connection

Status UcxTransport::Connect(const ProcessName& own, const std::vector<std::string>& contacts,
                             double limit_s) {
  ucp_am_handler_param_t handler{};
  handler.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kControlId;
  handler.cb = OnControl;
  handler.arg = this;
  RETURN_IF_ERROR(UcxStatus("UCX handler", Ucx().worker_set_am_recv_handler(worker_.get(), &handler)));
  for (UcxPeer& peer : peers_) {
    if (peer.rank == rank_) continue;
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    const std::string& contact = contacts[peer.rank];
    if (contact.size() <= sizeof(ProcessName)) {
      return DataLoss("rank {}: the contact data of rank {} has too few bytes: {}", rank_, peer.rank,
                      contact.size());
    }
    std::memcpy(&peer.process, contact.data(), sizeof(ProcessName));
    peer.is_local = AreOnOneHost(peer.process, own);
    params.address = reinterpret_cast<const ucp_address_t*>(contact.data() + sizeof(ProcessName));
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {OnError, &peer};
    RETURN_IF_ERROR(UcxStatus(fmt::format("rank {}: connecting to rank {}", rank_, peer.rank),
                              Ucx().ep_create(worker_.get(), &params, &peer.endpoint)));
    RETURN_IF_ERROR(SendControl(peer, {ControlType::kHello, static_cast<uint32_t>(rank_), 0}));
  }
  const auto all_present = [&] { return std::ranges::all_of(peers_, &UcxPeer::is_present); };
  const auto dead = [&] { return std::ranges::find(peers_, true, &UcxPeer::dead); };
  const bool complete = ProgressUntil(limit_s, [&] { return all_present() || dead() != peers_.end(); });
  if (dead() != peers_.end()) return DeadPeer(rank_, dead()->rank);
  if (complete) return OkStatus();
  std::string missing;
  for (const UcxPeer& peer : peers_) {
    if (!peer.is_present) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", peer.rank);
  }
  return FormatStatus(
      StatusCode::kDeadlineExceeded,
      "rank {}: UCX exchanged no message with some ranks; check UCX_TLS, UCX_NET_DEVICES and the "
      "firewall; ranks: {}",
      fmt::make_format_args(rank_, missing));
}

Status UcxTransport::SendControl(UcxPeer& peer, const Control& control) {
  SentControl& sent = sent_controls_.emplace_back(SentControl{control});
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = OnControlSent;
  param.user_data = &sent;
  void* const request =
      Ucx().am_send_nbx(peer.endpoint, kControlId, &sent.header, sizeof(sent.header), nullptr, 0, &param);
  if (!UCS_PTR_IS_PTR(request)) sent_controls_.pop_back();
  if (UCS_PTR_IS_ERR(request)) {
    return UcxStatus(fmt::format("rank {}: message to rank {}", rank_, peer.rank), UCS_PTR_STATUS(request));
  }
  return OkStatus();
}

std::vector<bool> UcxTransport::SendingPeers() const {
  std::vector<bool> sending(peers_.size(), false);
  pool_.ForEachSlot([&](const UcxTransfer& transfer) {
    if (transfer.is_send && transfer.request != nullptr) sending[transfer.peer] = true;
  });
  return sending;
}

// UCX aborts the process that destroys an endpoint with a send in flight, unless the endpoint is closed by
// force, which ends the send.
UcxTransport::~UcxTransport() {
  while (!receives_.empty()) Cancel(pool_.Id(*receives_.back()));
  ProgressUntil(kSendSeconds, [&] { return IsIdle(); });
  const std::vector<bool> sending = SendingPeers();
  for (UcxPeer& peer : peers_) Close(peer, peer.dead || sending[peer.rank]);
  const auto is_closed = [](const UcxPeer& peer) { return peer.closing == nullptr; };
  const bool all_closed =
      ProgressUntil(kCloseSeconds, [&] { return std::ranges::all_of(peers_, is_closed); });
  // Peers that do not read any more. The worker drops their messages, but UCX aborts the process if it finds
  // a request that was not released.
  for (UcxPeer& peer : peers_) {
    if (peer.closing != nullptr) Ucx().request_free(std::exchange(peer.closing, nullptr));
  }
  const auto has_failed = [&](const UcxPeer& peer) { return peer.dead || SilentSeconds(peer) > 0; };
  if (!IsIdle() || !all_closed || has_errors_ || std::ranges::any_of(peers_, has_failed)) KeepForever();
  worker_.reset();  // before the peers, because it ends their requests
}

// UCX 1.13 may keep requests of a peer that died, that is silent or whose endpoint was closed by force, which
// it never ends, and it aborts the process that destroys a worker with such a request. So the worker stays
// until the process ends, with the memory of its messages. The kernel then frees its shared memory, whose
// files have been unlinked.
void UcxTransport::KeepForever() {
  struct Kept {
    UcxContext context;
    UcxWorker worker;
    std::deque<StagedMessage> staged;
    std::list<Dropped> dropped;
    std::list<SentControl> sent_controls;
  };
  static auto* const all = new std::vector<std::unique_ptr<Kept>>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  all->push_back(std::make_unique<Kept>(Kept{std::move(context_), std::move(worker_), std::move(staged_),
                                             std::move(dropped_), std::move(sent_controls_)}));
}

void UcxTransport::Close(UcxPeer& peer, bool force) {
  if (peer.endpoint == nullptr) return;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  param.cb.send = OnClosed;
  param.user_data = &peer;
  void* const request = Ucx().ep_close_nbx(peer.endpoint, &param);
  peer.endpoint = nullptr;
  if (UCS_PTR_IS_PTR(request)) peer.closing = request;
  if (force || UCS_PTR_IS_ERR(request)) has_errors_ = true;
}

void UcxTransport::MarkDead(UcxPeer& peer) {
  if (peer.dead) return;
  peer.dead = true;
  peer.died = Now();
  newly_dead_.push_back(&peer);
}

// UCX ends sends to a dead peer itself, but not receives from it.
void UcxTransport::BuryDead() {
  while (!newly_dead_.empty()) {
    UcxPeer& peer = *newly_dead_.back();
    newly_dead_.pop_back();
    const std::vector<UcxTransfer*> receives = receives_;
    for (UcxTransfer* receive : receives) {
      if (receive->peer == peer.rank && !receive->ended)
        Ucx().request_cancel(worker_.get(), receive->request);
    }
    Close(peer, true);
  }
}

// ---- transfers

UcxTransfer& UcxTransport::Take(bool is_send, int peer, Tag tag, std::byte* data, size_t bytes) {
  UcxTransfer& transfer = pool_.Take();
  transfer.owner = this;
  transfer.is_send = is_send;
  transfer.peer = peer;
  transfer.tag = tag;
  transfer.data = data;
  transfer.bytes = bytes;
  transfer.ended = false;
  transfer.request = nullptr;
  transfer.staged = nullptr;
  return transfer;
}

void UcxTransport::EndTransfer(UcxTransfer& transfer, ucs_status_t code, size_t received_bytes) {
  transfer.ended = true;
  transfer.request = nullptr;
  if (code == UCS_ERR_MESSAGE_TRUNCATED) {
    transfer.result = TooLong(rank_, transfer.peer, transfer.tag, transfer.bytes);
  } else if (code != UCS_OK) {
    // Other errors of a transfer are errors of its connection, which is of no use any more.
    if (code != UCS_ERR_CANCELED) MarkDead(peers_[transfer.peer]);
    transfer.result = DeadPeer(rank_, transfer.peer);
  } else if (received_bytes != transfer.bytes) {
    transfer.result = WrongSize(rank_, transfer.peer, transfer.tag, transfer.bytes, received_bytes);
  }
}

StatusOr<TransferId> UcxTransport::StartSend(int peer, Tag tag, std::span<const std::byte> data,
                                             uint32_t flags) {
  RETURN_IF_ERROR(CheckTransfer(*this, peer, tag));
  if (peers_[peer].dead) return DeadPeer(rank_, peer);
  // The buffer of a send is only read.
  UcxTransfer& transfer = Take(true, peer, tag, const_cast<std::byte*>(data.data()), data.size());  // NOLINT
  if (peer == rank_) {
    self_.Post(transfer);
    return pool_.Id(transfer);
  }
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE | flags;
  param.cb.send = OnSent;
  param.user_data = &transfer;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  const std::byte* from = data.data();
  if (IsStaged(transfer)) {
    StagedMessage& staged = TakeStaged(transfer);
    std::ranges::copy(data, staged.buffer.begin());
    from = staged.buffer.data();
    param.cb.send = OnStagedSent;
    param.user_data = &staged;
  }
  void* const request =
      Ucx().tag_send_nbx(peers_[peer].endpoint, from, data.size(), WireTag(rank_, tag), &param);
  if (!UCS_PTR_IS_PTR(request) && transfer.staged != nullptr) ReturnStaged(transfer);
  if (UCS_PTR_IS_ERR(request)) {
    MarkDead(peers_[peer]);
    Release(transfer);
    return DeadPeer(rank_, peer);
  }
  transfer.request = request;
  transfer.ended = request == nullptr;
  return pool_.Id(transfer);
}

StagedMessage& UcxTransport::TakeStaged(UcxTransfer& transfer) {
  std::vector<StagedMessage*>& idle = idle_staged_[std::bit_width(transfer.bytes)];
  if (idle.empty()) idle.push_back(&staged_.emplace_back());
  StagedMessage& taken = *idle.back();
  idle.pop_back();
  if (taken.buffer.size() < transfer.bytes) taken.buffer.resize(transfer.bytes);
  taken.transfer = &transfer;
  transfer.staged = &taken;
  return taken;
}

void UcxTransport::ReturnStaged(UcxTransfer& transfer) {
  StagedMessage& returned = *std::exchange(transfer.staged, nullptr);
  returned.transfer = nullptr;
  idle_staged_[std::bit_width(transfer.bytes)].push_back(&returned);
}

StatusOr<TransferId> UcxTransport::Receive(int peer, Tag tag, std::span<std::byte> data) {
  RETURN_IF_ERROR(CheckTransfer(*this, peer, tag));
  UcxTransfer& transfer = Take(false, peer, tag, data.data(), data.size());
  if (peer == rank_) {
    self_.Post(transfer);
    return pool_.Id(transfer);
  }
  // UCX reports the length of a message to the callback only, so the callback is called for every receive:
  // before ucp_tag_recv_nbx() returns if the message has arrived.
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  param.cb.recv = OnReceived;
  param.user_data = &transfer;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  std::byte* to = data.data();
  if (IsStaged(transfer)) {
    StagedMessage& staged = TakeStaged(transfer);
    to = staged.buffer.data();
    param.cb.recv = OnStagedReceived;
    param.user_data = &staged;
  }
  void* const request =
      Ucx().tag_recv_nbx(worker_.get(), to, data.size(), WireTag(peer, tag), ~ucp_tag_t{0}, &param);
  if (UCS_PTR_IS_ERR(request)) {
    if (transfer.staged != nullptr) ReturnStaged(transfer);
    EndTransfer(transfer, UCS_PTR_STATUS(request), 0);
    return pool_.Id(transfer);
  }
  if (transfer.ended) {
    Ucx().request_free(request);
    return pool_.Id(transfer);
  }
  transfer.request = request;
  receives_.push_back(&transfer);
  if (peers_[peer].dead) {  // messages that came before its death are received
    Cancel(pool_.Id(transfer));
    return DeadPeer(rank_, peer);
  }
  return pool_.Id(transfer);
}

// A receiver must continue after its receive has ended: UCX still confirms large messages to their senders.
void UcxTransport::Progress() {
  for (int steps = 0; steps < kMaxProgressSteps && Ucx().worker_progress(worker_.get()) != 0; ++steps) {
  }
  if (!newly_dead_.empty()) BuryDead();
  if (!withdrawn_.empty()) DropWithdrawn();
  if (has_questions_) AnswerQuestions();
  if (++polls_ % kPollsBetweenClocks == 0) {
    const double now = Now();
    AskPeers(now);
    AbandonStaged(now);
  }
  const auto has_ended = [](const auto& request) { return request.ended; };
  if (!dropped_.empty()) std::erase_if(dropped_, has_ended);
  if (!sent_controls_.empty()) std::erase_if(sent_controls_, has_ended);
}

void UcxTransport::AnswerQuestions() {
  has_questions_ = false;
  for (UcxPeer& peer : peers_) {
    if (!std::exchange(peer.has_question, false) || peer.endpoint == nullptr) continue;
    (void)SendControl(peer, {ControlType::kAnswer, static_cast<uint32_t>(rank_), 0});
  }
}

void UcxTransport::AbandonStaged(double now) {
  for (StagedMessage& staged : staged_) {
    if (staged.transfer == nullptr) continue;
    UcxTransfer& transfer = *staged.transfer;
    const UcxPeer& peer = peers_[transfer.peer];
    if (!peer.dead || now - peer.died < kAbandonSeconds) continue;
    staged.transfer = nullptr;
    transfer.staged = nullptr;
    std::erase(receives_, &transfer);
    EndTransfer(transfer, UCS_ERR_CANCELED, 0);
  }
}

void UcxTransport::AskPeers(double now) {
  if (ended_ != ended_before_ || pool_.in_use() == 0) {
    ended_before_ = ended_;
    quiet_since_ = now;
  }
  if (now - quiet_since_ < kAskSeconds) return;
  for (UcxPeer& peer : peers_) {
    if (peer.endpoint == nullptr || peer.dead) continue;
    // The keepalive of UCX 1.13 misses some deaths while messages for the peer wait for shared memory.
    if (peer.is_local && now - peer.checked >= kAskSeconds) {
      peer.checked = now;
      if (HasEnded(peer.process)) {
        MarkDead(peer);
        continue;
      }
    }
    if (peer.asked >= 0 || now - peer.answered < kAskSeconds) continue;
    if (SendControl(peer, {ControlType::kQuestion, static_cast<uint32_t>(rank_), 0}).ok()) peer.asked = now;
  }
}

void UcxTransport::DropWithdrawn() {
  for (const Control& control : withdrawn_) {
    const ucp_tag_t tag = WireTag(static_cast<int>(control.rank), control.tag);
    ucp_tag_recv_info_t info{};
    // Ranks may cancel the sends of a tag in any order, but messages are found in the order of the sends.
    while (const ucp_tag_message_h message =
               Ucx().tag_probe_nb(worker_.get(), tag, ~ucp_tag_t{0}, 1, &info)) {
      Dropped& dropped = dropped_.emplace_back();
      dropped.buffer.resize(info.length);
      ucp_request_param_t param{};
      param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
      param.cb.recv = OnDropped;
      param.user_data = &dropped;
      void* const request = Ucx().tag_msg_recv_nbx(worker_.get(), dropped.buffer.data(),
                                                   dropped.buffer.size(), message, &param);
      dropped.ended = !UCS_PTR_IS_PTR(request);
    }
  }
  withdrawn_.clear();
}

void UcxTransport::AwaitCancelled(const UcxTransfer& transfer) {
  const double begin = Now();
  UcxPeer& peer = peers_[transfer.peer];
  while (!transfer.ended) {
    Progress();
    if (transfer.ended) return;
    const double now = Now();
    if (peer.dead) {
      if (now - std::max(begin, peer.died) < kForcedEndSeconds) continue;
      base::CheckFailed(
          __FILE__, __LINE__, "UCX ends the transfers of a connection that it closed",
          fmt::format("rank {}: {} of {} bytes with tag {}; its peer, rank {}, died {:.1f} s ago", rank_,
                      transfer.is_send ? "send" : "receive", transfer.bytes, transfer.tag, transfer.peer,
                      now - peer.died));
    }
    const double waited = now - begin, silent = SilentSeconds(peer);
    if (silent < kWithdrawSeconds && waited < kUcxDeathLimitSeconds) continue;
    peer.silent = std::max(silent, waited);
    MarkDead(peer);
  }
}

void UcxTransport::Cancel(TransferId id) {
  UcxTransfer& transfer = pool_.At(id);
  UcxPeer& peer = peers_[transfer.peer];
  if (!transfer.ended && transfer.peer == rank_) {
    self_.Remove(transfer);
  } else if (!transfer.ended && transfer.is_send) {
    const bool asked =
        !peer.dead &&
        SendControl(peer, {ControlType::kWithdraw, static_cast<uint32_t>(rank_), transfer.tag}).ok();
    if (!asked) MarkDead(peer);
    AwaitCancelled(transfer);
  } else if (!transfer.ended) {
    Ucx().request_cancel(worker_.get(), transfer.request);
    // A large message that has begun to arrive cannot be cancelled. It arrives unless its sender is dead or
    // stopped. Then closing the endpoint ends the receive, or it is abandoned.
    AwaitCancelled(transfer);
  }
  Release(transfer);
}

}  // namespace

StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const RendezvousOptions& options) {
  ASSIGN_OR_RETURN(UcxContext context, MakeUcxContext(options.size));
  ASSIGN_OR_RETURN(UcxWorker worker, MakeUcxWorker(context.get()));
  ASSIGN_OR_RETURN(const std::string address, UcxAddress(worker.get()));
  ProcessName own = OwnProcess();
  own.boot.back() = static_cast<char>(options.test_host);  // a boot has 36 characters
  const std::string contact = std::string(reinterpret_cast<const char*>(&own), sizeof(own)) + address;
  std::vector<Socket> connections;
  const bool watches = options.on_silence && options.size > 1;
  ASSIGN_OR_RETURN(const std::vector<std::string> contacts,
                   Rendezvous(options, contact, watches ? &connections : nullptr));
  auto made =
      std::make_unique<UcxTransport>(options.rank, options.size, std::move(context), std::move(worker));
  if (watches) {
    ASSIGN_OR_RETURN(auto watch, RankWatch::Start(options.rank, std::move(connections), options.on_silence));
    made->KeepWatch(std::move(watch));
  }
  RETURN_IF_ERROR(made->Connect(own, contacts, options.time_limit_s));
  return made;
}

}  // namespace moesaic::comm
