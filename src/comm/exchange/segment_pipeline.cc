#include "comm/exchange/segment_pipeline.h"

#include <utility>

namespace moesaic::comm {

Status SegmentPipeline::Start(std::vector<PeerRows> in, std::vector<PeerRows> out, int phases, int segments,
                              PhaseOrder order) {
  phases_ = phases;
  segments_ = segments;
  order_ = order;
  waiting_.assign(static_cast<size_t>(phases) * segments, 0);
  open_ = segments;
  next_settled_ = 0;
  in_.clear();
  out_.clear();
  for (PeerRows& rows : out) {
    PeerState& state = out_.emplace_back();
    state.rows = std::move(rows);
    state.transfers.resize(segments);
    for (int segment = 0; segment < segments; ++segment) open_ += BytesOf(state.rows, segment) > 0;
  }
  for (PeerRows& rows : in) {
    PeerState& state = in_.emplace_back();
    state.rows = std::move(rows);
    state.transfers.resize(segments);
    for (int segment = 0; segment < segments; ++segment) {
      if (BytesOf(state.rows, segment) == 0) continue;
      ++open_;
      ++waiting_[static_cast<size_t>(state.rows.phase) * segments + segment];
    }
  }
  for (PeerState& state : in_) {
    for (; state.next < segments; ++state.next) {
      if (BytesOf(state.rows, state.next) == 0) continue;
      ASSIGN_OR_RETURN(state.transfers[state.next],
                       transport_.Receive(state.rows.peer, state.rows.tag, SpanOf(state.rows, state.next)));
    }
  }
  return OkStatus();
}

bool SegmentPipeline::Ready(int phase, int segment) const {
  const int begin = order_ == PhaseOrder::kOutward ? 0 : phase + 1;
  const int end = order_ == PhaseOrder::kOutward ? phase : phases_;
  for (int earlier = begin; earlier < end; ++earlier) {
    if (waiting_[static_cast<size_t>(earlier) * segments_ + segment] > 0) return false;
  }
  return true;
}

void SegmentPipeline::Settle(PipelineSteps& steps, int segment) {
  for (int phase = 0; phase < phases_; ++phase) {
    if (waiting_[static_cast<size_t>(phase) * segments_ + segment] > 0) return;
  }
  --open_;
  steps.Settled(segment);
}

Status SegmentPipeline::AdvanceIn(int index, PipelineSteps& steps, bool* progressed) {
  PeerState& state = in_[index];
  for (; state.first < segments_; ++state.first) {
    if (BytesOf(state.rows, state.first) == 0) continue;
    Status result;
    if (!transport_.Test(state.transfers[state.first], &result)) return OkStatus();
    *progressed = true;
    const int segment = state.first;
    --open_;
    if (!result.ok()) {
      ++state.first;
      return result;
    }
    --waiting_[static_cast<size_t>(state.rows.phase) * segments_ + segment];
    steps.Arrived(index, segment);
    Settle(steps, segment);
  }
  return OkStatus();
}

Status SegmentPipeline::AdvanceOut(int index, PipelineSteps& steps, bool* progressed) {
  PeerState& state = out_[index];
  for (; state.first < state.next; ++state.first) {
    if (BytesOf(state.rows, state.first) == 0) continue;
    Status result;
    if (!transport_.Test(state.transfers[state.first], &result)) break;
    *progressed = true;
    --open_;
    if (!result.ok()) {
      ++state.first;
      return result;
    }
  }
  while (state.next < segments_ && state.next - state.first < kWindow) {
    if (BytesOf(state.rows, state.next) > 0) {
      if (!Ready(state.rows.phase, state.next)) break;
      steps.Pack(index, state.next);
      ASSIGN_OR_RETURN(state.transfers[state.next],
                       transport_.Send(state.rows.peer, state.rows.tag, SpanOf(state.rows, state.next)));
      *progressed = true;
    } else if (state.first == state.next) {
      ++state.first;
    }
    ++state.next;
  }
  return OkStatus();
}

Status SegmentPipeline::Advance(PipelineSteps& steps, bool* progressed) {
  for (; next_settled_ < segments_; ++next_settled_) {
    // Segments for which nothing arrives.
    bool quiet = true;
    for (int phase = 0; phase < phases_; ++phase) {
      quiet = quiet && waiting_[static_cast<size_t>(phase) * segments_ + next_settled_] == 0;
    }
    if (quiet) {
      --open_;
      steps.Settled(next_settled_);
    }
  }
  for (size_t index = 0; index < in_.size(); ++index) {
    RETURN_IF_ERROR(AdvanceIn(static_cast<int>(index), steps, progressed));
  }
  for (size_t index = 0; index < out_.size(); ++index) {
    RETURN_IF_ERROR(AdvanceOut(static_cast<int>(index), steps, progressed));
  }
  return OkStatus();
}

void SegmentPipeline::Cancel() {
  for (std::vector<PeerState>* states : {&in_, &out_}) {
    for (PeerState& state : *states) {
      for (int segment = state.first; segment < state.next; ++segment) {
        if (BytesOf(state.rows, segment) > 0) transport_.Cancel(state.transfers[segment]);
      }
    }
    states->clear();
  }
  open_ = 0;
}

int SegmentPipeline::WaitsFor() const {
  for (const PeerState& state : in_) {
    for (int segment = state.first; segment < segments_; ++segment) {
      if (BytesOf(state.rows, segment) > 0) return state.rows.peer;
    }
  }
  for (const PeerState& state : out_) {
    if (state.first < state.next) return state.rows.peer;
  }
  return -1;
}

}  // namespace moesaic::comm
