#include "comm/transport/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "comm/transport/rendezvous_messages.h"
#include "comm/transport/socket.h"

namespace moesaic::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Connections that have not proved the secret, in addition to one per rank. The oldest is closed when more
// arrive.
constexpr size_t kMaxStrangers = 64;
// Maximum connections that one poll accepts, so that rank 0 checks its time limit while peers connect all the
// time.
constexpr int kMaxAccepted = 64;
// Age at which a connection without a proof is closed if no more files can be opened.
constexpr auto kStrangerPatience = std::chrono::seconds(1);
constexpr double kMaxLimitSeconds = 1e9;
constexpr auto kRetryPause = std::chrono::milliseconds(50), kResolvePause = std::chrono::milliseconds(200);

template <typename... Args>
Status RendezvousFault(StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return FormatStatus(code, format, fmt::make_format_args(args...));
}

int MillisecondsUntil(Clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1000));
}

std::string Where(const RendezvousOptions& options) {
  return fmt::format("{}:{}", options.host, options.port);
}

struct AddressList {
  addrinfo* first = nullptr;
  AddressList() = default;
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

// The name may get its address while ranks start, as that of a pod of Kubernetes.
Status Resolve(const RendezvousOptions& options, Clock::time_point end, AddressList& found) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  for (;;) {
    const int code =
        getaddrinfo(options.host.c_str(), std::to_string(options.port).c_str(), &hints, &found.first);
    if (code == 0) return OkStatus();
    if (Clock::now() + kResolvePause >= end) {
      return RendezvousFault(StatusCode::kUnavailable, "rendezvous: {} cannot be resolved within {} s: {}",
                             Where(options), options.time_limit_s, gai_strerror(code));
    }
    std::this_thread::sleep_for(kResolvePause);
  }
}

