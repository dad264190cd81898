#include "proxy/gateway/kv_feeds.h"

#include <fmt/format.h>
#include <zmq.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "proxy/events/kv_decode.h"
#include "proxy/events/kv_encode.h"
#include "proxy/events/zmq_ipv6.h"
#include "proxy/gateway/gateway.h"
#include "proxy/index/index_writer.h"

namespace moesaic::proxy {
namespace {

constexpr int kHighWater = 100'000;
constexpr size_t kBatch = 256;                 // messages of one turn of the event loop
constexpr Nanos kReplayTimeout = 5 * kSecond;  // since the last reply
// A replay that failed is tried again after the first delay, which doubles with every failure.
constexpr Nanos kMinRetryDelay = 10 * kSecond, kMaxRetryDelay = 600 * kSecond;
constexpr uint64_t kNoMessage = INT64_MAX;  // a replay from here has no messages
constexpr Nanos kReopenDelay = kSecond;
constexpr Nanos kWriterDelay = 2 * kMillisecond;  // while the writer is not ready

// Receives one message with all its frames without waiting. False: there is none.
bool Receive(void* socket, std::vector<std::string>* frames) {
  frames->clear();
  for (;;) {
    zmq_msg_t message;
    zmq_msg_init(&message);
    if (zmq_msg_recv(&message, socket, ZMQ_DONTWAIT) < 0) {
      zmq_msg_close(&message);
      return false;
    }
    frames->emplace_back(static_cast<const char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
    const bool more = zmq_msg_more(&message) != 0;
    zmq_msg_close(&message);
    if (!more) return true;
  }
}

}  // namespace

class KvFeeds::Feed {
 public:
  Feed(Gateway& gateway, void* context, const EngineSettings& engine, int instance, uint32_t generation)
      : gateway_(gateway),
        context_(context),
        engine_(engine),
        instance_(instance),
        generation_(generation),
        writer_(gateway.state(), gateway.index(), instance, gateway.lease(), generation),
        events_(*this, /*replay=*/false),
        replay_(*this, /*replay=*/true),
        replay_timer_(gateway.timers()),
        retry_timer_(gateway.timers()),
        open_timer_(gateway.timers()) {
    Start();
  }
  ~Feed() {
    events_.Close(gateway_.transport());
    replay_.Close(gateway_.transport());
  }
  bool Is(const EngineSettings& engine, int instance, uint32_t generation) const {
    return instance == instance_ && generation == generation_ && engine.kv_events == engine_.kv_events &&
           engine.kv_replay == engine_.kv_replay && engine.kv_bind == engine_.kv_bind;
  }

 private:
  // Subscribes, or tries again later: another process may still hold the endpoint.
  void Start() {
    if (!Open(ZMQ_SUB, engine_.kv_events, engine_.kv_bind, &events_) ||
        (!engine_.kv_replay.empty() && !Open(ZMQ_DEALER, engine_.kv_replay, /*bind=*/false, &replay_))) {
      events_.Close(gateway_.transport());
      replay_.Close(gateway_.transport());
      if (writer_.Ready()) writer_.OnFeedFailed();
      open_timer_.At(gateway_.now() + kReopenDelay, [this] { Start(); });
      return;
    }
    Begin();
  }

  // Requests the messages that were sent before this subscription began.
  void Begin() {
    if (replay_.socket_ != nullptr) {
      if (!writer_.Ready()) {
        open_timer_.At(gateway_.now() + kWriterDelay, [this] { Begin(); });
        return;
      }
      const IndexWriter::Result result = writer_.Begin();
      if (result.fenced) return gateway_.ScheduleSoon();  // the next run notices that the lease was lost
      AskReplay(*result.replay_from);
    }
    events_.OnReadable();
  }

  // A socket with its descriptor in the event loop.
  class Socket : public Watcher {
   public:
    Socket(Feed& feed, bool replay) : again_(feed.gateway_.timers()), feed_(feed), replay_(replay) {}
    void OnReadable() override { feed_.Read(*this, replay_); }
    void Close(Transport& transport) {
      again_.Cancel();
      if (watch_ != nullptr) transport.Unwatch(std::exchange(watch_, nullptr));
      if (socket_ != nullptr) zmq_close(std::exchange(socket_, nullptr));
    }
    void* socket_ = nullptr;
    void* watch_ = nullptr;
    Timer again_;

   private:
    Feed& feed_;
    bool replay_;
  };

