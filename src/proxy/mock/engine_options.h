// Options of the mock engine: batching, memory, times and faults.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "proxy/schedule/latency_model.h"
#include "proxy/state/stage.h"

namespace moesaic::proxy {

/// Faults of a mock engine. Probabilities are drawn per request or per message from the seed.
struct MockFaults {
  double fail_request = 0;  ///< a request ends with an error instead of its first token
  double drop_message = 0;  ///< a KV event message is lost; its number is used up
  double duplicate_message = 0;
  double truncate_message = 0;  ///< a message lacks its end; the replay has the whole one
  double swap_messages = 0;     ///< a message is sent after its successor
  double slowdown = 1;          ///< factor on all step times
  Nanos stall_until = 0;        ///< no step begins before
};

struct MockEngineOptions {
  Role role = Role::kBoth;
  uint32_t block_size = 16;
  uint32_t num_blocks = 4096;
  uint32_t max_batch_tokens = 8192;  ///< tokens of one step: decode rows first, prefill chunks in the rest
  uint32_t max_sequences = 256;
  bool prefix_caching = true;
  LatencyCoefficients time;  ///< true times of steps
  double jitter = 0;         ///< relative standard deviation of step times
  Nanos transfer_latency = 2 * kMillisecond;
  double transfer_nanos_per_token = 1000;
  bool transfer_per_layer = false;  ///< KV is pushed while prefill runs; only the last layer remains
  bool emit_events = true;
  /// Hash of the block `tokens` after `parent`, as in MockRequest::keys; null: blocks of outputs are not
  /// cached.
  uint64_t (*hash)(uint64_t parent, std::span<const int32_t> tokens) = nullptr;
  std::string medium = "GPU";
  uint64_t seed = 1;
  MockFaults faults;
};

}  // namespace moesaic::proxy
