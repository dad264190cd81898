// Fuzzes the answers of etcd.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "proxy/gateway/etcd_messages.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)moesaic::proxy::ReadEtcdRange(text).ok();
  (void)moesaic::proxy::ReadEtcdWatch(text).ok();
  return 0;
}
