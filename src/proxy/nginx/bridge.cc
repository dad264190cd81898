#include "proxy/nginx/bridge.h"

#include <fmt/format.h>
#include <malloc.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "proxy/gateway/board.h"
#include "proxy/gateway/discovery.h"
#include "proxy/gateway/engine_control.h"
#include "proxy/gateway/gateway.h"
#include "proxy/gateway/settings.h"
#include "proxy/gateway/status_pages.h"

using moesaic::Message;
using moesaic::Status;
using moesaic::StatusOr;
namespace proxy = moesaic::proxy;

namespace {

std::string_view View(moesaic_text_t text) { return {text.data, text.len}; }

// Copies a text for the caller, who frees it with moesaic_free. False: there is no memory.
bool CopyText(const std::string& from, char** text, size_t* len) {
  *text = static_cast<char*>(std::malloc(from.size() + 1));
  if (*text == nullptr) return false;
  std::memcpy(*text, from.data(), from.size());
  *len = from.size();
  return true;
}
moesaic_text_t Text(std::string_view text) { return {text.data(), text.size()}; }

void Copy(std::string_view text, char* to, size_t size) {
  if (size == 0) return;
  const size_t bytes = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), bytes);
  to[bytes] = '\0';
}

// The shared memory: the board and the zone.
struct Prefix {
  uint64_t magic;
  proxy::Board board;
};
constexpr uint64_t kMagic = 0x6d6f657361696305;
constexpr size_t kPrefixBytes = (sizeof(Prefix) + 4095) & ~size_t{4095};

// Keeps freed memory of request bodies in the process. Otherwise the allocator returns it to the kernel after
// each request of some 100 KB, and the page faults of the next request cost more than its parsing.
void KeepFreedMemory() {
#ifdef __GLIBC__
  constexpr int kLargestKept = 8 << 20, kKeptAtTop = 32 << 20;
  mallopt(M_MMAP_THRESHOLD, kLargestKept);
  mallopt(M_TRIM_THRESHOLD, kKeptAtTop);
#endif
}

}  // namespace

struct moesaic_pool_s {
  proxy::PoolSettings settings;
  std::unique_ptr<proxy::PromptRenderer> renderer;
  Prefix* prefix = nullptr;
  std::optional<proxy::Zone> zone;
};

namespace {

// The socket by which other workers wake this one. Every worker opens its own after the fork, so that reloads
// and daemons need no common descriptors. Its name is random and known by the board only.
class WakeSocket {
 public:
  ~WakeSocket() {
    if (fd_ >= 0) close(fd_);
  }
  Status Open() {
    fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd_ < 0) return moesaic::IoError("socket: {}", std::strerror(errno));
    std::random_device random;
    name_ = static_cast<uint64_t>(random()) << 32 | random();
    const auto [address, size] = AddressOf(name_);
    if (bind(fd_, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
      return moesaic::IoError("bind: {}", std::strerror(errno));
    }
    return moesaic::OkStatus();
  }
  int fd() const { return fd_; }
  uint64_t name() const { return name_; }
  // A full queue means that the worker is awake already; a refusal, that it has ended.
  void Wake(uint64_t name) const { (void)Send(name, std::string_view("", 1)); }
  // False: no process has the name, or its queue is full.
  bool Send(uint64_t name, std::string_view message) const {
    const auto [address, size] = AddressOf(name);
    return sendto(fd_, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL,
                  reinterpret_cast<const sockaddr*>(&address), size) == static_cast<ssize_t>(message.size());
  }
  // Calls see(message) for each message that is longer than a wake-up.
  template <typename See>
  void Drain(See see) const {
    for (;;) {
      const ssize_t bytes = recv(fd_, buffer_.get(), proxy::Transport::kMaxMessage, MSG_DONTWAIT);
      if (bytes < 0 && errno != EINTR) return;
      if (bytes > 1) see(std::string_view(buffer_.get(), static_cast<size_t>(bytes)));
    }
  }

 private:
  static std::pair<sockaddr_un, socklen_t> AddressOf(uint64_t name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;  // the name begins with a zero: it is not in the file system
    const int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "moesaic-%016llx",
                                     static_cast<unsigned long long>(name));
    return {address,
            static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length))};
  }

  int fd_ = -1;
  uint64_t name_ = 0;
  std::unique_ptr<char[]> buffer_ = std::make_unique_for_overwrite<char[]>(proxy::Transport::kMaxMessage);
};

