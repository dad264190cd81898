// Operators on matrices whose offsets of elements exceed 32 bits, against the same rows close together.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "science/edge_attention.h"
#include "science/message_ops.h"
#include "science/test_graphs.h"

namespace moesaic::graph {
namespace {

constexpr Reduce kAllReduces[] = {Reduce::kSum, Reduce::kMean, Reduce::kMax, Reduce::kMin};

// Zeros, of which only the pages that are written take memory.
template <typename T>
class SparseArray {
 public:
  explicit SparseArray(int64_t size) : bytes_(static_cast<size_t>(size) * sizeof(T)) {
    void* mapped =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return;
    data_ = static_cast<T*>(mapped);
    madvise(mapped, bytes_, MADV_NOHUGEPAGE);  // else a written row may take 2 MiB
  }
  ~SparseArray() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  SparseArray(const SparseArray&) = delete;
  SparseArray& operator=(const SparseArray&) = delete;
  T* data() const { return data_; }

 private:
  size_t bytes_;
  T* data_ = nullptr;
};

// A matrix whose rows are so far apart that offsets of elements exceed 2^31.
class FarRows {
 public:
  explicit FarRows(const TestFeatures& x, int64_t stride = int64_t{1} << 30)
      : rows_(x.rows()), cols_(x.cols()), stride_(stride), values_(rows_ * stride) {
    for (int64_t r = 0; ok() && r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) values_.data()[r * stride_ + c] = x.at(r, c);
    }
  }
  bool ok() const { return values_.data() != nullptr; }
  Output out() const { return {values_.data(), tensor::DType::kF32, rows_, cols_, stride_}; }
  void ExpectEquals(const TestFeatures& want) const {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c)
        ASSERT_EQ(values_.data()[r * stride_ + c], want.at(r, c)) << r << " " << c;
    }
  }

 private:
  int64_t rows_, cols_, stride_;
  SparseArray<float> values_;
};

// Bytes of address space of the largest test.
constexpr int64_t kAddressSpace = int64_t{300} << 30;

class OffsetsTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  void SetUp() override {
    if (SparseArray<std::byte>(kAddressSpace).data() == nullptr)
      GTEST_SKIP() << "the limit of address space or of unwritten memory is below 300 GiB";
  }
  TestFeatures Random(int64_t rows, int64_t cols = 20) {
    return TestFeatures::Random(&rng_, tensor::DType::kF32, rows, cols);
  }

  std::unique_ptr<Workspace> workspace_ = MakeWorkspace(GetParam(), 2);
  Context ctx_ = workspace_->context();
  std::mt19937 rng_{5};
};
INSTANTIATE_TEST_SUITE_P(Isa, OffsetsTest, testing::ValuesIn(GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(OffsetsTest, OffsetsOfElementsMayExceed32Bits) {
  const Graph graph = RandomEdges(&rng_, 5, 5, 12).Build();
  const TestFeatures u = Random(5), e = Random(12);
  const FarRows far_u(u), far_e(e), far_nodes(u), far_edges(e);
  ASSERT_TRUE(far_u.ok() && far_e.ok() && far_nodes.ok() && far_edges.ok());
  TestFeatures nodes(tensor::DType::kF32, 5, 20), edges(tensor::DType::kF32, 12, 20);
  for (const Reduce reduce : kAllReduces) {
    for (const bool far : {false, true}) {
      ASSERT_TRUE(Gspmm(ctx_, graph,
                        {.message = Message::kUMulE,
                         .reduce = reduce,
                         .u = far ? far_u.out() : u.view(),
                         .e = far ? far_e.out() : e.view(),
                         .out = far ? far_nodes.out() : nodes.out(),
                         .options = {}})
                      .ok());
    }
    far_nodes.ExpectEquals(nodes);
  }
  for (const bool far : {false, true}) {
    ASSERT_TRUE(Gsddmm(ctx_, graph,
                       {.op = EdgeOp::kMul,
                        .lhs = far ? far_u.out() : u.view(),
                        .rhs = far ? far_e.out() : e.view(),
                        .lhs_target = Target::kSource,
                        .rhs_target = Target::kEdge,
                        .out = far ? far_edges.out() : edges.out()})
                    .ok());
  }
  far_edges.ExpectEquals(edges);
  for (const bool far : {false, true}) {
    ASSERT_TRUE(SegmentSoftmax(ctx_, graph.by_destination(), far ? far_e.out() : e.view(),
                               far ? far_edges.out() : edges.out())
                    .ok());
  }
  far_edges.ExpectEquals(edges);
  for (const bool far : {false, true}) {
    ASSERT_TRUE(EdgeAttention(ctx_, graph,
                              {.heads = 4,
                               .q = far ? far_u.out() : u.view(),
                               .k = far ? far_e.out() : e.view(),
                               .v = far ? far_e.out() : e.view(),
                               .bias = {},
                               .k_target = Target::kEdge,
                               .v_target = Target::kEdge,
                               .out = far ? far_nodes.out() : nodes.out()})
                    .ok());
  }
  far_nodes.ExpectEquals(nodes);
}

TEST_P(OffsetsTest, OffsetsOfGradientsOfMessagesMayExceed32Bits) {
  const Graph graph = RandomEdges(&rng_, 5, 5, 12).Build();
  const TestFeatures u = Random(5), e = Random(12), grad = Random(5), edge_grad = Random(12);
  const FarRows far_u(u), far_e(e), far_grad(grad), far_edge_grad(edge_grad), far_nodes(u), far_u_grad(u),
      far_e_grad(e);
  ASSERT_TRUE(far_u.ok() && far_e.ok() && far_grad.ok() && far_edge_grad.ok() && far_nodes.ok());
  ASSERT_TRUE(far_u_grad.ok() && far_e_grad.ok());
  TestFeatures nodes(tensor::DType::kF32, 5, 20), u_grad(tensor::DType::kF32, 5, 20),
      e_grad(tensor::DType::kF32, 12, 20);
  for (const Message message : {Message::kUMulE, Message::kUDivE, Message::kUDotE}) {  // 20 heads of a column
    for (const Reduce reduce : kAllReduces) {
      std::vector<int32_t> arg(IsExtreme(reduce) ? 5 * 20 : 0);
      for (const bool far : {false, true}) {
        const GspmmParams forward = {.message = message,
                                     .reduce = reduce,
                                     .u = far ? far_u.out() : u.view(),
                                     .e = far ? far_e.out() : e.view(),
                                     .out = far ? far_nodes.out() : nodes.out(),
                                     .options = {.arg = arg}};
        ASSERT_TRUE(Gspmm(ctx_, graph, forward).ok());
        ASSERT_TRUE(GspmmBackward(ctx_, graph, forward,
                                  {.out_grad = far ? far_grad.out() : grad.view(),
                                   .arg = arg,
                                   .u_grad = far ? far_u_grad.out() : u_grad.out(),
                                   .e_grad = far ? far_e_grad.out() : e_grad.out()})
                        .ok());
      }
      far_nodes.ExpectEquals(nodes);
      far_u_grad.ExpectEquals(u_grad);
      far_e_grad.ExpectEquals(e_grad);
    }
  }
  for (const EdgeOp op : {EdgeOp::kMul, EdgeOp::kDiv, EdgeOp::kDot}) {
    for (const bool far : {false, true}) {
      ASSERT_TRUE(GsddmmBackward(ctx_, graph,
                                 {.op = op,
                                  .lhs = far ? far_u.out() : u.view(),
                                  .rhs = far ? far_e.out() : e.view(),
                                  .lhs_target = Target::kSource,
                                  .rhs_target = Target::kEdge,
                                  .out = {}},
                                 {.out_grad = far ? far_edge_grad.out() : edge_grad.view(),
                                  .lhs_grad = far ? far_u_grad.out() : u_grad.out(),
                                  .rhs_grad = far ? far_e_grad.out() : e_grad.out()})
                      .ok());
    }
    far_u_grad.ExpectEquals(u_grad);
    far_e_grad.ExpectEquals(e_grad);
  }
}

TEST_P(OffsetsTest, OffsetsOfGradientsOfAttentionMayExceed32Bits) {
  const Graph graph = RandomEdges(&rng_, 5, 5, 12).Build();
  const TestFeatures q = Random(5), k = Random(12), v = Random(5), bias = Random(12, 4), grad = Random(5);
  const FarRows far_q(q), far_k(k), far_v(v), far_bias(bias), far_grad(grad), far_q_grad(q), far_k_grad(k),
      far_v_grad(v), far_bias_grad(bias);
  ASSERT_TRUE(far_q.ok() && far_k.ok() && far_v.ok() && far_bias.ok() && far_grad.ok());
  ASSERT_TRUE(far_q_grad.ok() && far_k_grad.ok() && far_v_grad.ok() && far_bias_grad.ok());
  TestFeatures q_grad(tensor::DType::kF32, 5, 20), k_grad(tensor::DType::kF32, 12, 20),
      v_grad(tensor::DType::kF32, 5, 20), bias_grad(tensor::DType::kF32, 12, 4);
  for (const bool far : {false, true}) {
    ASSERT_TRUE(EdgeAttentionBackward(ctx_, graph,
                                      {.heads = 4,
                                       .q = far ? far_q.out() : q.view(),
                                       .k = far ? far_k.out() : k.view(),
                                       .v = far ? far_v.out() : v.view(),
                                       .bias = far ? far_bias.out() : bias.view(),
                                       .k_target = Target::kEdge,
                                       .v_target = Target::kSource,
                                       .out = {}},
                                      {.out_grad = far ? far_grad.out() : grad.view(),
                                       .q_grad = far ? far_q_grad.out() : q_grad.out(),
                                       .k_grad = far ? far_k_grad.out() : k_grad.out(),
                                       .v_grad = far ? far_v_grad.out() : v_grad.out(),
                                       .bias_grad = far ? far_bias_grad.out() : bias_grad.out()})
                    .ok());
  }
  far_q_grad.ExpectEquals(q_grad);
  far_k_grad.ExpectEquals(k_grad);
  far_v_grad.ExpectEquals(v_grad);
  far_bias_grad.ExpectEquals(bias_grad);
}

// Two segments have few edges; that of index 1 is a hub, which is reduced in parts.
TEST_P(OffsetsTest, OffsetsOfScatteredRowsMayExceed32Bits) {
  constexpr int64_t kEdges = 8000, kFarStride = 1 << 19;
  const std::vector<int32_t> index = RandomEdges(&rng_, 1, 3, kEdges, true).dst;
  const Indices indices = Indices::Of(index.data(), kEdges);
  const Segments segments = *GroupByIndex(indices, 3);
  ASSERT_EQ(segments.hubs, std::vector<int32_t>{1});
  const TestFeatures src = Random(kEdges), grad = Random(3);
  const FarRows far_src(src, kFarStride), far_edges(src, kFarStride), far_grad(grad), far_out(grad);
  ASSERT_TRUE(far_src.ok() && far_edges.ok() && far_grad.ok() && far_out.ok());
  TestFeatures out(tensor::DType::kF32, 3, 20), edges(tensor::DType::kF32, kEdges, 20);
  for (const Reduce reduce : kAllReduces) {
    std::vector<int32_t> args[2];
    for (const bool far : {false, true}) {
      std::vector<int32_t>& arg = args[far];
      arg.resize(IsExtreme(reduce) ? 3 * 20 : 0);
      ASSERT_TRUE(Scatter(ctx_, reduce, far ? far_src.out() : src.view(), indices,
                          far ? far_out.out() : out.out(), {.arg = arg})
                      .ok());
      ASSERT_TRUE(SegmentBackward(ctx_, reduce, segments, far ? far_grad.out() : grad.view(), arg,
                                  far ? far_edges.out() : edges.out())
                      .ok());
    }
    far_out.ExpectEquals(out);
    far_edges.ExpectEquals(edges);
    EXPECT_EQ(args[0], args[1]);
  }
  for (const bool far : {false, true}) {
    ASSERT_TRUE(
        Gather(ctx_, segments, far ? far_grad.out() : grad.view(), far ? far_edges.out() : edges.out()).ok());
  }
  far_edges.ExpectEquals(edges);
  for (const bool far : {false, true}) {
    ASSERT_TRUE(SegmentSoftmaxBackward(ctx_, segments, far ? far_src.out() : src.view(),
                                       far ? far_src.out() : src.view(), far ? far_edges.out() : edges.out())
                    .ok());
  }
  far_edges.ExpectEquals(edges);
}

// The arrays of chosen edges [segments, columns] have more than 2^31 elements. An operator writes all of
// them, its micro-kernels only those of a task: here the segment whose first element has the offset 2^31.
// Operators are not run, since they would write 16 GiB.
TEST_P(OffsetsTest, OffsetsOfChosenEdgesMayExceed32BitsInMicroKernels) {
  constexpr int32_t kSegment = 1 << 16, kEdges = 3;
  constexpr int64_t kCols = 1 << 15, kFirst = kSegment * kCols;
  static_assert(kFirst == int64_t{1} << 31);
  const SparseArray<int32_t> arg(kFirst + kCols);
  const SparseArray<float> largest(kFirst + kCols);
  ASSERT_TRUE(arg.data() != nullptr && largest.data() != nullptr);
  const TestFeatures x = Random(kEdges, kCols);
  std::vector<int32_t> ptr(kSegment + 2, 0);
  ptr.back() = kEdges;
  ReduceTask forward;
  forward.ptr = ptr.data();
  forward.first = kSegment;
  forward.last = kSegment + 1;
  forward.u = forward.e = x.view().data;
  forward.u_stride = forward.out_stride = forward.cols = kCols;
  forward.e_group = 1;
  forward.reduce = Reduce::kMax;
  forward.alpha = 1;
  forward.out = largest.data();
  forward.arg = arg.data();
  ctx_.graph->reduce(forward);
  for (int64_t c = 0; c < kCols; ++c) {
    int32_t want = 0;
    for (int32_t e = 1; e < kEdges; ++e) want = x.at(e, c) > x.at(want, c) ? e : want;
    ASSERT_EQ(arg.data()[kFirst + c], want) << c;
    ASSERT_EQ(largest.data()[kFirst + c], x.at(want, c)) << c;
  }
  // Gradients read the segment's row once for each edge.
  const std::vector<int32_t> rows(kEdges, kSegment), edges = {0, 1, 2}, ends = {0, 1, 2, 3};
  TestFeatures sums(tensor::DType::kF32, kEdges, kCols), maps(tensor::DType::kF32, kEdges, kCols);
  ReduceTask backward = forward;
  backward.ptr = ends.data();
  backward.first = 0;
  backward.last = kEdges;
  backward.u_rows = rows.data();
  backward.e_rows = edges.data();
  backward.u = largest.data();
  backward.reduce = Reduce::kSum;
  backward.out = sums.out().data;
  ctx_.graph->reduce(backward);
  EdgeMapTask map;
  map.last = kEdges;
  map.lhs_rows = map.rhs_rows = rows.data();
  map.out_rows = edges.data();
  map.lhs = map.rhs = largest.data();
  map.lhs_stride = map.out_stride = map.cols = kCols;
  map.rhs_group = 1;
  map.alpha = 1;
  map.mask = arg.data();
  map.out = maps.out().data;
  ctx_.graph->edge_map(map);
  for (int32_t e = 0; e < kEdges; ++e) {
    for (int64_t c = 0; c < kCols; ++c) {
      const float want = arg.data()[kFirst + c] == e ? x.at(e, c) : 0;
      ASSERT_EQ(sums.at(e, c), want) << e << " " << c;
      ASSERT_EQ(maps.at(e, c), want) << e << " " << c;
    }
  }
}

}  // namespace
}  // namespace moesaic::graph
