#include "comm/topology/flow_simulator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moesaic::comm {

FlowSimulator::FlowSimulator(const Topology& topology, double quantum_s)
    : topology_(topology),
      quantum_s_(quantum_s),
      flows_of_channel_(topology.channels().size()),
      channel_bytes_(topology.channels().size(), 0),
      is_changed_(topology.channels().size(), 0),
      left_(topology.channels().size(), 0),
      unassigned_(topology.channels().size(), 0) {}

int FlowSimulator::Start(int from, int to, double bytes) {
  const int number = StartTimer(topology_.Latency(from, to));
  Flow& flow = flows_[number];
  flow.from = from;
  flow.to = to;
  flow.remaining = bytes;
  if (from != to && bytes > 0) flow.path = topology_.Path(from, to);
  for (const int channel : flow.path) channel_bytes_[channel] += bytes;
  return number;
}

int FlowSimulator::StartTimer(double seconds) {
  const int number = static_cast<int>(flows_.size());
  flows_.emplace_back();
  events_.push({now_ + seconds, number, 0});
  ++active_;
  return number;
}

void FlowSimulator::MarkChanged(const std::vector<int>& path) {
  for (const int channel : path) {
    if (is_changed_[channel] != 0) continue;
    is_changed_[channel] = 1;
    changed_.push_back(channel);
  }
}

void FlowSimulator::BeginTransfer(int number) {
  Flow& flow = flows_[number];
  flow.transferring = true;
  flow.updated = now_;
  ++flow.generation;
  for (const int channel : flow.path) {
    flow.positions.push_back(static_cast<int>(flows_of_channel_[channel].size()));
    flows_of_channel_[channel].push_back(number);
  }
  MarkChanged(flow.path);
}

void FlowSimulator::Finish(int number) {
  Flow& flow = flows_[number];
  --active_;
  ++flow.generation;
  flow.rate = 0;
  if (!flow.transferring) return;
  flow.transferring = false;
  for (size_t i = 0; i < flow.path.size(); ++i) {
    std::vector<int>& list = flows_of_channel_[flow.path[i]];
    const int moved = list.back();
    list[flow.positions[i]] = moved;
    list.pop_back();
    if (moved == number) continue;
    Flow& other = flows_[moved];
    for (size_t k = 0; k < other.path.size(); ++k) {
      if (other.path[k] == flow.path[i]) other.positions[k] = flow.positions[i];
    }
  }
  MarkChanged(flow.path);
}

void FlowSimulator::SetRate(int number, double rate) {
  Flow& flow = flows_[number];
  if (flow.rate == rate) return;
  flow.remaining = std::max(0.0, flow.remaining - flow.rate * (now_ - flow.updated));
  flow.updated = now_;
  flow.rate = rate;
  events_.push({now_ + flow.remaining / rate, number, ++flow.generation});
}

void FlowSimulator::AssignRates() {
  if (changed_.empty()) return;
  // All channels that share flows with a changed one, directly or not.
  std::vector<int> flows;
  for (size_t i = 0; i < changed_.size(); ++i) {
    const int channel = changed_[i];
    left_[channel] = topology_.channels()[channel].bytes_per_s;
    unassigned_[channel] = static_cast<int>(flows_of_channel_[channel].size());
    for (const int number : flows_of_channel_[channel]) {
      if (flows_[number].frozen) continue;
      flows_[number].frozen = true;
      flows.push_back(number);
      MarkChanged(flows_[number].path);
    }
  }
  for (const int number : flows) flows_[number].frozen = false;
  size_t assigned = 0;
  while (assigned < flows.size()) {
    double least = std::numeric_limits<double>::infinity();
    for (const int channel : changed_) {
      if (unassigned_[channel] > 0) least = std::min(least, left_[channel] / unassigned_[channel]);
    }
    for (const int channel : changed_) {
      if (unassigned_[channel] == 0 || left_[channel] / unassigned_[channel] > least * (1 + 1e-9)) continue;
      for (const int number : flows_of_channel_[channel]) {
        Flow& flow = flows_[number];
        if (flow.frozen) continue;
        flow.frozen = true;
        ++assigned;
        SetRate(number, least);
        for (const int crossed : flow.path) {
          left_[crossed] = std::max(0.0, left_[crossed] - least);
          --unassigned_[crossed];
        }
      }
    }
  }
  for (const int number : flows) flows_[number].frozen = false;
  for (const int channel : changed_) is_changed_[channel] = 0;
  changed_.clear();
}

