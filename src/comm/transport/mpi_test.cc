// Runs under mpirun: every rank is a process that runs all tests.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/collectives/conformance.h"
#include "comm/exchange/brute_force_test_support.h"
#include "comm/transport/conformance.h"
#include "comm/transport/mpi_transport.h"
#include "comm/transport/open_transport.h"

namespace {
int duplicates = 0;
}  // namespace

// The transport calls this function, because the linker takes the program's definition.
int MPI_Comm_dup(MPI_Comm communicator, MPI_Comm* made) {
  ++duplicates;
  return PMPI_Comm_dup(communicator, made);
}

namespace moesaic::comm {
namespace {

// One transport for all cases: the tags differ.
Transport& World() {
  static const std::unique_ptr<Transport> world = *MakeMpiTransport(MPI_COMM_WORLD);
  return *world;
}

class MpiConformanceTest : public testing::TestWithParam<size_t> {};

TEST_P(MpiConformanceTest, HoldsForTheRanksOfTheJob) {
  ConformanceCases()[GetParam()].run(World(), ConformanceTag(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, MpiConformanceTest, testing::Range<size_t>(0, ConformanceCases().size()),
                         [](const auto& info) { return ConformanceCases()[info.param].name; });

// A library with few tags, as of UCX inside MPI (2^23), spreads them over duplicates of the communicator.
TEST(MpiTransportTest, LargeTagsAreDividedAmongCommunicators) {
  const auto few = MakeMpiTransport(MPI_COMM_WORLD, {.max_tag = (1 << 27) - 1});
  ASSERT_TRUE(few.ok()) << few.status();
  for (size_t i = 0; i < ConformanceCases().size(); ++i) ConformanceCases()[i].run(**few, ConformanceTag(i));
  // Tags that are equal modulo the limit are different tags.
  Transport& t = **few;
  std::vector<std::byte> sent[2] = {std::vector<std::byte>(4, std::byte{1}),
                                    std::vector<std::byte>(4, std::byte{2})};
  std::vector<std::byte> got[2] = {std::vector<std::byte>(4), std::vector<std::byte>(4)};
  const int next = (t.rank() + 1) % t.size(), previous = (t.rank() + t.size() - 1) % t.size();
  const TransferId sends[2] = {*t.Send(next, 5, sent[0]), *t.Send(next, 5 + (1 << 27), sent[1])};
  const TransferId receives[2] = {*t.Receive(previous, 5 + (1 << 27), got[0]),
                                  *t.Receive(previous, 5, got[1])};
  for (const TransferId id : receives) EXPECT_TRUE(Wait(t, id, 30).ok());
  for (const TransferId id : sends) EXPECT_TRUE(Wait(t, id, 30).ok());
  EXPECT_EQ(got[0][0], std::byte{2});
  EXPECT_EQ(got[1][0], std::byte{1});
}

// Open MPI over UCX has 2^23 tags, and a program may have many communicators, whose numbers are limited.
TEST(MpiTransportTest, ATransportOfFewTagsNeedsFewDuplicates) {
  const int before = duplicates;
  const auto made = MakeMpiTransport(MPI_COMM_WORLD, {.max_tag = (1 << 23) - 1, .tag_limit = 1 << 24});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(duplicates - before, 2);
  Transport& t = **made;
  std::vector<std::byte> sent(4, std::byte{3}), got(4);
  const int next = (t.rank() + 1) % t.size(), previous = (t.rank() + t.size() - 1) % t.size();
  const TransferId send = *t.Send(next, (1 << 24) - 1, sent),
                   receive = *t.Receive(previous, (1 << 24) - 1, got);
  EXPECT_TRUE(Wait(t, receive, 30).ok() && Wait(t, send, 30).ok());
  EXPECT_EQ(got, sent);
  EXPECT_EQ(t.Send(next, 1 << 24, sent).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(t.Receive(next, 1 << 24, got).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(t.Exchange(next, 1 << 24, sent, got, 1).code(), StatusCode::kInvalidArgument);
}

TEST(MpiTransportTest, RefusesALibraryWithTooFewTags) {
  const auto made = MakeMpiTransport(MPI_COMM_WORLD, {.max_tag = 32767});
  EXPECT_EQ(made.status().code(), StatusCode::kUnimplemented) << made.status();
}

TEST(MpiTransportTest, OpensTheWorldOfTheLauncher) {
  const auto opened = OpenTransport("");
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ((*opened)->name(), "mpi");
  EXPECT_EQ((*opened)->size(), World().size());
  EXPECT_EQ((*opened)->rank(), World().rank());
}

TEST(MpiTransportTest, MessagesOfTwoTransportsDoNotMix) {
  const auto other = MakeMpiTransport(MPI_COMM_WORLD);
  ASSERT_TRUE(other.ok()) << other.status();
  Transport* const ends[2] = {&World(), other->get()};
  std::vector<std::byte> got[2] = {std::vector<std::byte>(4), std::vector<std::byte>(4)};
  const std::vector<std::byte> sent[2] = {std::vector<std::byte>(4, std::byte{1}),
                                          std::vector<std::byte>(4, std::byte{2})};
  const int next = (World().rank() + 1) % World().size();
  const int previous = (World().rank() + World().size() - 1) % World().size();
  TransferId ids[4];
  for (int i = 0; i < 2; ++i) ids[i] = *ends[i]->Send(next, 900000, sent[i]);
  for (int i = 1; i >= 0; --i) ids[2 + i] = *ends[i]->Receive(previous, 900000, got[i]);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Wait(*ends[i % 2], ids[i], 30).ok());
  for (int i = 0; i < 2; ++i) EXPECT_EQ(got[i], sent[i]);
}

TEST(MpiTransportTest, CollectivesAgreeWithBruteForce) {
  ConformanceOptions options = ConformanceOf(World().size(), /*large_ranks=*/4);
  options.samples = 1;
  options.first_tag = Tag{1} << kCommunicatorTagBits;
  const ConformanceReport report = CheckCollectives(World(), options);
  EXPECT_TRUE(report.first_failure.ok()) << report.first_failure;
  EXPECT_GT(report.runs, 0);
  RecordProperty("collectives", std::to_string(report.runs));
}

TEST(MpiTransportTest, DispatchAndCombineAgreeWithBruteForce) { CheckDispatchAndCombine(World()); }

}  // namespace
}  // namespace moesaic::comm

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) {
    delete testing::UnitTest::GetInstance()->listeners().Release(
        testing::UnitTest::GetInstance()->listeners().default_result_printer());
  }
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed;
}
