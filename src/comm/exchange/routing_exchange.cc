#include "comm/exchange/routing_exchange.h"

#include <algorithm>

namespace moesaic::comm {
namespace {

// Maximum bytes of one routing message: 14 million rows of 8 experts. The receiver allocates them before the
// message arrives.
constexpr int64_t kMaxRoutingBytes = int64_t{1} << 30;

}  // namespace

RoutingExchange::RoutingExchange(ExchangeState& state, const RouteTree& tree, RouteBuilder& builder,
                                 Route& route, OperationTags tags)
    : state_(state), tree_(tree), builder_(builder), route_(route), tags_(tags) {}

RoutingExchange::~RoutingExchange() {
  for (const auto& from : incoming_) {
    CancelTransfer(state_.transport, &from->header_transfer);
    CancelTransfer(state_.transport, &from->body_transfer);
  }
  for (const auto& to : outgoing_) {
    CancelTransfer(state_.transport, &to->header_transfer);
    CancelTransfer(state_.transport, &to->body_transfer);
  }
}

RoutingHeader RoutingExchange::Expected() const {
  RoutingHeader header;
  header.hidden = static_cast<uint32_t>(state_.hidden);
  header.segment_tokens = static_cast<uint32_t>(state_.options.segment_tokens);
  header.payload = static_cast<uint16_t>(state_.options.dispatch_payload);
  return header;
}

Status RoutingExchange::Begin() {
  const size_t first = route_.sends.size();
  builder_.BeginPhase(phase_);
  incoming_.clear();
  outgoing_.clear();
  const Tag header_tag = tags_.At(MessageKind::kHeader, phase_),
            body_tag = tags_.At(MessageKind::kRouting, phase_);
  for (const int peer : tree_.Sources(state_.rank(), phase_)) {
    Incoming& from = *incoming_.emplace_back(std::make_unique<Incoming>());
    from.peer = peer;
    ASSIGN_OR_RETURN(
        from.header_transfer.id,
        state_.transport.Receive(peer, header_tag, std::as_writable_bytes(std::span(&from.header, 1))));
    from.header_transfer.open = true;
  }
  size_t send = first;
  for (const int peer : tree_.Targets(state_.rank(), phase_)) {
    Outgoing& to = *outgoing_.emplace_back(std::make_unique<Outgoing>());
    to.peer = peer;
    to.header = Expected();
    if (send < route_.sends.size() && route_.sends[send].peer == peer) {
      builder_.Encode(route_.sends[send], &to.body);
      to.header.rows = static_cast<int32_t>(route_.sends[send].rows.size());
      to.header.bytes = static_cast<int64_t>(to.body.size());
      ++send;
    }
    const auto header = std::as_bytes(std::span(&to.header, 1));
    ASSIGN_OR_RETURN(to.header_transfer.id, state_.transport.Send(peer, header_tag, header));
    to.header_transfer.open = true;
    state_.dispatch_traffic.CountRouting(peer, static_cast<int64_t>(header.size()));
    if (to.body.empty()) continue;
    // The body follows without waiting for the peer, which posts its receive when the header arrives.
    ASSIGN_OR_RETURN(to.body_transfer.id, state_.transport.Send(peer, body_tag, to.body));
    to.body_transfer.open = true;
    state_.dispatch_traffic.CountRouting(peer, static_cast<int64_t>(to.body.size()));
  }
  begun_ = true;
  return OkStatus();
}

Status RoutingExchange::AdvanceIncoming(Incoming& from, bool* progressed) {
  if (!from.header_done) {
    RETURN_IF_ERROR(TestTransfer(state_.transport, &from.header_transfer, progressed));
    if (from.header_transfer.open) return OkStatus();
    from.header_done = true;
    RETURN_IF_ERROR(CheckHeader(Expected(), from.header, from.peer));
    if (from.header.bytes == 0) return OkStatus();
    if (from.header.bytes < from.header.rows * RowRoutingBytes(1) ||
        from.header.bytes > from.header.rows * kMaxRowRoutingBytes || from.header.bytes > kMaxRoutingBytes) {
      return DataLoss(
          "exchange: rank {} announces {} rows; their routing must have {} to {} bytes each, and at most {}, "
          "found {} bytes",
          from.peer, from.header.rows, RowRoutingBytes(1), kMaxRowRoutingBytes, kMaxRoutingBytes,
          from.header.bytes);
    }
    from.body.resize(static_cast<size_t>(from.header.bytes));
    ASSIGN_OR_RETURN(from.body_transfer.id,
                     state_.transport.Receive(from.peer, tags_.At(MessageKind::kRouting, phase_), from.body));
    from.body_transfer.open = true;
  }
  return TestTransfer(state_.transport, &from.body_transfer, progressed);
}

Status RoutingExchange::Advance(bool* progressed) {
  while (!done()) {
    if (!begun_) RETURN_IF_ERROR(Begin());
    bool open = false;
    for (const auto& from : incoming_) {
      RETURN_IF_ERROR(AdvanceIncoming(*from, progressed));
      open = open || !from->header_done || from->body_transfer.open;
    }
    for (const auto& to : outgoing_) {
      RETURN_IF_ERROR(TestTransfer(state_.transport, &to->header_transfer, progressed));
      RETURN_IF_ERROR(TestTransfer(state_.transport, &to->body_transfer, progressed));
      open = open || to->header_transfer.open || to->body_transfer.open;
    }
    if (open) return OkStatus();
    for (const auto& from : incoming_) {
      if (from->header.rows == 0) continue;
      RETURN_IF_ERROR(builder_.Accept(phase_, from->peer, from->header.rows, from->body));
    }
    ++phase_;
    begun_ = false;
    *progressed = true;
  }
  return OkStatus();
}

int RoutingExchange::WaitsFor() const {
  for (const auto& from : incoming_) {
    if (!from->header_done || from->body_transfer.open) return from->peer;
  }
  for (const auto& to : outgoing_) {
    if (to->header_transfer.open || to->body_transfer.open) return to->peer;
  }
  return -1;
}

}  // namespace moesaic::comm
