#include "comm/collectives/plan_checker.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "comm/collectives/symbolic_buffer.h"

namespace moesaic::comm {
namespace {

struct Access {
  int64_t begin = 0, end = 0;
  int stream = 0;
  bool write = false;
};

// The furthest ends among accesses of two different streams.
class FurthestEnds {
 public:
  void Add(int64_t end, int stream) {
    if (stream == first_stream_) {
      first_ = std::max(first_, end);
    } else if (end > first_) {
      second_ = first_;
      second_stream_ = first_stream_;
      first_ = end;
      first_stream_ = stream;
    } else if (end > second_) {
      second_ = end;
      second_stream_ = stream;
    }
  }
  // Another stream whose access ends after `begin`, or -1.
  int Conflict(int64_t begin, int stream) const {
    if (first_stream_ != stream && first_ > begin) return first_stream_;
    if (second_stream_ != stream && second_ > begin) return second_stream_;
    return -1;
  }

 private:
  int64_t first_ = -1, second_ = -1;
  int first_stream_ = -1, second_stream_ = -1;
};

std::string Describe(const Slice& slice) {
  return fmt::format("{}[{}, {})", Name(slice.buffer), slice.offset, slice.offset + slice.count);
}

bool Overlap(const Slice& a, const Slice& b) {
  return a.buffer == b.buffer && a.count > 0 && b.count > 0 && a.offset < b.offset + b.count &&
         b.offset < a.offset + a.count;
}

class Checker {
 public:
  explicit Checker(const Plan& plan) : plan_(plan), request_(plan.request) {}

  Status Check() {
    RETURN_IF_ERROR(ValidateRequest(request_));
    if (static_cast<int>(plan_.ranks.size()) != request_.ranks) {
      return Fault(fmt::format("expected steps of {} ranks, found {}", request_.ranks, plan_.ranks.size()));
    }
    size_t streams = 0;
    for (int rank = 0; rank < request_.ranks; ++rank) {
      RETURN_IF_ERROR(CheckSlices(rank));
      RETURN_IF_ERROR(CheckRaces(rank));
      streams = std::max(streams, plan_.ranks[rank].streams.size());
    }
    Initialize();
    for (size_t stream = 0; stream < streams; ++stream) {
      RETURN_IF_ERROR(Match(static_cast<int>(stream)));
      RETURN_IF_ERROR(Execute(static_cast<int>(stream)));
    }
    return CheckResult();
  }

 private:
  struct Partner {
    int peer = 0;
    int round = 0;    // of the peer
    int message = 0;  // index among the peer's sends or receives
  };
  struct RoundState {
    std::vector<Partner> sends, receives;  // parallel to the round's messages
    std::vector<SymbolicMessage> sent;
    std::vector<bool> known;  // barrier: ranks that have started before this round
    int missing = 0;          // starts that this round waits for
    bool started = false;
  };

  Status Fault(const std::string& text) const {
    return InvalidArgument("plan {}: {}", plan_.algorithm, text);
  }
  Status Fault(int rank, int stream, int round, const std::string& text) const {
    return Fault(fmt::format("rank {}, stream {}, round {}: {}", rank, stream, round, text));
  }

  int64_t SizeOf(int rank, PlanBuffer buffer) const {
    switch (buffer) {
      case PlanBuffer::kInput:
        return InputCount(request_, rank);
      case PlanBuffer::kOutput:
        return OutputCount(request_, rank);
      case PlanBuffer::kScratch:
        return plan_.ranks[rank].scratch;
    }
    return 0;
  }

  Status CheckSlice(int rank, int stream, int round, const Slice& slice, bool write) const {
    // Written without sums, which could overflow.
    const int64_t size = SizeOf(rank, slice.buffer);
    if (slice.offset < 0 || slice.count < 0 || slice.count > size || slice.offset > size - slice.count) {
      return Fault(rank, stream, round,
                   fmt::format("offset {} and count {} leave the {} of {} elements", slice.offset,
                               slice.count, Name(slice.buffer), size));
    }
    if (write && slice.buffer == PlanBuffer::kInput) {
      return Fault(rank, stream, round,
                   fmt::format("{} is written, but inputs are read-only", Describe(slice)));
    }
    return OkStatus();
  }

