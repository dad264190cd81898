#include "comm/exchange/route.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

namespace moesaic::comm {
namespace {

// Routing of a row on the wire. The physical expert has 24 bits, its slot 8.
struct WireRow {
  int32_t token;
  uint16_t source, entries;
};
struct WireEntry {
  uint32_t slot_and_expert;
  float weight;
};

template <typename T>
void Append(const T& value, std::vector<std::byte>* bytes) {
  const auto* from = reinterpret_cast<const std::byte*>(&value);
  bytes->insert(bytes->end(), from, from + sizeof(T));
}

// Gives every block an end for each segment.
template <typename Blocks>
void GrowSegments(Blocks* blocks, size_t segments) {
  for (auto& block : *blocks) {
    const int32_t last = block.segment_end.empty() ? 0 : block.segment_end.back();
    block.segment_end.resize(segments, last);
  }
}

}  // namespace

RouteBuilder::RouteBuilder(const RouteTree& tree, const ExpertMap& map, int rank, int segment_tokens,
                           Route* route)
    : tree_(tree), map_(map), rank_(rank), segment_tokens_(segment_tokens), route_(*route) {
  route_.own_rows = 0;
  route_.segment_tokens = segment_tokens;
  route_.segments = 1;
  route_.held.clear();
  route_.entries.clear();
  route_.sends.clear();
  route_.receives.clear();
  route_.dropped.clear();
  phase_of_peer_.resize(map.ranks());
  for (int peer = 0; peer < map.ranks(); ++peer) phase_of_peer_[peer] = tree.MeetingPhase(rank, peer);
  send_of_peer_.assign(map.ranks(), -1);
}

void RouteBuilder::AddTokens(const TokenRoutes& tokens) {
  route_.own_rows = static_cast<int32_t>(tokens.begin.size()) - 1;
  route_.dropped = tokens.dropped;
  route_.entries = tokens.entries;
  for (int32_t token = 0; token < route_.own_rows; ++token) {
    route_.held.push_back({rank_, token, tokens.begin[token], tokens.begin[token + 1]});
  }
  if (route_.own_rows > 0) route_.segments = SegmentOf(route_.own_rows - 1) + 1;
  places_.assign(route_.entries.size(), {});
}

void RouteBuilder::AppendRow(int32_t row, int phase) {
  const HeldRow& held = route_.held[row];
  for (int32_t at = held.entry_begin; at < held.entry_end; ++at) {
    const int destination = map_.physical(route_.entries[at].physical).rank;
    if (destination == rank_ || phase_of_peer_[destination] != phase) continue;
    const int peer = tree_.Entry(rank_, destination, held.source, held.token);
    if (send_of_peer_[peer] < 0) {
      send_of_peer_[peer] = static_cast<int32_t>(route_.sends.size());
      RouteSend& added = route_.sends.emplace_back();
      added.phase = phase;
      added.peer = peer;
    }
    RouteSend& send = route_.sends[send_of_peer_[peer]];
    if (send.rows.empty() || send.rows.back() != row) {
      send.rows.push_back(row);
      send.entry_end.push_back(send.entry_end.empty() ? 0 : send.entry_end.back());
      const size_t segment = static_cast<size_t>(SegmentOf(held.token));
      if (send.segment_end.size() <= segment) {
        send.segment_end.resize(segment + 1, static_cast<int32_t>(send.rows.size()) - 1);
      }
      send.segment_end[segment] = static_cast<int32_t>(send.rows.size());
    }
    // `send` is an index until BeginPhase() sorts the phase's sends.
    places_[at] = {send_of_peer_[peer], static_cast<int32_t>(send.rows.size()) - 1,
                   static_cast<int32_t>(send.entries.size())};
    send.entries.push_back(at);
    ++send.entry_end.back();
  }
}

void RouteBuilder::BeginPhase(int phase) {
  const size_t first = route_.sends.size();
  for (int segment = 0; segment < route_.segments; ++segment) {
    for (int32_t row = route_.OwnBegin(segment); row < route_.OwnBegin(segment + 1); ++row)
      AppendRow(row, phase);
    for (const RouteReceive& block : route_.receives) {
      if (static_cast<size_t>(segment) >= block.segment_end.size()) continue;
      const int32_t begin = segment == 0 ? 0 : block.segment_end[segment - 1];
      for (int32_t i = begin; i < block.segment_end[segment]; ++i) AppendRow(block.first_row + i, phase);
    }
  }
  // Sends of the phase in the order of peers.
  std::vector<int32_t> order(route_.sends.size() - first);
  std::iota(order.begin(), order.end(), static_cast<int32_t>(first));
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return route_.sends[a].peer < route_.sends[b].peer; });
  std::vector<RouteSend> sorted;
  sorted.reserve(order.size());
  for (const int32_t send : order) sorted.push_back(std::move(route_.sends[send]));
  std::move(sorted.begin(), sorted.end(), route_.sends.begin() + static_cast<std::ptrdiff_t>(first));
  for (size_t send = first; send < route_.sends.size(); ++send) {
    for (const int32_t at : route_.sends[send].entries) places_[at].send = static_cast<int32_t>(send);
    send_of_peer_[route_.sends[send].peer] = -1;
  }
}