  bool Open(int type, const std::string& endpoint, bool bind, Socket* socket) {
    socket->socket_ = zmq_socket(context_, type);
    if (socket->socket_ == nullptr) return false;
    const int linger = 0, water = kHighWater;
    zmq_setsockopt(socket->socket_, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(socket->socket_, ZMQ_RCVHWM, &water, sizeof water);
    AllowIpv6(socket->socket_, endpoint);
    if (type == ZMQ_SUB) zmq_setsockopt(socket->socket_, ZMQ_SUBSCRIBE, "", 0);
    const int failed =
        bind ? zmq_bind(socket->socket_, endpoint.c_str()) : zmq_connect(socket->socket_, endpoint.c_str());
    int fd = -1;
    size_t size = sizeof fd;
    if (failed != 0 || zmq_getsockopt(socket->socket_, ZMQ_FD, &fd, &size) != 0) {
      if (!std::exchange(fault_reported_, true)) {
        gateway_.transport().Log(
            true, fmt::format("KV events of {}: cannot {} {}: {}; it is tried again", engine_.instance.url,
                              bind ? "bind" : "connect to", endpoint, zmq_strerror(zmq_errno())));
      }
      zmq_close(std::exchange(socket->socket_, nullptr));
      return false;
    }
    socket->watch_ = gateway_.transport().Watch(fd, *socket);
    return socket->watch_ != nullptr;
  }

  void AskReplay(uint64_t from) {
    if (replay_.socket_ == nullptr) return ReplayFailed();
    SendReplay(from);
    AwaitReply();
    replay_.OnReadable();  // the descriptor signals changes only, and sending may have hidden one
  }
  void SendReplay(uint64_t from) {
    const std::string number = EncodeSequence(from);
    zmq_send(replay_.socket_, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT);
    zmq_send(replay_.socket_, number.data(), number.size(), ZMQ_DONTWAIT);
  }

  void AwaitReply() {
    replay_timer_.At(gateway_.now() + kReplayTimeout, [this] { ReplayFailed(); });
  }
  void ReplayFailed() {
    if (!HoldsLease()) return gateway_.ScheduleSoon();
    if (!IsWriterReady()) {
      replay_timer_.At(gateway_.now() + kWriterDelay, [this] { ReplayFailed(); });
      return;
    }
    writer_.OnReplayFailed();
    gateway_.SweepSoon();
    if (engine_.kv_replay.empty()) return;
    gateway_.transport().Log(true,
                             fmt::format("KV events of {}: {} did not answer in time; it is asked again",
                                         engine_.instance.url, engine_.kv_replay));
    OpenReplay();
    retry_timer_.At(gateway_.now() + retry_delay_, [this] { Probe(); });
    retry_delay_ = std::min(2 * retry_delay_, kMaxRetryDelay);
  }

  // A new socket gets no late answer to an earlier request.
  bool OpenReplay() {
    replay_.Close(gateway_.transport());
    probing_ = false;
    return Open(ZMQ_DEALER, engine_.kv_replay, /*bind=*/false, &replay_);
  }

  // Requests no message until the replay socket answers, and then all of them. Until then, the events that
  // arrive stay in the index.
  void Probe() {
    const bool replays = replay_timer_.armed();  // for a gap
    if (!replays && writer_.state() != IndexState::kDegraded) return;
    if (!replays && OpenReplay()) {
      probing_ = true;
      SendReplay(kNoMessage);
      replay_.OnReadable();
    }
    if (!retry_timer_.armed()) retry_timer_.At(gateway_.now() + kMinRetryDelay, [this] { Probe(); });
  }

  void Answered() {
    if (!HoldsLease()) return gateway_.ScheduleSoon();
    if (!IsWriterReady()) {
      retry_timer_.At(gateway_.now() + kWriterDelay, [this] { Answered(); });
      return;
    }
    const IndexWriter::Result result = writer_.Retry();
    if (result.fenced) return gateway_.ScheduleSoon();
    if (result.replay_from) AskReplay(*result.replay_from);
  }

  bool HoldsLease() const { return gateway_.state().lease().Holds(gateway_.lease()); }

  // A call of the writer may clear the instance, which takes a spare number, and waits for a process that is
  // stopped inside a call.
  bool IsWriterReady() {
    gateway_.SweepSoon();  // the call before may have cleared the instance
    return gateway_.index().SpareNumbers() > 0 && writer_.Ready();
  }

  void Read(Socket& socket, bool replay) {
    if (socket.socket_ == nullptr || !HoldsLease()) return;
    std::vector<std::string> frames;
    for (size_t i = 0; i < kBatch; ++i) {
      if (open_timer_.armed() || !IsWriterReady()) {  // until then the messages wait in the socket
        if (replay && replay_timer_.armed()) AwaitReply();
        socket.again_.At(gateway_.now() + kWriterDelay, [&socket] { socket.OnReadable(); });
        return;
      }
      if (!Receive(socket.socket_, &frames)) {
        // Events that arrived between the last read and now make no new edge.
        int events = 0;
        size_t size = sizeof events;
        if (zmq_getsockopt(socket.socket_, ZMQ_EVENTS, &events, &size) != 0 || (events & ZMQ_POLLIN) == 0)
          return;
        continue;
      }
      replay ? Replayed(frames) : Received(frames);
    }
    socket.again_.At(0, [&socket] { socket.OnReadable(); });  // let other events run
  }

  void Received(const std::vector<std::string>& frames) {  // topic, sequence, payload
    gateway_.board().kv_messages.fetch_add(1, std::memory_order_relaxed);
    if (frames.size() != 3) return Damaged("message has no three frames");
    const StatusOr<uint64_t> sequence = DecodeSequence(frames[1]);
    if (!sequence.ok()) return Damaged(Message(sequence.status()));
    const StatusOr<KvBatch> batch = DecodeKvBatch(frames[2]);
    if (!batch.ok()) return Damaged(Message(batch.status()));
    const IndexWriter::Result result = writer_.Apply(*sequence, *batch);
    if (result.fenced) return gateway_.ScheduleSoon();
    CheckBlockSize();
    if (!result.replay_from) return;
    gateway_.board().kv_gaps.fetch_add(1, std::memory_order_relaxed);
    AskReplay(*result.replay_from);
  }

  // [empty] [topic] sequence payload
  void Replayed(const std::vector<std::string>& frames) {
    if (frames.size() < 2) return Damaged("replay message has no two frames");
    const StatusOr<uint64_t> sequence = DecodeSequence(frames[frames.size() - 2]);
    if (!sequence.ok()) return Damaged(Message(sequence.status()));
    IndexWriter::Result result;
    if (*sequence == kReplayEnd) {
      if (std::exchange(probing_, false)) {
        retry_timer_.At(gateway_.now(), [this] { Answered(); });
        return;
      }
      replay_timer_.Cancel();
      retry_delay_ = kMinRetryDelay;
      result = writer_.ApplyReplay(kReplayEnd, nullptr);
    } else {
      const StatusOr<KvBatch> batch = DecodeKvBatch(frames.back());
      if (!batch.ok()) return Damaged(Message(batch.status()));
      result = writer_.ApplyReplay(*sequence, &*batch);
      if (replay_timer_.armed()) AwaitReply();
    }
    if (result.fenced) gateway_.ScheduleSoon();
  }

  // Keys of prompts are those of blocks of the pool's size.
  void CheckBlockSize() {
    const uint32_t size = writer_.block_size();
    if (size == 0 || size == gateway_.settings().block_size || std::exchange(block_size_reported_, true))
      return;
    gateway_.transport().Log(
        true, fmt::format("KV events of {}: its blocks have {} tokens, and block_size of the pool is {}: no "
                          "prompt is matched with its cache",
                          engine_.instance.url, size, gateway_.settings().block_size));
  }

  void Damaged(const std::string& fault) {
    if (gateway_.board().kv_errors.fetch_add(1, std::memory_order_relaxed) < 100) {
      gateway_.transport().Log(true, fmt::format("KV events of {}: {}", engine_.instance.url, fault));
    }
  }

  Gateway& gateway_;
  void* context_;
  const EngineSettings engine_;
  const int instance_;
  const uint32_t generation_;
  IndexWriter writer_;
  Socket events_, replay_;
  Timer replay_timer_, retry_timer_, open_timer_;
  Nanos retry_delay_ = kMinRetryDelay;
  bool probing_ = false;  // no answer to the question of Probe() has come
  bool fault_reported_ = false, block_size_reported_ = false;
};

KvFeeds::KvFeeds(Gateway& gateway) : gateway_(gateway) {}

void KvFeeds::Follow(const std::vector<EngineSettings>& engines) {
  struct Wanted {
    const EngineSettings* engine;
    int instance;
    uint32_t generation;
  };
  std::vector<Wanted> wanted;
  std::vector<std::unique_ptr<Feed>> kept;
  for (const EngineSettings& engine : engines) {
    if (engine.kv_events.empty()) continue;
    const int instance = gateway_.state().FindInstance(engine.instance.url, engine.instance.dp_rank);
    const std::optional<InstanceVersion> version = gateway_.state().Version(instance);
    if (!version) continue;
    const uint32_t generation = version->generation;  // other settings of the instance do not change a feed
    const auto known = std::find_if(feeds_.begin(), feeds_.end(), [&](const auto& feed) {
      return feed != nullptr && feed->Is(engine, instance, generation);
    });
    if (known != feeds_.end()) {
      kept.push_back(std::move(*known));
    } else {
      wanted.push_back({.engine = &engine, .instance = instance, .generation = generation});
    }
  }
  feeds_ = std::move(kept);  // a new feed may bind the endpoint of an old one
  for (const Wanted& one : wanted) {
    if (context_ == nullptr) context_ = zmq_ctx_new();
    feeds_.push_back(std::make_unique<Feed>(gateway_, context_, *one.engine, one.instance, one.generation));
  }
}

KvFeeds::~KvFeeds() {
  feeds_.clear();
  if (context_ != nullptr) zmq_ctx_term(context_);
}

}  // namespace moesaic::proxy
