#include "parallel/rank_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "comm/transport/local_transport.h"

namespace moesaic::parallel {
namespace {

using comm::Transport;

std::unique_ptr<RankGroups> JoinGroups(Transport& end, const Layout& layout, double limit_s = 60) {
  return *RankGroups::Create(
      end, comm::Topology::Flat(layout.ranks(), {.latency_s = 1e-6, .bytes_per_s = 1e10}), layout, limit_s);
}

TEST(RankGroups, SumsOverTheShardsOfAStage) {
  const Layout layout = *Layout::Create({.tensor = 3, .pipeline = 2});
  comm::RunRanks(6, [&](Transport& end) {
    const auto groups = JoinGroups(end, layout);
    std::vector<float> values(1000);
    std::iota(values.begin(), values.end(), static_cast<float>(end.rank()));
    groups->Sum(values);
    ASSERT_TRUE(groups->Finish().ok());
    const auto first = static_cast<float>(groups->at().stage * 9 + 3);  // 0 + 1 + 2, or 3 + 4 + 5
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], first + 3 * static_cast<float>(i));
  });
}

TEST(RankGroups, SumsThatWereStartedAdvanceTogether) {
  const Layout layout = *Layout::Create({.tensor = 2});
  comm::RunRanks(2, [&](Transport& end) {
    const auto groups = JoinGroups(end, layout);
    std::vector<float> a(70'000, 1.0F), b(3, 2.0F), c(1, 5.0F);
    groups->StartSum(a);
    groups->StartSum(b);
    groups->Progress();
    groups->FinishSums();
    groups->Sum(c);
    EXPECT_EQ(a, std::vector<float>(70'000, 2.0F));
    EXPECT_EQ(b, std::vector<float>(3, 4.0F));
    EXPECT_EQ(c, std::vector<float>(1, 10.0F));
    EXPECT_TRUE(groups->Finish().ok());
  });
}

TEST(RankGroups, ASumThatWasStartedFailsWithItsPeer) {
  const Layout layout = *Layout::Create({.tensor = 2});
  comm::RunRanks(2, [&](Transport& end) {
    if (end.rank() == 1) return;  // takes no part
    const auto groups = JoinGroups(end, layout, /*limit_s=*/0.2);
    std::vector<float> a(70'000, 1.0F), b(100, 2.0F);
    groups->StartSum(a);
    groups->StartSum(b);
    groups->FinishSums();
    EXPECT_EQ(groups->TakeFailure().code(), StatusCode::kDeadlineExceeded);
  });
}

TEST(RankGroups, SumsOverSlowLinksMayBeRounded) {
  const Layout layout = *Layout::Create({.tensor = 2});
  const comm::Topology topology = comm::Topology::Flat(2, {.latency_s = 1e-5, .bytes_per_s = 1e8});
  // One decoded row of a large model, and a prompt. 128 int8 values share a scale.
  for (const int64_t count : {2048, 1 << 18}) {
    for (const auto& [format, bytes] :
         {std::pair(comm::WireFormat::kInt8, 1), std::pair(comm::WireFormat::kBf16, 2)}) {
      SCOPED_TRACE(testing::Message() << count << " values, " << Name(format));
      std::array<int64_t, 2> sent{};
      comm::RunRanks(2, [&, wire = format](Transport& end) {
        const auto groups = *RankGroups::Create(end, topology, layout, 60, wire);
        std::vector<float> values(count, 0.3F);
        groups->Sum(values);
        EXPECT_TRUE(groups->Finish().ok());
        for (const float value : values) ASSERT_NEAR(value, 0.6F, 0.6F / 100);
        sent[end.rank()] = groups->traffic().sent_bytes;
      });
      for (const int64_t of_rank : sent) {
        EXPECT_GE(of_rank, count * bytes);
        EXPECT_LE(of_rank, count * bytes + count / 16 + 256);
      }
    }
  }
}

// Algorithms of a sum send different numbers of bytes.
TEST(RankGroups, MeasuredTimesChooseTheAlgorithmOfSums) {
  constexpr int kRanks = 4, kValues = 1000;
  const Layout layout = *Layout::Create({.tensor = kRanks});
  const comm::Topology topology = comm::Topology::Flat(kRanks, {.latency_s = 1e-6, .bytes_per_s = 1e10});
  const comm::PlanRequest request = {
      .collective = comm::Collective::kAllReduce, .ranks = kRanks, .count = kValues, .element_bytes = 4};
  std::set<std::array<int64_t, kRanks>> sent;  // bytes by rank
  for (const comm::Choice& choice : comm::Planner(topology).Compare(request, {})) {
    auto table = std::make_shared<comm::TuningTable>();
    table->Add(comm::Collective::kAllReduce, kRanks, comm::RequestBytes(request), Name(choice.candidate),
               1e-12);
    std::array<int64_t, kRanks> bytes{};
    comm::RunRanks(kRanks, [&](Transport& end) {
      const auto groups = *RankGroups::Create(end, topology, layout, 60, comm::WireFormat::kExact, table);
      std::vector<float> values(kValues, 1.0F);
      groups->Sum(values);
      EXPECT_TRUE(groups->Finish().ok());
      EXPECT_EQ(values, std::vector<float>(kValues, 4.0F));
      bytes[end.rank()] = groups->traffic().sent_bytes;
    });
    sent.insert(bytes);
  }
  EXPECT_GT(sent.size(), 1U);
}

TEST(RankGroups, SendsHiddenStatesToTheNextStageInOrder) {
  const Layout layout = *Layout::Create({.tensor = 2, .pipeline = 3});
  comm::RunRanks(6, [&](Transport& end) {
    const auto groups = JoinGroups(end, layout);
    for (int batch = 0; batch < 4; ++batch) {
      std::vector<float> hidden(64, static_cast<float>(100 * groups->at().shard + batch));
      if (groups->at().stage > 0) {
        std::vector<float> received(64);
        groups->ExpectHidden(received);
        groups->AwaitHidden();
        EXPECT_EQ(received, hidden);
      }
      if (groups->at().stage < 2) groups->SendHidden(hidden);
    }
    EXPECT_TRUE(groups->Finish().ok());
  });
}

TEST(RankGroups, UsesTheMemoryOfFinishedSendsAgain) {
  const Layout layout = *Layout::Create({.pipeline = 2});
  comm::RunRanks(2, [&](Transport& end) {
    const auto groups = JoinGroups(end, layout);
    std::vector<float> hidden(4096);
    std::byte taken{};
    for (int batch = 0; batch < 20; ++batch) {
      if (groups->at().stage == 0) {
        groups->SendHidden(hidden);
        EXPECT_EQ(groups->pending_sends(), 1) << "the send before has ended";
        // Only now a receive is posted, which would end the send in its call.
        ASSERT_TRUE(comm::Wait(end, *end.Send(1, 0, {&taken, 1}), 60).ok());
        ASSERT_TRUE(comm::Wait(end, *end.Receive(1, 0, {&taken, 1}), 60).ok());
      } else {
        ASSERT_TRUE(comm::Wait(end, *end.Receive(0, 0, {&taken, 1}), 60).ok());
        groups->ExpectHidden(hidden);
        groups->AwaitHidden();
        ASSERT_TRUE(comm::Wait(end, *end.Send(0, 0, {&taken, 1}), 60).ok());
      }
    }
    EXPECT_TRUE(groups->Finish().ok());
  });
}

TEST(RankGroups, ReceivesSeveralHiddenStatesThatAreExpected) {
  const Layout layout = *Layout::Create({.pipeline = 2});
  comm::RunRanks(2, [&](Transport& end) {
    const auto groups = JoinGroups(end, layout);
    constexpr size_t kParts = 5, kCount = 300;
    std::vector<float> all(kParts * kCount);
    for (size_t part = 0; part < kParts; ++part) {
      const std::span<float> of = std::span(all).subspan(part * kCount, kCount);
      if (groups->at().stage == 1) {
        groups->ExpectHidden(of);
      } else {
        std::fill(of.begin(), of.end(), static_cast<float>(part));
        groups->SendHidden(of);
      }
    }
    for (size_t part = 0; part < kParts && groups->at().stage == 1; ++part) {
      groups->AwaitHidden();
      EXPECT_EQ(all[part * kCount], static_cast<float>(part));
    }
    EXPECT_TRUE(groups->Finish().ok());
    EXPECT_EQ(groups->traffic().sent_bytes, groups->at().stage == 0 ? std::ssize(all) * 4 : 0);
  });
}

// Stage 1 waits for stage 0, which waits for the dead rank.
TEST(RankGroups, NamesADeadRankThatIsNotItsPeer) {
  const Layout layout = *Layout::Create({.tensor = 2, .pipeline = 2});
  comm::LocalJob job(4);
  const auto groups = JoinGroups(job.end(2), layout);  // stage 1, shard 0; its peer is rank 0
  job.Kill(1);
  std::vector<float> hidden(64, 1.0F);
  groups->ExpectHidden(hidden);
  groups->AwaitHidden();
  EXPECT_EQ(hidden, std::vector<float>(64));
  EXPECT_THAT(Message(groups->TakeFailure()), testing::HasSubstr("rank 1 died"));
}

TEST(RankGroups, KeepsTheFirstFailure) {
  const Layout layout = *Layout::Create({.tensor = 2});
  comm::LocalJob job(2);
  job.Kill(1);
  const auto groups = JoinGroups(job.end(0), layout, 1);
  std::vector<float> values(8, 1.0F);
  groups->Sum(values);
  groups->Sum(values);
  const Status failure = groups->TakeFailure();
  EXPECT_THAT(Message(failure), testing::HasSubstr("rank 1"));
  EXPECT_TRUE(groups->TakeFailure().ok());
}

TEST(RankGroups, RefusesToContinueWithoutRanksThatDoNotExist) {
  comm::LocalJob job(2);
  const auto groups = JoinGroups(job.end(1), *Layout::Create({.data = 2, .expert = 2}));
  for (const int rank : {-1, 1, 2}) {
    EXPECT_EQ(groups->Exclude(std::vector<int>{rank}).code(), StatusCode::kInvalidArgument) << rank;
  }
}

TEST(RankGroups, RefusesALayoutOfAnotherSize) {
  comm::LocalJob job(2);
  const auto groups = RankGroups::Create(job.end(0), comm::Topology::Flat(2, {.bytes_per_s = 1}), Layout());
  EXPECT_THAT(Message(groups.status()), testing::HasSubstr("has 1 ranks, but the job has 2"));
}

}  // namespace
}  // namespace moesaic::parallel
