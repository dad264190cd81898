#include "proxy/gateway/etcd_messages.h"

#include <absl/strings/escaping.h>
#include <absl/strings/numbers.h>
#include <fmt/format.h>

#include "proxy/protocol/json_members.h"

namespace moesaic::proxy {
namespace {

constexpr JsonLimits kEtcdLimits{.max_depth = 16, .max_members = 1 << 16};

StatusOr<JsonMembers> ScanEtcd(std::string_view json) {
  StatusOr<JsonMembers> members = JsonMembers::Scan(json, kEtcdLimits);
  if (!members.ok()) return Annotate(members.status(), "etcd's answer");
  return members;
}

// First key after all that begin with `prefix`: etcd's own rule for prefixes.
std::string RangeEnd(std::string_view prefix) {
  std::string end(prefix);
  while (!end.empty() && static_cast<unsigned char>(end.back()) == 0xFF) end.pop_back();
  if (end.empty()) return std::string(1, '\0');  // all keys
  ++end.back();
  return end;
}

std::string Base64(const std::string& bytes) { return absl::Base64Escape(bytes); }

std::string RangeOf(std::string_view prefix) {
  // The empty prefix, all keys, begins at the key of one zero byte.
  const std::string key = prefix.empty() ? std::string(1, '\0') : std::string(prefix);
  return fmt::format(R"("key":"{}","range_end":"{}")", Base64(key), Base64(RangeEnd(prefix)));
}

// 64-bit integers are strings in this mapping of protocol buffers.
StatusOr<int64_t> Revision(const JsonMembers& message) {
  ASSIGN_OR_RETURN(const JsonMembers header, ScanEtcd(message.Value("header")));
  int64_t revision = 0;
  if (!absl::SimpleAtoi(header.String("revision").value_or(""), &revision))
    return InvalidArgument("etcd's answer has no revision");
  return revision;
}

StatusOr<EtcdChange> KeyValue(std::string_view json) {
  ASSIGN_OR_RETURN(const JsonMembers kv, ScanEtcd(json));
  EtcdChange change;
  if (!absl::Base64Unescape(kv.String("key").value_or(""), &change.key) ||
      !absl::Base64Unescape(kv.String("value").value_or(""), &change.value)) {
    return InvalidArgument("etcd's answer has a key or value that is not base64");
  }
  return change;
}

}  // namespace

std::string EtcdRangeRequest(std::string_view prefix) { return fmt::format("{{{}}}", RangeOf(prefix)); }

std::string EtcdWatchRequest(std::string_view prefix, int64_t revision) {
  return fmt::format(R"({{"create_request":{{{},"start_revision":"{}"}}}})", RangeOf(prefix), revision);
}

StatusOr<EtcdAnswer> ReadEtcdRange(std::string_view json) {
  ASSIGN_OR_RETURN(const JsonMembers message, ScanEtcd(json));
  EtcdAnswer answer;
  ASSIGN_OR_RETURN(answer.revision, Revision(message));
  if (!message.Given("kvs")) return answer;
  ASSIGN_OR_RETURN(const JsonMembers list, ScanEtcd(message.Value("kvs")));
  for (const JsonMember& kv : list.all()) {
    ASSIGN_OR_RETURN(EtcdChange change, KeyValue(list.Text(kv)));
    answer.changes.push_back(std::move(change));
  }
  return answer;
}

StatusOr<EtcdAnswer> ReadEtcdWatch(std::string_view json) {
  ASSIGN_OR_RETURN(const JsonMembers line, ScanEtcd(json));
  if (!line.Given("result")) return InvalidArgument("etcd ends the watch: {}", json.substr(0, 200));
  ASSIGN_OR_RETURN(const JsonMembers result, ScanEtcd(line.Value("result")));
  EtcdAnswer answer;
  answer.canceled = result.Bool("canceled").value_or(false);
  if (answer.canceled) return answer;
  ASSIGN_OR_RETURN(answer.revision, Revision(result));
  if (!result.Given("events")) return answer;
  ASSIGN_OR_RETURN(const JsonMembers list, ScanEtcd(result.Value("events")));
  for (const JsonMember& event : list.all()) {
    ASSIGN_OR_RETURN(const JsonMembers fields, ScanEtcd(list.Text(event)));
    ASSIGN_OR_RETURN(EtcdChange change, KeyValue(fields.Value("kv")));
    change.deleted = fields.String("type").value_or("PUT") == "DELETE";
    answer.changes.push_back(std::move(change));
  }
  return answer;
}

}  // namespace moesaic::proxy