size_t RouteBuilder::EncodedBytes(const RouteSend& send) {
  return send.rows.size() * sizeof(WireRow) + send.entries.size() * sizeof(WireEntry);
}

void RouteBuilder::Encode(const RouteSend& send, std::vector<std::byte>* bytes) const {
  int32_t entry = 0;
  for (size_t i = 0; i < send.rows.size(); ++i) {
    const HeldRow& row = route_.held[send.rows[i]];
    Append(WireRow{row.token, static_cast<uint16_t>(row.source),
                   static_cast<uint16_t>(send.entry_end[i] - entry)},
           bytes);
    for (; entry < send.entry_end[i]; ++entry) {
      const RouteEntry& from = route_.entries[send.entries[entry]];
      Append(WireEntry{static_cast<uint32_t>(from.slot) << 24 | static_cast<uint32_t>(from.physical),
                       from.weight},
             bytes);
    }
  }
}

Status RouteBuilder::Accept(int phase, int peer, int32_t rows, std::span<const std::byte> bytes) {
  RouteReceive block;
  block.phase = phase;
  block.peer = peer;
  block.first_row = static_cast<int32_t>(route_.held.size());
  block.rows = rows;
  const auto damaged = [&](const char* what) {
    return DataLoss("exchange: routing sent by rank {} in phase {} is malformed: {}; {} rows in {} bytes",
                    peer, phase, what, rows, bytes.size());
  };
  size_t at = 0;
  for (int32_t i = 0; i < rows; ++i) {
    WireRow row;
    if (bytes.size() - at < sizeof(row)) return damaged("it ends within a row");
    std::memcpy(&row, bytes.data() + at, sizeof(row));
    at += sizeof(row);
    if (row.token < 0 || row.source >= map_.ranks() || row.entries == 0)
      return damaged("a row's header is out of range");
    if (bytes.size() - at < row.entries * sizeof(WireEntry)) return damaged("it ends within a row's entries");
    HeldRow held{row.source, row.token, static_cast<int32_t>(route_.entries.size()), 0};
    for (int entry = 0; entry < row.entries; ++entry, at += sizeof(WireEntry)) {
      WireEntry wire;
      std::memcpy(&wire, bytes.data() + at, sizeof(wire));
      const auto physical = static_cast<int32_t>(wire.slot_and_expert & 0xffffffU);
      if (physical >= map_.physical_experts()) return damaged("a physical expert is out of range");
      // Rows come down the tree: their destinations meet this rank in a later phase.
      const int destination = map_.physical(physical).rank;
      if (destination != rank_ && phase_of_peer_[destination] <= phase)
        return damaged("a row took a wrong turn");
      route_.entries.push_back({physical, static_cast<int32_t>(wire.slot_and_expert >> 24), wire.weight});
    }
    held.entry_end = static_cast<int32_t>(route_.entries.size());
    const int segment = SegmentOf(row.token);
    if (static_cast<size_t>(segment) + 1 < block.segment_end.size())
      return damaged("its segments are not in order");
    block.segment_end.resize(segment + 1, i);
    block.segment_end[segment] = i + 1;
    route_.segments = std::max(route_.segments, segment + 1);
    route_.held.push_back(held);
  }
  if (at != bytes.size()) return damaged("it has bytes after the last row");
  places_.resize(route_.entries.size());
  if (rows > 0) route_.receives.push_back(std::move(block));
  return OkStatus();
}

