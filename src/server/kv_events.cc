#include "server/kv_events.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <deque>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "tensor/kv_layout.h"

namespace moesaic::server {
namespace {

using EventJson = nlohmann::json;

constexpr const char* kMedium = "CPU";  // as vLLM calls main memory
constexpr uint64_t kEnd = ~uint64_t{0};

std::string BigEndian(uint64_t number) {
  std::string bytes(8, '\0');
  for (int i = 7; i >= 0; --i, number >>= 8) bytes[i] = static_cast<char>(number & 0xff);
  return bytes;
}

uint64_t FromBigEndian(std::string_view bytes) {
  uint64_t number = 0;
  for (const char c : bytes) number = number << 8 | static_cast<unsigned char>(c);
  return number;
}

std::string Packed(const std::vector<EventJson>& events) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::vector<uint8_t> bytes = EventJson::to_msgpack(EventJson::array({now, events, 0}));
  return {bytes.begin(), bytes.end()};
}

// ZeroMQ refuses "tcp://[::1]:5557" unless the socket allows IPv6.
bool HasIpv6Address(const std::string& endpoint) { return endpoint.find('[') != std::string::npos; }

}  // namespace

class KvPublisher::Impl {
 public:
  explicit Impl(const KvPublisherOptions& options)
      : options_(options), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  ~Impl() {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
      }
      Wake();
      thread_.join();
    }
    if (wake_ >= 0) close(wake_);
  }

  Status Open() {
    if (wake_ < 0) return IoError("no file descriptor for KV events");
    try {
      publish_.set(zmq::sockopt::linger, 500);
      publish_.set(zmq::sockopt::ipv6, HasIpv6Address(options_.endpoint));
      publish_.bind(options_.endpoint);
      endpoint_ = publish_.get(zmq::sockopt::last_endpoint);
      if (!options_.replay_endpoint.empty()) {
        replay_.set(zmq::sockopt::linger, 0);
        replay_.set(zmq::sockopt::ipv6, HasIpv6Address(options_.replay_endpoint));
        replay_.bind(options_.replay_endpoint);
        replay_endpoint_ = replay_.get(zmq::sockopt::last_endpoint);
      }
    } catch (const zmq::error_t& error) {
      return IoError("KV events at {}: {}", options_.endpoint, error.what());
    }
    thread_ = std::thread([this] { Run(); });
    return OkStatus();
  }

  // Fields by name, in vLLM's order.
  void Add(const char* type, std::vector<std::pair<const char*, EventJson>> fields) {
    const bool map = options_.format == "map";
    EventJson event = map ? EventJson({{"type", type}}) : EventJson::array({type});
    for (auto& [name, value] : fields) {
      if (map) {
        event[name] = std::move(value);
      } else {
        event.push_back(std::move(value));
      }
    }
    Add(std::move(event));
  }

  const std::string& endpoint() const { return endpoint_; }
  const std::string& replay_endpoint() const { return replay_endpoint_; }

 private:
  void Add(EventJson event) {
    {
      const std::lock_guard lock(mutex_);
      if (queue_.size() >= options_.max_queued) {
        queue_.clear();
        gap_ = true;  // listeners must learn that they missed events
      }
      queue_.push_back(std::move(event));
    }
    Wake();
  }

  void Wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);  // full means awake already
  }

  void Run() {
    std::array<zmq::pollitem_t, 2> items = {
        {{nullptr, wake_, ZMQ_POLLIN, 0}, {replay_.handle(), 0, ZMQ_POLLIN, 0}}};
    for (bool stopping = false; !stopping;) {
      try {
        zmq::poll(items.data(), replay_endpoint_.empty() ? 1 : 2, std::chrono::milliseconds(-1));
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t got = read(wake_, &count, sizeof count);
        stopping = Publish();
        if (!replay_endpoint_.empty() && (items[1].revents & ZMQ_POLLIN) != 0) Replay();
      } catch (const zmq::error_t& error) {
        if (error.num() != EINTR && error.num() != EHOSTUNREACH) return;
      }
    }
  }

  // True when it is time to end.
  bool Publish() {
    std::vector<EventJson> events;
    bool stopping = false;
    {
      const std::lock_guard lock(mutex_);
      events.swap(queue_);
      stopping = stopping_;
      if (std::exchange(gap_, false)) ++next_;
    }
    if (events.empty()) return stopping;
    std::string payload = Packed(events);
    Send(publish_, {options_.topic, BigEndian(next_), payload});
    kept_.emplace_back(next_++, std::move(payload));
    if (kept_.size() > options_.kept) kept_.pop_front();
    return stopping;
  }

  void Replay() {
    std::vector<std::string> frames;
    for (bool more = true; more;) {
      zmq::message_t message;
      if (!replay_.recv(message, zmq::recv_flags::dontwait)) return;
      frames.push_back(message.to_string());
      more = message.more();
    }
    // [client, "", first number]
    if (frames.size() != 3 || frames[2].size() != 8) return;
    const uint64_t first = FromBigEndian(frames[2]);
    for (const auto& [number, payload] : kept_) {
      if (number >= first) Send(replay_, {frames[0], "", BigEndian(number), payload});
    }
    Send(replay_, {frames[0], "", BigEndian(kEnd), ""});
  }

  static void Send(zmq::socket_t& socket, const std::vector<std::string>& frames) {
    for (size_t i = 0; i < frames.size(); ++i) {
      const auto flags = i + 1 < frames.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
      socket.send(zmq::buffer(frames[i]), flags | zmq::send_flags::dontwait);
    }
  }

  const KvPublisherOptions options_;
  const int wake_;
  zmq::context_t context_{1};
  zmq::socket_t publish_{context_, zmq::socket_type::pub};
  zmq::socket_t replay_{context_, zmq::socket_type::router};
  std::string endpoint_, replay_endpoint_;
  std::mutex mutex_;
  std::vector<EventJson> queue_;
  bool gap_ = false, stopping_ = false;
  uint64_t next_ = 0;                                  // the publishing thread's, as all below
  std::deque<std::pair<uint64_t, std::string>> kept_;  // number, payload
  std::thread thread_;
};

