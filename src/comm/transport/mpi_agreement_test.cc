// Our collectives and those of the MPI library get the same inputs, in the same run, under mpirun.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/collectives/topology_test_support.h"
#include "comm/topology/topology_builder.h"
#include "comm/transport/mpi_transport.h"

namespace moesaic::comm {
namespace {

// Open MPI 4.1 has no types of 16-bit numbers: it moves their bits as MPI_UINT16_T, and reduces them by
// operations that this test defines. Sums and comparisons are those of the values in f32, rounded to the
// type.
template <typename Format>
struct Number16 {
  Number16() = default;
  explicit Number16(float value) : bits(Format::Bits(value)) {}
  explicit operator float() const { return Format::Value(bits); }
  bool operator==(const Number16&) const = default;

  uint16_t bits = 0;
};
struct HalfFormat {
  static uint16_t Bits(float value) { return tensor::FloatToHalf(value); }
  static float Value(uint16_t bits) { return tensor::HalfToFloat(bits); }
};
struct Bf16Format {
  static uint16_t Bits(float value) { return tensor::ToBF16(value).bits; }
  static float Value(uint16_t bits) { return tensor::ToFloat(tensor::BF16{bits}); }
};
using Half = Number16<HalfFormat>;
using Bf16 = Number16<Bf16Format>;
template <typename T>
inline constexpr bool kIs16 = std::is_same_v<T, Half> || std::is_same_v<T, Bf16>;

template <typename T, ReduceOp kOp>
void Reduce16(void* in, void* in_out, int* count, MPI_Datatype* /*type*/) {
  const T* const a = static_cast<const T*>(in);
  T* const b = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) {
    const auto x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    if constexpr (kOp == ReduceOp::kSum) b[i] = T(x + y);
    if constexpr (kOp == ReduceOp::kProduct) b[i] = T(x * y);
    if constexpr (kOp == ReduceOp::kMin) b[i] = T(std::min(x, y));
    if constexpr (kOp == ReduceOp::kMax) b[i] = T(std::max(x, y));
  }
}

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

template <>
MpiTypeCase TypeCase<Half>() {
  return {tensor::DType::kF16, MPI_UINT16_T};
}
template <>
MpiTypeCase TypeCase<Bf16>() {
  return {tensor::DType::kBF16, MPI_UINT16_T};
}

struct OpCase {
  ReduceOp op;
  MPI_Op mpi;
};

template <typename T, ReduceOp kOp>
OpCase UserOp() {
  MPI_Op made = MPI_OP_NULL;
  MPI_Op_create(&Reduce16<T, kOp>, /*commute=*/1, &made);
  return {kOp, made};
}

// Operations of MPI for a type. Those of the user are freed.
template <typename T>
class MpiOps {
 public:
  MpiOps() {
    if constexpr (kIs16<T>) {
      all_ = {UserOp<T, ReduceOp::kSum>(), UserOp<T, ReduceOp::kProduct>(), UserOp<T, ReduceOp::kMin>(),
              UserOp<T, ReduceOp::kMax>()};
    } else {
      all_ = {{ReduceOp::kSum, MPI_SUM},
              {ReduceOp::kProduct, MPI_PROD},
              {ReduceOp::kMin, MPI_MIN},
              {ReduceOp::kMax, MPI_MAX}};
    }
  }
  MpiOps(const MpiOps&) = delete;
  MpiOps& operator=(const MpiOps&) = delete;
  ~MpiOps() {
    if constexpr (kIs16<T>) {
      for (OpCase& op : all_) MPI_Op_free(&op.mpi);
    }
  }
  const std::vector<OpCase>& all() const { return all_; }

