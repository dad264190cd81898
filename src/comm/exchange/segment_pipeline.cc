#include "comm/exchange/segment_pipeline.h"

#include <utility>

namespace moesaic::comm {

Status SegmentPipeline::Start(std::vector<Lane> in, std::vector<Lane> out, int phases, int segments,
                              LaneOrder order) {
  phases_ = phases;
  segments_ = segments;
  order_ = order;
  waiting_.assign(static_cast<size_t>(phases) * segments, 0);
  open_ = segments;
  next_settled_ = 0;
  in_.clear();
  out_.clear();
  for (Lane& lane : out) {
    LaneState& state = out_.emplace_back();
    state.lane = std::move(lane);
    state.transfers.resize(segments);
    for (int segment = 0; segment < segments; ++segment) open_ += BytesOf(state.lane, segment) > 0;
  }
  for (Lane& lane : in) {
    LaneState& state = in_.emplace_back();
    state.lane = std::move(lane);
    state.transfers.resize(segments);
    for (int segment = 0; segment < segments; ++segment) {
      if (BytesOf(state.lane, segment) == 0) continue;
      ++open_;
      ++waiting_[static_cast<size_t>(state.lane.phase) * segments + segment];
    }
  }
  for (LaneState& state : in_) {
    for (; state.next < segments; ++state.next) {
      if (BytesOf(state.lane, state.next) == 0) continue;
      ASSIGN_OR_RETURN(state.transfers[state.next],
                       transport_.Receive(state.lane.peer, state.lane.tag, SpanOf(state.lane, state.next)));
    }
  }
  return OkStatus();
}

bool SegmentPipeline::Ready(int phase, int segment) const {
  const int begin = order_ == LaneOrder::kOutward ? 0 : phase + 1;
  const int end = order_ == LaneOrder::kOutward ? phase : phases_;
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

Status SegmentPipeline::AdvanceIn(int lane, PipelineSteps& steps, bool* progressed) {
  LaneState& state = in_[lane];
  for (; state.first < segments_; ++state.first) {
    if (BytesOf(state.lane, state.first) == 0) continue;
    Status result;
    if (!transport_.Test(state.transfers[state.first], &result)) return OkStatus();
    *progressed = true;
    const int segment = state.first;
    --open_;
    if (!result.ok()) {
      ++state.first;
      return result;
    }
    --waiting_[static_cast<size_t>(state.lane.phase) * segments_ + segment];
    steps.Arrived(lane, segment);
    Settle(steps, segment);
  }
  return OkStatus();
}

Status SegmentPipeline::AdvanceOut(int lane, PipelineSteps& steps, bool* progressed) {
  LaneState& state = out_[lane];
  for (; state.first < state.next; ++state.first) {
    if (BytesOf(state.lane, state.first) == 0) continue;
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
    if (BytesOf(state.lane, state.next) > 0) {
      if (!Ready(state.lane.phase, state.next)) break;
      steps.Pack(lane, state.next);
      ASSIGN_OR_RETURN(state.transfers[state.next],
                       transport_.Send(state.lane.peer, state.lane.tag, SpanOf(state.lane, state.next)));
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
  for (size_t lane = 0; lane < in_.size(); ++lane) {
    RETURN_IF_ERROR(AdvanceIn(static_cast<int>(lane), steps, progressed));
  }
  for (size_t lane = 0; lane < out_.size(); ++lane) {
    RETURN_IF_ERROR(AdvanceOut(static_cast<int>(lane), steps, progressed));
  }
  return OkStatus();
}

void SegmentPipeline::Cancel() {
  for (std::vector<LaneState>* lanes : {&in_, &out_}) {
    for (LaneState& state : *lanes) {
      for (int segment = state.first; segment < state.next; ++segment) {
        if (BytesOf(state.lane, segment) > 0) transport_.Cancel(state.transfers[segment]);
      }
    }
    lanes->clear();
  }
  open_ = 0;
}

int SegmentPipeline::WaitsFor() const {
  for (const LaneState& state : in_) {
    for (int segment = state.first; segment < segments_; ++segment) {
      if (BytesOf(state.lane, segment) > 0) return state.lane.peer;
    }
  }
  for (const LaneState& state : out_) {
    if (state.first < state.next) return state.lane.peer;
  }
  return -1;
}

}  // namespace moesaic::comm