std::vector<int> FlowSimulator::AdvanceToNextCompletion() {
  std::vector<int> completed;
  while (completed.empty() && active_ > 0) {
    AssignRates();
    MOESAIC_CHECK(!events_.empty());
    bool first = true;
    while (!events_.empty()) {
      const Event event = events_.top();
      if (event.generation != flows_[event.flow].generation) {
        events_.pop();
        continue;
      }
      if (first) {
        now_ = std::max(now_, event.time);
        first = false;
      } else if (event.time > now_ * (1 + 1e-12) + quantum_s_) {
        break;
      }
      events_.pop();
      Flow& flow = flows_[event.flow];
      if (!flow.transferring && !flow.path.empty()) {
        BeginTransfer(event.flow);
      } else {
        Finish(event.flow);
        completed.push_back(event.flow);
      }
    }
  }
  std::sort(completed.begin(), completed.end());
  return completed;
}

double FlowSimulator::rate(int flow) {
  AssignRates();
  return flows_[flow].rate;
}

StatusOr<std::vector<double>> SimulateFlows(const Topology& topology, std::span<const ScheduledFlow> flows,
                                            double quantum_s) {
  const auto count = static_cast<int>(flows.size());
  std::vector<int> waits(flows.size(), 0);  // messages before it that have not completed
  std::vector<std::vector<int>> followers(flows.size());
  for (int i = 0; i < count; ++i) {
    const ScheduledFlow& flow = flows[i];
    for (const int rank : {flow.from, flow.to}) {
      if (rank < 0 || rank >= topology.ranks()) {
        return InvalidArgument("flow {}: ranks are in [0, {}), found {}", i, topology.ranks(), rank);
      }
    }
    for (const double value : {flow.bytes, flow.start_s}) {
      if (!(value >= 0) || value > std::numeric_limits<double>::max()) {
        return InvalidArgument("flow {}: bytes and start must be finite and not negative, found {}", i,
                               value);
      }
    }
    waits[i] = static_cast<int>(flow.after.size());
    for (const int before : flow.after) {
      if (before < 0 || before >= count) {
        return InvalidArgument("flow {}: waits for a flow outside [0, {}): {}", i, count, before);
      }
      followers[before].push_back(i);
    }
  }

  FlowSimulator simulator(topology, quantum_s);
  std::vector<double> ends(flows.size(), 0);
  std::vector<std::pair<int, bool>> started;  // by the simulator's number: flow, and whether it is its timer
  const auto start = [&](int i) {
    const ScheduledFlow& flow = flows[i];
    const bool early = flow.start_s > simulator.now();
    started.emplace_back(i, early);
    const int number = early ? simulator.StartTimer(flow.start_s - simulator.now())
                             : simulator.Start(flow.from, flow.to, flow.bytes);
    MOESAIC_CHECK_EQ(number, static_cast<int>(started.size()) - 1);
  };
  for (int i = 0; i < count; ++i) {
    if (waits[i] == 0) start(i);
  }
  int completed = 0;
  while (simulator.active() > 0) {
    for (const int number : simulator.AdvanceToNextCompletion()) {
      const auto [i, timer] = started[number];
      if (timer) {
        started.emplace_back(i, false);
        simulator.Start(flows[i].from, flows[i].to, flows[i].bytes);
        continue;
      }
      ends[i] = simulator.now();
      ++completed;
      for (const int next : followers[i]) {
        if (--waits[next] == 0) start(next);
      }
    }
  }
  for (int i = 0; i < count && completed < count; ++i) {
    if (waits[i] > 0) return InvalidArgument("flows wait for each other; one of them is flow {}", i);
  }
  return ends;
}

}  // namespace moesaic::comm
