// Decodes KV event messages of vLLM, SGLang and this project's engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "proxy/events/kv_event.h"

namespace moesaic::proxy {

/// Decodes the payload of a message: the array [time, events, rank]. An event is an array that begins with
/// its type, or a map with the type under "type". Fields after block_size are optional; unknown fields and
/// types are ignored. DataLoss names the byte at which the payload is damaged.
StatusOr<KvBatch> DecodeKvBatch(std::string_view payload);

/// Value of the 8-byte big-endian frame; DataLoss for another length.
StatusOr<uint64_t> DecodeSequence(std::string_view frame);

}  // namespace moesaic::proxy
