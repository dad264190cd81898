#include "proxy/gateway/etcd_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "proxy/gateway/engine_line.h"
#include "proxy/gateway/gateway.h"

namespace moesaic::proxy {
namespace {

constexpr size_t kMaxEtcdBytes = 16 << 20;  // of one answer or line
constexpr Nanos kEtcdConnect = 2 * kSecond, kEtcdAnswer = 5 * kSecond;
// A watch without a message is replaced by a new list, which also finds out whether the member lives.
constexpr Nanos kEtcdIdle = 60 * kSecond;
constexpr Nanos kMinEtcdDelay = 100 * kMillisecond, kMaxEtcdDelay = 5 * kSecond;

StatusOr<std::vector<EngineSettings>> EnginesOf(const PoolSettings& pool, std::string_view value) {
  std::vector<std::string_view> words;
  while (!value.empty()) {
    const size_t end = std::min(value.find_first_of(" \t\r\n"), value.size());
    if (end > 0) words.push_back(value.substr(0, end));
    value.remove_prefix(std::min(end + 1, value.size()));
  }
  ASSIGN_OR_RETURN(std::vector<EngineSettings> ranks, ParseEngine(words));
  for (EngineSettings& rank : ranks) {
    RETURN_IF_ERROR(FitToPool(pool, &rank));
    if (rank.resolve) continue;
    RETURN_IF_ERROR(Resolve(&rank, /*numeric=*/true));
    rank.instance.pod = SourceNumber(rank.instance.url) | 1U << 31;
  }
  return ranks;
}

}  // namespace

EtcdWatch::EtcdWatch(Gateway& gateway, const EtcdSettings& settings, std::function<void()> changed)
    : gateway_(gateway),
      settings_(settings),
      changed_(std::move(changed)),
      timer_(gateway.timers()),
      delay_(kMinEtcdDelay) {
  List();
}

EtcdWatch::~EtcdWatch() { gateway_.DestroyLater(std::move(exchange_)); }

bool EtcdWatch::Append(std::vector<EngineSettings>* engines) const {
  bool all = listed_;
  for (const auto& [key, entry] : entries_) {
    const std::vector<EngineSettings>* found =
        entry.named != nullptr ? entry.named->engines() : &entry.engines;
    all = all && found != nullptr;
    if (found != nullptr) engines->insert(engines->end(), found->begin(), found->end());
  }
  return all;
}

void EtcdWatch::Post(std::string_view target, const std::string& body, Nanos idle_timeout) {
  received_.clear();
  const EngineSettings& member = settings_.members[member_];
  exchange_ = std::make_unique<Exchange>(gateway_.transport(), gateway_.timers(), *this);
  exchange_->Start(member.address,
                   gateway_.HttpRequest(member, "POST", target, {{"Content-Type", "application/json"}}, body),
                   {.connect = kEtcdConnect, .first_byte = kEtcdAnswer, .idle = idle_timeout});
}

void EtcdWatch::List() {
  watching_ = false;
  Post("/v3/kv/range", EtcdRangeRequest(settings_.prefix), kEtcdAnswer);
}

void EtcdWatch::Watch() {
  watching_ = true;
  Post("/v3/watch", EtcdWatchRequest(settings_.prefix, revision_ + 1), kEtcdIdle);
}

void EtcdWatch::Again(Nanos delay) {
  gateway_.DestroyLater(std::move(exchange_));
  timer_.At(gateway_.now() + delay, [this] { List(); });
}

void EtcdWatch::Fail(const std::string& fault) {
  gateway_.board().discovery_errors.fetch_add(1, std::memory_order_relaxed);
  if (!std::exchange(fault_reported_, true)) {
    gateway_.transport().Log(true, fmt::format("etcd {}: {}; it is tried again, and its engines stay",
                                               settings_.members[member_].instance.url, fault));
  }
  member_ = (member_ + 1) % settings_.members.size();
  Again(delay_);
  delay_ = std::min(delay_ * 2, kMaxEtcdDelay);
}

void EtcdWatch::Set(const EtcdChange& change) {
  Entry entry;
  entry.value = change.value;
  StatusOr<std::vector<EngineSettings>> engines = EnginesOf(gateway_.settings(), change.value);
  if (!engines.ok()) {
    gateway_.board().discovery_errors.fetch_add(1, std::memory_order_relaxed);
    gateway_.transport().Log(true, fmt::format("the value of '{}' in etcd is no engine: {}", change.key,
                                               Message(engines.status())));
  } else if (engines->front().resolve) {
    entry.named = std::make_unique<NamedEngines>(gateway_, *std::move(engines), changed_);
  } else {
    entry.engines = *std::move(engines);
  }
  entries_.insert_or_assign(change.key, std::move(entry));
}

Status EtcdWatch::TakeList() {
  if (exchange_->response().status() != 200)
    return absl::UnavailableError(
        fmt::format("status {}: {}", exchange_->response().status(), received_.substr(0, 200)));
  ASSIGN_OR_RETURN(const EtcdAnswer answer, ReadEtcdRange(received_));
  revision_ = answer.revision;
  bool changed = !std::exchange(listed_, true);
  std::set<std::string_view> keys;
  for (const EtcdChange& change : answer.changes) {
    keys.insert(change.key);
    const auto known = entries_.find(change.key);
    if (known != entries_.end() && known->second.value == change.value) continue;
    Set(change);
    changed = true;
  }
  changed =
      std::erase_if(entries_, [&](const auto& item) { return !keys.contains(item.first); }) > 0 || changed;
  if (changed) changed_();
  return OkStatus();
}

Status EtcdWatch::TakeLine(std::string_view line) {
  ASSIGN_OR_RETURN(const EtcdAnswer answer, ReadEtcdWatch(line));
  if (answer.canceled) return absl::AbortedError("the watch was canceled");
  for (const EtcdChange& change : answer.changes) {
    if (change.deleted) {
      entries_.erase(change.key);
    } else {
      Set(change);
    }
  }
  if (!answer.changes.empty()) changed_();
  return OkStatus();
}

void EtcdWatch::OnHead(Exchange&) {}

void EtcdWatch::OnBody(Exchange& exchange, std::string_view bytes) {
  if (received_.size() + bytes.size() > kMaxEtcdBytes) {
    exchange.Cancel();
    return Fail("its answer is too long");
  }
  received_.append(bytes);
  if (!watching_ || exchange.response().status() != 200) return;
  delay_ = kMinEtcdDelay;
  if (std::exchange(fault_reported_, false))
    gateway_.transport().Log(false,
                             fmt::format("etcd {} answers again", settings_.members[member_].instance.url));
  size_t begin = 0;
  for (size_t end; (end = received_.find('\n', begin)) != std::string::npos; begin = end + 1) {
    if (end == begin) continue;
    const Status status = TakeLine(std::string_view(received_).substr(begin, end - begin));
    if (status.ok()) continue;
    exchange.Cancel();
    return status.code() == StatusCode::kAborted ? Again(delay_) : Fail(Message(status));
  }
  received_.erase(0, begin);
}

void EtcdWatch::OnEnd(Exchange&) {
  if (watching_) return Fail("the watch has ended");
  const Status status = TakeList();
  if (!status.ok()) return Fail(Message(status));
  gateway_.DestroyLater(std::move(exchange_));
  Watch();
}

void EtcdWatch::OnError(Exchange& exchange, const Status& status) {
  // Nothing has changed for a while.
  if (watching_ && exchange.answered() && status.code() == StatusCode::kDeadlineExceeded) return Again(0);
  Fail(Message(status));
}

}  // namespace moesaic::proxy