  Status CheckSlices(int rank) const {
    const RankPlan& own = plan_.ranks[rank];
    if (own.scratch < 0) return Fault(fmt::format("rank {}: scratch is negative: {}", rank, own.scratch));
    for (int s = 0; s < static_cast<int>(own.streams.size()); ++s) {
      for (int r = 0; r < static_cast<int>(own.streams[s].rounds.size()); ++r) {
        RETURN_IF_ERROR(CheckRound(rank, s, r, own.streams[s].rounds[r]));
      }
    }
    return OkStatus();
  }

  Status CheckRound(int rank, int s, int r, const Round& round) const {
    for (const LocalStep& step : round.local) {
      RETURN_IF_ERROR(CheckSlice(rank, s, r, step.from, false));
      RETURN_IF_ERROR(CheckSlice(rank, s, r, step.to, true));
      if (step.from.count != step.to.count) {
        return Fault(
            rank, s, r,
            fmt::format("local step from {} to {} of another size", Describe(step.from), Describe(step.to)));
      }
      const bool in_place =
          step.wire != WireFormat::kExact && !step.reduce && step.from.offset == step.to.offset;
      if (Overlap(step.from, step.to) && !in_place) {
        return Fault(rank, s, r, fmt::format("{} overlaps {}", Describe(step.from), Describe(step.to)));
      }
    }
    for (const auto& [messages, received] :
         {std::pair{&round.sends, false}, std::pair{&round.receives, true}}) {
      for (const Message& message : *messages) {
        RETURN_IF_ERROR(CheckSlice(rank, s, r, message.slice, received));
        if (message.peer < 0 || message.peer >= request_.ranks || message.peer == rank) {
          return Fault(rank, s, r, fmt::format("peer must be another rank, found {}", message.peer));
        }
        if (message.reduce && !received) return Fault(rank, s, r, "a send is marked as a reduction");
        if (message.addend < 0) continue;
        if (!message.reduce) return Fault(rank, s, r, "a message that is not a reduction has an addend");
        RETURN_IF_ERROR(
            CheckSlice(rank, s, r, {PlanBuffer::kInput, message.addend, message.slice.count}, false));
      }
    }
    return CheckDisjoint(rank, s, r, round);
  }

  Status CheckDisjoint(int rank, int s, int r, const Round& round) const {
    // (buffer, begin, end, received), sorted: a sweep keeps the furthest end of each kind.
    std::vector<std::tuple<PlanBuffer, int64_t, int64_t, bool>> ranges;
    const auto add = [&](const Message& message, bool received) {
      const Slice& slice = message.slice;
      if (slice.count > 0)
        ranges.emplace_back(slice.buffer, slice.offset, slice.offset + slice.count, received);
    };
    for (const Message& message : round.sends) add(message, false);
    for (const Message& message : round.receives) add(message, true);
    std::sort(ranges.begin(), ranges.end());
    PlanBuffer buffer = PlanBuffer::kInput;
    int64_t end_of_sends = 0, end_of_receives = 0;
    for (const auto& [in, begin, end, received] : ranges) {
      if (in != buffer) {
        end_of_sends = end_of_receives = 0;
        buffer = in;
      }
      if (end_of_receives > begin || (received && end_of_sends > begin)) {
        return Fault(rank, s, r,
                     fmt::format("{}[{}, {}) is received and used by another message of the round", Name(in),
                                 begin, end));
      }
      int64_t& furthest = received ? end_of_receives : end_of_sends;
      furthest = std::max(furthest, end);
    }
    return OkStatus();
  }

  Status CheckRaces(int rank) const {
    const std::vector<Stream>& streams = plan_.ranks[rank].streams;
    if (streams.size() < 2) return OkStatus();
    std::array<std::vector<Access>, 3> accesses;  // by buffer
    for (int s = 0; s < static_cast<int>(streams.size()); ++s) {
      const auto add = [&](const Slice& slice, bool write) {
        if (slice.count == 0) return;
        accesses[static_cast<size_t>(slice.buffer)].push_back(
            {slice.offset, slice.offset + slice.count, s, write});
      };
      for (const Round& round : streams[s].rounds) {
        for (const LocalStep& step : round.local) {
          add(step.from, false);
          add(step.to, true);
        }
        for (const Message& message : round.sends) add(message.slice, false);
        for (const Message& message : round.receives) add(message.slice, true);
      }
    }
    for (size_t buffer = 0; buffer < accesses.size(); ++buffer) {
      std::vector<Access>& list = accesses[buffer];
      std::sort(list.begin(), list.end(), [](const Access& a, const Access& b) { return a.begin < b.begin; });
      FurthestEnds writes, all;
      for (const Access& access : list) {
        const int other = (access.write ? all : writes).Conflict(access.begin, access.stream);
        if (other >= 0) {
          return Fault(fmt::format("rank {}: streams {} and {} race for {}[{}, {})", rank, other,
                                   access.stream, Name(static_cast<PlanBuffer>(buffer)), access.begin,
                                   access.end));
        }
        if (access.write) writes.Add(access.end, access.stream);
        all.Add(access.end, access.stream);
      }
    }
    return OkStatus();
  }

