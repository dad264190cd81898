// One request on its way through the engine: its tokens, how far they are computed, and the blocks that hold
// them.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_pool.h"
#include "engine/request.h"
#include "engine/sampling.h"

namespace moesaic::engine {

/// Owned by the scheduler; the engine thread only.
struct Sequence {
  RequestId id = 0;
  Request request;
  std::vector<int32_t> tokens;  // the prompt, then what was drawn
  int limit = 0;                // tokens.size() at which it ends by length
  int computed = 0;             // leading tokens whose keys and values stand in `blocks`
  uint64_t seed = 0;
  TokenHistory history;
  std::vector<LogprobEntry> prompt_logprobs;  // as far as they are known; kept over preemption
  bool prompt_told = false;                   // the first event is out, prompt_logprobs with it
  bool prompt_counted = false;                // in EngineStats::prompt_tokens

  std::vector<cache::BlockRef> blocks;
  std::vector<int32_t> block_table;  // [blocks] their numbers, as kernels want them

  int size() const { return static_cast<int>(tokens.size()); }
  int prompt_size() const { return static_cast<int>(request.prompt.size()); }
  int outputs() const { return size() - prompt_size(); }
  int remaining() const { return size() - computed; }  // 1: a decode; more: a prefill
  bool wants_prompt_logprobs() const {
    return request.prompt_logprobs && !prompt_told &&
           static_cast<int>(prompt_logprobs.size()) < prompt_size() - 1;
  }
};

}  // namespace moesaic::engine
