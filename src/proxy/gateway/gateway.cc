#include "proxy/gateway/gateway.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "base/check.h"
#include "proxy/gateway/discovery.h"
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

// The name that Flow gives to a request.
struct RequestName {
  std::string text;
  int worker = 0;
  RequestId id;
  uint64_t wake = 0;  // of the worker
};

// Engines put "chatcmpl-" or "cmpl-" before the name, and a number after it.
std::optional<RequestName> ReadRequestName(std::string text) {
  RequestName name;
  uint64_t random = 0;
  int end = 0;
  text.erase(0, std::min(text.find("moesaic-"), text.size()));
  if (std::sscanf(text.c_str(), "moesaic-%d-%u-%u-%16" SCNx64 "-%16" SCNx64 "%n", &name.worker, &name.id.slot,
                  &name.id.generation, &name.wake, &random, &end) != 5)
    return std::nullopt;
  text.resize(static_cast<size_t>(end));
  name.text = std::move(text);
  return name;
}

int OpenPidFd(int32_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

constexpr Nanos kBootstrapAge = 30 * kSecond;  // an id of a bootstrap server is used for this long
constexpr size_t kMaxPassing = 1024;           // requests of a worker that pass without scheduling
// Buckets that are searched for blocks of cleared instances in one turn of the event loop: about 0.6 ms if
// each block is on 50 instances.
constexpr size_t kSweptBuckets = 1 << 13;
constexpr Nanos kSweepInterval = kMillisecond;

// Counts requests that release blocks and failed.
class ReleaseHandler : public DrainHandler {
 public:
  using DrainHandler::DrainHandler;

 private:
  void Ended(Exchange& exchange) override {
    if (exchange.response().status() >= 400) Count(fmt::format("status {}", exchange.response().status()));
  }
  void Failed(Exchange&, const Status& status) override { Count(Message(status)); }
  void Count(const std::string& fault) {
    gateway_.board().failed_releases.fetch_add(1, std::memory_order_relaxed);
    gateway_.transport().Log(
        true,
        "blocks of a prefill engine stay until its timeout, a decode engine did not fetch them: " + fault);
  }
};

}  // namespace

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
      sweep_(timers_),
      random_(std::random_device()()) {}

void DrainHandler::OnBody(Exchange& exchange, std::string_view bytes) {
  if (until_first_byte_) return gateway_.EndDrain(exchange);
  Read(bytes);
}

void DrainHandler::OnEnd(Exchange& exchange) {
  Ended(exchange);
  gateway_.EndDrain(exchange);
}

void DrainHandler::OnError(Exchange& exchange, const Status& status) {
  Failed(exchange, status);
  gateway_.EndDrain(exchange);
}

void Gateway::EndDrain(Exchange& exchange) {
  const auto found = drains_.find(&exchange);
  if (found == drains_.end()) return;
  exchange.Cancel();
  if (const Drainage& kept = found->second.kept; kept.id) {
    state_.Finish(kept.id, kept.outcome, transport_.Now());
    schedule_wanted_ = true;
  }
  destroyed_.push_back(std::move(found->second));
  drains_.erase(found);
  if (!std::exchange(soon_, true)) transport_.RunSoon();
}

Gateway::~Gateway() { Stop(); }

Status Gateway::Start(int32_t pid, uint64_t wake) {
  pid_ = pid;
  wake_ = wake;
  ASSIGN_OR_RETURN(const int number, state_.RegisterWorker(pid));
  if (number >= kMaxWorkers) {
    state_.UnregisterWorker(number, transport_.Now());
    return ResourceExhausted("more than {} worker processes", kMaxWorkers);
  }
  worker_ = number;
  board_.Join(worker_, pid, wake);
  for (const EngineSettings& engine : settings_.engines) {
    const int instance = state_.FindInstance(engine.instance.url, engine.instance.dp_rank);
    const auto version = state_.Version(instance);
    // The zone may not have room for all engines of a reloaded configuration.
    if (version) engines_[instance] = {.version = *version, .settings = &engine};
  }
  const int probe = OpenPidFd(pid);
  if (probe >= 0) {  // deaths are seen at once, so that the lease need not expire quickly
    close(probe);
    lease_options_ = {.renew = 100 * kMillisecond, .timeout = 500 * kMillisecond};
  }
  ScheduleSoon();
  WakeOthers();  // they watch this one
  return OkStatus();
}

void Gateway::WakeOthers() {
  for (int i = 0; i < board_.Numbers(); ++i) {
    if (i != worker_ && board_.Pid(i) != 0) transport_.Wake(i);
  }
}

