// A zone in anonymous shared memory, for tests and benchmarks.
#pragma once

#include <sys/mman.h>

#include <utility>

#include "base/check.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

/// Shared with processes that are forked while it lives.
class TestZone {
 public:
  explicit TestZone(const ZoneOptions& options = {.max_instances = 16,
                                                  .max_requests = 256,
                                                  .max_workers = 16,
                                                  .max_tenants = 64,
                                                  .request_keys = 1 << 14,
                                                  .index_blocks = 1 << 14,
                                                  .engine_blocks = 1 << 15,
                                                  .shared_blocks = 1 << 10,
                                                  .speculative_blocks = 1 << 12})
      : bytes_(Zone::Bytes(options)),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0)) {
    MOESAIC_CHECK(memory_ != MAP_FAILED);
    MOESAIC_CHECK(Zone::Create(memory_, bytes_, options).ok());
  }
  ~TestZone() { munmap(memory_, bytes_); }
  TestZone(const TestZone&) = delete;
  TestZone& operator=(const TestZone&) = delete;

  Zone zone() const { return *Zone::Attach(memory_, bytes_); }
  void* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* memory_;
};

}  // namespace moesaic::proxy
