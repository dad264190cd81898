// Header of a routing message.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "comm/exchange/exchange_options.h"

namespace moesaic::comm {

/// Precedes a peer's rows. Ranks with other options are found by it.
struct RoutingHeader {
  static constexpr uint32_t kMagic = 0x4d6f4531;  // "MoE1"
  uint32_t magic = kMagic;
  uint32_t hidden = 0;
  uint32_t segment_tokens = 0;
  uint16_t payload = 0;
  uint16_t mode = 0;  // 0: throughput, 1: low latency
  int32_t rows = 0;
  int32_t reserved = 0;
  int64_t bytes = 0;  // of the message that follows; 0: none follows
};

/// InvalidArgument, which names the peer and the option, when the peer's options differ from ours.
Status CheckHeader(const RoutingHeader& expected, const RoutingHeader& found, int peer);

/// A send or receive of routing. The ids of all transfers of an operation are ended early by CancelAll().
struct RoutingTransfer {
  TransferId id;
  bool open = false;
};

/// Tests an open transfer. Returns its error; `*progressed` is set when it ended.
Status TestTransfer(Transport& transport, RoutingTransfer* transfer, bool* progressed);
void CancelTransfer(Transport& transport, RoutingTransfer* transfer);

}  // namespace moesaic::comm