class ShellTransport : public proxy::Transport {
 public:
  ShellTransport(const moesaic_shell_t& shell, void* loop, const proxy::Board& board)
      : shell_(shell), loop_(loop), board_(board) {}
  WakeSocket& wake_socket() { return wake_; }
  const WakeSocket& wake_socket() const { return wake_; }
  proxy::Nanos Now() override {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * proxy::kSecond + now.tv_nsec;
  }
  Connected Connect(proxy::Exchange& exchange, const proxy::EngineAddress& address, std::string_view head,
                    std::string_view body, bool reuse) override {
    const moesaic_connected_t connected =
        shell_.connect(loop_, reinterpret_cast<moesaic_exchange_t*>(&exchange), address.sockaddr.data(),
                       address.sockaddr.size(), Text(head), Text(body), reuse ? 1 : 0);
    return {.connection = connected.connection,
            .reused = connected.reused != 0,
            .refused = connected.refused != 0};
  }
  void Release(void* connection, bool keep) override { shell_.release(connection, keep ? 1 : 0); }
  void Pause(void* connection, bool paused) override { shell_.pause(connection, paused ? 1 : 0); }
  void ArmTimer(proxy::Nanos delay, bool idle) override { shell_.arm_timer(loop_, delay, idle ? 1 : 0); }
  void RunSoon() override { shell_.run_soon(loop_); }
  void Wake(int worker) override {
    if (board_.Pid(worker) != 0) wake_.Wake(board_.Wake(worker));
  }
  bool Send(uint64_t wake, std::string_view message) override {
    return message.size() <= kMaxMessage && wake_.Send(wake, message);
  }
  void* Watch(int fd, proxy::Watcher& watcher) override {
    return shell_.watch(loop_, fd, reinterpret_cast<moesaic_watcher_t*>(&watcher));
  }
  void Unwatch(void* watch) override {
    if (watch != nullptr) shell_.unwatch(watch);
  }
  void* Resolve(std::string_view name, proxy::Lookup& lookup) override {
    return shell_.resolve(loop_, Text(name), reinterpret_cast<moesaic_lookup_t*>(&lookup));
  }
  void CancelResolve(void* handle) override { shell_.cancel_resolve(handle); }
  void Log(bool error, std::string_view message) override { shell_.log(loop_, error ? 1 : 0, Text(message)); }

 private:
  const moesaic_shell_t& shell_;
  void* loop_;
  const proxy::Board& board_;
  WakeSocket wake_;
};

}  // namespace

struct moesaic_gateway_s {
  moesaic_gateway_s(moesaic_pool_t& pool, const moesaic_shell_t& shell, void* loop)
      : shell(shell),
        transport(shell, loop, pool.prefix->board),
        board(pool.prefix->board),
        gateway(pool.settings, *pool.zone, pool.prefix->board, pool.renderer.get(), transport) {}
  const moesaic_shell_t& shell;
  ShellTransport transport;
  proxy::Board& board;
  proxy::Gateway gateway;
};

struct moesaic_flow_s : proxy::Client {
  moesaic_flow_s(const moesaic_shell_t& shell, void* client) : shell(shell), client(client) {}
  void SendHead(int status, std::span<const proxy::Header> headers) override {
    std::vector<moesaic_header_t> list;
    for (const proxy::Header& header : headers) list.push_back({Text(header.name), Text(header.value)});
    shell.send_head(client, status, list.data(), list.size());
  }
  void SendBody(std::string_view bytes) override { shell.send_body(client, Text(bytes)); }
  void End(bool complete) override { shell.end(client, complete ? 1 : 0); }
  bool StartPrepare(proxy::Flow& task) override {
    return shell.prepare(client, reinterpret_cast<moesaic_task_t*>(&task)) != 0;
  }
  const moesaic_shell_t& shell;
  void* client;
  proxy::Flow* flow = nullptr;
};

