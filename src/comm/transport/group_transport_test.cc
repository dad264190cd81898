#include "comm/transport/group_transport.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

namespace moesaic::comm {
namespace {

// A job of four ranks that records the calls which its rank 2 makes.
class RecordedJob : public Transport {
 public:
  std::string_view name() const override { return "recorded"; }
  int rank() const override { return 2; }
  int size() const override { return 4; }
  StatusOr<TransferId> Send(int peer, Tag tag, std::span<const std::byte> data) override {
    return Record("send", peer, tag, data.size());
  }
  StatusOr<TransferId> SendAhead(int peer, Tag tag, std::span<const std::byte> data) override {
    return Record("send ahead", peer, tag, data.size());
  }
  StatusOr<TransferId> Receive(int peer, Tag tag, std::span<std::byte> data) override {
    return Record("receive", peer, tag, data.size());
  }
  Status Exchange(int peer, Tag tag, std::span<const std::byte> data, std::span<std::byte>, double) override {
    return Record("exchange", peer, tag, data.size()).status();
  }
  void Progress() override {}
  bool Test(TransferId, Status*) override { return false; }
  void Cancel(TransferId) override {}
  bool failed(int peer) const override { return peer == 3; }
  double SilentSeconds(int peer) const override { return peer; }
  double Now() const override { return 0; }
  void EndJob() override { calls.emplace_back("end job"); }

  std::vector<std::string> calls;

 private:
  StatusOr<TransferId> Record(const char* call, int peer, Tag tag, size_t bytes) {
    calls.push_back(fmt::format("{} of rank {}, tag {}, bytes {}", call, peer, tag, bytes));
    return TransferId{};
  }
};

TEST(GroupTransportTest, CallsReachTheJobWithItsRanks) {
  RecordedJob job;
  const auto group = GroupTransport::Create(job, {3, 2, 0});
  ASSERT_TRUE(group.ok()) << group.status();
  Transport& t = **group;
  EXPECT_EQ(t.rank(), 1);
  EXPECT_EQ(t.size(), 3);
  std::array<std::byte, 5> data{};
  EXPECT_TRUE(t.Send(0, 7, data).ok() && t.SendAhead(2, 8, data).ok() && t.Receive(0, 9, data).ok());
  EXPECT_TRUE(t.Exchange(2, 10, data, data, 1).ok());
  t.EndJob();
  EXPECT_EQ(job.calls,
            (std::vector<std::string>{
                "send of rank 3, tag 7, bytes 5", "send ahead of rank 0, tag 8, bytes 5",
                "receive of rank 3, tag 9, bytes 5", "exchange of rank 0, tag 10, bytes 5", "end job"}));
  EXPECT_TRUE(t.failed(0));
  EXPECT_FALSE(t.failed(2));
  EXPECT_EQ(t.SilentSeconds(0), 3);
}

TEST(GroupTransportTest, RefusesFaultyGroupsAndPeers) {
  RecordedJob job;
  for (const std::vector<int>& ranks : {std::vector<int>{0, 1}, {2, 2}, {2, 4}, {2, -1}, {}}) {
    EXPECT_EQ(GroupTransport::Create(job, ranks).status().code(), StatusCode::kInvalidArgument);
  }
  const auto group = GroupTransport::Create(job, {2, 0});
  std::array<std::byte, 1> data{};
  for (const int peer : {-1, 2}) {
    EXPECT_EQ((*group)->Send(peer, 0, data).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ((*group)->SendAhead(peer, 0, data).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ((*group)->Receive(peer, 0, data).status().code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(job.calls.empty());
}

}  // namespace
}  // namespace moesaic::comm
