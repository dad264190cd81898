// Reads the prompt of a request to the mock engine.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proxy/protocol/request_body.h"

namespace moesaic::proxy {

/// A request's side of a KV transfer.
struct MockTransfer {
  enum class Side { kNone, kPrefill, kDecode };
  Side side = Side::kNone;
  std::string key;   ///< names the transfer at P
  std::string peer;  ///< "HOST:PORT" of the other engine; empty: that engine connects to this one
  std::string metaserver;
  bool prefilled = false;  ///< P has finished already (NIXL)
};

struct MockPrompt {
  RequestBody body;
  std::vector<int32_t> ids;
  std::vector<uint64_t> keys;  ///< chained hashes of full blocks
  bool had_ids = false;        ///< the body brought the ids
  MockTransfer transfer;
  uint32_t output_tokens = 16;
  bool return_ids = false;
};

/// Hash of the block `tokens` after the block with hash `parent`.
uint64_t MockBlockHash(uint64_t parent, std::span<const int32_t> tokens);

/// `body` must outlive the result. `seed` makes the block hashes of two engines different.
StatusOr<MockPrompt> ReadMockPrompt(Endpoint endpoint, std::string_view body, Transfer transfer,
                                    uint32_t block_size, uint64_t seed);

}  // namespace moesaic::proxy
