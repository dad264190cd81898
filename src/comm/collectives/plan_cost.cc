#include "comm/collectives/plan_cost.h"

#include <algorithm>
#include <map>
#include <utility>

#include "comm/collectives/plan_executor.h"
#include "comm/collectives/wire_codec.h"
#include "comm/topology/flow_simulator.h"

namespace moesaic::comm {
namespace {

// Time of memory traffic on a rank.
class Memory {
 public:
  Memory(const Topology& topology, int rank, const CostOptions& options) : options_(options) {
    const double rate = topology.device_types().empty() ? 0 : topology.device_type(rank).memory_bytes_per_s;
    if (rate > 0) rate_ = rate;
  }

  double Seconds(double bytes) const {
    const double cached = std::min(bytes, options_.cache_bytes);
    return cached / std::max(rate_, options_.cache_bytes_per_s) + (bytes - cached) / rate_;
  }
  // Local steps of a round: a copy reads and writes, a sum reads twice.
  double Seconds(const Round& round, int element_bytes) const {
    double bytes = 0;
    for (const LocalStep& step : round.local) {
      bytes += static_cast<double>(step.from.count) * element_bytes * (step.reduce ? 3 : 2);
    }
    return Seconds(bytes);
  }
  // The sum of the last piece of a message that is received.
  double LastSum(const Message& message, int element_bytes) const {
    if (!message.reduce && message.wire == WireFormat::kExact) return 0;
    const int64_t piece = std::min(message.slice.count, PieceElements(message.slice.count, element_bytes));
    return Seconds(static_cast<double>(piece) * element_bytes * 3);
  }

 private:
  const CostOptions& options_;
  double rate_ = options_.memory_bytes_per_s;
};

void FindBottleneck(const Topology& topology, PlanCost* cost) {
  for (size_t channel = 0; channel < cost->channel_bytes.size(); ++channel) {
    const double seconds = cost->channel_bytes[channel] / topology.channels()[channel].bytes_per_s;
    if (seconds <= cost->bottleneck_s) continue;
    cost->bottleneck_s = seconds;
    cost->bottleneck = static_cast<int>(channel);
  }
}

class Simulation {
 public:
  Simulation(const Plan& plan, const Topology& topology, const CostOptions& options)
      : plan_(plan), topology_(topology), options_(options), flows_(topology) {}

  PlanCost Run() {
    Match();
    for (Line& line : lines_) StartRound(line);
    while (flows_.active() > 0) {
      for (const int ended : flows_.AdvanceToNextCompletion()) OnEnd(ended);
    }
    PlanCost cost;
    cost.seconds = flows_.now();
    cost.channel_bytes = flows_.channel_bytes();
    FindBottleneck(topology_, &cost);
    return cost;
  }

 private:
  // One stream of a rank.
  struct Line {
    int rank = 0;
    const std::vector<Round>* rounds = nullptr;
    size_t round = 0;
    size_t left = 0;                              // messages of the round that have not ended
    std::vector<std::vector<int>> of_round = {};  // message numbers by round
  };
  struct Flow {
    int from = 0, to = 0;  // lines
    const Message* received = nullptr;
    double bytes = 0;
    int posted = 0;  // sides that have started their round
  };
  enum class Event : uint8_t { kLocal, kMessage, kSum };

  void Match() {
    size_t streams = 0;
    for (const RankPlan& rank : plan_.ranks) streams = std::max(streams, rank.streams.size());
    for (size_t stream = 0; stream < streams; ++stream) {
      std::map<std::pair<int, int>, std::vector<int>> sent;  // by (from, to): numbers in order
      std::map<std::pair<int, int>, size_t> received;
      const size_t first = lines_.size();
      for (int rank = 0; rank < plan_.request.ranks; ++rank) {
        if (stream >= plan_.ranks[rank].streams.size()) continue;
        const std::vector<Round>& rounds = plan_.ranks[rank].streams[stream].rounds;
        Line line{.rank = rank, .rounds = &rounds};
        line.of_round.resize(rounds.size());
        for (size_t r = 0; r < rounds.size(); ++r) {
          for (const Message& message : rounds[r].sends) {
            const int number = static_cast<int>(messages_.size());
            messages_.push_back({.from = static_cast<int>(lines_.size()),
                                 .bytes = WireBytes(message, plan_.request.element_bytes)});
            sent[{rank, message.peer}].push_back(number);
            line.of_round[r].push_back(number);
          }
        }
        lines_.push_back(std::move(line));
      }
      for (size_t l = first; l < lines_.size(); ++l) {
        for (size_t r = 0; r < lines_[l].rounds->size(); ++r) {
          for (const Message& message : (*lines_[l].rounds)[r].receives) {
            const std::pair<int, int> pair = {message.peer, lines_[l].rank};
            const int number = sent[pair][received[pair]++];
            messages_[number].to = static_cast<int>(l);
            messages_[number].received = &message;
            lines_[l].of_round[r].push_back(number);
          }
        }
      }
    }
  }

  void Remember(int started, Event event, int subject) {
    events_.resize(std::max<size_t>(events_.size(), started + 1));
    events_[started] = {event, subject};
  }

  void StartRound(Line& line) {
    while (line.round < line.rounds->size()) {
      const Round& round = (*line.rounds)[line.round];
      line.left = line.of_round[line.round].size();
      const double seconds =
          Memory(topology_, line.rank, options_).Seconds(round, plan_.request.element_bytes) +
          options_.message_s * static_cast<double>(line.left);
      if (seconds > 0) {
        Remember(flows_.StartTimer(seconds), Event::kLocal, static_cast<int>(&line - lines_.data()));
        return;
      }
      if (line.left > 0) {
        PostMessages(line);
        return;
      }
      ++line.round;
    }
  }

