#include "proxy/nginx/bridge.h"

#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "proxy/gateway/board.h"
#include "proxy/gateway/gateway.h"
#include "proxy/gateway/settings.h"
#include "proxy/gateway/status_pages.h"

using moesaic::Message;
using moesaic::Status;
using moesaic::StatusOr;
namespace proxy = moesaic::proxy;

namespace {

std::string_view View(moesaic_text_t text) { return {text.data, text.len}; }
moesaic_text_t Text(std::string_view text) { return {text.data(), text.size()}; }

void Copy(std::string_view text, char* to, size_t size) {
  if (size == 0) return;
  const size_t bytes = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), bytes);
  to[bytes] = '\0';
}

// The shared memory: the board, the wake descriptors, and the zone.
struct Prefix {
  uint64_t magic;
  int32_t master;  // process that opened the descriptors; its children inherit their numbers
  int32_t wake_fds[MOESAIC_WORKERS];
  proxy::Board board;
};
constexpr uint64_t kMagic = 0x6d6f657361696302;
constexpr size_t kPrefixBytes = (sizeof(Prefix) + 4095) & ~size_t{4095};

}  // namespace

struct moesaic_pool_s {
  proxy::PoolSettings settings;
  std::unique_ptr<proxy::PromptRenderer> renderer;
  Prefix* prefix = nullptr;
  std::optional<proxy::Zone> zone;
};

namespace {

class ShellTransport : public proxy::Transport {
 public:
  ShellTransport(const moesaic_shell_t& shell, void* loop) : shell_(shell), loop_(loop) {}
  proxy::Nanos Now() override {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * proxy::kSecond + now.tv_nsec;
  }
  void* Connect(proxy::Exchange& exchange, const proxy::EngineAddress& address, std::string_view bytes,
                bool reuse) override {
    return shell_.connect(loop_, reinterpret_cast<moesaic_exchange_t*>(&exchange), address.sockaddr.data(),
                          address.sockaddr.size(), Text(bytes), reuse ? 1 : 0);
  }
  void Release(void* connection, bool keep) override { shell_.release(connection, keep ? 1 : 0); }
  void Pause(void* connection, bool paused) override { shell_.pause(connection, paused ? 1 : 0); }
  void ArmTimer(proxy::Nanos delay, bool idle) override { shell_.arm_timer(loop_, delay, idle ? 1 : 0); }
  void RunSoon() override { shell_.run_soon(loop_); }
  void Wake(int worker) override { shell_.wake(loop_, worker); }
  void* Watch(int fd, proxy::Watcher& watcher) override {
    return shell_.watch(loop_, fd, reinterpret_cast<moesaic_watcher_t*>(&watcher));
  }
  void Unwatch(void* watch) override {
    if (watch != nullptr) shell_.unwatch(watch);
  }
  void Log(bool error, std::string_view message) override { shell_.log(loop_, error ? 1 : 0, Text(message)); }

 private:
  const moesaic_shell_t& shell_;
  void* loop_;
};

}  // namespace

struct moesaic_gateway_s {
  moesaic_gateway_s(moesaic_pool_t& pool, const moesaic_shell_t& shell, void* loop)
      : shell(shell), transport(shell, loop), board(pool.prefix->board),
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
  bool StartTokenize(proxy::Flow& task) override {
    return shell.tokenize(client, reinterpret_cast<moesaic_task_t*>(&task)) != 0;
  }
  const moesaic_shell_t& shell;
  void* client;
  proxy::Flow* flow = nullptr;
};

namespace {

// Runs `body` and keeps exceptions, which can only be a lack of memory or a bug, away from nginx.
template <typename Body>
void Guard(const moesaic_gateway_t* gateway, Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    if (gateway != nullptr) const_cast<moesaic_gateway_t*>(gateway)->transport.Log(true, error.what());
  }
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
    Guard(nullptr, [&] { pool->settings.name = View(name); });
  }
  return pool;
}

void moesaic_pool_destroy(moesaic_pool_t* pool) { delete pool; }

int moesaic_pool_set(moesaic_pool_t* pool, const moesaic_text_t* words, size_t count, char* error, size_t error_len) {
  return Checked(error, error_len, [&] {
    std::vector<std::string_view> args;
    for (size_t i = 1; i < count; ++i) args.push_back(View(words[i]));
    return proxy::ApplyDirective(pool->settings, View(words[0]), args);
  });
}

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

size_t moesaic_pool_zone_bytes(const moesaic_pool_t* pool) { return pool->settings.zone_bytes + kPrefixBytes; }

int moesaic_pool_attach(moesaic_pool_t* pool, void* memory, size_t bytes, int formatted, char* error, size_t error_len) {
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
    } else {
      std::memset(memory, 0, kPrefixBytes);
      const proxy::ZoneOptions options =
          proxy::Zone::Fit(zone_bytes, pool->settings.max_instances, pool->settings.max_requests);
      StatusOr<proxy::Zone> zone = proxy::Zone::Create(zone_memory, zone_bytes, options);
      if (!zone.ok()) return zone.status();
      pool->zone = *zone;
      prefix->magic = kMagic;
    }
    if (prefix->master != getpid()) {
      for (int& fd : prefix->wake_fds) {
        fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (fd < 0) return moesaic::IoError("eventfd: {}", std::strerror(errno));
      }
      prefix->master = getpid();
    }
    return moesaic::OkStatus();
  });
}

