// Runs under mpirun: every rank is a process that runs all tests.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/collectives/conformance.h"
#include "comm/transport/conformance.h"
#include "comm/transport/mpi_transport.h"
#include "comm/transport/open_transport.h"

namespace moesaic::comm {
namespace {

// One transport for all cases: the tags differ.
Transport& World() {
  static const std::unique_ptr<Transport> world = *MakeMpiTransport(MPI_COMM_WORLD);
  return *world;
}

class MpiConformanceTest : public testing::TestWithParam<size_t> {};

TEST_P(MpiConformanceTest, Holds) { ConformanceCases()[GetParam()].run(World(), ConformanceTag(GetParam())); }

INSTANTIATE_TEST_SUITE_P(All, MpiConformanceTest, testing::Range<size_t>(0, ConformanceCases().size()),
                         [](const auto& info) { return ConformanceCases()[info.param].name; });

// A library with few tags, as of UCX inside MPI (2^23), spreads them over duplicates of the communicator.
TEST(MpiTransportTest, TagsAreSplitWhereMpiHasFew) {
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

TEST(MpiTransportTest, TwoTransportsDoNotMix) {
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
  const ConformanceReport report =
      CheckCollectives(World(), {.max_count = 5000, .sizes = 1, .first_tag = 1 << 24});
  EXPECT_TRUE(report.first_failure.ok()) << report.first_failure;
  EXPECT_GT(report.runs, 0);
}

// Small integers in f32: sums are exact, so results do not depend on the order of additions.
std::vector<float> Integers(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> made(count);
  for (float& value : made) value = static_cast<float>(static_cast<int>(random() % 2001) - 1000);
  return made;
}

// Our collectives and those of the MPI library get the same inputs, in the same run.
TEST(MpiTransportTest, CollectivesAgreeWithThoseOfMpi) {
  constexpr tensor::DType kF32 = tensor::DType::kF32;
  Transport& t = World();
  CommunicatorOptions options;
  options.first_tag = Tag{2} << kCommunicatorTagBits;
  const auto made =
      Communicator::Create(t, Topology::Flat(t.size(), {.latency_s = 1e-6, .bytes_per_s = 5e9}), options);
  ASSERT_TRUE(made.ok()) << made.status();
  Communicator& ours = **made;
  const auto rank = static_cast<size_t>(t.rank()), size = static_cast<size_t>(t.size());
  for (const size_t part : {0, 1, 3, 1000, 100003}) {
    SCOPED_TRACE(part);
    const auto count = static_cast<int>(part), total = static_cast<int>(part * size);
    const std::vector<int64_t> counts(size, count);
    const std::vector<float> in = Integers(part * size, static_cast<uint32_t>(part + rank));
    const std::vector<float> own(in.begin(), in.begin() + count);
    std::vector<float> got(part * size), expected(part * size), got_part(part), expected_part(part);
    const auto input = std::as_bytes(std::span(in)), own_input = std::as_bytes(std::span(own));
    const auto output = std::as_writable_bytes(std::span(got));
    const auto part_output = std::as_writable_bytes(std::span(got_part));

    EXPECT_TRUE(ours.AllReduce(input, output, kF32).ok());
    MPI_Allreduce(in.data(), expected.data(), total, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(got, expected) << "AllReduce, sum";
    EXPECT_TRUE(ours.AllReduce(input, output, kF32, ReduceOp::kMax).ok());
    MPI_Allreduce(in.data(), expected.data(), total, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
    EXPECT_EQ(got, expected) << "AllReduce, maximum";
    EXPECT_TRUE(ours.ReduceScatter(input, part_output, counts, kF32).ok());
    MPI_Reduce_scatter_block(in.data(), expected_part.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(got_part, expected_part) << "ReduceScatter";
    EXPECT_TRUE(ours.AllGather(own_input, output, counts, kF32).ok());
    MPI_Allgather(own.data(), count, MPI_FLOAT, expected.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
    EXPECT_EQ(got, expected) << "AllGather";
    EXPECT_TRUE(ours.AllToAll(input, output, kF32).ok());
    MPI_Alltoall(in.data(), count, MPI_FLOAT, expected.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
    EXPECT_EQ(got, expected) << "AllToAll";
    for (int root = 0; root < t.size(); ++root) {
      EXPECT_TRUE(ours.Broadcast(own_input, part_output, root, kF32).ok());
      expected_part = own;
      MPI_Bcast(expected_part.data(), count, MPI_FLOAT, root, MPI_COMM_WORLD);
      EXPECT_EQ(got_part, expected_part) << "Broadcast from rank " << root;
    }
  }
}

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