  void PostMessages(Line& line) {
    for (const int number : line.of_round[line.round]) {
      Flow& message = messages_[number];
      if (++message.posted < 2) continue;
      Remember(flows_.Start(lines_[message.from].rank, lines_[message.to].rank, message.bytes),
               Event::kMessage, number);
    }
  }

  void EndMessage(Line& line) {
    if (--line.left > 0) return;
    ++line.round;
    StartRound(line);
  }

  void OnEnd(int ended) {
    const auto [event, subject] = events_[ended];
    switch (event) {
      case Event::kLocal: {
        Line& line = lines_[subject];
        if (line.left > 0) {
          PostMessages(line);
        } else {
          ++line.round;
          StartRound(line);
        }
        return;
      }
      case Event::kMessage: {
        const Flow& message = messages_[subject];
        Line& receiver = lines_[message.to];
        EndMessage(lines_[message.from]);
        const double sum = Memory(topology_, receiver.rank, options_)
                               .LastSum(*message.received, plan_.request.element_bytes);
        if (sum > 0) {
          Remember(flows_.StartTimer(sum), Event::kSum, subject);
        } else {
          EndMessage(receiver);
        }
        return;
      }
      case Event::kSum:
        EndMessage(lines_[messages_[subject].to]);
        return;
    }
  }

  const Plan& plan_;
  const Topology& topology_;
  const CostOptions& options_;
  FlowSimulator flows_;
  std::vector<Line> lines_;
  std::vector<Flow> messages_;
  std::vector<std::pair<Event, int>> events_;  // by number of FlowSimulator; line or message
};

}  // namespace

double WireBytes(const Message& message, int element_bytes) {
  if (message.wire == WireFormat::kExact) return static_cast<double>(message.slice.count) * element_bytes;
  return static_cast<double>(EncodedBytes(message.wire, message.slice.count));
}

PlanCost EstimatePlan(const Plan& plan, const Topology& topology, const CostOptions& options) {
  struct Step {
    double latency = 0, local = 0;
    std::vector<double> bytes;  // [channels]
  };
  struct Path {
    double latency = -1;  // not looked up yet
    std::vector<int> channels;
  };
  std::vector<Step> steps;
  PlanCost cost;
  cost.channel_bytes.resize(topology.channels().size(), 0);
  const auto ranks = static_cast<size_t>(plan.request.ranks);
  std::vector<Path> paths(ranks * ranks);  // [from][to]
  for (int rank = 0; rank < plan.request.ranks; ++rank) {
    const Memory memory(topology, rank, options);
    for (const Stream& stream : plan.ranks[rank].streams) {
      for (const Round& round : stream.rounds) {
        if (static_cast<int>(steps.size()) <= round.step) steps.resize(round.step + 1);
        Step& step = steps[round.step];
        step.bytes.resize(topology.channels().size(), 0);
        double local = memory.Seconds(round, plan.request.element_bytes) +
                       options.message_s * static_cast<double>(round.sends.size() + round.receives.size());
        for (const Message& message : round.receives) {
          local += memory.LastSum(message, plan.request.element_bytes);
        }
        step.local = std::max(step.local, local);
        for (const Message& message : round.sends) {
          Path& path = paths[rank * ranks + message.peer];
          if (path.latency < 0) {
            path = {topology.Latency(rank, message.peer), topology.Path(rank, message.peer)};
          }
          step.latency = std::max(step.latency, path.latency);
          const double bytes = WireBytes(message, plan.request.element_bytes);
          for (const int channel : path.channels) {
            step.bytes[channel] += bytes;
            cost.channel_bytes[channel] += bytes;
          }
        }
      }
    }
  }
  for (const Step& step : steps) {
    double busiest = 0;
    for (size_t channel = 0; channel < step.bytes.size(); ++channel) {
      busiest = std::max(busiest, step.bytes[channel] / topology.channels()[channel].bytes_per_s);
    }
    cost.seconds += step.latency + step.local + busiest;
  }
  FindBottleneck(topology, &cost);
  return cost;
}

PlanCost SimulatePlan(const Plan& plan, const Topology& topology, const CostOptions& options) {
  return Simulation(plan, topology, options).Run();
}

double AllReduceBound(const Topology& topology, double bytes) {
  // Groups that divide all ranks: first the root, then its children, and so on. Leaves stay.
  std::vector<int> parts = {0};
  double bound = 0;
  for (bool divided = true; divided;) {
    divided = false;
    std::vector<int> next;
    for (const int part : parts) {
      const std::vector<int>& children = topology.groups()[part].children;
      divided |= !children.empty();
      if (children.empty()) next.push_back(part);
      next.insert(next.end(), children.begin(), children.end());
    }
    parts = std::move(next);
    if (!divided || parts.size() < 2) continue;
    double ports = 0;
    for (const int part : parts) {
      const Group& group = topology.groups()[part];
      const Link& link = topology.groups()[group.parent].link;
      const double count = link.shared ? 1 : static_cast<double>(group.ranks.size());
      ports += group.port_bytes_per_s * count / (link.full_duplex ? 1 : 2);
    }
    // n - 1 vectors must leave the parts for the sum, and n - 1 enter them for the result.
    bound = std::max(bound, 2 * (static_cast<double>(parts.size()) - 1) * bytes / ports);
  }
  return bound;
}

}  // namespace moesaic::comm
