// The engines that etcd names below a prefix of keys.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "proxy/gateway/etcd_messages.h"
#include "proxy/gateway/exchange.h"
#include "proxy/gateway/named_engines.h"

namespace moesaic::proxy {

/// Reads all keys, then watches for changes from that revision on. When the watch ends it begins again, at
/// the next member, with a delay that grows; meanwhile the engines stay.
class EtcdWatch : public Exchange::Handler {
 public:
  /// `settings` outlives the object. `changed` is called when the engines change.
  EtcdWatch(Gateway& gateway, const EtcdSettings& settings, std::function<void()> changed);
  ~EtcdWatch() override;

  /// Appends the known engines. False: the keys are not known yet.
  bool Append(std::vector<EngineSettings>* engines) const;
  /// Returns InstanceConfig::source_key of the known keys whose engines are not known: their names were not
  /// looked up yet, or their values are wrong.
  std::vector<uint32_t> UnknownKeys() const;
  const std::string& prefix() const { return settings_.prefix; }

  void OnHead(Exchange& exchange) override;
  void OnBody(Exchange& exchange, std::string_view bytes) override;
  void OnEnd(Exchange& exchange) override;
  void OnError(Exchange& exchange, const Status& status) override;

 private:
  // The value of one key.
  struct Entry {
    std::string value;
    std::vector<EngineSettings> engines;  // of a value with an IP address; with a wrong one those before it
    std::unique_ptr<NamedEngines> named;  // of a value with `resolve`
  };
  using Entries = std::map<std::string, Entry>;

  // Null: not known yet.
  static const std::vector<EngineSettings>* EnginesOf(const Entry& entry);

  void Post(std::string_view target, const std::string& body, Nanos idle_timeout);
  void List();
  void Watch();
  void Again(Nanos delay);
  void Fail(const std::string& fault);
  Status TakeList();
  Status TakeLine(std::string_view line);
  bool Set(const EtcdChange& change);  // false: nothing has changed
  bool LeaveOut(const std::string& key);
  bool HasRoom(Entries::const_iterator known, size_t added) const;
  size_t Room() const;  // engines of the zone

  Gateway& gateway_;
  const EtcdSettings& settings_;
  const std::function<void()> changed_;
  Timer timer_;
  std::unique_ptr<Exchange> exchange_;
  Entries entries_;
  std::string received_;  // of the list, or the last line of the watch
  size_t scanned_ = 0;    // bytes of `received_` that contain no end of a line
  size_t member_ = 0;
  int64_t revision_ = 0;
  Nanos delay_;
  bool listed_ = false, watching_ = false, fault_reported_ = false;
  bool left_out_ = false, left_out_reported_ = false;  // a key for whose engines there was no room
};

}  // namespace moesaic::proxy
