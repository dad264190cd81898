// Our collectives and those of the MPI library get the same inputs, in the same run, under mpirun.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/transport/mpi_transport.h"

namespace moesaic::comm {
namespace {

struct MpiTypeCase {
  tensor::DType dtype;
  MPI_Datatype mpi;
};

template <typename T>
MpiTypeCase TypeCase();
template <>
MpiTypeCase TypeCase<float>() {
  return {tensor::DType::kF32, MPI_FLOAT};
}
template <>
MpiTypeCase TypeCase<double>() {
  return {tensor::DType::kF64, MPI_DOUBLE};
}
template <>
MpiTypeCase TypeCase<int8_t>() {
  return {tensor::DType::kI8, MPI_INT8_T};
}
template <>
MpiTypeCase TypeCase<uint8_t>() {
  return {tensor::DType::kU8, MPI_UINT8_T};
}
template <>
MpiTypeCase TypeCase<int32_t>() {
  return {tensor::DType::kI32, MPI_INT32_T};
}
template <>
MpiTypeCase TypeCase<int64_t>() {
  return {tensor::DType::kI64, MPI_INT64_T};
}

struct OpCase {
  ReduceOp op;
  MPI_Op mpi;
};

// Inputs whose reductions do not depend on the order of operations: small integers, and powers of two for
// products, which wrap in types of 8 bits.
template <typename T>
std::vector<T> InputsFor(ReduceOp op, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<T> made(static_cast<size_t>(count));
  for (T& value : made) {
    value = op == ReduceOp::kProduct ? static_cast<T>(1 + random() % 2) : static_cast<T>(random() % 13);
  }
  return made;
}

std::vector<int> OffsetsBefore(const std::vector<int>& counts) {
  std::vector<int> offsets(counts.size(), 0);
  std::partial_sum(counts.begin(), counts.end() - 1, offsets.begin() + 1);
  return offsets;
}

std::vector<int64_t> Wide(const std::vector<int>& counts) { return {counts.begin(), counts.end()}; }

template <typename T>
class MpiAgreementTest : public testing::Test {
 protected:
  MpiAgreementTest() : world_(*MakeMpiTransport(MPI_COMM_WORLD)) {
    ours_ =
        *Communicator::Create(*world_, Topology::Flat(size(), {.latency_s = 1e-6, .bytes_per_s = 5e9}), {});
  }

  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  // Even counts and uneven ones with empty parts. The large count runs with few ranks.
  std::vector<std::vector<int>> Counts() const {
    std::vector<std::vector<int>> all;
    for (const int part : {0, 1, 3, 1001, size() <= 4 ? 100003 : 5003}) {
      all.emplace_back(size(), part);
      std::vector<int> uneven(size());
      for (int to = 0; to < size(); ++to) uneven[to] = to % 3 == 1 ? 0 : part + to;
      all.push_back(std::move(uneven));
    }
    return all;
  }
  static std::span<const std::byte> In(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
  }
  static std::span<std::byte> Out(std::vector<T>& values) {
    return std::as_writable_bytes(std::span(values));
  }

