#include <cstring>
#include <utility>

#include "comm/exchange/row_dispatch.h"

namespace moesaic::comm {

LowLatencyDispatch::LowLatencyDispatch(ExchangeState& state, const PayloadRows& x, const TokenRoutes& tokens,
                                       std::shared_ptr<Route> route, std::shared_ptr<RowMemory> rows,
                                       std::shared_ptr<OperationMemory> memory,
                                       std::shared_ptr<FixedBuffers> buffers)
    : state_(state),
      x_(x),
      route_(std::move(route)),
      rows_(std::move(rows)),
      memory_(std::move(memory)),
      buffers_(std::move(buffers)),
      tags_(OperationTags::Next(state)),
      row_bytes_(WireRowBytes(state.options.dispatch_payload, state.hidden)),
      builder_(state.direct, *state.map, state.rank(), state.options.low_latency_tokens, route_.get()),
      peers_(state.map->ranks()) {
  builder_.AddTokens(tokens);
  if (state.direct.phases() > 0) live_peers_ = state.direct.Targets(state.rank(), 0);
}

void LowLatencyDispatch::CancelTransfers() {
  for (Peer& peer : peers_) {
    for (RoutingTransfer* transfer :
         {&peer.send_header, &peer.send_body, &peer.receive_header, &peer.receive_body}) {
      CancelTransfer(state_.transport, transfer);
    }
  }
}

RoutingHeader LowLatencyDispatch::Expected() const {
  RoutingHeader header;
  header.hidden = static_cast<uint32_t>(state_.hidden);
  header.segment_tokens = static_cast<uint32_t>(state_.options.low_latency_tokens);
  header.payload = static_cast<uint16_t>(state_.options.dispatch_payload);
  header.mode = 1;
  return header;
}

Status LowLatencyDispatch::Start() {
  builder_.BeginPhase(0);
  RETURN_IF_ERROR(own_.Encode(state_, x_, *route_, &memory_->own));
  int64_t bytes = 0;
  for (const RouteSend& send : route_->sends) {
    bytes += static_cast<int64_t>(RouteBuilder::EncodedBytes(send)) +
             static_cast<int64_t>(send.rows.size()) * row_bytes_;
  }
  RETURN_IF_ERROR(memory_->out.Reserve(static_cast<size_t>(bytes), /*huge=*/true));
  for (const int peer : live_peers_) {
    Peer& from = peers_[peer];
    ASSIGN_OR_RETURN(from.receive_header.id,
                     state_.transport.Receive(peer, tags_.At(MessageKind::kHeader, 0),
                                              std::as_writable_bytes(std::span(&from.received, 1))));
    from.receive_header.open = true;
  }
  size_t next = 0;
  std::byte* body = memory_->out.data();
  for (const int peer : live_peers_) {
    const bool has_rows = next < route_->sends.size() && route_->sends[next].peer == peer;
    RETURN_IF_ERROR(SendTo(peer, has_rows ? &route_->sends[next] : nullptr, body));
    body += peers_[peer].sent.bytes;
    next += has_rows;
  }
  return OkStatus();
}

Status LowLatencyDispatch::SendTo(int peer, const RouteSend* send, std::byte* body) {
  Peer& to = peers_[peer];
  to.sent = Expected();
  if (send != nullptr) {
    routing_.clear();
    builder_.Encode(*send, &routing_);
    to.sent.rows = static_cast<int32_t>(send->rows.size());
    to.sent.bytes = static_cast<int64_t>(routing_.size()) + to.sent.rows * row_bytes_;
    std::memcpy(body, routing_.data(), routing_.size());
    std::byte* row = body + routing_.size();
    for (const int32_t held : send->rows) {
      std::memcpy(row, own_.row(held), static_cast<size_t>(row_bytes_));
      row += row_bytes_;
    }
  }
  const auto header = std::as_bytes(std::span(&to.sent, 1));
  ASSIGN_OR_RETURN(to.send_header.id, state_.transport.Send(peer, tags_.At(MessageKind::kHeader, 0), header));
  to.send_header.open = true;
  state_.dispatch_traffic.CountRouting(peer, static_cast<int64_t>(header.size()));
  if (send == nullptr) return OkStatus();
  ASSIGN_OR_RETURN(to.send_body.id, state_.transport.Send(peer, tags_.At(MessageKind::kRows, 0),
                                                          {body, static_cast<size_t>(to.sent.bytes)}));
  to.send_body.open = true;
  state_.dispatch_traffic.CountRows(peer, to.sent.rows, to.sent.rows * row_bytes_);
  state_.dispatch_traffic.AddRoutingBytes(peer, to.sent.bytes - to.sent.rows * row_bytes_);
  return OkStatus();
}

Status LowLatencyDispatch::AdvancePeer(int peer, bool* progressed) {
  Peer& at = peers_[peer];
  RETURN_IF_ERROR(TestTransfer(state_.transport, &at.send_header, progressed));
  RETURN_IF_ERROR(TestTransfer(state_.transport, &at.send_body, progressed));
  if (!at.has_header) {
    RETURN_IF_ERROR(TestTransfer(state_.transport, &at.receive_header, progressed));
    if (at.receive_header.open) return OkStatus();
    at.has_header = true;
    RETURN_IF_ERROR(CheckHeader(Expected(), at.received, peer));
    if (at.received.bytes == 0) return OkStatus();
    if (at.received.rows > state_.options.low_latency_tokens ||
        at.received.bytes > buffers_->bytes_per_rank || at.received.bytes < at.received.rows * row_bytes_) {
      return InvalidArgument(
          "exchange: rank {} sends {} rows in {} bytes; the fixed buffers have {} rows, {} bytes", peer,
          at.received.rows, at.received.bytes, state_.options.low_latency_tokens, buffers_->bytes_per_rank);
    }
    ASSIGN_OR_RETURN(at.receive_body.id,
                     state_.transport.Receive(peer, tags_.At(MessageKind::kRows, 0),
                                              {BufferOf(peer), static_cast<size_t>(at.received.bytes)}));
    at.receive_body.open = true;
  }
  return TestTransfer(state_.transport, &at.receive_body, progressed);
}

Status LowLatencyDispatch::Advance(bool* progressed) {
  if (done_) return OkStatus();
  bool open = false;
  for (const int peer : live_peers_) {
    RETURN_IF_ERROR(AdvancePeer(peer, progressed));
    const Peer& at = peers_[peer];
    open = open || !at.has_header || at.receive_body.open || at.send_header.open || at.send_body.open;
  }
  if (open) return OkStatus();
  *progressed = true;
  return FinishRoute();
}

Status LowLatencyDispatch::FinishRoute() {
  for (const int peer : live_peers_) {
    const RoutingHeader& header = peers_[peer].received;
    if (header.rows == 0) continue;
    RETURN_IF_ERROR(
        builder_.Accept(0, peer, header.rows,
                        {BufferOf(peer), static_cast<size_t>(header.bytes - header.rows * row_bytes_)}));
  }
  builder_.Finish();
  RETURN_IF_ERROR(ReserveRows(state_, *route_, rows_.get()));
  for (int32_t row = 0; row < route_->own_rows; ++row)
    ExpandRow(state_, *route_, row, own_.row(row), rows_.get());
  for (const RouteReceive& block : route_->receives) {
    const RoutingHeader& header = peers_[block.peer].received;
    const std::byte* data = BufferOf(block.peer) + (header.bytes - header.rows * row_bytes_);
    for (int32_t i = 0; i < block.rows; ++i) {
      ExpandRow(state_, *route_, block.first_row + i, data + i * row_bytes_, rows_.get());
    }
  }
  done_ = true;
  return OkStatus();
}

int LowLatencyDispatch::WaitsFor() const {
  for (const int peer : live_peers_) {
    const Peer& at = peers_[peer];
    if (!at.has_header || at.receive_body.open || at.send_header.open || at.send_body.open) return peer;
  }
  return -1;
}

}  // namespace moesaic::comm
