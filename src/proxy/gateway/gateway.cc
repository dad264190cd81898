#include "proxy/gateway/gateway.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/check.h"
#include "proxy/gateway/engine_checks.h"
#include "proxy/gateway/kv_feeds.h"

namespace moesaic::proxy {
namespace {

std::unique_ptr<Policy> PolicyOf(const PoolSettings& settings) {
  StatusOr<std::unique_ptr<Policy>> policy = MakePolicy(settings.policy, settings.policy_options);
  MOESAIC_CHECK(policy.ok());  // settings.cc accepts known names only
  return *std::move(policy);
}

uint64_t Word(RequestId id) { return uint64_t{id.slot} << 32 | id.generation; }

int OpenPidFd(int32_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

// Discards the answer of a drained exchange.
class Gateway::DrainHandler : public Exchange::Handler {
 public:
  DrainHandler(Gateway& gateway, bool until_first_byte)
      : gateway_(gateway), until_first_byte_(until_first_byte) {}
  void OnHead(Exchange&) override {}
  void OnBody(Exchange& exchange, std::string_view) override {
    if (until_first_byte_) gateway_.EndDrain(exchange);
  }
  void OnEnd(Exchange& exchange) override { gateway_.EndDrain(exchange); }
  void OnError(Exchange& exchange, const Status&) override { gateway_.EndDrain(exchange); }

 private:
  Gateway& gateway_;
  bool until_first_byte_;
};

// Reads the answer of P after its client left, and frees the blocks that it names.
class Gateway::PrefillDrain : public Exchange::Handler {
 public:
  PrefillDrain(Gateway& gateway, Endpoint endpoint, std::string text, std::string target)
      : gateway_(gateway), endpoint_(endpoint), text_(std::move(text)), target_(std::move(target)) {}
  void OnHead(Exchange&) override {}
  void OnBody(Exchange&, std::string_view bytes) override {
    if (answer_.size() + bytes.size() <= kMaxAnswer) answer_.append(bytes);
  }
  void OnEnd(Exchange& exchange) override {
    const StatusOr<PrefillAnswer> answer = ReadPrefillAnswer(answer_);
    if (exchange.response().status() == 200 && answer.ok() && !answer->transfer_params.empty()) {
      gateway_.ReleaseKv(endpoint_, text_, target_, answer->transfer_params);
    }
    gateway_.EndDrain(exchange);
  }
  void OnError(Exchange& exchange, const Status&) override { gateway_.EndDrain(exchange); }

 private:
  static constexpr size_t kMaxAnswer = 16 << 20;
  Gateway& gateway_;
  Endpoint endpoint_;
  std::string text_, target_, answer_;
};

// Watches another worker's process.
class Gateway::Death : public Watcher {
 public:
  Death(Gateway& gateway, int32_t pid, int fd) : gateway_(gateway), pid_(pid), fd_(fd) {
    watch_ = gateway_.transport_.Watch(fd_, *this);
  }
  ~Death() override {
    gateway_.transport_.Unwatch(watch_);
    close(fd_);
  }
  void OnReadable() override {
    dead_ = true;
    gateway_.ScheduleSoon();
  }
  bool dead() const { return dead_; }
  int32_t pid() const { return pid_; }

 private:
  Gateway& gateway_;
  int32_t pid_;
  int fd_;
  void* watch_;
  bool dead_ = false;
};

Gateway::Gateway(const PoolSettings& settings, Zone zone, Board& board, PromptRenderer* renderer,
                 Transport& transport)
    : settings_(settings),
      board_(board),
      renderer_(renderer),
      transport_(transport),
      state_(zone),
      index_(zone),
      keys_(zone),
      scheduler_(state_, index_, PolicyOf(settings), settings.scheduler),
      timers_([this] { ArmTimer(); }),
      run_(timers_),
      check_(timers_),
      random_(std::random_device()()) {}

Gateway::~Gateway() { Stop(); }

Status Gateway::Start(int32_t pid) {
  pid_ = pid;
  ASSIGN_OR_RETURN(worker_, state_.RegisterWorker(pid));
  if (worker_ >= kMaxWorkers) return ResourceExhausted("more than {} worker processes", kMaxWorkers);
  board_.pids[static_cast<size_t>(worker_)].store(pid, std::memory_order_release);
  for (size_t i = 0; i < settings_.engines.size(); ++i) {
    const InstanceConfig& config = settings_.engines[i].instance;
    const int instance = state_.FindInstance(config.url, config.dp_rank);
    if (instance < 0) return absl::InternalError(fmt::format("engine {} is not in the zone", config.url));
    if (engine_of_instance_.size() <= static_cast<size_t>(instance))
      engine_of_instance_.resize(instance + 1, -1);
    engine_of_instance_[static_cast<size_t>(instance)] = static_cast<int>(i);
  }
  const int probe = OpenPidFd(pid);
  if (probe >= 0) {  // deaths are seen at once, so that the lease need not expire quickly
    close(probe);
    lease_options_ = {.renew = 100 * kMillisecond, .timeout = 500 * kMillisecond};
  }
  ScheduleSoon();
  for (int i = 0; i < kMaxWorkers; ++i) {
    if (i != worker_ && board_.pids[static_cast<size_t>(i)].load() != 0)
      transport_.Wake(i);  // they watch this one
  }
  return OkStatus();
}

void Gateway::Retire() {
  retiring_ = true;
  DropLease(/*release=*/true);
  ArmTimer();
}

void Gateway::Stop() {
  if (worker_ < 0) return;
  DropLease(/*release=*/true);
  deaths_.clear();
  drains_.clear();
  flows_.clear();
  by_id_.clear();
  buried_.clear();
  board_.pids[static_cast<size_t>(worker_)].store(0, std::memory_order_release);
  state_.UnregisterWorker(std::exchange(worker_, -1), transport_.Now());
}

const EngineSettings* Gateway::Engine(int instance) const {
  if (instance < 0 || static_cast<size_t>(instance) >= engine_of_instance_.size()) return nullptr;
  const int engine = engine_of_instance_[static_cast<size_t>(instance)];
  return engine < 0 ? nullptr : &settings_.engines[static_cast<size_t>(engine)];
}

int Gateway::AnyEngine() const {
  int best = -1;
  uint64_t best_load = 0;
  for (const InstanceRecord& instance : state_.Instances()) {
    if (Engine(instance.id) == nullptr || instance.state != InstanceState::kEnabled || !instance.healthy)
      continue;
    if (instance.config.role == Role::kPrefill) continue;
    const uint64_t load = instance.load.decode_requests + instance.load.prefill_requests;
    if (best < 0 || load < best_load) {
      best = instance.id;
      best_load = load;
    }
  }
  return best;
}

Flow& Gateway::NewFlow(Client& client) {
  auto flow = std::make_unique<Flow>(*this, client);
  Flow& added = *flow;
  flows_.emplace(&added, std::move(flow));
  return added;
}

void Gateway::Register(Flow& flow) { by_id_[Word(flow.id())] = &flow; }
void Gateway::Unregister(RequestId id) { by_id_.erase(Word(id)); }

void Gateway::Bury(std::unique_ptr<Exchange> exchange) {
  if (exchange == nullptr) return;
  exchange->Cancel();
  buried_.push_back(std::move(exchange));
  if (!std::exchange(soon_, true)) transport_.RunSoon();
}

void Gateway::Drain(std::unique_ptr<Exchange> exchange) {
  DrainWith(std::move(exchange), std::make_unique<DrainHandler>(*this, /*until_first_byte=*/false));
}

void Gateway::DrainToFirstByte(std::unique_ptr<Exchange> exchange) {
  DrainWith(std::move(exchange), std::make_unique<DrainHandler>(*this, /*until_first_byte=*/true));
}

void Gateway::DrainPrefill(std::unique_ptr<Exchange> exchange, Endpoint endpoint, std::string text,
                           std::string target) {
  DrainWith(std::move(exchange),
            std::make_unique<PrefillDrain>(*this, endpoint, std::move(text), std::move(target)));
}

void Gateway::DrainWith(std::unique_ptr<Exchange> exchange, std::unique_ptr<Exchange::Handler> handler) {
  if (exchange == nullptr) return;
  if (!exchange->live()) return Bury(std::move(exchange));
  exchange->SetHandler(*handler);
  exchange->Pause(false);
  Exchange* key = exchange.get();
  drains_.emplace(key, Drained{std::move(exchange), std::move(handler)});
  ArmTimer();
}

void Gateway::EndDrain(Exchange& exchange) {
  const auto found = drains_.find(&exchange);
  if (found == drains_.end()) return;
  buried_handlers_.push_back(std::move(found->second.handler));
  Bury(std::move(found->second.exchange));
  drains_.erase(found);
}

void Gateway::Reap(Flow& flow) {
  reap_.push_back(&flow);
  if (!std::exchange(soon_, true)) transport_.RunSoon();
}

void Gateway::ScheduleSoon() {
  schedule_wanted_ = true;
  if (!std::exchange(soon_, true)) transport_.RunSoon();
}

ExchangeTimeouts Gateway::timeouts() const {
  return {.connect = settings_.connect_timeout,
          .first_byte = settings_.prefill_timeout,
          .idle = settings_.idle_timeout};
}

std::string Gateway::HttpRequest(const EngineSettings& engine, std::string_view method,
                                 std::string_view target, const std::vector<Header>& headers,
                                 std::string_view body) const {
  std::string request;
  request.reserve(body.size() + 1024);
  fmt::format_to(std::back_inserter(request), "{} {}{} HTTP/1.1\r\nHost: {}\r\n", method, engine.path, target,
                 engine.address.host);
  for (const Header& header : headers) {
    fmt::format_to(std::back_inserter(request), "{}: {}\r\n", header.name, header.value);
  }
  if (method != "GET" && method != "HEAD") {
    fmt::format_to(std::back_inserter(request), "Content-Length: {}\r\n", body.size());
  }
  request += "\r\n";
  request += body;
  return request;
}

void Gateway::ReleaseKv(Endpoint endpoint, std::string_view text, const std::string& target,
                        const std::string& params) {
  const EngineSettings* engine = Engine(AnyEngine());
  const StatusOr<RequestBody> body = ReadRequestBody(endpoint, text);
  if (engine == nullptr || !body.ok()) return;
  JsonEdit edit(body->members);
  edit.Set("kv_transfer_params", params);
  edit.Set("max_tokens", "1");
  if (body->members.Find("max_completion_tokens") != nullptr) edit.Set("max_completion_tokens", "1");
  edit.Set("stream", "false");
  edit.Remove("stream_options");
  auto handler = std::make_unique<DrainHandler>(*this, /*until_first_byte=*/false);
  auto exchange = std::make_unique<Exchange>(transport_, timers_, *handler);
  exchange->Start(engine->address,
                  HttpRequest(*engine, "POST", target, {{"Content-Type", "application/json"}}, edit.Apply()),
                  timeouts());
  board_.released_kv.fetch_add(1, std::memory_order_relaxed);
  DrainWith(std::move(exchange), std::move(handler));
}

void Gateway::OnTimer() {
  timers_.Run(transport_.Now());
  ArmTimer();
}

void Gateway::ArmTimer() {
  const std::optional<Nanos> next = timers_.Next();
  if (!next) return transport_.ArmTimer(-1, /*idle=*/true);
  const Nanos now = transport_.Now();
  transport_.ArmTimer(std::max<Nanos>(*next - now, 0), idle());
}

void Gateway::Collect() {
  const auto handlers = std::exchange(buried_handlers_, {});  // outlive the exchanges
  const auto buried = std::exchange(buried_, {});
  for (Flow* flow : std::exchange(reap_, {})) {
    const auto found = flows_.find(flow);
    if (found != flows_.end() && flow->finished()) flows_.erase(found);
  }
}

void Gateway::OnSoon() {
  soon_ = false;
  if (std::exchange(schedule_wanted_, false) && worker_ >= 0) Schedule();
  Collect();
  ArmTimer();
}

void Gateway::OnWake() {
  if (worker_ < 0) return;
  board_.Receive(worker_, [this](uint32_t slot, uint32_t generation, const std::string& text) {
    const auto found = by_id_.find(Word({slot, generation}));
    if (found != by_id_.end()) found->second->OnLetter(text);
  });
  WatchWorkers();
  DispatchScheduled();
  if (!retiring_) ScheduleSoon();
}

// Watches processes that registered since the last call, and forgets those that died.
void Gateway::WatchWorkers() {
  for (int i = 0; i < kMaxWorkers; ++i) {
    const int32_t pid = board_.pids[static_cast<size_t>(i)].load(std::memory_order_acquire);
    if (pid == 0 || pid == pid_ || deaths_.contains(pid)) continue;
    const int fd = OpenPidFd(pid);
    if (fd >= 0) deaths_[pid] = std::make_unique<Death>(*this, pid, fd);
  }
}

void Gateway::TryAcquire() {
  if (retiring_) return;
  const Nanos now = transport_.Now();
  if (const std::optional<LeaseToken> lease = state_.lease().Acquire(pid_, now, lease_options_))
    TakeLease(*lease);
}

void Gateway::TakeLease(LeaseToken lease) {
  lease_ = lease;
  board_.takeovers.fetch_add(1, std::memory_order_relaxed);
  state_.ReclaimDeadWorkers(transport_.Now());
  feeds_ = std::make_unique<KvFeeds>(*this);
  checks_ = std::make_unique<EngineChecks>(*this);
  for (int i = 0; i < kMaxWorkers; ++i) {  // the old master, if it lives, stops its feeds
    if (i != worker_ && board_.pids[static_cast<size_t>(i)].load() != 0) transport_.Wake(i);
  }
}

void Gateway::DropLease(bool release) {
  if (!lease_) return;
  feeds_.reset();
  checks_.reset();
  run_.Cancel();
  if (release) state_.lease().Release(lease_);
  lease_ = {};
  if (!release) return;
  for (int i = 0; i < kMaxWorkers; ++i) {
    if (i != worker_ && board_.pids[static_cast<size_t>(i)].load() != 0) transport_.Wake(i);
  }
}

void Gateway::Schedule() {
  const Nanos now = transport_.Now();
  WatchWorkers();
  bool dead = false;
  for (auto it = deaths_.begin(); it != deaths_.end();) {
    if (!it->second->dead()) {
      ++it;
      continue;
    }
    dead = true;
    const int number = board_.NumberOf(it->first);
    if (number >= 0) board_.pids[static_cast<size_t>(number)].store(0, std::memory_order_release);
    it = deaths_.erase(it);
  }
  if (lease_ && !state_.lease().Renew(lease_, now)) DropLease(/*release=*/false);
  if (!lease_) {
    const int32_t holder = state_.lease().holder();
    if (holder == 0 || holder == pid_ || !ProcessLives(holder)) TryAcquire();
  } else if (dead) {
    state_.ReclaimDeadWorkers(now);
  }
  if (!lease_) {
    const bool waits =
        std::any_of(flows_.begin(), flows_.end(), [](const auto& item) { return item.first->waiting(); });
    const int holder = board_.NumberOf(state_.lease().holder());
    if (holder >= 0 && holder != worker_) transport_.Wake(holder);
    if (waits && !check_.armed()) {
      const Nanos next = std::max(state_.lease().NextCheck(lease_options_), now + lease_options_.timeout);
      check_.At(next, [this] {
        TryAcquire();
        ScheduleSoon();
      });
    }
    return;
  }
  const RunResult result = scheduler_.Run(lease_, now);
  if (result.lost_lease) return DropLease(/*release=*/false);
  for (const int worker : result.wake) {
    if (worker != worker_) transport_.Wake(worker);
  }
  DispatchScheduled();
  const bool waiting = result.waiting_prefill + result.waiting_decode > 0;
  Nanos next = waiting ? now + lease_options_.renew : 0;
  if (result.next_run != 0) next = next == 0 ? result.next_run : std::min(next, result.next_run);
  if (next != 0) {
    run_.At(std::max(next, now + kMillisecond / 4), [this] { ScheduleSoon(); });
  } else {
    run_.Cancel();
  }
}

int Gateway::Metaserver(std::string_view body) {
  const StatusOr<JsonMembers> members = JsonMembers::Scan(body);
  if (!members.ok()) return 400;
  const std::string id = members->String("request_id").value_or("");
  // Engines put "chatcmpl-" or "cmpl-" before our id, and a number after it.
  const size_t at = id.find("moesaic-");
  int worker = 0;
  uint32_t slot = 0, generation = 0;
  if (at == std::string::npos ||
      std::sscanf(id.c_str() + at, "moesaic-%d-%u-%u-", &worker, &slot, &generation) != 3)
    return 404;
  JsonEdit params(*members);
  params.Remove("request_id");
  const std::string text = params.Apply();
  if (worker == worker_) {
    const auto found = by_id_.find(Word({slot, generation}));
    if (found == by_id_.end()) return 404;
    found->second->OnLetter(text);
    return 200;
  }
  if (worker < 0 || worker >= kMaxWorkers || board_.pids[static_cast<size_t>(worker)].load() == 0) return 404;
  if (!state_.Request({slot, generation})) return 404;
  if (!board_.Send(worker, slot, generation, text)) return 503;
  transport_.Wake(worker);
  return 200;
}

void Gateway::DispatchScheduled() {
  if (!state_.HasScheduled(worker_)) return;
  std::vector<RequestId> scheduled;
  state_.TakeScheduled(worker_, scheduled);
  for (const RequestId id : scheduled) {
    const auto found = by_id_.find(Word(id));
    const std::optional<RequestRecord> record = state_.Request(id);
    if (found != by_id_.end() && record) found->second->OnScheduled(*record);
  }
}

}  // namespace moesaic::proxy