  const MpiTypeCase type_ = TypeCase<T>();
  std::unique_ptr<Transport> world_;
  std::unique_ptr<Communicator> ours_;
};

using MpiTypes = testing::Types<float, double, int8_t, uint8_t, int32_t, int64_t>;
TYPED_TEST_SUITE(MpiAgreementTest, MpiTypes);

TYPED_TEST(MpiAgreementTest, Reductions) {
  const OpCase ops[] = {{ReduceOp::kSum, MPI_SUM},
                        {ReduceOp::kProduct, MPI_PROD},
                        {ReduceOp::kMin, MPI_MIN},
                        {ReduceOp::kMax, MPI_MAX}};
  for (const std::vector<int>& counts : this->Counts()) {
    const int total = std::accumulate(counts.begin(), counts.end(), 0);
    for (const OpCase& op : ops) {
      SCOPED_TRACE(testing::Message() << total << " elements, operation " << Name(op.op));
      const auto in = InputsFor<TypeParam>(op.op, total, static_cast<uint32_t>(total + this->rank()));
      std::vector<TypeParam> got(total), expected(total);
      EXPECT_TRUE(this->ours_->AllReduce(this->In(in), this->Out(got), this->type_.dtype, op.op).ok());
      MPI_Allreduce(in.data(), expected.data(), total, this->type_.mpi, op.mpi, MPI_COMM_WORLD);
      EXPECT_EQ(got, expected) << "AllReduce";
      std::vector<TypeParam> part(counts[this->rank()]), expected_part(part);
      EXPECT_TRUE(
          this->ours_->ReduceScatter(this->In(in), this->Out(part), Wide(counts), this->type_.dtype, op.op)
              .ok());
      MPI_Reduce_scatter(in.data(), expected_part.data(), counts.data(), this->type_.mpi, op.mpi,
                         MPI_COMM_WORLD);
      EXPECT_EQ(part, expected_part) << "ReduceScatter";
    }
  }
}

TYPED_TEST(MpiAgreementTest, Gathers) {
  for (const std::vector<int>& counts : this->Counts()) {
    const int total = std::accumulate(counts.begin(), counts.end(), 0);
    SCOPED_TRACE(testing::Message() << total << " elements");
    const int own_count = counts[this->rank()];
    const auto own = InputsFor<TypeParam>(ReduceOp::kSum, own_count, static_cast<uint32_t>(this->rank()));
    std::vector<TypeParam> got(total), expected(total);
    EXPECT_TRUE(this->ours_->AllGather(this->In(own), this->Out(got), Wide(counts), this->type_.dtype).ok());
    MPI_Allgatherv(own.data(), own_count, this->type_.mpi, expected.data(), counts.data(),
                   OffsetsBefore(counts).data(), this->type_.mpi, MPI_COMM_WORLD);
    EXPECT_EQ(got, expected) << "AllGather";
    for (int root = 0; root < this->size(); ++root) {
      std::vector<TypeParam> sent(counts[root]), received(sent);
      if (root == this->rank()) sent = own;
      EXPECT_TRUE(this->ours_->Broadcast(this->In(sent), this->Out(received), root, this->type_.dtype).ok());
      MPI_Bcast(sent.data(), counts[root], this->type_.mpi, root, MPI_COMM_WORLD);
      EXPECT_EQ(received, sent) << "Broadcast from rank " << root;
    }
    EXPECT_TRUE(this->ours_->Barrier().ok());
  }
}

TYPED_TEST(MpiAgreementTest, AllToAll) {
  for (const std::vector<int>& counts : this->Counts()) {
    const int part = counts[0], total = part * this->size();
    SCOPED_TRACE(testing::Message() << part << " elements per pair of ranks");
    const auto in = InputsFor<TypeParam>(ReduceOp::kSum, total, static_cast<uint32_t>(this->rank()));
    std::vector<TypeParam> got(total), expected(total);
    EXPECT_TRUE(this->ours_->AllToAll(this->In(in), this->Out(got), this->type_.dtype).ok());
    MPI_Alltoall(in.data(), part, this->type_.mpi, expected.data(), part, this->type_.mpi, MPI_COMM_WORLD);
    EXPECT_EQ(got, expected);
  }
}

TYPED_TEST(MpiAgreementTest, AllToAllv) {
  for (const std::vector<int>& counts : this->Counts()) {
    // Rank r sends counts[(r + to) % size] elements to rank `to`, and so receives as many from it.
    std::vector<int> pairs(counts);
    for (int to = 0; to < this->size(); ++to) pairs[to] = counts[(this->rank() + to) % this->size()];
    const int total = std::accumulate(pairs.begin(), pairs.end(), 0);
    SCOPED_TRACE(testing::Message() << total << " elements per rank");
    const auto in = InputsFor<TypeParam>(ReduceOp::kSum, total, static_cast<uint32_t>(this->rank()));
    std::vector<TypeParam> got(total), expected(total);
    std::vector<int64_t> received(pairs.size(), -1);
    EXPECT_TRUE(
        this->ours_->AllToAllv(this->In(in), Wide(pairs), this->Out(got), received, this->type_.dtype).ok());
    const std::vector<int> offsets = OffsetsBefore(pairs);
    MPI_Alltoallv(in.data(), pairs.data(), offsets.data(), this->type_.mpi, expected.data(), pairs.data(),
                  offsets.data(), this->type_.mpi, MPI_COMM_WORLD);
    EXPECT_EQ(got, expected);
    EXPECT_EQ(received, Wide(pairs));
  }
}

}  // namespace
}  // namespace moesaic::comm