  void Initialize() {
    contents_.resize(request_.ranks);
    heard_.resize(request_.ranks);
    known_at_end_.resize(request_.ranks, std::vector<bool>(request_.ranks, request_.ranks == 1));
    for (int rank = 0; rank < request_.ranks; ++rank) {
      const int64_t count = InputCount(request_, rank);
      if (count == 0) continue;
      const auto own = std::make_shared<Terms>(Terms{{rank, 0}});
      contents_[rank][static_cast<size_t>(PlanBuffer::kInput)].Write(0, {{0, count, own, 0}});
    }
  }

  const std::vector<Round>& Rounds(int rank, int stream) const {
    static const std::vector<Round> kNone;
    const std::vector<Stream>& streams = plan_.ranks[rank].streams;
    return stream < static_cast<int>(streams.size()) ? streams[stream].rounds : kNone;
  }

  Status Match(int stream) {
    struct End {
      int round, message;
    };
    std::map<std::pair<int, int>, std::pair<std::vector<End>, std::vector<End>>> pairs;  // by (from, to)
    states_.assign(request_.ranks, {});
    for (int rank = 0; rank < request_.ranks; ++rank) {
      heard_[rank].assign(request_.ranks, false);
      heard_[rank][rank] = true;
    }
    for (int rank = 0; rank < request_.ranks; ++rank) {
      const std::vector<Round>& rounds = Rounds(rank, stream);
      states_[rank].resize(rounds.size());
      for (int r = 0; r < static_cast<int>(rounds.size()); ++r) {
        states_[rank][r].sends.resize(rounds[r].sends.size());
        states_[rank][r].receives.resize(rounds[r].receives.size());
        for (int m = 0; m < static_cast<int>(rounds[r].sends.size()); ++m) {
          pairs[{rank, rounds[r].sends[m].peer}].first.push_back({r, m});
        }
        for (int m = 0; m < static_cast<int>(rounds[r].receives.size()); ++m) {
          pairs[{rounds[r].receives[m].peer, rank}].second.push_back({r, m});
        }
      }
    }
    for (const auto& [ranks, ends] : pairs) {
      const auto [from, to] = ranks;
      const auto& [sends, receives] = ends;
      if (sends.size() != receives.size()) {
        return Fault(fmt::format("stream {}: rank {} sends {} messages to rank {}, which receives {}", stream,
                                 from, sends.size(), to, receives.size()));
      }
      for (size_t i = 0; i < sends.size(); ++i) {
        const Message& sent = Rounds(from, stream)[sends[i].round].sends[sends[i].message];
        const Message& received = Rounds(to, stream)[receives[i].round].receives[receives[i].message];
        if (sent.slice.count != received.slice.count || sent.wire != received.wire) {
          return Fault(to, stream, receives[i].round,
                       fmt::format("receives {} elements ({}) from rank {}, which sends {} ({}) in round {}",
                                   received.slice.count, Name(received.wire), from, sent.slice.count,
                                   Name(sent.wire), sends[i].round));
        }
        states_[from][sends[i].round].sends[sends[i].message] = {to, receives[i].round, receives[i].message};
        states_[to][receives[i].round].receives[receives[i].message] = {from, sends[i].round,
                                                                        sends[i].message};
      }
    }
    return OkStatus();
  }