void Gateway::Retire() {
  retiring_ = true;
  if (worker_ >= 0) board_.workers[static_cast<size_t>(worker_)].retiring.store(1, std::memory_order_release);
  DropLease(/*release=*/true);
  ScheduleSoon();
  ArmTimer();
}

void Gateway::Stop() {
  if (worker_ < 0) return;
  DropLease(/*release=*/true);
  deaths_.clear();
  drains_.clear();
  flows_.clear();
  by_id_.clear();
  destroyed_.clear();
  board_.Leave(worker_);
  state_.UnregisterWorker(std::exchange(worker_, -1), transport_.Now());
}

const EngineSettings* Gateway::Engine(int instance) {
  const std::optional<InstanceVersion> version = state_.Version(instance);
  if (!version) return nullptr;
  KnownEngine& known = engines_[instance];
  if (known.version == *version) return known.settings;
  const std::optional<InstanceRecord> record = state_.Instance(instance);
  if (!record) return nullptr;
  const InstanceVersion read{.generation = record->generation, .revision = record->revision};
  if (known.settings != nullptr && known.version.generation == read.generation) {
    // The address is the same.
    if (known.own == nullptr) known.own = std::make_unique<EngineSettings>(*known.settings);
    known.own->instance = record->config;
    known.settings = known.own.get();
    known.version = read;
    return known.settings;
  }
  // Another configuration added it. Requests of this worker are placed on it too.
  known = {.version = read};
  StatusOr<EngineSettings> settings = EngineOf(record->config);
  if (!settings.ok()) {
    transport_.Log(true, fmt::format("engine {} of a newer configuration: {}", record->config.url,
                                     Message(settings.status())));
    return nullptr;
  }
  known.own = std::make_unique<EngineSettings>(*std::move(settings));
  known.settings = known.own.get();
  return known.settings;
}

int Gateway::AnyEngine(int prefill) {
  int best = -1;
  uint64_t best_load = 0;
  const std::optional<InstanceRecord> first = prefill < 0 ? std::nullopt : state_.Instance(prefill);
  for (const InstanceRecord& instance : state_.Instances()) {
    if (instance.state != InstanceState::kEnabled || !instance.healthy) continue;
    if (instance.config.role == Role::kPrefill || (first && instance.config.group != first->config.group))
      continue;
    const uint64_t load = instance.load.decode_requests + instance.load.prefill_requests;
    if (best < 0 || load < best_load) {
      best = instance.id;
      best_load = load;
    }
  }
  return best;
}

std::shared_ptr<BodyHold> Gateway::TakeBody(size_t bytes) {
  if (body_bytes_ + bytes > settings_.body_memory) return nullptr;
  return std::make_shared<BodyHold>(body_bytes_, bytes);
}

bool Gateway::TakePass() {
  if (passing_ >= kMaxPassing) return false;
  ++passing_;
  return true;
}

std::string Gateway::BootstrapId(int instance) {
  const Bootstrap& known = bootstrap_ids_[instance];
  const auto version = state_.Version(instance);
  const bool same = version && version->generation == known.generation;
  return same && known.until > now() ? known.id : std::string();
}

void Gateway::SetBootstrapId(int instance, std::string id) {
  const auto version = state_.Version(instance);
  bootstrap_ids_[instance] = {
      .id = std::move(id), .generation = version ? version->generation : 0, .until = now() + kBootstrapAge};
}

Flow& Gateway::NewFlow(Client& client) {
  auto flow = std::make_unique<Flow>(*this, client);
  Flow& added = *flow;
  flows_.emplace(&added, std::move(flow));
  return added;
}

void Gateway::Register(Flow& flow) { by_id_[Word(flow.id())] = &flow; }
void Gateway::Unregister(RequestId id) { by_id_.erase(Word(id)); }

void Gateway::DestroyLater(std::unique_ptr<Exchange> exchange) {
  if (exchange == nullptr) return;
  exchange->Cancel();
  destroyed_.push_back({.exchange = std::move(exchange), .handler = nullptr, .kept = {}});
  if (!std::exchange(soon_, true)) transport_.RunSoon();
}

void Gateway::Drain(std::unique_ptr<Exchange> exchange, std::unique_ptr<DrainHandler> handler,
                    Drainage kept) {
  if (exchange == nullptr) return;
  if (!exchange->live()) {
    if (kept.id) state_.Finish(kept.id, kept.outcome, transport_.Now());
    return DestroyLater(std::move(exchange));
  }
  if (handler == nullptr) handler = std::make_unique<DrainHandler>(*this);
  exchange->SetHandler(*handler);
  exchange->Pause(false);
  Exchange* key = exchange.get();
  drains_.emplace(key, Drained{std::move(exchange), std::move(handler), std::move(kept)});
  ArmTimer();
}

