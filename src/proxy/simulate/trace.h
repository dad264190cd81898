// Traces of requests: arrival times, lengths and shared prefixes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "proxy/state/stage.h"

namespace moesaic::proxy {

struct TraceRequest {
  Nanos arrival = 0;  ///< since the first request
  uint32_t prompt_tokens = 1, output_tokens = 1;
  uint64_t session = 0;        ///< 0: none
  std::vector<uint64_t> keys;  ///< of the full blocks of the prompt; empty: it shares nothing
};

struct Trace {
  std::string name;
  uint32_t block_size = 512;
  std::vector<TraceRequest> requests;  ///< in order of arrival

  uint64_t prompt_tokens() const;
  uint64_t output_tokens() const;
  Nanos span() const { return requests.empty() ? 0 : requests.back().arrival; }
  /// Prompt tokens of each request that were in an earlier prompt: the hits of one cache without end.
  std::vector<uint32_t> ReusableTokens() const;
  /// Share of all prompt tokens that were in an earlier prompt.
  double reusable() const;
  /// Stretches the arrival times so that the mean rate is `requests_per_second`.
  void ScaleTo(double requests_per_second);
  /// Adds `copies` - 1 copies of all requests with keys and sessions of their own, shifted by parts of the
  /// span.
  void Replicate(int copies);
  /// Keeps the first `count` requests.
  void Truncate(size_t count);
};

/// Reads a trace; the format is recognized by its contents:
///   Mooncake JSON lines (timestamp, input_length, output_length, hash_ids of 512 tokens)
///   sessions of kv-cache-tester as JSON lines (requests with t, in, out and hash_runs of 64 tokens)
///   Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens)
///   SWE-agent trajectories: one .traj file or a tar archive of them. A token is taken for 4 bytes; a turn
///   follows the one before it by 2 s and 20 ms per token of the answer, and runs begin 7 s apart.
/// Files may be gzipped. Errors name the file and the line.
StatusOr<Trace> ReadTrace(const std::string& path);

}  // namespace moesaic::proxy
