// Paths of all rows of one dispatch, as one rank sees them: rows that it sends, forwards and consumes. A
// route depends on the ids alone and can be reused for any payload of the same routing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "comm/exchange/route_tree.h"
#include "comm/exchange/token_routing.h"

namespace moesaic::comm {

/// Tokens after the last full segment all belong to it.
inline constexpr int kMaxSegments = 4096;

/// A row on its way: a token of `source` with the entries that this rank consumes or forwards.
struct HeldRow {
  int32_t source = 0, token = 0;
  int32_t entry_begin = 0, entry_end = 0;  // into Route::entries
};

/// Rows that go to one peer in one phase, grouped by segment.
struct RouteSend {
  int phase = 0, peer = 0;
  std::vector<int32_t> rows;         // held rows
  std::vector<int32_t> entry_end;    // [rows]: entries of all rows up to this one
  std::vector<int32_t> entries;      // indices into Route::entries, grouped by row
  std::vector<int32_t> segment_end;  // [segments]: rows
};

/// Rows that come from one peer in one phase: the held rows [first_row, first_row + segment_end.back()).
struct RouteReceive {
  int phase = 0, peer = 0;
  int32_t first_row = 0, rows = 0;
  std::vector<int32_t> segment_end;  // [segments]
};

/// A summand of a held row on the way back.
struct Contribution {
  int32_t send = -1;     ///< RouteSend whose peer returns it; -1: a local expert's row.
  int32_t position = 0;  ///< Row of the send (partial sums), entry of the send (rows by slot), or expert row.
  float weight = 1;      ///< Used for local expert's rows and at the owner.
};

/// Origin of a received row of a local expert.
struct RowOrigin {
  int32_t source = 0, token = 0, slot = 0;
  float weight = 1;
};

struct Route {
  int32_t own_rows = 0;  ///< The first held rows: one per token of this rank.
  int segment_tokens = 1;
  /// Segments of the rank with the most tokens among the ranks whose counts this rank receives.
  int segments = 1;
  std::vector<HeldRow> held;
  std::vector<RouteEntry> entries;
  std::vector<RouteSend> sends;        // by (phase, peer)
  std::vector<RouteReceive> receives;  // by (phase, peer)
  std::vector<DroppedPair> dropped;

  // Rows of local experts, ordered by (expert, source, token, slot), which no topology changes.
  std::vector<int64_t> expert_begin;  // [local experts + 1]
  std::vector<RowOrigin> origins;     // [expert rows]
  std::vector<int32_t> output_begin;  // [held + 1] into `outputs`
  std::vector<int32_t> outputs;       // expert rows that a held row is copied to

  // Summands of each held row in their order: local experts by slot, then sends (partial sums).
  std::vector<int32_t> sum_begin;  // [held + 1]
  std::vector<Contribution> sums;
  std::vector<Contribution> slots;  // [entries]: summands by slot

  /// First token of this rank in a segment.
  int32_t OwnBegin(int segment) const {
    if (segment >= kMaxSegments) return own_rows;
    return static_cast<int32_t>(std::min<int64_t>(int64_t{segment} * segment_tokens, own_rows));
  }
  /// Number of phases with messages: one more than the last.
  int phases() const {
    int last = -1;
    if (!sends.empty()) last = sends.back().phase;
    if (!receives.empty() && receives.back().phase > last) last = receives.back().phase;
    return last + 1;
  }
};

/// Limit of a row's routing on the wire.
inline constexpr int64_t RowRoutingBytes(int slots) { return 8 + 8 * int64_t{slots}; }
inline constexpr int64_t kMaxRowRoutingBytes = RowRoutingBytes(kMaxTopK);

/// Builds the route of one rank: AddTokens(), then for each phase BeginPhase(), Encode() of each send and
/// Accept() of the peers' bytes in the order of ranks, then Finish(). Borrows all arguments.
class RouteBuilder {
 public:
  /// `segment_tokens` is the number of consecutive tokens that travel together.
  RouteBuilder(const RouteTree& tree, const ExpertMap& map, int rank, int segment_tokens, Route* route);

  void AddTokens(const TokenRoutes& tokens);
  /// Appends the phase's sends to Route::sends.
  void BeginPhase(int phase);
  /// Appends the routing of a send's rows to `bytes`; EncodedBytes() is its size.
  void Encode(const RouteSend& send, std::vector<std::byte>* bytes) const;
  static size_t EncodedBytes(const RouteSend& send);
  /// Adds rows that a peer sent in `phase`. DataLoss: the bytes are malformed.
  Status Accept(int phase, int peer, int32_t rows, std::span<const std::byte> bytes);
  void Finish();

 private:
  struct EntryPlace {
    int32_t send = -1, row = 0, entry = 0;  // position in the send; send -1: local
  };

  void AppendRow(int32_t row, int phase);
  void FinishExperts();
  void FinishSums();
  int SegmentOf(int32_t token) const { return std::min(token / segment_tokens_, kMaxSegments - 1); }

  const RouteTree& tree_;
  const ExpertMap& map_;
  const int rank_, segment_tokens_;
  Route& route_;
  std::vector<int> phase_of_peer_;     // [ranks]
  std::vector<int32_t> send_of_peer_;  // [ranks] in the current phase; -1: no send
  std::vector<EntryPlace> places_;     // [entries]
};

}  // namespace moesaic::comm