  // Starts rounds in an order in which each follows the starts of its predecessor's partners. A round that
  // never becomes ready is part of a cycle, or follows one.
  Status Execute(int stream) {
    std::vector<std::pair<int, int>> ready;  // (rank, round)
    std::map<std::pair<int, int>, std::vector<std::pair<int, int>>> dependents;
    for (int rank = 0; rank < request_.ranks; ++rank) {
      if (!states_[rank].empty()) ready.emplace_back(rank, 0);
      for (int r = 1; r < static_cast<int>(states_[rank].size()); ++r) {
        for (const std::pair<int, int>& before : Before(rank, r)) {
          dependents[before].emplace_back(rank, r);
          ++states_[rank][r].missing;
        }
      }
    }
    while (!ready.empty()) {
      const auto [rank, round] = ready.back();
      ready.pop_back();
      RETURN_IF_ERROR(StartRound(rank, stream, round));
      const auto found = dependents.find({rank, round});
      if (found == dependents.end()) continue;
      for (const auto& [other, next] : found->second) {
        if (--states_[other][next].missing == 0) ready.emplace_back(other, next);
      }
    }
    for (int rank = 0; rank < request_.ranks; ++rank) {
      for (int r = 0; r < static_cast<int>(states_[rank].size()); ++r) {
        if (!states_[rank][r].started) return Deadlock(rank, stream, r);
      }
      if (!states_[rank].empty()) {
        RETURN_IF_ERROR(FinishRound(rank, stream, static_cast<int>(states_[rank].size()) - 1));
      }
      for (int other = 0; other < request_.ranks; ++other) {
        if (heard_[rank][other]) known_at_end_[rank][other] = true;
      }
    }
    return OkStatus();
  }

  std::vector<std::pair<int, int>> Before(int rank, int round) const {
    std::vector<std::pair<int, int>> before = {{rank, round - 1}};
    for (const Partner& match : states_[rank][round - 1].sends) before.emplace_back(match.peer, match.round);
    for (const Partner& match : states_[rank][round - 1].receives)
      before.emplace_back(match.peer, match.round);
    return before;
  }

  Status Deadlock(int rank, int stream, int round) const {
    std::vector<std::pair<int, int>> path;
    std::pair<int, int> at = {rank, round};
    while (std::find(path.begin(), path.end(), at) == path.end()) {
      path.push_back(at);
      for (const std::pair<int, int>& before : Before(at.first, at.second)) {
        if (states_[before.first][before.second].started) continue;
        at = before;
        break;
      }
    }
    std::string cycle;
    for (auto it = std::find(path.begin(), path.end(), at); it != path.end(); ++it) {
      cycle += fmt::format("rank {} (round {}) -> ", it->first, it->second);
    }
    return Fault(fmt::format("stream {}: deadlock, these rounds wait for each other: {}rank {} (round {})",
                             stream, cycle, at.first, at.second));
  }

  Status Load(int rank, int stream, int round, const Slice& slice, SymbolicMessage* message) const {
    int64_t missing = 0;
    if (contents_[rank][static_cast<size_t>(slice.buffer)].Read(slice.offset, slice.count, message,
                                                                &missing)) {
      return OkStatus();
    }
    return Fault(rank, stream, round,
                 fmt::format("{} is read, but element {} was never written", Describe(slice), missing));
  }

  Status Store(int rank, int stream, int round, const Slice& slice, const SymbolicMessage& message,
               bool reduce) {
    SymbolicBuffer& buffer = contents_[rank][static_cast<size_t>(slice.buffer)];
    int64_t missing = 0;
    if (!reduce) {
      buffer.Write(slice.offset, message);
    } else if (!buffer.Reduce(slice.offset, message, &missing)) {
      return Fault(rank, stream, round,
                   fmt::format("{} is added to, but element {} was never written", Describe(slice), missing));
    }
    return OkStatus();
  }

  Status StartRound(int rank, int stream, int index) {
    if (index > 0) RETURN_IF_ERROR(FinishRound(rank, stream, index - 1));
    const Round& round = Rounds(rank, stream)[index];
    SymbolicMessage message;
    for (const LocalStep& step : round.local) {
      RETURN_IF_ERROR(Load(rank, stream, index, step.from, &message));
      RETURN_IF_ERROR(Store(rank, stream, index, step.to, message, step.reduce));
    }
    RoundState& state = states_[rank][index];
    for (const Message& sent : round.sends) {
      RETURN_IF_ERROR(Load(rank, stream, index, sent.slice, &message));
      state.sent.push_back(message);
    }
    state.known = heard_[rank];
    state.started = true;
    return OkStatus();
  }