void RouteBuilder::Finish() {
  GrowSegments(&route_.sends, route_.segments);
  GrowSegments(&route_.receives, route_.segments);
  FinishExperts();
  FinishSums();
}

void RouteBuilder::FinishExperts() {
  struct Consumed {
    int32_t local, source, token, slot, row, entry;
  };
  std::vector<Consumed> consumed;
  for (size_t row = 0; row < route_.held.size(); ++row) {
    const HeldRow& held = route_.held[row];
    for (int32_t at = held.entry_begin; at < held.entry_end; ++at) {
      const ExpertReplica& replica = map_.physical(route_.entries[at].physical);
      if (replica.rank != rank_) continue;
      consumed.push_back(
          {replica.local, held.source, held.token, route_.entries[at].slot, static_cast<int32_t>(row), at});
    }
  }
  std::sort(consumed.begin(), consumed.end(), [](const Consumed& a, const Consumed& b) {
    return std::tie(a.local, a.source, a.token, a.slot) < std::tie(b.local, b.source, b.token, b.slot);
  });
  route_.expert_begin.assign(map_.local_experts(rank_) + 1, 0);
  route_.origins.clear();
  route_.output_begin.assign(route_.held.size() + 1, 0);
  for (const Consumed& c : consumed) {
    ++route_.expert_begin[c.local + 1];
    ++route_.output_begin[c.row + 1];
    places_[c.entry] = {-1, static_cast<int32_t>(route_.origins.size()), 0};
    route_.origins.push_back({c.source, c.token, c.slot, route_.entries[c.entry].weight});
  }
  std::partial_sum(route_.expert_begin.begin(), route_.expert_begin.end(), route_.expert_begin.begin());
  std::partial_sum(route_.output_begin.begin(), route_.output_begin.end(), route_.output_begin.begin());
  route_.outputs.resize(consumed.size());
  std::vector<int32_t> next(route_.output_begin.begin(), route_.output_begin.end() - 1);
  for (size_t i = 0; i < consumed.size(); ++i)
    route_.outputs[next[consumed[i].row]++] = static_cast<int32_t>(i);
}

void RouteBuilder::FinishSums() {
  route_.sums.clear();
  route_.sum_begin.assign(1, 0);
  route_.slots.resize(route_.entries.size());
  for (const HeldRow& held : route_.held) {
    for (int32_t at = held.entry_begin; at < held.entry_end; ++at) {
      const EntryPlace& place = places_[at];
      const float weight = route_.entries[at].weight;
      route_.slots[at] = {place.send, place.send < 0 ? place.row : place.entry, weight};
      if (place.send < 0) route_.sums.push_back({-1, place.row, weight});
    }
    const size_t first_send = route_.sums.size();
    for (int32_t at = held.entry_begin; at < held.entry_end; ++at) {
      const EntryPlace& place = places_[at];
      if (place.send < 0) continue;
      const bool known =
          std::any_of(route_.sums.begin() + static_cast<std::ptrdiff_t>(first_send), route_.sums.end(),
                      [&](const Contribution& c) { return c.send == place.send; });
      if (!known) route_.sums.push_back({place.send, place.row, 1});
    }
    std::sort(route_.sums.begin() + static_cast<std::ptrdiff_t>(first_send), route_.sums.end(),
              [](const Contribution& a, const Contribution& b) { return a.send < b.send; });
    route_.sum_begin.push_back(static_cast<int32_t>(route_.sums.size()));
  }
}

}  // namespace moesaic::comm