void Gateway::Reap(Flow& flow) {
  reap_.push_back(&flow);
  if (!std::exchange(soon_, true)) transport_.RunSoon();
}

void Gateway::SweepSoon() {
  if (!lease_ || sweep_.armed() || !index_.SweepWanted()) return;
  sweep_.At(now() + kSweepInterval, [this] {
    index_.Sweep(kSweptBuckets);
    SweepSoon();
  });
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

std::string Gateway::HttpHead(const EngineSettings& engine, std::string_view method, std::string_view target,
                              const std::vector<Header>& headers, size_t body_bytes) const {
  std::string request;
  request.reserve(1024);
  fmt::format_to(std::back_inserter(request), "{} {}{} HTTP/1.1\r\nHost: {}\r\n", method, engine.path, target,
                 engine.address.host);
  for (const Header& header : headers) {
    fmt::format_to(std::back_inserter(request), "{}: {}\r\n", header.name, header.value);
  }
  // Without a length the engine would take a body for its next request.
  if (body_bytes > 0 || (method != "GET" && method != "HEAD")) {
    fmt::format_to(std::back_inserter(request), "Content-Length: {}\r\n", body_bytes);
  }
  return request += "\r\n";
}

void Gateway::ReleaseKv(const KvRelease& release, const std::string& params) {
  const EngineSettings* engine = Engine(AnyEngine(release.prefill));
  StatusOr<RequestBody> body = ReadRequestBody(release.endpoint, *release.body);
  if (engine == nullptr || !body.ok()) {
    board_.failed_releases.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  body->has_kv_transfer = body->has_kv_transfer && release.strip;
  std::vector<Header> headers = release.headers;
  if (engine->instance.ranked())
    headers.push_back({"X-data-parallel-rank", std::to_string(engine->instance.dp_rank)});
  auto handler = std::make_unique<ReleaseHandler>(*this);
  auto exchange = std::make_unique<Exchange>(transport_, timers_, *handler);
  auto sent = std::make_shared<const std::string>(ReleaseBody(*body, params));
  std::string head = HttpHead(*engine, "POST", release.target, headers, sent->size());
  exchange->Start(engine->address, std::move(head), timeouts(), std::move(sent), /*once=*/true);
  board_.released_kv.fetch_add(1, std::memory_order_relaxed);
  Drain(std::move(exchange), std::move(handler), {.body = release.hold, .id = {}});
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
  const auto destroyed = std::exchange(destroyed_, {});
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
  board_.Receive(worker_,
                 [this](uint32_t slot, uint32_t generation, const std::string& id, const std::string& text) {
                   PassBlocks({slot, generation}, id, text);
                 });
  WatchWorkers();
  DispatchScheduled();
  ScheduleSoon();
}

// Two lines: the name of a request and the blocks that a decode engine has for it.
void Gateway::OnMessage(std::string_view message) {
  const size_t end = std::min(message.find('\n'), message.size());
  const std::optional<RequestName> name = ReadRequestName(std::string(message.substr(0, end)));
  if (name && end < message.size()) PassBlocks(name->id, name->text, std::string(message.substr(end + 1)));
}

// Watches processes that registered since the last call, and forgets those that died.
void Gateway::WatchWorkers() {
  for (int i = 0; i < board_.Numbers(); ++i) {
    const int32_t pid = board_.Pid(i);
    if (pid == 0 || pid == pid_ || deaths_.contains(pid)) continue;
    const int fd = OpenPidFd(pid);
    if (fd >= 0) {
      deaths_[pid] = std::make_unique<Death>(*this, pid, fd);
    } else if (!ProcessLives(pid)) {
      board_.Forget(pid);
    }
  }
}

void Gateway::TryAcquire(int32_t dead) {
  // A retiring worker schedules only when there is no other, for requests of retiring workers.
  if (retiring_ && (idle() || board_.HasSuccessor(worker_))) return;
  if (const std::optional<LeaseToken> lease =
          state_.lease().Acquire(pid_, transport_.Now(), lease_options_, dead)) {
    TakeLease(*lease);
  }
}

// A worker's request has waited for the lease's timeout. The master that was woken for it renews the lease,
// unless it hangs.
void Gateway::CheckMaster() {
  Nanos oldest = 0;
  for (const auto& [flow, owned] : flows_) {
    if (flow->waiting() && (oldest == 0 || flow->queued() < oldest)) oldest = flow->queued();
  }
  if (oldest == 0) return;
  if (state_.lease().renewed() < oldest && transport_.Now() - oldest >= lease_options_.timeout) TryAcquire();
  ScheduleSoon();
}

void Gateway::TakeLease(LeaseToken lease) {
  lease_ = lease;
  board_.takeovers.fetch_add(1, std::memory_order_relaxed);
  board_.master_since.store(transport_.Now(), std::memory_order_relaxed);
  state_.ReclaimDeadWorkers(transport_.Now());
  if (!retiring_) {
    feeds_ = std::make_unique<KvFeeds>(*this);
    checks_ = std::make_unique<EngineChecks>(*this);
    discovery_ = std::make_unique<Discovery>(*this);
  }
  WakeOthers();  // the old master, if it lives, stops its feeds
}

void Gateway::Follow(const std::vector<EngineSettings>& engines) {
  feeds_->Follow(engines);
  checks_->Follow(engines);
}

void Gateway::DropLease(bool release) {
  if (!lease_) return;
  discovery_.reset();
  feeds_.reset();
  checks_.reset();
  run_.Cancel();
  sweep_.Cancel();
  if (release) state_.lease().Release(lease_);
  lease_ = {};
  if (release) WakeOthers();
}

void Gateway::Schedule() {
  const Nanos now = transport_.Now();
  WatchWorkers();
  const int32_t holder = state_.lease().holder();
  int32_t dead = 0;  // a process that has ended; the holder of the lease if it is one
  bool watched = false;
  for (auto it = deaths_.begin(); it != deaths_.end();) {
    watched |= it->first == holder;
    if (!it->second->dead()) {
      ++it;
      continue;
    }
    if (dead != holder) dead = it->first;
    board_.Forget(it->first);
    it = deaths_.erase(it);
  }
  if (lease_ && !state_.lease().Renew(lease_, now)) DropLease(/*release=*/false);
  if (lease_ && retiring_ && board_.HasSuccessor(worker_)) DropLease(/*release=*/true);
  if (!lease_) {
    // Without a descriptor of its process the kernel must be asked.
    if (!watched && holder != 0 && holder != pid_ && dead != holder && !ProcessLives(holder)) dead = holder;
    if (holder == 0 || holder == pid_ || holder == dead) TryAcquire(dead);
  } else if (dead != 0) {
    state_.ReclaimDeadWorkers(now);
  }
  if (!lease_) {
    const bool waits =
        std::any_of(flows_.begin(), flows_.end(), [](const auto& item) { return item.first->waiting(); });
    const int master = board_.NumberOf(state_.lease().holder());
    // A request that ended matters to others that wait; those that come later wake the master themselves.
    if (master >= 0 && master != worker_ && state_.HasWaiting()) transport_.Wake(master);
    if (waits && !check_.armed()) check_.At(now + lease_options_.timeout, [this] { CheckMaster(); });
    return;
  }
  const RunResult result = scheduler_.Run(lease_, now);
  if (result.lost_lease) return DropLease(/*release=*/false);
  for (const int worker : result.wake) {
    if (worker != worker_) transport_.Wake(worker);
  }
  DispatchScheduled();
  SweepSoon();  // another process may have cleared an instance
  const bool waiting = result.waiting_prefill + result.waiting_decode > 0;
  Nanos next = waiting ? now + lease_options_.renew : 0;
  for (const Nanos due : {result.next_run, result.next_expiry}) {
    if (due != 0) next = next == 0 ? due : std::min(next, due);
  }
  if (next != 0) {
    run_.At(std::max(next, now + kMillisecond / 4), [this] { ScheduleSoon(); });
  } else {
    run_.Cancel();
  }
}

int Gateway::Metaserver(std::string_view body) {
  const StatusOr<JsonMembers> members = JsonMembers::Scan(body);
  if (!members.ok()) return 400;
  const std::optional<RequestName> name = ReadRequestName(members->String("request_id").value_or(""));
  if (!name) return 404;
  JsonEdit params(*members);
  params.Remove("request_id");
  const std::string text = params.Apply();
  if (name->wake == wake_) return PassBlocks(name->id, name->text, text) ? 200 : 404;
  if (board_.Pid(name->worker) == 0 || board_.Wake(name->worker) != name->wake) {
    // A worker of the binary before an upgrade, or the one after it, or of a configuration with another zone.
    return transport_.Send(name->wake, name->text + '\n' + text) ? 200 : 404;
  }
  if (!state_.Request(name->id)) return 404;
  if (!board_.Send(pid_, name->worker, name->id.slot, name->id.generation, name->text, text)) return 503;
  transport_.Wake(name->worker);
  return 200;
}

// Gives the blocks of a decode engine to the request with this id and name. False: it does not exist here.
bool Gateway::PassBlocks(RequestId id, const std::string& name, const std::string& text) {
  const auto found = by_id_.find(Word(id));
  return found != by_id_.end() && found->second->OnBlocks(name, text);
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