namespace {

// Runs `body` and keeps exceptions, which can only be a lack of memory or a bug, away from nginx. `failed`
// ends the request that they belong to.
template <typename Body, typename Failed>
void Guard(Body body, Failed failed) {
  try {
    body();
  } catch (const std::exception& error) {
    try {
      failed(error.what());
    } catch (const std::exception&) {  // no memory for the end either: timeouts end the request
    }
  }
}

template <typename Body>
void Guard(moesaic_gateway_t* gateway, Body body) {
  Guard(body, [gateway](const char* what) { gateway->transport.Log(true, what); });
}

template <typename Body>
int Checked(char* error, size_t error_len, Body body) {
  try {
    const Status status = body();
    if (status.ok()) return 1;
    Copy(Message(status), error, error_len);
  } catch (const std::exception& exception) {
    Copy(exception.what(), error, error_len);
  }
  return 0;
}

proxy::Exchange& Of(moesaic_exchange_t* exchange) { return *reinterpret_cast<proxy::Exchange*>(exchange); }
proxy::Flow& Of(moesaic_task_t* task) { return *reinterpret_cast<proxy::Flow*>(task); }

}  // namespace

moesaic_pool_t* moesaic_pool_create(moesaic_text_t name) {
  auto* pool = new (std::nothrow) moesaic_pool_t;
  if (pool != nullptr) {
    Guard([&] { pool->settings.name = View(name); }, [](const char*) {});
  }
  return pool;
}

void moesaic_pool_destroy(moesaic_pool_t* pool) { delete pool; }

int moesaic_pool_set(moesaic_pool_t* pool, const moesaic_text_t* words, size_t count, char* error,
                     size_t error_len) {
  return Checked(error, error_len, [&] {
    std::vector<std::string_view> args;
    for (size_t i = 1; i < count; ++i) args.push_back(View(words[i]));
    return proxy::ApplyDirective(pool->settings, View(words[0]), args);
  });
}

int moesaic_pool_resolves(const moesaic_pool_t* pool) { return pool->settings.named.empty() ? 0 : 1; }

int moesaic_pool_finish(moesaic_pool_t* pool, char* error, size_t error_len) {
  return Checked(error, error_len, [&]() -> Status {
    RETURN_IF_ERROR(proxy::FinishPool(pool->settings));
    if (pool->settings.model_folder.empty()) return moesaic::OkStatus();
    auto renderer = proxy::PromptRenderer::Open(pool->settings.model_folder, pool->settings.dialect,
                                                pool->settings.token_cache_bytes);
    if (!renderer.ok()) return moesaic::Annotate(renderer.status(), "model " + pool->settings.model_folder);
    pool->renderer = *std::move(renderer);
    return moesaic::OkStatus();
  });
}

size_t moesaic_pool_zone_bytes(const moesaic_pool_t* pool) {
  return pool->settings.zone_bytes + kPrefixBytes;
}

int moesaic_pool_attach(moesaic_pool_t* pool, void* memory, size_t bytes, int formatted, char* note,
                        size_t note_len, char* error, size_t error_len) {
  Copy("", note, note_len);
  return Checked(error, error_len, [&]() -> Status {
    if (bytes <= kPrefixBytes) return moesaic::InvalidArgument("zone of {} bytes is too small", bytes);
    auto* prefix = static_cast<Prefix*>(memory);
    std::byte* zone_memory = static_cast<std::byte*>(memory) + kPrefixBytes;
    const size_t zone_bytes = bytes - kPrefixBytes;
    pool->prefix = prefix;
    if (formatted != 0 && prefix->magic == kMagic) {
      StatusOr<proxy::Zone> zone = proxy::Zone::Attach(zone_memory, zone_bytes);
      if (!zone.ok()) return zone.status();
      pool->zone = *zone;
      const proxy::ZoneOptions& options = zone->options();
      if (options.max_instances != pool->settings.max_instances ||
          options.max_requests != pool->settings.max_requests) {
        Copy(fmt::format("the zone is used on: max_engines stays {} and max_live {} until its size changes "
                         "or nginx restarts",
                         options.max_instances, options.max_requests),
             note, note_len);
      }
    } else {
      std::memset(memory, 0, kPrefixBytes);
      // Each worker has a bit per request; they take a small part of the zone at most.
      const size_t workers = zone_bytes / 16 / (pool->settings.max_requests / 8 + 64);
      const proxy::ZoneOptions options =
          proxy::Zone::Fit(zone_bytes, pool->settings.max_instances, pool->settings.max_requests,
                           static_cast<uint32_t>(std::clamp<size_t>(workers, 64, proxy::kMaxWorkers)));
      StatusOr<proxy::Zone> zone = proxy::Zone::Create(zone_memory, zone_bytes, options);
      if (!zone.ok()) return zone.status();
      pool->zone = *zone;
      prefix->magic = kMagic;
    }
    return proxy::State(*pool->zone).CheckCapacity(pool->settings.Instances());
  });
}