StatusOr<Socket> Listen(const RendezvousOptions& options, Clock::time_point end) {
  if (options.listener >= 0) return Socket(fcntl(options.listener, F_DUPFD_CLOEXEC, 0));
  AddressList addresses;
  RETURN_IF_ERROR(Resolve(options, end, addresses));
  int fault = 0;
  for (const addrinfo* at = addresses.first; at != nullptr; at = at->ai_next) {
    Socket made(socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int one = 1;
    if (made.fd() >= 0 && setsockopt(made.fd(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 &&
        bind(made.fd(), at->ai_addr, at->ai_addrlen) == 0 && listen(made.fd(), 1024) == 0) {
      return made;
    }
    fault = errno;
  }
  return RendezvousFault(StatusCode::kUnavailable, "rendezvous: rank 0 cannot listen on {}: {}",
                         Where(options), std::strerror(fault));
}

// A connection with buffers of bounded size.
class Connection {
 public:
  explicit Connection(Socket socket) : socket_(std::move(socket)) {
    const int one = 1;
    setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  }
  int fd() const { return socket_.fd(); }
  short events() const { return static_cast<short>(POLLIN | (drained() ? 0 : POLLOUT)); }
  bool drained() const { return out_.empty() && shared_ == nullptr; }

  void Queue(RendezvousType type, std::string_view payload) { out_ += EncodeFrame(type, payload); }
  // Queues bytes that follow all others, and of which all connections share one copy.
  void QueueLast(std::string_view own, std::shared_ptr<const std::string> shared) {
    out_ += own;
    shared_ = std::move(shared);
  }
  // Sends and receives as much as possible. False: the peer has closed the connection.
  bool Transfer() {
    while (!drained()) {
      const std::string_view next = out_.empty() ? std::string_view(*shared_).substr(shared_sent_) : out_;
      const ssize_t sent = send(fd(), next.data(), next.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno != EAGAIN) return false;
      if (sent < 0) break;
      if (!out_.empty()) {
        out_.erase(0, static_cast<size_t>(sent));
      } else if ((shared_sent_ += static_cast<size_t>(sent)) == shared_->size()) {
        shared_ = nullptr;
      }
    }
    char bytes[16384];
    const ssize_t got = recv(fd(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got > 0) in_.append(bytes, static_cast<size_t>(got));
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
  }
  StatusOr<bool> Take(size_t max_payload, Frame* frame) { return TakeFrame(in_, max_payload, frame); }
  Socket Release() { return std::move(socket_); }

 private:
  Socket socket_;
  std::string in_, out_;
  std::shared_ptr<const std::string> shared_;  // sent after `out_`; null: nothing
  size_t shared_sent_ = 0;
};

// Rank 0: collects the contacts and answers.
class Host {
 public:
  Host(const RendezvousOptions& options, std::string_view contact, std::vector<Socket>* kept)
      : options_(options), kept_(kept), contacts_(options.size) {
    contacts_[0] = contact;
    present_.assign(options.size, false);
    present_[0] = true;
  }

  StatusOr<std::vector<std::string>> Run(Clock::time_point end) {
    if (options_.size == 1) return contacts_;
    ASSIGN_OR_RETURN(Socket listener, Listen(options_, end));
    while (std::ranges::find(present_, false) != present_.end()) {
      if (Clock::now() >= end) return Expire();
      if (options_.check) RETURN_IF_ERROR(options_.check());
      if (const Status status = Poll(listener, end); !status.ok()) return Refuse(status);
    }
    const auto list = std::make_shared<const std::string>(EncodeContacts(contacts_));
    for (const auto& peer : peers_) {
      if (peer->rank < 0) continue;
      const std::string mac = TableMac(options_.secret, peer->challenge, peer->nonce, *list);
      peer->connection.QueueLast(EncodeTableHead(mac, list->size()), list);
    }
    Drain(end);
    return contacts_;
  }

 private:
  struct Peer {
    explicit Peer(Socket socket) : connection(std::move(socket)), challenge(RandomNonce()) {
      connection.Queue(RendezvousType::kChallenge, challenge);
    }
    Connection connection;
    const Clock::time_point arrived = Clock::now();
    std::string challenge, nonce;
    int rank = -1;         // -1: has not proved the secret
    bool refused = false;  // closed when its buffer is drained
  };

  Status Poll(const Socket& listener, Clock::time_point end) {
    // The listener is not polled while no file can be opened: waiting connections would end each poll at
    // once.
    std::vector<pollfd> polled = {{is_full_ ? -1 : listener.fd(), POLLIN, 0}};
    for (const auto& peer : peers_) polled.push_back({peer->connection.fd(), peer->connection.events(), 0});
    poll(polled.data(), polled.size(), MillisecondsUntil(is_full_ ? Clock::now() + kRetryPause : end));
    std::vector<std::unique_ptr<Peer>> kept;
    for (size_t i = 0; i < peers_.size(); ++i) {
      const bool alive = polled[i + 1].revents == 0 || Serve(*peers_[i]);
      if (alive && !(peers_[i]->refused && peers_[i]->connection.drained())) {
        kept.push_back(std::move(peers_[i]));
      } else if (peers_[i]->rank >= 0) {
        present_[peers_[i]->rank] = false;  // it ended, and may start again
      }
    }
    peers_ = std::move(kept);
    for (int accepts = 0; accepts < kMaxAccepted; ++accepts) {
      Socket accepted(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      is_full_ = accepted.fd() < 0 && (errno == EMFILE || errno == ENFILE);
      if (is_full_) {
        const int fault = errno;
        pollfd waiting = {listener.fd(), POLLIN, 0};
        is_full_ = poll(&waiting, 1, 0) > 0;  // accept4() fails even if no connection waits
        if (!is_full_) break;
        if (fault == ENFILE) break;  // the limit of the system, which other processes reach and leave
        const auto stranger = std::ranges::find_if(peers_, IsStranger);
        if (stranger != peers_.end()) {
          // It may be a rank whose proof is on its way.
          if (Clock::now() - (*stranger)->arrived < kStrangerPatience) break;
          peers_.erase(stranger);
          continue;
        }
        return RendezvousFault(
            StatusCode::kUnavailable,
            "rendezvous: rank 0 at {} cannot accept the connections of {} ranks: {}; raise "
            "its limit of open files (ulimit -n)",
            Where(options_), options_.size, std::strerror(fault));
      }
      if (accepted.fd() < 0) break;
      peers_.push_back(std::make_unique<Peer>(std::move(accepted)));
      if (!Serve(*peers_.back())) peers_.pop_back();
      if (std::ranges::count_if(peers_, IsStranger) > static_cast<int64_t>(kMaxStrangers + options_.size))
        peers_.erase(std::ranges::find_if(peers_, IsStranger));
    }
    return OkStatus();
  }

  static bool IsStranger(const std::unique_ptr<Peer>& peer) { return peer->rank < 0; }

  // False: the connection ends.
  bool Serve(Peer& peer) {
    if (!peer.connection.Transfer()) return false;
    Frame frame;
    const StatusOr<bool> taken = peer.connection.Take(MaxHelloBytes(), &frame);
    if (!taken.ok()) return false;
    if (!*taken || peer.refused) return true;
    if (frame.type != RendezvousType::kHello || peer.rank >= 0) return false;
    StatusOr<Hello> hello = ParseHello(frame.payload);
    if (!hello.ok()) return false;
    if (const Status status = Admit(*hello, peer); !status.ok()) {
      peer.connection.Queue(RendezvousType::kRefusal, EncodeRefusal(status));
      peer.refused = true;
      return peer.connection.Transfer();
    }
    return true;
  }

  Status Admit(const Hello& hello, Peer& peer) {
    if (!EqualMacs(hello.mac, HelloMac(options_.secret, peer.challenge, hello))) {
      ++refused_;
      return RendezvousFault(StatusCode::kPermissionDenied,
                             "rendezvous: rank 0 at {} has another secret; give all ranks the same one",
                             Where(options_));
    }
    if (hello.size != static_cast<uint32_t>(options_.size)) {
      return InvalidArgument("rendezvous: size must be {}, as that of rank 0; found {}", options_.size,
                             hello.size);
    }
    if (hello.rank >= hello.size || present_[hello.rank]) {
      return InvalidArgument("rendezvous: each rank below {} must come once; found another rank {}",
                             options_.size, hello.rank);
    }
    peer.rank = static_cast<int>(hello.rank);
    peer.nonce = hello.nonce;
    present_[peer.rank] = true;
    contacts_[peer.rank] = hello.contact;
    return OkStatus();
  }

  Status Expire() {
    std::string missing;
    for (int rank = 0; rank < options_.size; ++rank) {
      if (!present_[rank]) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", rank);
    }
    std::string strangers;
    if (refused_ > 0) strangers = fmt::format("; {} connections with another secret were refused", refused_);
    const Status status =
        RendezvousFault(StatusCode::kDeadlineExceeded,
                        "rendezvous at {}: not all of {} ranks came within {} s{}; missing: {}",
                        Where(options_), options_.size, options_.time_limit_s, strangers, missing);
    return Refuse(status);
  }

  // Reports the error to all ranks that have arrived, and returns it.
  Status Refuse(const Status& status) {
    for (const auto& peer : peers_) {
      if (peer->rank >= 0) peer->connection.Queue(RendezvousType::kRefusal, EncodeRefusal(status));
    }
    Drain(Clock::now() + std::chrono::seconds(1));
    return status;
  }

  // Sends everything that is queued for ranks.
  void Drain(Clock::time_point end) {
    std::erase_if(peers_, IsStranger);
    while (!peers_.empty() && Clock::now() < end) {
      std::erase_if(peers_, [this](const auto& peer) {
        if (!peer->connection.Transfer()) return true;
        if (!peer->connection.drained()) return false;
        if (kept_ != nullptr) (*kept_)[peer->rank] = peer->connection.Release();
        return true;
      });
      std::vector<pollfd> polled;
      for (const auto& peer : peers_) polled.push_back({peer->connection.fd(), POLLOUT, 0});
      if (!polled.empty()) poll(polled.data(), polled.size(), MillisecondsUntil(end));
    }
  }

  const RendezvousOptions& options_;
  std::vector<Socket>* const kept_;  // connections that stay open; null: none
  std::vector<std::string> contacts_;
  std::vector<bool> present_;
  std::vector<std::unique_ptr<Peer>> peers_;
  int refused_ = 0;
  bool is_full_ = false;  // no file could be opened for the last connection
};

// While no process listens on a port of the ephemeral range, a connection to it can be given that port as its
// own.
bool IsConnectedToItself(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof(own), peer_length = sizeof(peer);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

// Connects to rank 0, which may start later.
StatusOr<Socket> Connect(const RendezvousOptions& options, Clock::time_point end) {
  int fault = ETIMEDOUT;
  while (Clock::now() < end) {
    AddressList addresses;
    RETURN_IF_ERROR(Resolve(options, end, addresses));
    for (const addrinfo* at = addresses.first; at != nullptr; at = at->ai_next) {
      Socket made(socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (made.fd() < 0) continue;
      if (connect(made.fd(), at->ai_addr, at->ai_addrlen) != 0 && errno != EINPROGRESS) {
        fault = errno;
        continue;
      }
      pollfd polled = {made.fd(), POLLOUT, 0};
      while (poll(&polled, 1, MillisecondsUntil(end)) == 0 && Clock::now() < end) {
      }
      socklen_t length = sizeof(fault);
      if (polled.revents != 0 && getsockopt(made.fd(), SOL_SOCKET, SO_ERROR, &fault, &length) == 0 &&
          fault == 0 && !IsConnectedToItself(made.fd())) {
        return made;
      }
    }
    std::this_thread::sleep_for(kRetryPause);
  }
  return RendezvousFault(StatusCode::kDeadlineExceeded,
                         "rendezvous: rank {} found no rank 0 at {} within {} s; missing: 0 ({})",
                         options.rank, Where(options), options.time_limit_s, std::strerror(fault));
}

// One exchange with rank 0.
StatusOr<std::vector<std::string>> Join(const RendezvousOptions& options, std::string_view contact,
                                        Clock::time_point end, std::vector<Socket>* kept) {
  ASSIGN_OR_RETURN(Socket socket, Connect(options, end));
  Connection connection(std::move(socket));
  std::string challenge;
  const std::string nonce = RandomNonce();
  // Rank 0 reports its own time limit; this one ends later.
  const auto last = end + std::chrono::seconds(2);
  while (Clock::now() < last) {
    pollfd polled = {connection.fd(), connection.events(), 0};
    poll(&polled, 1, MillisecondsUntil(last));
    const bool open = connection.Transfer();
    Frame frame;
    for (;;) {
      ASSIGN_OR_RETURN(const bool taken, connection.Take(MaxTableBytes(options.size), &frame));
      if (!taken) break;
      if (frame.type == RendezvousType::kChallenge && challenge.empty() &&
          frame.payload.size() == kNonceBytes) {
        challenge = frame.payload;
        Hello hello{nonce, "", static_cast<uint32_t>(options.rank), static_cast<uint32_t>(options.size),
                    std::string(contact)};
        hello.mac = HelloMac(options.secret, challenge, hello);
        connection.Queue(RendezvousType::kHello, EncodeHello(hello));
      } else if (frame.type == RendezvousType::kRefusal) {
        ASSIGN_OR_RETURN(Status refusal, ParseRefusal(frame.payload));
        return refusal;
      } else if (frame.type == RendezvousType::kTable && !challenge.empty()) {
        ASSIGN_OR_RETURN(ContactTable table, ParseTable(frame.payload, options.size));
        if (EqualMacs(table.mac,
                      TableMac(options.secret, challenge, nonce, EncodeContacts(table.contacts)))) {
          if (kept != nullptr) kept->front() = connection.Release();
          return table.contacts;
        }
        return RendezvousFault(StatusCode::kPermissionDenied,
                               "rendezvous: the process at {} does not have the secret", Where(options));
      } else {
        return DataLoss("rendezvous: rank 0 at {} sent an unexpected message of type {}", Where(options),
                        static_cast<int>(frame.type));
      }
    }
    if (!open) {
      return RendezvousFault(StatusCode::kUnavailable,
                             "rendezvous: rank 0 at {} closed the connection of rank {}", Where(options),
                             options.rank);
    }
  }
  return RendezvousFault(StatusCode::kDeadlineExceeded,
                         "rendezvous: rank 0 at {} did not answer rank {} within {} s", Where(options),
                         options.rank, options.time_limit_s);
}

}  // namespace

StatusOr<std::vector<std::string>> Rendezvous(const RendezvousOptions& options, std::string_view contact,
                                              std::vector<Socket>* kept) {
  if (options.size < 1 || options.size > kMaxRendezvousRanks) {
    return InvalidArgument("rendezvous: size must be between 1 and {}, found {}", kMaxRendezvousRanks,
                           options.size);
  }
  if (options.rank < 0 || options.rank >= options.size) {
    return InvalidArgument("rendezvous: rank must be between 0 and {}, found {}", options.size - 1,
                           options.rank);
  }
  if (options.secret.empty()) return InvalidArgument("rendezvous: the job's secret must not be empty");
  if (contact.size() > kMaxContactBytes) {
    return InvalidArgument("rendezvous: contact must have at most {} bytes, found {}", kMaxContactBytes,
                           contact.size());
  }
  if (options.port == 0 && options.listener < 0) {
    return InvalidArgument("rendezvous: port must be between 1 and 65535, found 0");
  }
  if (!(options.time_limit_s > 0) || options.time_limit_s > kMaxLimitSeconds) {
    return InvalidArgument("rendezvous: the time limit must be positive and at most {} s, found {} s",
                           kMaxLimitSeconds, options.time_limit_s);
  }
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(options.time_limit_s));
  if (kept != nullptr) kept->resize(options.size);
  if (options.rank == 0) return Host(options, contact, kept).Run(end);
  return Join(options, contact, end, kept);
}

}  // namespace moesaic::comm