  Status FinishRound(int rank, int stream, int index) {
    const Round& round = Rounds(rank, stream)[index];
    for (size_t i = 0; i < round.receives.size(); ++i) {
      const Partner& match = states_[rank][index].receives[i];
      const RoundState& sender = states_[match.peer][match.round];
      const Message& received = round.receives[i];
      if (received.addend >= 0) {
        SymbolicMessage addend;
        const Slice input = {PlanBuffer::kInput, received.addend, received.slice.count};
        RETURN_IF_ERROR(Load(rank, stream, index, input, &addend));
        RETURN_IF_ERROR(Store(rank, stream, index, received.slice, addend, false));
      }
      RETURN_IF_ERROR(
          Store(rank, stream, index, received.slice, sender.sent[match.message], received.reduce));
      for (int other = 0; other < request_.ranks; ++other) {
        if (sender.known[other]) heard_[rank][other] = true;
      }
    }
    return OkStatus();
  }

  // Ranges of a rank's output with the contributions that they must have.
  SymbolicMessage Expected(int rank) const {
    SymbolicMessage expected;
    int64_t end = 0;
    const auto add = [&](int64_t count, Terms terms,
                         int64_t first) {  // first: input element of the first one
      if (count == 0) return;
      expected.push_back({end, end + count, std::make_shared<Terms>(std::move(terms)), first - end});
      end += count;
    };
    Terms all;
    for (int other = 0; other < request_.ranks; ++other) all.push_back({other, 0});
    switch (request_.collective) {
      case Collective::kBroadcast:
        add(request_.count, {{request_.root, 0}}, 0);
        break;
      case Collective::kAllReduce:
        add(request_.count, all, 0);
        break;
      case Collective::kReduceScatter: {
        int64_t first = 0;
        for (int other = 0; other < rank; ++other) first += request_.counts[other];
        add(request_.counts[rank], all, first);
        break;
      }
      case Collective::kAllGather:
        for (int from = 0; from < request_.ranks; ++from) add(request_.counts[from], {{from, 0}}, 0);
        break;
      case Collective::kAllToAll:
        for (int from = 0; from < request_.ranks; ++from) {
          add(request_.count, {{from, 0}}, request_.count * rank);
        }
        break;
      case Collective::kAllToAllv:
        for (int from = 0; from < request_.ranks; ++from) {
          const int64_t* const row = request_.matrix.data() + static_cast<size_t>(from) * request_.ranks;
          int64_t first = 0;
          for (int to = 0; to < rank; ++to) first += row[to];
          add(row[rank], {{from, 0}}, first);
        }
        break;
      case Collective::kBarrier:
        break;
    }
    return expected;
  }

  Status CheckResult() const {
    for (int rank = 0; rank < request_.ranks; ++rank) {
      for (const SymbolicInterval& part : Expected(rank)) {
        SymbolicMessage found;
        int64_t missing = 0;
        if (!contents_[rank][static_cast<size_t>(PlanBuffer::kOutput)].Read(part.begin, part.end - part.begin,
                                                                            &found, &missing)) {
          return Fault(fmt::format("rank {}: output element {} is never written", rank, missing));
        }
        for (const SymbolicInterval& piece : found) {
          const int64_t difference = piece.shift - (part.shift + part.begin);
          const bool equal = std::equal(piece.terms->begin(), piece.terms->end(), part.terms->begin(),
                                        part.terms->end(), [&](const Term& a, const Term& b) {
                                          return a.rank == b.rank && a.delta + difference == b.delta;
                                        });
          if (equal) continue;
          return Fault(fmt::format("rank {}: output element {} is the sum of {}; expected {}", rank,
                                   part.begin + piece.begin,
                                   comm::Describe(*piece.terms, piece.shift + piece.begin),
                                   comm::Describe(*part.terms, part.shift + part.begin + piece.begin)));
        }
      }
      if (request_.collective != Collective::kBarrier) continue;
      for (int other = 0; other < request_.ranks; ++other) {
        if (!known_at_end_[rank][other]) {
          return Fault(fmt::format("rank {} leaves the barrier before rank {} has entered it", rank, other));
        }
      }
    }
    return OkStatus();
  }

  const Plan& plan_;
  const PlanRequest& request_;
  std::vector<std::array<SymbolicBuffer, 3>> contents_;  // [ranks], by buffer
  std::vector<std::vector<bool>> heard_;         // [ranks]: ranks of whose start the stream has learned
  std::vector<std::vector<bool>> known_at_end_;  // [ranks]: the same over all streams
  std::vector<std::vector<RoundState>> states_;  // [ranks][rounds] of the current stream
};

}  // namespace

Status CheckPlan(const Plan& plan) { return Checker(plan).Check(); }

}  // namespace moesaic::comm
