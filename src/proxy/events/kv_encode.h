// Encodes KV event messages as vLLM does, for the mock engine and tests.
#pragma once

#include <cstdint>
#include <string>

#include "proxy/events/kv_event.h"

namespace moesaic::proxy {

enum class KvEncoding : uint8_t { kArray, kMap };

/// Payload of a message.
std::string EncodeKvBatch(const KvBatch& batch, KvEncoding encoding);
/// 8 bytes, high first.
std::string EncodeSequence(uint64_t sequence);

}  // namespace moesaic::proxy
