#include "comm/collectives/plan_checker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/collectives/plan_test_support.h"

namespace moesaic::comm {
namespace {

using testing::HasSubstr;

constexpr PlanBuffer kIn = PlanBuffer::kInput, kOut = PlanBuffer::kOutput;

// Two ranks that exchange `count` elements and add.
Plan ExchangePlan(int64_t count = 8) {
  Plan plan;
  plan.request = {.collective = Collective::kAllReduce, .ranks = 2, .count = count};
  plan.algorithm = "exchange";
  plan.ranks.resize(2);
  for (int rank = 0; rank < 2; ++rank) {
    Round round;
    round.local.push_back({{kIn, 0, count}, {kOut, 0, count}});
    round.sends.push_back({1 - rank, {kIn, 0, count}});
    round.receives.push_back({1 - rank, {kOut, 0, count}, WireFormat::kExact, true});
    plan.ranks[rank].streams.push_back({{round}});
  }
  return plan;
}

std::string FaultOf(const Plan& plan) { return moesaic::Message(CheckPlan(plan)); }

TEST(PlanCheckerTest, AcceptsAPlanOfAnySize) {
  EXPECT_EQ(CheckPlan(ExchangePlan()), OkStatus());
  EXPECT_EQ(CheckPlan(ExchangePlan(int64_t{1} << 40)), OkStatus());
}

TEST(PlanCheckerTest, RejectsAMissingContribution) {
  Plan plan = ExchangePlan();
  plan.ranks[1].streams[0].rounds[0].receives[0].reduce = false;
  EXPECT_THAT(FaultOf(plan), HasSubstr("rank 1: output element 0 is the sum of rank 0"));
}

TEST(PlanCheckerTest, RejectsADoubledContribution) {
  Plan plan = ExchangePlan();
  plan.ranks[0].streams[0].rounds.push_back(
      {.local = {{{kIn, 3, 1}, {kOut, 3, 1}, true}}, .sends = {}, .receives = {}});
  EXPECT_THAT(FaultOf(plan), HasSubstr("rank 0: output element 3"));
}

TEST(PlanCheckerTest, RejectsSlicesOutOfRange) {
  Plan plan = ExchangePlan();
  plan.ranks[1].streams[0].rounds[0].sends[0].slice.offset = 1;
  EXPECT_THAT(FaultOf(plan),
              HasSubstr("rank 1, stream 0, round 0: offset 1 and count 8 leave the input of 8"));
}

TEST(PlanCheckerTest, RejectsCountsAndEncodingsThatDoNotMatch) {
  Plan counts = ExchangePlan();
  counts.ranks[1].streams[0].rounds[0].sends[0].slice.count = 7;
  EXPECT_THAT(FaultOf(counts), HasSubstr("receives 8 elements (exact) from rank 1, which sends 7"));
  Plan encodings = ExchangePlan();
  encodings.ranks[1].streams[0].rounds[0].sends[0].wire = WireFormat::kInt8;
  EXPECT_THAT(FaultOf(encodings), HasSubstr("(int8)"));
}

TEST(PlanCheckerTest, RejectsReadsOfElementsThatWereNeverWritten) {
  Plan plan = ExchangePlan();
  plan.ranks[0].streams[0].rounds[0].local.clear();
  EXPECT_THAT(FaultOf(plan), HasSubstr("output[0, 8) is added to, but element 0 was never written"));
}

TEST(PlanCheckerTest, RejectsAReceiveIntoARangeThatIsSent) {
  Plan plan = ExchangePlan();
  plan.ranks[0].streams[0].rounds[0].sends[0].slice.buffer = kOut;
  EXPECT_THAT(FaultOf(plan), HasSubstr("is received and used by another message"));
}

TEST(PlanCheckerTest, RejectsOverlappingLocalSteps) {
  Plan plan = ExchangePlan();
  plan.ranks[0].streams[0].rounds[0].local.push_back({{kOut, 0, 4}, {kOut, 2, 4}});
  EXPECT_THAT(FaultOf(plan), HasSubstr("output[0, 4) overlaps output[2, 6)"));
}

TEST(PlanCheckerTest, RejectsWritesToTheInput) {
  Plan plan = ExchangePlan();
  plan.ranks[0].streams[0].rounds[0].local.push_back({{kOut, 0, 4}, {kIn, 0, 4}});
  EXPECT_THAT(FaultOf(plan), HasSubstr("inputs are read-only"));
}

TEST(PlanCheckerTest, AcceptsTheInputAsTheOtherOperandOfASum) {
  Plan plan = ExchangePlan();
  for (RankPlan& rank : plan.ranks) {
    rank.streams[0].rounds[0].local.clear();
    rank.streams[0].rounds[0].receives[0].addend = 0;
  }
  EXPECT_EQ(CheckPlan(plan), OkStatus());
  plan.ranks[0].streams[0].rounds[0].receives[0].addend = 1;
  EXPECT_THAT(FaultOf(plan), HasSubstr("offset 1 and count 8 leave the input"));
  plan.ranks[0].streams[0].rounds[0].receives[0] = {1, {kOut, 0, 8}, WireFormat::kExact, false, 0};
  EXPECT_THAT(FaultOf(plan), HasSubstr("has an addend"));
}

TEST(PlanCheckerTest, RejectsRacesBetweenStreams) {
  Plan plan = ExchangePlan();
  plan.ranks[1].streams.push_back({{{.local = {{{kIn, 5, 1}, {kOut, 5, 1}}}, .sends = {}, .receives = {}}}});
  EXPECT_THAT(FaultOf(plan), HasSubstr("rank 1: streams 0 and 1 race for output[5, 6)"));
}

TEST(PlanCheckerTest, NamesTheRanksOfADeadlock) {
  // Three ranks that each first receive from the next one.
  Plan plan;
  plan.request = {.collective = Collective::kAllGather, .ranks = 3, .counts = {1, 1, 1}};
  plan.algorithm = "cycle";
  for (int rank = 0; rank < 3; ++rank) {
    const int next = (rank + 1) % 3, before = (rank + 2) % 3;
    Round receive, send;
    receive.local.push_back({{kIn, 0, 1}, {kOut, rank, 1}});
    receive.receives.push_back({next, {kOut, next, 1}});
    send.sends.push_back({before, {kIn, 0, 1}});
    plan.ranks.push_back({0, {{{receive, send}}}});
  }
  const std::string fault = FaultOf(plan);
  EXPECT_THAT(fault, HasSubstr("deadlock"));
  for (const char* rank : {"rank 0 (round 1)", "rank 1 (round 1)", "rank 2 (round 1)"}) {
    EXPECT_THAT(fault, HasSubstr(rank));
  }
}

TEST(PlanCheckerTest, RejectsABarrierThatDoesNotWaitForARank) {
  Plan plan;
  plan.request = {.collective = Collective::kBarrier, .ranks = 3};
  plan.algorithm = "half a barrier";
  plan.ranks.resize(3);
  Round send, receive;
  send.sends.push_back({1, {}});
  receive.receives.push_back({0, {}});
  plan.ranks[0].streams.push_back({{send}});
  plan.ranks[1].streams.push_back({{receive}});
  EXPECT_THAT(FaultOf(plan), HasSubstr("leaves the barrier before rank 1"));
}

// Position of a message in a plan.
struct MessagePosition {
  int rank = 0, stream = 0, round = 0, message = 0;
  bool is_send = false;
};
std::vector<MessagePosition> MessagePositions(const Plan& plan) {
  std::vector<MessagePosition> positions;
  for (int rank = 0; rank < plan.request.ranks; ++rank) {
    const std::vector<Stream>& streams = plan.ranks[rank].streams;
    for (int s = 0; s < static_cast<int>(streams.size()); ++s) {
      for (int r = 0; r < static_cast<int>(streams[s].rounds.size()); ++r) {
        const Round& round = streams[s].rounds[r];
        for (int m = 0; m < static_cast<int>(round.sends.size()); ++m)
          positions.push_back({rank, s, r, m, true});
        for (int m = 0; m < static_cast<int>(round.receives.size()); ++m)
          positions.push_back({rank, s, r, m, false});
      }
    }
  }
  return positions;
}

enum class Mutation { kDrop, kDuplicate, kPeer, kOffset, kReduce };

TEST(PlanCheckerTest, RejectsMutantsOfValidPlans) {
  std::mt19937 random(11);
  int mutants = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<int> ranks(2 + random() % 9);
    std::iota(ranks.begin(), ranks.end(), 0);
    const RankTree tree = RandomTree(ranks, random);
    const Collective collective = kAllCollectives[random() % std::size(kAllCollectives)];
    const std::vector<PlanShape> shapes = ShapesOf(collective, tree);
    const PlanRequest request = MakeRequest(collective, static_cast<int>(ranks.size()), 500, random() % 3);
    Plan plan = *BuildPlan(request, tree, shapes[random() % shapes.size()]);
    const std::vector<MessagePosition> positions = MessagePositions(plan);
    if (positions.empty()) continue;
    const MessagePosition position = positions[random() % positions.size()];
    Round& round = plan.ranks[position.rank].streams[position.stream].rounds[position.round];
    std::vector<Message>& messages = position.is_send ? round.sends : round.receives;
    Message& message = messages[position.message];
    const auto mutation = static_cast<Mutation>(random() % 5);
    switch (mutation) {
      case Mutation::kDrop:
        messages.erase(messages.begin() + position.message);
        break;
      case Mutation::kDuplicate:
        messages.push_back(Message(message));
        break;
      case Mutation::kPeer:
        message.peer = (message.peer + 1) % request.ranks;
        break;
      case Mutation::kOffset:
        if (message.slice.count == 0) continue;
        message.slice.offset += random() % 2 == 0 ? 1 : -1;
        break;
      case Mutation::kReduce:
        if (message.slice.count == 0 || position.is_send) continue;
        message.reduce = !message.reduce;
        break;
    }
    ++mutants;
    EXPECT_FALSE(CheckPlan(plan).ok())
        << Name(collective) << ", " << plan.algorithm << ", mutation " << static_cast<int>(mutation)
        << ", rank " << position.rank << ", round " << position.round
        << (position.is_send ? ", send " : ", receive ") << position.message;
  }
  EXPECT_GT(mutants, 2000);
}

}  // namespace
}  // namespace moesaic::comm