int moesaic_pool_configure(moesaic_pool_t* pool, char* error, size_t error_len) {
  return Checked(error, error_len, [&]() -> Status {
    proxy::State state(*pool->zone);
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return state
        .Configure(proxy::WithDiscovered(pool->settings, state), now.tv_sec * proxy::kSecond + now.tv_nsec)
        .status();
  });
}

moesaic_gateway_t* moesaic_gateway_create(moesaic_pool_t* pool, const moesaic_shell_t* shell, void* loop,
                                          int32_t pid, char* error, size_t error_len) {
  std::unique_ptr<moesaic_gateway_t> gateway;
  KeepFreedMemory();
  const int ok = Checked(error, error_len, [&]() -> Status {
    gateway = std::make_unique<moesaic_gateway_t>(*pool, *shell, loop);
    RETURN_IF_ERROR(gateway->transport.wake_socket().Open());
    return gateway->gateway.Start(pid, gateway->transport.wake_socket().name());
  });
  return ok != 0 ? gateway.release() : nullptr;
}

void moesaic_gateway_destroy(moesaic_gateway_t* gateway) {
  Guard(gateway, [&] { gateway->gateway.Stop(); });
  delete gateway;
}

int moesaic_gateway_wake_fd(const moesaic_gateway_t* gateway) {
  return gateway->transport.wake_socket().fd();
}
void moesaic_gateway_retire(moesaic_gateway_t* gateway) {
  Guard(gateway, [&] { gateway->gateway.Retire(); });
}
void moesaic_gateway_timer(moesaic_gateway_t* gateway) {
  Guard(gateway, [&] { gateway->gateway.OnTimer(); });
}
void moesaic_gateway_soon(moesaic_gateway_t* gateway) {
  Guard(gateway, [&] { gateway->gateway.OnSoon(); });
}
void moesaic_gateway_woken(moesaic_gateway_t* gateway) {
  Guard(gateway, [&] {
    gateway->transport.wake_socket().Drain(
        [gateway](std::string_view message) { gateway->gateway.OnMessage(message); });
    gateway->gateway.OnWake();
  });
}

moesaic_flow_t* moesaic_flow_create(moesaic_gateway_t* gateway, void* client) {
  std::unique_ptr<moesaic_flow_t> flow;
  Guard(gateway, [&] {
    auto created = std::make_unique<moesaic_flow_t>(gateway->shell, client);
    created->flow = &gateway->gateway.NewFlow(*created);
    flow = std::move(created);
  });
  return flow.release();
}

void moesaic_flow_start(moesaic_flow_t* flow, moesaic_text_t method, moesaic_text_t target,
                        moesaic_text_t path, const moesaic_header_t* headers, size_t count,
                        const moesaic_text_t* parts, size_t num_parts) {
  Guard(
      [&] {
        proxy::ClientRequest request;
        request.method = View(method);
        request.target = View(target);
        request.path = View(path);
        for (size_t i = 0; i < count; ++i) {
          request.headers.push_back(
              {std::string(View(headers[i].name)), std::string(View(headers[i].value))});
        }
        auto body = std::make_shared<std::string>();
        size_t bytes = 0;
        for (size_t i = 0; i < num_parts; ++i) bytes += parts[i].len;
        body->reserve(bytes);
        for (size_t i = 0; i < num_parts; ++i) body->append(View(parts[i]));
        request.body = std::move(body);
        flow->flow->Start(std::move(request));
      },
      [&](const char* what) { flow->flow->OnException(what); });
}

void moesaic_flow_pause(moesaic_flow_t* flow, int paused) {
  Guard([&] { flow->flow->Pause(paused != 0); }, [&](const char* what) { flow->flow->OnException(what); });
}

void moesaic_flow_detach(moesaic_flow_t* flow, moesaic_log_t* log) {
  Guard(
      [&] {
        const proxy::FlowLog facts = flow->flow->Detach();
        std::copy(facts.entered.begin(), facts.entered.end(), log->entered);
        log->first_token = facts.first_token;
        log->prompt_tokens = facts.prompt_tokens;
        log->matched_tokens = facts.matched_tokens;
        log->cached_tokens = facts.cached_tokens;
        log->output_tokens = facts.output_tokens;
        log->retries = facts.retries;
        log->outcome = proxy::OutcomeName(facts.outcome).data();
        Copy(facts.prefill, log->prefill, sizeof log->prefill);
        Copy(facts.decode, log->decode, sizeof log->decode);
        Copy(facts.request_id, log->request_id, sizeof log->request_id);
        Copy(facts.key_name, log->key_name, sizeof log->key_name);
      },
      [&](const char* what) { flow->flow->OnException(what); });
  delete flow;
}

