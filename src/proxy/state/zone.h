// The shared-memory region of the proxy: header, state of requests and instances, prefix index.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace moesaic::proxy {

/// Numbers that the index has for instances: 11 bits. Some are spare, because the number of a cleared
/// instance is used again only when its blocks were removed.
inline constexpr int kMaxNumbers = 2048;
inline constexpr int kSpareNumbers = 8;
inline constexpr int kMaxInstances = kMaxNumbers - kSpareNumbers;

/// Capacities, fixed when a region is formatted.
struct ZoneOptions {
  uint32_t max_instances = 128;
  uint32_t max_requests = 8192;      ///< requests that are in the proxy at one time
  uint32_t max_workers = 64;         ///< worker processes, those of an old configuration included
  uint32_t max_tenants = 1024;       ///< tenants with their own token bucket
  uint64_t request_keys = 1 << 20;   ///< block keys of all requests together
  uint64_t index_blocks = 1 << 20;   ///< distinct blocks in the prefix index
  uint64_t engine_blocks = 1 << 21;  ///< blocks of all instances together: engine hash to key
  uint64_t shared_blocks = 1 << 14;  ///< distinct blocks that more than four instances hold
  uint64_t speculative_blocks = 1 << 18;
};

struct ZoneHeader;
struct StateLayout;
struct IndexLayout;

/// A view of a formatted region. Copyable; every process makes its own. All references inside the region are
/// offsets, so that each process may map it at another address.
class Zone {
 public:
  /// Returns the bytes that a region with these capacities needs.
  static size_t Bytes(const ZoneOptions& options);
  /// Returns capacities that use about `bytes`. The index gets the memory that requests and instances leave.
  static ZoneOptions Fit(size_t bytes, uint32_t max_instances, uint32_t max_requests,
                         uint32_t max_workers = 64);

  /// Formats `memory`, aligned to 64 bytes. No other process may use it yet.
  static StatusOr<Zone> Create(void* memory, size_t bytes, const ZoneOptions& options);
  /// Uses a region that another process, or an earlier configuration, has formatted. FailedPrecondition when
  /// it has another version or is damaged: the caller formats it again.
  static StatusOr<Zone> Attach(void* memory, size_t bytes);

  const ZoneOptions& options() const;
  StateLayout& state() const;
  IndexLayout& index() const;
  /// Address of `offset` in this process.
  template <typename T>
  T* At(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  std::byte* base() const { return base_; }

 private:
  explicit Zone(void* memory) : base_(static_cast<std::byte*>(memory)) {}
  std::byte* base_;
};

}  // namespace moesaic::proxy
