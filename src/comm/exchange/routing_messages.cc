#include "comm/exchange/routing_messages.h"

namespace moesaic::comm {

Status CheckHeader(const RoutingHeader& expected, const RoutingHeader& found, int peer) {
  if (found.magic != expected.magic) {
    return InvalidArgument("exchange: rank {} sent a message that is no routing header; it starts with {:#x}",
                           peer, found.magic);
  }
  if (found.mode != expected.mode) {
    return InvalidArgument(
        "exchange: rank {} uses another mode; give all ranks the same calls, mode {}, found {}", peer,
        expected.mode, found.mode);
  }
  if (found.hidden != expected.hidden) {
    return InvalidArgument("exchange: hidden size is {} here and differs on rank {}: {}", expected.hidden,
                           peer, found.hidden);
  }
  if (found.payload != expected.payload) {
    return InvalidArgument("exchange: dispatch payload is number {} here and differs on rank {}: {}",
                           expected.payload, peer, found.payload);
  }
  if (found.segment_tokens != expected.segment_tokens) {
    return InvalidArgument("exchange: segments have {} tokens here and differ on rank {}: {}",
                           expected.segment_tokens, peer, found.segment_tokens);
  }
  if (found.rows < 0 || found.bytes < 0 || (found.rows == 0) != (found.bytes == 0)) {
    return DataLoss("exchange: rank {} sent a header of {} rows in {} bytes", peer, found.rows, found.bytes);
  }
  return OkStatus();
}

Status TestTransfer(Transport& transport, RoutingTransfer* transfer, bool* progressed) {
  Status result;
  if (!transfer->open || !transport.Test(transfer->id, &result)) return OkStatus();
  transfer->open = false;
  *progressed = true;
  return result;
}

void CancelTransfer(Transport& transport, RoutingTransfer* transfer) {
  if (transfer->open) transport.Cancel(transfer->id);
  transfer->open = false;
}

}  // namespace moesaic::comm