void moesaic_task_run(moesaic_task_t* task) {
  Guard([&] { Of(task).Prepare(); }, [&](const char* what) { Of(task).PrepareFailed(what); });
}
void moesaic_task_done(moesaic_task_t* task) {
  Guard([&] { Of(task).OnPrepared(); }, [&](const char* what) { Of(task).OnException(what); });
}

void moesaic_exchange_connected(moesaic_exchange_t* exchange) {
  Guard([&] { Of(exchange).OnConnected(); }, [&](const char* what) { Of(exchange).OnException(what); });
}
void moesaic_exchange_data(moesaic_exchange_t* exchange, moesaic_text_t bytes) {
  Guard([&] { Of(exchange).OnData(View(bytes)); }, [&](const char* what) { Of(exchange).OnException(what); });
}
void moesaic_exchange_closed(moesaic_exchange_t* exchange) {
  Guard([&] { Of(exchange).OnClosed(); }, [&](const char* what) { Of(exchange).OnException(what); });
}
void moesaic_exchange_failed(moesaic_exchange_t* exchange, moesaic_text_t reason) {
  Guard([&] { Of(exchange).OnFailed(View(reason)); },
        [&](const char* what) { Of(exchange).OnException(what); });
}
void moesaic_watcher_readable(moesaic_watcher_t* watcher) {
  // The next event of the descriptor continues.
  Guard([&] { reinterpret_cast<proxy::Watcher*>(watcher)->OnReadable(); }, [](const char*) {});
}

void moesaic_lookup_done(moesaic_lookup_t* lookup, const moesaic_text_t* addresses, size_t count,
                         int64_t valid_ns, moesaic_text_t fault) {
  auto& waiting = *reinterpret_cast<proxy::Lookup*>(lookup);
  Guard(
      [&] {
        proxy::Addresses answer;
        answer.valid = valid_ns;
        answer.fault = View(fault);
        for (size_t i = 0; i < count; ++i) answer.sockaddrs.emplace_back(View(addresses[i]));
        answer.verdict = fault.len > 0 ? proxy::Addresses::Verdict::kFailed
                         : count > 0   ? proxy::Addresses::Verdict::kFound
                                       : proxy::Addresses::Verdict::kNone;
        waiting.OnAddresses(answer);
      },
      [&](const char* what) { waiting.OnLost(what); });
}

int moesaic_render(moesaic_gateway_t* gateway, int kind, char** text, size_t* len, const char** type) {
  int ok = 0;
  Guard(gateway, [&] {
    std::string page;
    switch (kind) {
      case MOESAIC_METRICS:
        page = proxy::MetricsText(gateway->gateway);
        *type = "text/plain; version=0.0.4; charset=utf-8";
        break;
      case MOESAIC_STATE:
      case MOESAIC_CHECK:
        page = proxy::StateJson(gateway->gateway, kind == MOESAIC_CHECK);
        *type = "application/json";
        break;
      case MOESAIC_TRACE:
        page = proxy::TraceJson(gateway->gateway);
        *type = "application/json";
        break;
      default:
        page = proxy::LivePage(gateway->gateway);
        *type = "text/html; charset=utf-8";
        break;
    }
    if (CopyText(page, text, len)) ok = 1;
  });
  return ok;
}

int moesaic_engines(moesaic_gateway_t* gateway, moesaic_text_t query, char** text, size_t* len) {
  int status = 0;
  Guard(gateway, [&] {
    const proxy::ControlAnswer answer = proxy::ControlEngines(gateway->gateway, View(query));
    if (CopyText(answer.body, text, len)) status = answer.status;
  });
  return status;
}

void moesaic_free(char* text) { std::free(text); }

int moesaic_metaserver_allows(const moesaic_gateway_t* gateway, moesaic_text_t address) {
  return gateway->gateway.MetaserverAllows(View(address)) ? 1 : 0;
}

int moesaic_metaserver(moesaic_gateway_t* gateway, moesaic_text_t body) {
  int status = 500;
  Guard(gateway, [&] { status = gateway->gateway.Metaserver(View(body)); });
  return status;
}
