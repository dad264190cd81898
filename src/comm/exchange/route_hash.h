// Hash of a token's identity, equal on all ranks and builds.
#pragma once

#include <cstdint>

namespace moesaic::comm {

/// Mixes the source rank, the token and one more number (finalizer of MurmurHash3, which is in the public
/// domain).
inline uint64_t RouteHash(int source, int token, int salt) {
  uint64_t h = (static_cast<uint64_t>(static_cast<uint32_t>(source)) << 32 | static_cast<uint32_t>(token)) +
               static_cast<uint64_t>(static_cast<uint32_t>(salt)) * 0x9e3779b97f4a7c15ULL;
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  return h ^ (h >> 33);
}

}  // namespace moesaic::comm
