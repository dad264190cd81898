// Messages of etcd's JSON gateway (etcd 3.4 and later, prefix /v3).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::proxy {

/// A key that has a value, or that was deleted.
struct EtcdChange {
  std::string key;
  std::string value;
  bool deleted = false;
};

struct EtcdAnswer {
  int64_t revision = 0;
  std::vector<EtcdChange> changes;
  bool canceled = false;  ///< the watch has ended, for example because its revision was compacted
};

/// Body of /v3/kv/range for all keys that begin with `prefix`.
std::string EtcdRangeRequest(std::string_view prefix);
/// Body of /v3/watch for their changes since `revision`.
std::string EtcdWatchRequest(std::string_view prefix, int64_t revision);

StatusOr<EtcdAnswer> ReadEtcdRange(std::string_view json);
/// One line of the stream of /v3/watch. InvalidArgument for an error that etcd reports.
StatusOr<EtcdAnswer> ReadEtcdWatch(std::string_view json);

}  // namespace moesaic::proxy
