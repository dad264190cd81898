// Moves the rows of a route between ranks, segment by segment: while one segment crosses the outer links, the
// segment before it is forwarded over the inner ones.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "comm/transport/transport.h"

namespace moesaic::comm {

/// Rows that go to, or come from, one peer in one phase. Bytes of consecutive segments are adjacent in
/// `data`.
struct PeerRows {
  int phase = 0, peer = 0;
  Tag tag = 0;
  std::byte* data = nullptr;
  std::vector<int64_t> end;  // [segments]: bytes
};

/// Direction of a pipeline: from the outermost phase to the innermost one, or back.
enum class PhaseOrder : uint8_t { kOutward, kHomeward };

/// Steps of the data between messages. Called by SegmentPipeline::Advance().
class PipelineSteps {
 public:
  virtual ~PipelineSteps() = default;
  /// Fills a segment of the outgoing rows `out[out_index]`. All segments that it depends on have arrived.
  virtual void Pack(int out_index, int segment) = 0;
  /// A segment of the incoming rows `in[in_index]` has arrived.
  virtual void Arrived(int in_index, int segment) = 0;
  /// Nothing more will arrive for the segment. Called once per segment.
  virtual void Settled(int segment) = 0;
};

/// One rank's part of an exchange of rows. The thread of the transport calls it.
class SegmentPipeline {
 public:
  /// Messages in flight per outgoing peer and phase. One more than the one on the wire hides the latency
  /// between them; all at once would share the link, and the first segment would arrive no earlier than the
  /// last.
  static constexpr int kWindow = 2;

  explicit SegmentPipeline(Transport& transport) : transport_(transport) {}
  ~SegmentPipeline() { Cancel(); }
  SegmentPipeline(const SegmentPipeline&) = delete;
  SegmentPipeline& operator=(const SegmentPipeline&) = delete;

  /// Posts the receives. All PeerRows have `segments` ends; their memory is borrowed until done() or
  /// Cancel().
  Status Start(std::vector<PeerRows> in, std::vector<PeerRows> out, int phases, int segments,
               PhaseOrder order);
  /// Ends finished transfers and starts those that became possible. `*progressed` is set when there was one.
  Status Advance(PipelineSteps& steps, bool* progressed);
  bool done() const { return open_ == 0; }
  /// Ends all transfers early; called by the destructor, too.
  void Cancel();
  /// A peer that this rank waits for; -1 when it waits for none.
  int WaitsFor() const;

 private:
  struct PeerState {
    PeerRows rows;
    int next = 0;                       // segment to start
    int first = 0;                      // oldest segment in flight
    std::vector<TransferId> transfers;  // [segments]
  };

  Status AdvanceIn(int index, PipelineSteps& steps, bool* progressed);
  Status AdvanceOut(int index, PipelineSteps& steps, bool* progressed);
  bool Ready(int phase, int segment) const;
  void Settle(PipelineSteps& steps, int segment);
  int64_t BytesOf(const PeerRows& rows, int segment) const {
    return rows.end[segment] - (segment == 0 ? 0 : rows.end[segment - 1]);
  }
  std::span<std::byte> SpanOf(const PeerRows& rows, int segment) const {
    return {rows.data + (segment == 0 ? 0 : rows.end[segment - 1]),
            static_cast<size_t>(BytesOf(rows, segment))};
  }

  Transport& transport_;
  std::vector<PeerState> in_, out_;
  std::vector<int> waiting_;  // [phases, segments]: messages that have not arrived
  int phases_ = 0, segments_ = 0;
  int open_ = 0;          // messages that have not ended, and segments that are not settled
  int next_settled_ = 0;  // segments below it were checked at the start
  PhaseOrder order_ = PhaseOrder::kOutward;
};

}  // namespace moesaic::comm
