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

StatusOr<std::vector<EngineSettings>> ParseValue(const PoolSettings& pool, size_t max_ranks,
                                                 const EtcdChange& change) {
  std::string_view value = change.value;
  std::vector<std::string_view> words;
  while (!value.empty()) {
    const size_t end = std::min(value.find_first_of(" \t\r\n"), value.size());
    if (end > 0) words.push_back(value.substr(0, end));
    value.remove_prefix(std::min(end + 1, value.size()));
  }
  ASSIGN_OR_RETURN(std::vector<EngineSettings> ranks, ParseEngine(words, max_ranks));
  for (EngineSettings& rank : ranks) {
    RETURN_IF_ERROR(FitToPool(pool, &rank));
    rank.instance.source_key = SourceNumber(change.key);
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

const std::vector<EngineSettings>* EtcdWatch::EnginesOf(const Entry& entry) {
  if (entry.named != nullptr) return entry.named->engines();
  return entry.engines.empty() ? nullptr : &entry.engines;
}

size_t EtcdWatch::Room() const { return static_cast<size_t>(gateway_.state().max_instances()); }

bool EtcdWatch::Append(std::vector<EngineSettings>* engines) const {
  for (const auto& [key, entry] : entries_) {
    if (engines->size() > Room()) break;  // Discovery reports it
    if (const auto* found = EnginesOf(entry)) engines->insert(engines->end(), found->begin(), found->end());
  }
  return listed_;
}

std::vector<uint32_t> EtcdWatch::UnknownKeys() const {
  std::vector<uint32_t> keys;
  for (const auto& [key, entry] : entries_) {
    if (EnginesOf(entry) == nullptr) keys.push_back(SourceNumber(key));
  }
  return keys;
}

void EtcdWatch::Post(std::string_view target, const std::string& body, Nanos idle_timeout) {
  received_.clear();
  scanned_ = 0;
  const EngineSettings& member = settings_.members[member_];
  exchange_ = std::make_unique<Exchange>(gateway_.transport(), gateway_.timers(), *this);
  exchange_->Start(
      member.address,
      gateway_.HttpHead(member, "POST", target, {{"Content-Type", "application/json"}}, body.size()) + body,
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

// Whether a key may have `added` engines besides those of the other keys.
bool EtcdWatch::HasRoom(Entries::const_iterator known, size_t added) const {
  const size_t room = Room();
  if (known == entries_.end() && (left_out_ || entries_.size() >= room)) return false;
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it != known) added += it->second.engines.size();
  }
  return added <= room;
}

bool EtcdWatch::LeaveOut(const std::string& key) {
  left_out_ = true;
  gateway_.board().discovery_errors.fetch_add(1, std::memory_order_relaxed);
  if (!std::exchange(left_out_reported_, true)) {
    gateway_.transport().Log(true,
                             fmt::format("etcd names more than max_engines {} engines below '{}': that of "
                                         "'{}' is left out, and possibly others",
                                         Room(), settings_.prefix, key));
  }
  return false;
}

bool EtcdWatch::Set(const EtcdChange& change) {
  const auto known = entries_.find(change.key);
  if (known != entries_.end() && known->second.value == change.value) return false;
  if (!HasRoom(known, 0)) return LeaveOut(change.key);
  StatusOr<std::vector<EngineSettings>> engines = ParseValue(gateway_.settings(), Room(), change);
  if (engines.ok() && !HasRoom(known, engines->size())) return LeaveOut(change.key);
  Entry& entry = entries_[change.key];
  entry.value = change.value;
  if (!engines.ok()) {
    gateway_.board().discovery_errors.fetch_add(1, std::memory_order_relaxed);
    gateway_.transport().Log(true, fmt::format("the value of '{}' in etcd is no engine: {}", change.key,
                                               Message(engines.status())));
  } else if (engines->front().resolve) {
    entry.engines.clear();
    entry.named = std::make_unique<NamedEngines>(gateway_, *std::move(engines), changed_);
  } else {
    entry.named.reset();
    entry.engines = *std::move(engines);
  }
  return true;
}

Status EtcdWatch::TakeList() {
  ASSIGN_OR_RETURN(const EtcdAnswer answer, ReadEtcdRange(received_));
  revision_ = answer.revision;
  bool changed = !std::exchange(listed_, true);
  std::set<std::string_view> keys;
  for (const EtcdChange& change : answer.changes) keys.insert(change.key);
  changed =
      std::erase_if(entries_, [&](const auto& item) { return !keys.contains(item.first); }) > 0 || changed;
  left_out_ = false;
  for (const EtcdChange& change : answer.changes) changed = Set(change) || changed;
  left_out_reported_ = left_out_;
  if (changed) changed_();
  return OkStatus();
}

Status EtcdWatch::TakeLine(std::string_view line) {
  ASSIGN_OR_RETURN(const EtcdAnswer answer, ReadEtcdWatch(line));
  if (answer.canceled) return absl::AbortedError("the watch was canceled");
  bool changed = false, removed = false;
  for (const EtcdChange& change : answer.changes) {
    if (change.deleted) {
      removed = entries_.erase(change.key) > 0 || removed;
    } else {
      changed = Set(change) || changed;
    }
  }
  if (changed || removed) changed_();
  if ((changed || removed) && left_out_)
    return absl::AbortedError("a new list finds the keys that were left out");
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
  for (size_t end; (end = received_.find('\n', std::max(begin, scanned_))) != std::string::npos;
       begin = end + 1) {
    if (end == begin) continue;
    const Status status = TakeLine(std::string_view(received_).substr(begin, end - begin));
    if (status.ok()) continue;
    exchange.Cancel();
    return status.code() == StatusCode::kAborted ? Again(delay_) : Fail(Message(status));
  }
  received_.erase(0, begin);
  scanned_ = received_.size();
}

void EtcdWatch::OnEnd(Exchange& exchange) {
  if (exchange.response().status() != 200)
    return Fail(fmt::format("status {}: {}", exchange.response().status(), received_.substr(0, 200)));
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