KvPublisher::KvPublisher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KvPublisher::~KvPublisher() = default;

StatusOr<std::unique_ptr<KvPublisher>> KvPublisher::Create(const KvPublisherOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<KvPublisher>(new KvPublisher(std::move(impl)));
}

void KvPublisher::Stored(std::span<const uint64_t> hashes, std::optional<uint64_t> parent,
                         std::span<const int32_t> tokens, std::string_view name_space) {
  // The first block of a sequence has the namespace in vLLM's extra keys, so that blocks of others differ.
  EventJson extra_keys;
  if (!name_space.empty()) {
    extra_keys = EventJson::array();
    for (size_t i = 0; i < hashes.size(); ++i) {
      extra_keys.push_back(i == 0 && !parent ? EventJson::array({std::string(name_space)}) : EventJson());
    }
  }
  impl_->Add("BlockStored", {{"block_hashes", std::vector<uint64_t>(hashes.begin(), hashes.end())},
                             {"parent_block_hash", parent ? EventJson(*parent) : EventJson()},
                             {"token_ids", std::vector<int32_t>(tokens.begin(), tokens.end())},
                             {"block_size", tensor::kKvBlockTokens},
                             {"lora_id", nullptr},
                             {"medium", kMedium},
                             {"lora_name", nullptr},
                             {"extra_keys", std::move(extra_keys)}});
}

void KvPublisher::Removed(std::span<const uint64_t> hashes) {
  impl_->Add("BlockRemoved",
             {{"block_hashes", std::vector<uint64_t>(hashes.begin(), hashes.end())}, {"medium", kMedium}});
}

std::string KvPublisher::endpoint() const { return impl_->endpoint(); }
std::string KvPublisher::replay_endpoint() const { return impl_->replay_endpoint(); }

}  // namespace moesaic::server
