#include "comm/exchange/row_combine.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace moesaic::comm {

namespace {
Payload WirePayload(const ExchangeOptions& options, const PayloadRows& y) {
  if (options.reduction == Reduction::kBySlot && y.payload == Payload::kBf16) return Payload::kBf16;
  return options.combine_payload;
}
}  // namespace

RowCombine::RowCombine(ExchangeState& state, const PayloadRows& y, const CombineOutput& out,
                       std::shared_ptr<const Route> route, std::shared_ptr<OperationMemory> memory)
    : state_(state),
      y_(y),
      out_(out),
      route_(std::move(route)),
      memory_(std::move(memory)),
      tags_(OperationTags::Next(state)),
      wire_(WirePayload(state.options, y)),
      row_bytes_(WireRowBytes(wire_, state.hidden)),
      y_row_bytes_(WireRowBytes(y.payload, state.hidden)),
      pipeline_(state.transport) {}

Status RowCombine::Start() {
  const Route& route = *route_;
  const auto peer_rows = [&](int phase, int peer) {
    return PeerRows{phase, peer, tags_.At(MessageKind::kSums, phase), nullptr, {}};
  };
  std::vector<PeerRows> in, out;
  int64_t rows = 0;
  for (const RouteSend& send : route.sends) {
    PeerRows& made = in.emplace_back(peer_rows(send.phase, send.peer));
    for (const int32_t end : send.segment_end) {
      const int32_t entries = end == 0 ? 0 : send.entry_end[end - 1];
      made.end.push_back((by_slot() ? entries : end) * row_bytes_);
    }
    in_begin_.push_back(rows);
    rows += by_slot() ? send.entry_end.back() : static_cast<int64_t>(send.rows.size());
  }
  RETURN_IF_ERROR(memory_->in.Reserve(static_cast<size_t>(rows * row_bytes_), /*huge=*/true));
  for (size_t i = 0; i < in.size(); ++i) in[i].data = memory_->in.data() + in_begin_[i] * row_bytes_;
  rows = 0;
  for (const RouteReceive& block : route.receives) {
    PeerRows& made = out.emplace_back(peer_rows(block.phase, block.peer));
    const int32_t first_entry = route.held[block.first_row].entry_begin;
    for (const int32_t end : block.segment_end) {
      const int32_t entries = end == 0 ? 0 : route.held[block.first_row + end - 1].entry_end - first_entry;
      made.end.push_back((by_slot() ? entries : end) * row_bytes_);
    }
    out_begin_.push_back(rows);
    rows += made.end.back() / row_bytes_;
  }
  RETURN_IF_ERROR(memory_->out.Reserve(static_cast<size_t>(rows * row_bytes_), /*huge=*/true));
  for (size_t i = 0; i < out.size(); ++i) out[i].data = memory_->out.data() + out_begin_[i] * row_bytes_;
  return pipeline_.Start(std::move(in), std::move(out), route.phases(), route.segments,
                         PhaseOrder::kHomeward);
}

void RowCombine::SumRow(int32_t row, Payload payload, std::byte* to) const {
  const HeldRow& held = route_->held[row];
  const std::span<const Contribution> summands =
      by_slot() ? std::span(route_->slots).subspan(held.entry_begin, held.entry_end - held.entry_begin)
                : std::span(route_->sums)
                      .subspan(route_->sum_begin[row], route_->sum_begin[row + 1] - route_->sum_begin[row]);
  // Columns are summed block by block, so that a block of all summands stays in the first-level cache.
  constexpr int64_t kBlock = 512;
  alignas(64) float sum[kBlock];
  std::byte rounded[kBlock * sizeof(float)];
  for (int64_t begin = 0; begin < state_.hidden; begin += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, state_.hidden - begin);
    if (summands.empty()) std::fill(sum, sum + count, 0.0F);
    for (size_t i = 0; i < summands.size(); ++i) {
      const Contribution& from = summands[i];
      const bool local = from.send < 0;
      Payload form = local ? y_.payload : wire_;
      const std::byte* data = (local ? Output(from.position) : Returned(from)) + begin * ElementBytes(form);
      if (by_slot() && form != wire_) {
        // Rows of this rank are rounded as if they had travelled.
        EncodeRow(form, data, count, wire_, rounded);
        form = wire_;
        data = rounded;
      }
      // Partial sums are weighted already.
      const bool weighted = state_.options.apply_weights && (local || by_slot());
      AccumulateRow(form, data, count, weighted ? from.weight : 1, i == 0, sum);
    }
    EncodeRow(Payload::kF32, reinterpret_cast<const std::byte*>(sum), count, payload,
              to + begin * ElementBytes(payload));
  }
}

std::byte* RowCombine::CopySlots(int32_t row, std::byte* wire) const {
  const HeldRow& held = route_->held[row];
  for (int32_t at = held.entry_begin; at < held.entry_end; ++at, wire += row_bytes_) {
    const Contribution& from = route_->slots[at];
    if (from.send < 0) {
      EncodeRow(y_.payload, Output(from.position), state_.hidden, wire_, wire);
    } else {
      std::memcpy(wire, Returned(from), static_cast<size_t>(row_bytes_));
    }
  }
  return wire;
}

void RowCombine::Pack(int out_index, int segment) {
  const RouteReceive& block = route_->receives[out_index];
  const int32_t begin = segment == 0 ? 0 : block.segment_end[segment - 1], end = block.segment_end[segment];
  const int32_t first_entry = route_->held[block.first_row].entry_begin;
  const int64_t before = by_slot() ? route_->held[block.first_row + begin].entry_begin - first_entry : begin;
  std::byte* const first = memory_->out.data() + (out_begin_[out_index] + before) * row_bytes_;
  std::byte* to = first;
  for (int32_t i = begin; i < end; ++i) {
    if (by_slot()) {
      to = CopySlots(block.first_row + i, to);
      continue;
    }
    SumRow(block.first_row + i, wire_, to);
    to += row_bytes_;
  }
  state_.combine_traffic.CountRows(block.peer, (to - first) / row_bytes_, to - first);
}

void RowCombine::Settled(int segment) {
  const int64_t element = ElementBytes(out_.payload);
  for (int32_t token = route_->OwnBegin(segment); token < route_->OwnBegin(segment + 1); ++token) {
    SumRow(token, out_.payload, out_.data.data() + token * state_.hidden * element);
  }
}

}  // namespace moesaic::comm
