#include "comm/collectives/plan_builder.h"

#include <iterator>
#include <utility>

#include "comm/collectives/copy_elision.h"

namespace moesaic::comm {

PlanBuilder::PlanBuilder(PlanRequest request, std::string algorithm) {
  plan_.request = std::move(request);
  plan_.algorithm = std::move(algorithm);
  plan_.ranks.resize(plan_.request.ranks);
}

int64_t PlanBuilder::AddScratch(int rank, int64_t count) {
  const int64_t offset = plan_.ranks[rank].scratch;
  plan_.ranks[rank].scratch += count;
  return offset;
}

Round& PlanBuilder::At(int rank, int step) {
  std::vector<Stream>& streams = plan_.ranks[rank].streams;
  if (static_cast<int>(streams.size()) <= stream_) streams.resize(stream_ + 1);
  std::vector<Round>& rounds = streams[stream_].rounds;
  if (static_cast<int>(rounds.size()) <= step) rounds.resize(step + 1);
  return rounds[step];
}

void PlanBuilder::Send(int step, int from, const Slice& source, int to, const Slice& target, bool reduce,
                       WireFormat wire) {
  if (source.count == 0) return;
  if (from == to) {
    Local(step, from, source, target, reduce);
    return;
  }
  At(from, step).sends.push_back({to, source, wire, false});
  At(to, step).receives.push_back({from, target, wire, reduce});
}

void PlanBuilder::SendEmpty(int step, int from, int to) {
  At(from, step).sends.push_back({to, {PlanBuffer::kOutput, 0, 0}});
  At(to, step).receives.push_back({from, {PlanBuffer::kOutput, 0, 0}});
}

void PlanBuilder::Local(int step, int rank, const Slice& source, const Slice& target, bool reduce,
                        WireFormat wire) {
  if (source.count == 0) return;
  if (source.buffer == target.buffer && source.offset == target.offset && wire == WireFormat::kExact) return;
  At(rank, step).local.push_back({source, target, reduce, wire});
}

Plan PlanBuilder::Build() && {
  for (RankPlan& rank : plan_.ranks) {
    for (Stream& stream : rank.streams) {
      std::vector<Round> rounds;
      std::vector<LocalStep> waiting;  // local steps of rounds without messages: they join the next round
      for (size_t step = 0; step < stream.rounds.size(); ++step) {
        Round& round = stream.rounds[step];
        round.step = static_cast<int>(step);
        waiting.insert(waiting.end(), round.local.begin(), round.local.end());
        if (round.sends.empty() && round.receives.empty()) continue;
        round.local = std::exchange(waiting, {});
        rounds.push_back(std::move(round));
      }
      if (!waiting.empty()) {
        rounds.push_back({std::move(waiting), {}, {}, static_cast<int>(stream.rounds.size())});
      }
      stream.rounds = std::move(rounds);
    }
    ElideCopies(&rank);
  }
  return std::move(plan_);
}

}  // namespace moesaic::comm