 private:
  std::vector<OpCase> all_;
};

template <typename T>
T Number(uint32_t value) {
  if constexpr (kIs16<T>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// MOESAIC_CONFORMANCE=whole in the environment selects all sizes on all shapes.
bool IsWhole() {
  const char* const text = std::getenv("MOESAIC_CONFORMANCE");
  return text != nullptr && std::string_view(text) == "whole";
}
constexpr int kLargeCount = (1 << 20) + 3;  // an odd tail

constexpr Link kInside = {1e-6, 1e10}, kBetween = {2e-5, 1.25e8};

// Nodes of two sockets of pairs; the last ones may be smaller.
Topology ThreeLevels(int ranks) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "cluster", kBetween, 0);
  for (int rank = 0; rank < ranks;) {
    const int node = builder.AddGroup(0, "node", {5e-6, 1e9}, 0);
    for (int socket = 0; socket < 2 && rank < ranks; ++socket) {
      const int of_socket = builder.AddGroup(node, "socket", kInside, 0);
      for (int i = 0; i < 2 && rank < ranks; ++i, ++rank) builder.AddDevice(of_socket, 0, 0);
    }
  }
  return builder.Finish("three levels", "test", {DeviceType{"device", {}, 1e12, 0}});
}

struct Shape {
  std::string name;
  Topology topology;
};

// One level, and those of 1 + n, 2 + 2 + ... + 1 and three levels that the ranks suffice for.
std::vector<Shape> ShapesOf(int ranks) {
  std::vector<Shape> shapes = {{"flat", Topology::Flat(ranks, {.latency_s = 1e-6, .bytes_per_s = 5e9})}};
  if (ranks >= 3) shapes.push_back({"1 + n", GroupTopology({1, ranks - 1}, kInside, kBetween)});
  if (ranks >= 4) {
    std::vector<int> pairs(ranks / 2, 2);
    if (ranks % 2 == 1) pairs.push_back(1);
    shapes.push_back({"pairs", GroupTopology(pairs, kInside, kBetween)});
  }
  if (ranks >= 5) shapes.push_back({"three levels", ThreeLevels(ranks)});
  return shapes;
}

// Inputs whose reductions do not depend on the order of operations: small integers, whose sums over 9 ranks
// are exact in bf16, too; and powers of two for products, which wrap in types of 8 bits.
template <typename T>
std::vector<T> InputsFor(ReduceOp op, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<T> made(static_cast<size_t>(count));
  for (T& value : made) {
    value = Number<T>(op == ReduceOp::kProduct ? 1 + random() % 2 : random() % 13);
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
  MpiAgreementTest() : world_(*MakeMpiTransport(MPI_COMM_WORLD)), shapes_(ShapesOf(world_->size())) {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      CommunicatorOptions options;
      options.first_tag = static_cast<Tag>(i) << kCommunicatorTagBits;
      communicators_.push_back(*Communicator::Create(*world_, shapes_[i].topology, options));
    }
  }

  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  // Even counts and uneven ones with empty parts. A sample has few counts with groups, and the largest one
  // with few ranks: on one shape for each type.
  std::vector<std::vector<int>> Counts(size_t shape) const {
    std::vector<int> parts = {0, 1, 3, 1001, size() <= 4 ? 100003 : 5003};
    if (shape > 0 && !IsWhole()) parts = {3, 1001};
    std::vector<std::vector<int>> all;
    for (const int part : parts) {
      all.emplace_back(size(), part);
      std::vector<int> uneven(size());
      for (int to = 0; to < size(); ++to) uneven[to] = to % 3 == 1 ? 0 : part + to;
      all.push_back(std::move(uneven));
    }
    const auto of_type = static_cast<size_t>(type_.dtype) % shapes_.size();
    if (IsWhole() || (size() <= 4 && shape == of_type)) {
      std::vector<int> large(size(), kLargeCount / size());
      large.back() += kLargeCount % size();
      all.push_back(std::move(large));
    }
    return all;
  }
  // Calls check(communicator, counts) for each shape.
  template <typename Check>
  void ForEach(const Check& check) {
    for (size_t shape = 0; shape < shapes_.size(); ++shape) {
      for (const std::vector<int>& counts : Counts(shape)) {
        SCOPED_TRACE(testing::Message() << shapes_[shape].name << ", "
                                        << std::accumulate(counts.begin(), counts.end(), 0) << " elements");
        check(*communicators_[shape], counts);
      }
    }
  }
  static std::span<const std::byte> In(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
  }
  static std::span<std::byte> Out(std::vector<T>& values) {
    return std::as_writable_bytes(std::span(values));
  }

  const MpiTypeCase type_ = TypeCase<T>();
  const MpiOps<T> ops_;
  std::unique_ptr<Transport> world_;
  const std::vector<Shape> shapes_;
  std::vector<std::unique_ptr<Communicator>> communicators_;  // by shape
};

using MpiTypes = testing::Types<float, double, int8_t, uint8_t, int32_t, int64_t, Half, Bf16>;
TYPED_TEST_SUITE(MpiAgreementTest, MpiTypes);

TYPED_TEST(MpiAgreementTest, ReductionsEqualThoseOfMpi) {
  this->ForEach([&](Communicator& ours, const std::vector<int>& counts) {
    const int total = std::accumulate(counts.begin(), counts.end(), 0);
    for (const OpCase& op : this->ops_.all()) {
      SCOPED_TRACE(testing::Message() << "operation " << Name(op.op));
      const auto in = InputsFor<TypeParam>(op.op, total, static_cast<uint32_t>(total + this->rank()));
      std::vector<TypeParam> got(total), expected(total);
      EXPECT_TRUE(ours.AllReduce(this->In(in), this->Out(got), this->type_.dtype, op.op).ok());
      MPI_Allreduce(in.data(), expected.data(), total, this->type_.mpi, op.mpi, MPI_COMM_WORLD);
      EXPECT_TRUE(got == expected) << "AllReduce";
      std::vector<TypeParam> part(counts[this->rank()]), expected_part(part);
      EXPECT_TRUE(
          ours.ReduceScatter(this->In(in), this->Out(part), Wide(counts), this->type_.dtype, op.op).ok());
      MPI_Reduce_scatter(in.data(), expected_part.data(), counts.data(), this->type_.mpi, op.mpi,
                         MPI_COMM_WORLD);
      EXPECT_TRUE(part == expected_part) << "ReduceScatter";
    }
  });
}

template <typename T>
class MpiRealAgreementTest : public MpiAgreementTest<T> {};

using RealTypes = testing::Types<float, Half, Bf16>;
TYPED_TEST_SUITE(MpiRealAgreementTest, RealTypes);

// A sum of n numbers rounds n - 1 times, by a fraction of at most u each, in any order (Higham, Accuracy and
// Stability of Numerical Algorithms, section 4.2). So it differs from the sum in f64, which MPI computes, by
// at most ((1 + u)^(n - 1) - 1) times the sum of the absolute values.
TYPED_TEST(MpiRealAgreementTest, SumsAreWithinTheRoundingBound) {
  constexpr double kUnit = std::is_same_v<TypeParam, float>  ? 0x1p-24
                           : std::is_same_v<TypeParam, Half> ? 0x1p-11
                                                             : 0x1p-8;
  // Sums of 16-bit numbers are rounded to f32 first; and the reference rounds, too.
  const double factor = std::pow(1 + kUnit * (1 + 0x1p-10), this->size() - 1) - 1;
  this->ForEach([&](Communicator& ours, const std::vector<int>& counts) {
    const int total = std::accumulate(counts.begin(), counts.end(), 0);
    std::mt19937 random(static_cast<uint32_t>(total + 31 * this->rank()));
    std::normal_distribution<float> normal;
    std::vector<TypeParam> in(total), got(total);
    std::vector<double> values(total), absolute(total), sums(total), absolute_sums(total);
    for (int i = 0; i < total; ++i) {
      in[i] = TypeParam(normal(random));
      values[i] = static_cast<double>(static_cast<float>(in[i]));
      absolute[i] = std::abs(values[i]);
    }
    EXPECT_TRUE(ours.AllReduce(this->In(in), this->Out(got), this->type_.dtype, ReduceOp::kSum).ok());
    MPI_Allreduce(values.data(), sums.data(), total, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(absolute.data(), absolute_sums.data(), total, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    int outside = 0;
    for (int i = 0; i < total; ++i) {
      const double error = std::abs(static_cast<double>(static_cast<float>(got[i])) - sums[i]);
      if (!(error <= factor * absolute_sums[i])) ++outside;
    }
    EXPECT_EQ(outside, 0);
  });
}

TYPED_TEST(MpiAgreementTest, GathersEqualThoseOfMpi) {
  this->ForEach([&](Communicator& ours, const std::vector<int>& counts) {
    const int total = std::accumulate(counts.begin(), counts.end(), 0);
    const int own_count = counts[this->rank()];
    const auto own = InputsFor<TypeParam>(ReduceOp::kSum, own_count, static_cast<uint32_t>(this->rank()));
    std::vector<TypeParam> got(total), expected(total);
    EXPECT_TRUE(ours.AllGather(this->In(own), this->Out(got), Wide(counts), this->type_.dtype).ok());
    MPI_Allgatherv(own.data(), own_count, this->type_.mpi, expected.data(), counts.data(),
                   OffsetsBefore(counts).data(), this->type_.mpi, MPI_COMM_WORLD);
    EXPECT_TRUE(got == expected) << "AllGather";
    for (int root = 0; root < this->size(); ++root) {
      std::vector<TypeParam> sent(counts[root]), received(sent);
      if (root == this->rank()) sent = own;
      EXPECT_TRUE(ours.Broadcast(this->In(sent), this->Out(received), root, this->type_.dtype).ok());
      MPI_Bcast(sent.data(), counts[root], this->type_.mpi, root, MPI_COMM_WORLD);
      EXPECT_TRUE(received == sent) << "Broadcast from rank " << root;
    }
    EXPECT_TRUE(ours.Barrier().ok());
  });
}

TYPED_TEST(MpiAgreementTest, AllToAllEqualsThatOfMpi) {
  this->ForEach([&](Communicator& ours, const std::vector<int>& counts) {
    const int part = counts[0], total = part * this->size();
    const auto in = InputsFor<TypeParam>(ReduceOp::kSum, total, static_cast<uint32_t>(this->rank()));
    std::vector<TypeParam> got(total), expected(total);
    EXPECT_TRUE(ours.AllToAll(this->In(in), this->Out(got), this->type_.dtype).ok());
    MPI_Alltoall(in.data(), part, this->type_.mpi, expected.data(), part, this->type_.mpi, MPI_COMM_WORLD);
    EXPECT_TRUE(got == expected);
  });
}

TYPED_TEST(MpiAgreementTest, AllToAllvEqualsThatOfMpi) {
  this->ForEach([&](Communicator& ours, const std::vector<int>& counts) {
    // Rank r sends counts[(r + to) % size] elements to rank `to`, and so receives as many from it.
    std::vector<int> pairs(counts);
    for (int to = 0; to < this->size(); ++to) pairs[to] = counts[(this->rank() + to) % this->size()];
    const int total = std::accumulate(pairs.begin(), pairs.end(), 0);
    const auto in = InputsFor<TypeParam>(ReduceOp::kSum, total, static_cast<uint32_t>(this->rank()));
    std::vector<TypeParam> got(total), expected(total);
    std::vector<int64_t> received(pairs.size(), -1);
    EXPECT_TRUE(ours.AllToAllv(this->In(in), Wide(pairs), this->Out(got), received, this->type_.dtype).ok());
    const std::vector<int> offsets = OffsetsBefore(pairs);
    MPI_Alltoallv(in.data(), pairs.data(), offsets.data(), this->type_.mpi, expected.data(), pairs.data(),
                  offsets.data(), this->type_.mpi, MPI_COMM_WORLD);
    EXPECT_TRUE(got == expected);
    EXPECT_EQ(received, Wide(pairs));
  });
}

}  // namespace
}  // namespace moesaic::comm