int moesaic_pool_configure(moesaic_pool_t* pool, char* error, size_t error_len) {
  return Checked(error, error_len, [&]() -> Status {
    proxy::State state(*pool->zone);
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return state.Configure(pool->settings.Instances(), now.tv_sec * proxy::kSecond + now.tv_nsec).status();
  });
}

int moesaic_pool_wake_fd(const moesaic_pool_t* pool, int worker) {
  return worker >= 0 && worker < MOESAIC_WORKERS ? pool->prefix->wake_fds[worker] : -1;
}

moesaic_gateway_t* moesaic_gateway_create(moesaic_pool_t* pool, const moesaic_shell_t* shell, void* loop, int32_t pid,
                                          char* error, size_t error_len) {
  std::unique_ptr<moesaic_gateway_t> gateway;
  const int ok = Checked(error, error_len, [&]() -> Status {
    gateway = std::make_unique<moesaic_gateway_t>(*pool, *shell, loop);
    return gateway->gateway.Start(pid);
  });
  return ok != 0 ? gateway.release() : nullptr;
}

void moesaic_gateway_destroy(moesaic_gateway_t* gateway) {
  Guard(gateway, [&] { gateway->gateway.Stop(); });
  delete gateway;
}

int moesaic_gateway_worker(const moesaic_gateway_t* gateway) { return gateway->gateway.worker(); }
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
  Guard(gateway, [&] { gateway->gateway.OnWake(); });
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
                        const moesaic_header_t* headers, size_t count, moesaic_text_t body) {
  Guard(nullptr, [&] {
    proxy::ClientRequest request;
    request.method = View(method);
    request.target = View(target);
    for (size_t i = 0; i < count; ++i) {
      request.headers.push_back({std::string(View(headers[i].name)), std::string(View(headers[i].value))});
    }
    request.body = View(body);
    flow->flow->Start(std::move(request));
  });
}

void moesaic_flow_pause(moesaic_flow_t* flow, int paused) {
  Guard(nullptr, [&] { flow->flow->Pause(paused != 0); });
}

void moesaic_flow_detach(moesaic_flow_t* flow, moesaic_log_t* log) {
  Guard(nullptr, [&] {
    const proxy::FlowLog facts = flow->flow->Detach();
    std::copy(facts.entered.begin(), facts.entered.end(), log->entered);
    log->first_token = facts.first_token;
    log->prompt_tokens = facts.prompt_tokens;
    log->cached_tokens = facts.cached_tokens;
    log->output_tokens = facts.output_tokens;
    log->retries = facts.retries;
    log->outcome = proxy::OutcomeName(facts.outcome).data();
    Copy(facts.prefill, log->prefill, sizeof log->prefill);
    Copy(facts.decode, log->decode, sizeof log->decode);
    Copy(facts.request_id, log->request_id, sizeof log->request_id);
    Copy(facts.key_name, log->key_name, sizeof log->key_name);
  });
  delete flow;
}

void moesaic_task_run(moesaic_task_t* task) {
  Guard(nullptr, [&] { Of(task).Tokenize(); });
}
void moesaic_task_done(moesaic_task_t* task) {
  Guard(nullptr, [&] { Of(task).OnTokenized(); });
}

void moesaic_exchange_connected(moesaic_exchange_t* exchange, int reused) {
  Guard(nullptr, [&] { Of(exchange).OnConnected(reused != 0); });
}
void moesaic_exchange_data(moesaic_exchange_t* exchange, moesaic_text_t bytes) {
  Guard(nullptr, [&] { Of(exchange).OnData(View(bytes)); });
}
void moesaic_exchange_closed(moesaic_exchange_t* exchange) {
  Guard(nullptr, [&] { Of(exchange).OnClosed(); });
}
void moesaic_exchange_failed(moesaic_exchange_t* exchange, moesaic_text_t reason) {
  Guard(nullptr, [&] { Of(exchange).OnFailed(View(reason)); });
}
void moesaic_watcher_readable(moesaic_watcher_t* watcher) {
  Guard(nullptr, [&] { reinterpret_cast<proxy::Watcher*>(watcher)->OnReadable(); });
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
        page = proxy::StateJson(gateway->gateway);
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
    *text = static_cast<char*>(std::malloc(page.size() + 1));
    if (*text == nullptr) return;
    std::memcpy(*text, page.data(), page.size());
    *len = page.size();
    ok = 1;
  });
  return ok;
}

void moesaic_free(char* text) { std::free(text); }

int moesaic_metaserver(moesaic_gateway_t* gateway, moesaic_text_t body) {
  int status = 500;
  Guard(gateway, [&] { status = gateway->gateway.Metaserver(View(body)); });
  return status;
}
