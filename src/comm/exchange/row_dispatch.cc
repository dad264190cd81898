#include "comm/exchange/row_dispatch.h"

#include <cstring>
#include <utility>

namespace moesaic::comm {

Status CheckRows(const PayloadRows& rows, int64_t count, int hidden, const char* name) {
  const int64_t bytes = count * hidden * ElementBytes(rows.payload);
  if (static_cast<int64_t>(rows.data.size()) != bytes) {
    return InvalidArgument("exchange: {} of {} rows x {} elements ({}) need {} bytes, found {}", name, count,
                           hidden, PayloadName(rows.payload), bytes, rows.data.size());
  }
  const int64_t scales = count * ScalesPerRow(rows.payload, hidden);
  if (static_cast<int64_t>(rows.scales.size()) != scales) {
    return InvalidArgument("exchange: {} of {} rows x {} elements ({}) need {} scales, found {}", name, count,
                           hidden, PayloadName(rows.payload), scales, rows.scales.size());
  }
  return OkStatus();
}

Status OwnRows::Encode(const ExchangeState& state, const PayloadRows& x, const Route& route,
                       runtime::Buffer* memory) {
  const Payload wire = state.options.dispatch_payload;
  const int64_t hidden = state.hidden, element = ElementBytes(x.payload);
  bytes_ = WireRowBytes(wire, hidden);
  if (x.payload == wire && x.scales.empty()) {
    data_ = x.data.data();
    return OkStatus();
  }
  RETURN_IF_ERROR(memory->Reserve(static_cast<size_t>(route.own_rows * bytes_), /*huge=*/true));
  data_ = memory->data();
  const int64_t scales = ScalesPerRow(wire, hidden);
  for (int32_t token = 0; token < route.own_rows; ++token) {
    if (route.held[token].entry_begin == route.held[token].entry_end) continue;
    std::byte* to = memory->data() + token * bytes_;
    EncodeRow(x.payload, x.data.data() + token * hidden * element, hidden, wire, to);
    if (x.payload == wire) {
      std::memcpy(to + hidden, x.scales.data() + token * scales, static_cast<size_t>(4 * scales));
    }
  }
  return OkStatus();
}

Status ReserveRows(const ExchangeState& state, const Route& route, RowMemory* memory) {
  const auto rows = static_cast<int64_t>(route.origins.size());
  const Payload payload = state.options.dispatch_payload;
  RETURN_IF_ERROR(
      memory->data.Reserve(static_cast<size_t>(rows * state.hidden * ElementBytes(payload)), /*huge=*/true));
  return memory->scales.Reserve(static_cast<size_t>(4 * rows * ScalesPerRow(payload, state.hidden)),
                                /*huge=*/false);
}

void ExpandRow(const ExchangeState& state, const Route& route, int32_t row, const std::byte* wire,
               RowMemory* memory) {
  const Payload payload = state.options.dispatch_payload;
  const auto data_bytes = static_cast<size_t>(state.hidden * ElementBytes(payload));
  const auto scale_bytes = static_cast<size_t>(4 * ScalesPerRow(payload, state.hidden));
  for (int32_t at = route.output_begin[row]; at < route.output_begin[row + 1]; ++at) {
    const auto output = static_cast<size_t>(route.outputs[at]);
    std::memcpy(memory->data.data() + output * data_bytes, wire, data_bytes);
    if (scale_bytes > 0)
      std::memcpy(memory->scales.data() + output * scale_bytes, wire + data_bytes, scale_bytes);
  }
}

RowDispatch::RowDispatch(ExchangeState& state, const PayloadRows& x, const TokenRoutes* tokens,
                         std::shared_ptr<Route> route, std::shared_ptr<RowMemory> rows,
                         std::shared_ptr<OperationMemory> memory)
    : state_(state),
      x_(x),
      route_(std::move(route)),
      rows_(std::move(rows)),
      memory_(std::move(memory)),
      tags_(OperationTags::Next(state)),
      row_bytes_(WireRowBytes(state.options.dispatch_payload, state.hidden)),
      pipeline_(state.transport) {
  if (tokens == nullptr) return;
  builder_.emplace(state.tree, *state.map, state.rank(), state.options.segment_tokens, route_.get());
  builder_->AddTokens(*tokens);
  routing_.emplace(state, state.tree, *builder_, *route_, tags_);
}

Status RowDispatch::StartRows() {
  if (builder_) builder_->Finish();
  const Route& route = *route_;
  RETURN_IF_ERROR(own_.Encode(state_, x_, route, &memory_->own));
  RETURN_IF_ERROR(ReserveRows(state_, route, rows_.get()));
  const auto received = static_cast<int64_t>(route.held.size()) - route.own_rows;
  RETURN_IF_ERROR(memory_->in.Reserve(static_cast<size_t>(received * row_bytes_), /*huge=*/true));
  int64_t sent = 0;
  for (const RouteSend& send : route.sends) sent += static_cast<int64_t>(send.rows.size());
  RETURN_IF_ERROR(memory_->out.Reserve(static_cast<size_t>(sent * row_bytes_), /*huge=*/true));
  const auto peer_rows = [&](int phase, int peer, std::byte* data, const std::vector<int32_t>& segment_end) {
    PeerRows made{phase, peer, tags_.At(MessageKind::kRows, phase), data, {}};
    for (const int32_t end : segment_end) made.end.push_back(end * row_bytes_);
    return made;
  };
  std::vector<PeerRows> in, out;
  std::byte* to = memory_->out.data();
  for (const RouteSend& send : route.sends) {
    out.push_back(peer_rows(send.phase, send.peer, to, send.segment_end));
    to += static_cast<int64_t>(send.rows.size()) * row_bytes_;
  }
  for (const RouteReceive& block : route.receives) {
    in.push_back(peer_rows(block.phase, block.peer,
                           memory_->in.data() + (block.first_row - route.own_rows) * row_bytes_,
                           block.segment_end));
  }
  for (int32_t row = 0; row < route.own_rows; ++row)
    ExpandRow(state_, route, row, own_.row(row), rows_.get());
  started_rows_ = true;
  return pipeline_.Start(std::move(in), std::move(out), route.phases(), route.segments, PhaseOrder::kOutward);
}

Status RowDispatch::Advance(bool* progressed) {
  if (!started_rows_) {
    if (routing_) {
      RETURN_IF_ERROR(routing_->Advance(progressed));
      if (!routing_->done()) return OkStatus();
    }
    RETURN_IF_ERROR(StartRows());
    *progressed = true;
  }
  return pipeline_.Advance(*this, progressed);
}

void RowDispatch::Cancel() {
  routing_.reset();
  pipeline_.Cancel();
}

const std::byte* RowDispatch::RowData(int32_t row) const {
  return row < route_->own_rows ? own_.row(row) : memory_->in.data() + (row - route_->own_rows) * row_bytes_;
}

void RowDispatch::Pack(int out_index, int segment) {
  const RouteSend& send = route_->sends[out_index];
  const int32_t begin = segment == 0 ? 0 : send.segment_end[segment - 1], end = send.segment_end[segment];
  std::byte* to = memory_->out.data();
  for (int i = 0; i < out_index; ++i) to += static_cast<int64_t>(route_->sends[i].rows.size()) * row_bytes_;
  for (int32_t i = begin; i < end; ++i) {
    std::memcpy(to + i * row_bytes_, RowData(send.rows[i]), static_cast<size_t>(row_bytes_));
  }
  state_.dispatch_traffic.CountRows(send.peer, end - begin, (end - begin) * row_bytes_);
}

void RowDispatch::Arrived(int in_index, int segment) {
  const RouteReceive& block = route_->receives[in_index];
  const int32_t begin = segment == 0 ? 0 : block.segment_end[segment - 1];
  for (int32_t i = begin; i < block.segment_end[segment]; ++i) {
    ExpandRow(state_, *route_, block.first_row + i, RowData(block.first_row + i), rows_.get());
  }
}

}  // namespace moesaic::comm
