// gspmm, gsddmm and their gradients against plain loops in double.
#include "science/message_ops.h"

#include <gtest/gtest.h>

#include <functional>

#include "science/edge_attention.h"
#include "science/test_graphs.h"

namespace moesaic::graph {
namespace {

using Matrix = std::vector<double>;

constexpr Message kMessages[] = {Message::kCopyU, Message::kCopyE, Message::kUAddE, Message::kUSubE,
                                 Message::kUMulE, Message::kUDivE, Message::kUDotE};
constexpr Reduce kReduces[] = {Reduce::kSum, Reduce::kMean, Reduce::kMax, Reduce::kMin};

Matrix Values(const TestFeatures& x) {
  Matrix values;
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t c = 0; c < x.cols(); ++c) values.push_back(x.at(r, c));
  }
  return values;
}

double Combined(Message message, double u, double e) {
  switch (message) {
    case Message::kCopyU:
      return u;
    case Message::kCopyE:
      return e;
    case Message::kUAddE:
      return u + e;
    case Message::kUSubE:
      return u - e;
    case Message::kUDivE:
      return u / e;
    default:
      return u * e;
  }
}

// gspmm in double. cols is the width of u (of e for kCopyE), e_cols that of e, out_cols that of the result.
// With `chosen`, elements are the messages of these edges: 16-bit floats have equal maxima, of which a
// derivative must not choose another.
Matrix Expected(const TestEdges& graph, Message message, Reduce reduce, const Matrix& u, const Matrix& e,
                int64_t cols, int64_t e_cols, int64_t out_cols, const std::vector<int32_t>& chosen = {}) {
  Matrix out(graph.num_dst * out_cols, 0);
  std::vector<int> count(graph.num_dst, 0);
  for (int64_t i = 0; i < graph.size(); ++i) {
    const int64_t s = graph.src[i], d = graph.dst[i];
    for (int64_t o = 0; o < out_cols; ++o) {
      double value = 0;
      const int64_t width = cols / out_cols;  // above 1 for a dot product
      for (int64_t c = o * width; c < (o + 1) * width; ++c) {
        const double ue = u.empty() ? 0 : u[s * cols + c];
        const double ee = e.empty() ? 0 : e[i * e_cols + c / (cols / e_cols)];
        value += Combined(message, ue, ee);
      }
      double& at = out[d * out_cols + o];
      if (!chosen.empty()) {
        if (chosen[d * out_cols + o] == i) at = value;
      } else if (reduce == Reduce::kSum || reduce == Reduce::kMean) {
        at += value;
      } else if (count[d] == 0 || (reduce == Reduce::kMax ? value > at : value < at)) {
        at = value;
      }
    }
    ++count[d];
  }
  if (reduce != Reduce::kMean) return out;
  for (int64_t d = 0; d < graph.num_dst; ++d) {
    for (int64_t o = 0; o < out_cols; ++o) out[d * out_cols + o] /= std::max(1, count[d]);
  }
  return out;
}

struct Case {
  int64_t cols, e_cols, out_cols;
};

// Widths of u, e and out for a message.
std::vector<Case> Cases(Message message) {
  if (message == Message::kUDotE) return {{40, 40, 4}, {33, 33, 1}, {8, 8, 8}};
  if (message == Message::kCopyU || message == Message::kCopyE)
    return {{1, 1, 1}, {70, 70, 70}, {64, 64, 64}};
  return {{7, 7, 7}, {70, 1, 70}, {96, 4, 96}, {20, 10, 20}, {128, 128, 128}};
}

class MessageOpsTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::unique_ptr<Workspace> workspace_ = MakeWorkspace(GetParam(), 2);
  Context ctx_ = workspace_->context();
  std::mt19937 rng_{11};
};
INSTANTIATE_TEST_SUITE_P(Isa, MessageOpsTest, testing::ValuesIn(GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

void ExpectNear(const TestFeatures& got, const Matrix& want, double bound) {
  for (int64_t r = 0; r < got.rows(); ++r) {
    for (int64_t c = 0; c < got.cols(); ++c) {
      const double x = want[r * got.cols() + c];
      ASSERT_NEAR(got.at(r, c), x, bound * std::max(1.0, std::abs(x))) << "row " << r << " column " << c;
    }
  }
}

// Bounds of the errors of gspmm. In f32 a message is rounded once, a dot product once per column and a copy
// never; a sum of n messages is rounded n - 1 times, and a mean once more. Each rounding is 2^-24 of the sum
// of magnitudes or less. The result is rounded to its type once.
Matrix ErrorBounds(const TestEdges& graph, tensor::DType dtype, Message message, Reduce reduce,
                   const Matrix& u, const Matrix& e, const Case& c, const Matrix& want) {
  const bool copies = message == Message::kCopyU || message == Message::kCopyE, extreme = IsExtreme(reduce);
  const int64_t width = c.cols / c.out_cols;
  Matrix size(want.size(), 0), bounds(want.size(), 0);
  std::vector<int> count(graph.num_dst, 0);
  for (int64_t i = 0; i < graph.size(); ++i) {
    const int64_t s = graph.src[i], d = graph.dst[i];
    ++count[d];
    for (int64_t o = 0; o < c.out_cols; ++o) {
      double terms = 0;
      for (int64_t k = o * width; k < (o + 1) * width; ++k)
        terms += std::abs(Combined(message, u[s * c.cols + k], e[i * c.e_cols + k / (c.cols / c.e_cols)]));
      double& at = size[d * c.out_cols + o];
      at = extreme ? std::max(at, terms) : at + terms;
    }
  }
  const double store = dtype == tensor::DType::kF32 || (copies && extreme) ? 0 : Unit(dtype);
  for (int64_t d = 0; d < graph.num_dst; ++d) {
    const double roundings = static_cast<double>((copies ? 0 : width) + (extreme ? 0 : count[d]));
    const double divisor = reduce == Reduce::kMean ? std::max(1, count[d]) : 1;
    for (int64_t o = d * c.out_cols; o < (d + 1) * c.out_cols; ++o) {
      // The last factor holds products of roundings.
      bounds[o] = store * std::abs(want[o]) + 0x1p-24 * roundings * size[o] / divisor * (1 + 0x1p-7);
    }
  }
  return bounds;
}

TEST_P(MessageOpsTest, GspmmMatchesDouble) {
  const TestEdges edges = RandomEdges(&rng_, 29, 31, 400);
  const Graph graph = edges.Build();
  for (const tensor::DType dtype : {tensor::DType::kF32, tensor::DType::kBF16, tensor::DType::kF16}) {
    for (const Message message : kMessages) {
      for (const Reduce reduce : kReduces) {
        for (const Case& c : Cases(message)) {
          SCOPED_TRACE(testing::Message() << tensor::DTypeName(dtype) << " message " << int(message)
                                          << " reduce " << int(reduce) << " columns " << c.cols);
          const TestFeatures u = TestFeatures::Random(&rng_, dtype, 29, c.cols, 3);
          const TestFeatures e = TestFeatures::Random(&rng_, dtype, 400, c.e_cols);
          TestFeatures out(dtype, 31, c.out_cols);
          ASSERT_TRUE(Gspmm(ctx_, graph,
                            {.message = message,
                             .reduce = reduce,
                             .u = u.view(),
                             .e = e.view(),
                             .out = out.out(),
                             .options = {}})
                          .ok());
          const Matrix want =
              Expected(edges, message, reduce, Values(u), Values(e), c.cols, c.e_cols, c.out_cols);
          const Matrix bounds = ErrorBounds(edges, dtype, message, reduce, Values(u), Values(e), c, want);
          const Matrix got = Values(out);
          for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], bounds[i]) << i;
        }
      }
    }
  }
}

// The derivative of a function of one matrix in direction d, by central differences in double.
double Derivative(const std::function<double(const Matrix&)>& f, const Matrix& x, const Matrix& d) {
  constexpr double kStep = 1e-6;
  Matrix above = x, below = x;
  for (size_t i = 0; i < x.size(); ++i) {
    above[i] += kStep * d[i];
    below[i] -= kStep * d[i];
  }
  return (f(above) - f(below)) / (2 * kStep);
}

double Dot(const Matrix& a, const Matrix& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

constexpr tensor::DType kMessageTypes[] = {tensor::DType::kF32, tensor::DType::kBF16, tensor::DType::kF16};

// Expects the derivative in a direction. Elements of the gradient are rounded to their type once.
void ExpectDerivative(const TestFeatures& grad, const Matrix& direction, double want) {
  double magnitude = 0;
  const Matrix values = Values(grad);
  for (size_t i = 0; i < values.size(); ++i) magnitude += std::abs(values[i] * direction[i]);
  EXPECT_NEAR(Dot(values, direction), want,
              2e-4 * std::max(10.0, std::abs(want)) + Unit(grad.dtype()) * magnitude);
}

TEST_P(MessageOpsTest, GspmmGradientsMatchDifferences) {
  const TestEdges edges = RandomEdges(&rng_, 13, 12, 90);
  const Graph graph = edges.Build();
  for (const Message message : kMessages) {
    for (const Reduce reduce : kReduces) {
      const bool extreme = reduce == Reduce::kMax || reduce == Reduce::kMin;
      for (const Case& c : Cases(message)) {
        for (const tensor::DType dtype : kMessageTypes) {
          SCOPED_TRACE(testing::Message()
                       << "message " << int(message) << " reduce " << int(reduce) << " columns " << c.cols);
          const TestFeatures u = TestFeatures::Random(&rng_, dtype, 13, c.cols);
          const TestFeatures e = TestFeatures::Random(&rng_, dtype, 90, c.e_cols);
          const TestFeatures grad = TestFeatures::Random(&rng_, dtype, 12, c.out_cols);
          TestFeatures out(dtype, 12, c.out_cols), u_grad(dtype, 13, c.cols), e_grad(dtype, 90, c.e_cols);
          u_grad.Fill(7);
          e_grad.Fill(7);
          std::vector<int32_t> arg(extreme ? 12 * c.out_cols : 0);
          const GspmmParams forward = {.message = message,
                                       .reduce = reduce,
                                       .u = u.view(),
                                       .e = e.view(),
                                       .out = out.out(),
                                       .options = {.arg = arg}};
          ASSERT_TRUE(Gspmm(ctx_, graph, forward).ok());
          ASSERT_TRUE(
              GspmmBackward(
                  ctx_, graph, forward,
                  {.out_grad = grad.view(), .arg = arg, .u_grad = u_grad.out(), .e_grad = e_grad.out()})
                  .ok());
          auto loss = [&](const Matrix& x, const Matrix& y) {
            return Dot(Expected(edges, message, reduce, x, y, c.cols, c.e_cols, c.out_cols, arg),
                       Values(grad));
          };
          const Matrix du = Values(TestFeatures::Random(&rng_, dtype, 13, c.cols));
          const Matrix de = Values(TestFeatures::Random(&rng_, dtype, 90, c.e_cols));
          if (message == Message::kCopyE || message == Message::kCopyU) {
            for (const double x : Values(message == Message::kCopyE ? u_grad : e_grad)) ASSERT_EQ(x, 0);
          }
          if (message != Message::kCopyE) {
            const double want =
                Derivative([&](const Matrix& x) { return loss(x, Values(e)); }, Values(u), du);
            ExpectDerivative(u_grad, du, want);
          }
          if (message != Message::kCopyU) {
            const double want =
                Derivative([&](const Matrix& y) { return loss(Values(u), y); }, Values(e), de);
            ExpectDerivative(e_grad, de, want);
          }
        }
      }
    }
  }
}

// Products u g of a dot are added in f32, and a quotient's gradient -g u / e^2 is rounded once.
TEST_P(MessageOpsTest, GradientsOfQuotientsAreRoundedOnce) {
  const TestEdges edges = RandomEdges(&rng_, 13, 12, 90);
  const Graph graph = edges.Build();
  constexpr int kCols = 24;
  for (const tensor::DType dtype : {tensor::DType::kBF16, tensor::DType::kF16}) {
    for (const int64_t e_cols : {1, 3, kCols}) {
      const TestFeatures u = TestFeatures::Random(&rng_, dtype, 13, kCols),
                         e = TestFeatures::Random(&rng_, dtype, 90, e_cols),
                         grad = TestFeatures::Random(&rng_, dtype, 12, kCols),
                         per_edge = TestFeatures::Random(&rng_, dtype, 90, kCols),
                         v = TestFeatures::Random(&rng_, dtype, 12, e_cols);
      TestFeatures e_grad(dtype, 90, e_cols), edge_grad(dtype, 90, e_cols), v_grad(dtype, 12, e_cols);
      ASSERT_TRUE(GspmmBackward(ctx_, graph,
                                {.message = Message::kUDivE,
                                 .reduce = Reduce::kSum,
                                 .u = u.view(),
                                 .e = e.view(),
                                 .out = {},
                                 .options = {}},
                                {.out_grad = grad.view(), .e_grad = e_grad.out()})
                      .ok());
      auto divide = [&](const TestFeatures& rhs, Target target, TestFeatures& rhs_grad) {
        ASSERT_TRUE(GsddmmBackward(ctx_, graph,
                                   {.op = EdgeOp::kDiv,
                                    .lhs = u.view(),
                                    .rhs = rhs.view(),
                                    .lhs_target = Target::kSource,
                                    .rhs_target = target,
                                    .out = {}},
                                   {.out_grad = per_edge.view(), .rhs_grad = rhs_grad.out()})
                        .ok());
      };
      divide(e, Target::kEdge, edge_grad);
      divide(v, Target::kDestination, v_grad);
      Matrix want(90 * e_cols, 0), want_edge = want, want_v(12 * e_cols, 0);
      Matrix size = want, size_edge = want, size_v = want_v;
      for (int64_t i = 0; i < 90; ++i) {
        for (int64_t c = 0; c < kCols; ++c) {
          const int64_t j = c / (kCols / e_cols), at = i * e_cols + j, d = edges.dst[i];
          const double x = u.at(edges.src[i], c), by = e.at(i, j), by_v = v.at(d, j);
          want[at] -= grad.at(d, c) * x / by / by;
          size[at] += std::abs(grad.at(d, c) * x / by / by);
          want_edge[at] -= per_edge.at(i, c) * x / by / by;
          size_edge[at] += std::abs(per_edge.at(i, c) * x / by / by);
          want_v[d * e_cols + j] -= per_edge.at(i, c) * x / by_v / by_v;
          size_v[d * e_cols + j] += std::abs(per_edge.at(i, c) * x / by_v / by_v);
        }
      }
      auto expect = [&](const TestFeatures& got, const Matrix& values, const Matrix& magnitudes) {
        const Matrix found = Values(got);
        // Sums in f32 have up to 24 * 90 terms.
        for (size_t i = 0; i < values.size(); ++i)
          ASSERT_NEAR(found[i], values[i], Unit(dtype) * std::abs(values[i]) + 1e-5 * magnitudes[i]) << i;
      };
      expect(e_grad, want, size);
      expect(edge_grad, want_edge, size_edge);
      expect(v_grad, want_v, size_v);
    }
  }
}

// The gradient of a mean, divided by the number of edges, is not rounded before it is summed or multiplied.
TEST_P(MessageOpsTest, GradientsOfMeansAreRoundedOnce) {
  const TestEdges edges = RandomEdges(&rng_, 13, 12, 90);
  const Graph graph = edges.Build();
  constexpr int kCols = 24, kHeads = 3;
  std::vector<int> count(12, 0);
  for (const int32_t d : edges.dst) ++count[d];
  for (const tensor::DType dtype : kMessageTypes) {
    for (const Message message : kMessages) {
      const bool dot = message == Message::kUDotE, copies_edges = message == Message::kCopyE;
      for (const int64_t e_cols : {kCols, 1}) {
        if (e_cols == 1 && (dot || copies_edges)) continue;
        SCOPED_TRACE(testing::Message() << "message " << int(message) << " columns of e " << e_cols);
        const int64_t out_cols = dot ? kHeads : kCols;
        const TestFeatures u = TestFeatures::Random(&rng_, dtype, 13, kCols),
                           e = TestFeatures::Random(&rng_, dtype, 90, e_cols),
                           grad = TestFeatures::Random(&rng_, dtype, 12, out_cols);
        TestFeatures u_grad(dtype, 13, kCols), e_grad(dtype, 90, e_cols);
        ASSERT_TRUE(GspmmBackward(ctx_, graph,
                                  {.message = message,
                                   .reduce = Reduce::kMean,
                                   .u = u.view(),
                                   .e = e.view(),
                                   .out = {},
                                   .options = {}},
                                  {.out_grad = grad.view(), .u_grad = u_grad.out(), .e_grad = e_grad.out()})
                        .ok());
        Matrix want_u(13 * kCols, 0), want_e(90 * e_cols, 0), size_u = want_u, size_e = want_e;
        auto add = [](Matrix& want, Matrix& size, int64_t at, double value) {
          want[at] += value;
          size[at] += std::abs(value);
        };
        for (int64_t i = 0; i < 90; ++i) {
          const int64_t s = edges.src[i], d = edges.dst[i];
          for (int64_t c = 0; c < kCols; ++c) {
            const int64_t j = c / (kCols / e_cols);
            const double share = grad.at(d, c / (kCols / out_cols)) / double(count[d]), x = u.at(s, c),
                         y = e.at(i, j);
            double u_factor = 1, e_factor = 1;
            if (message == Message::kUMulE || dot) {
              u_factor = y;
              e_factor = x;
            } else if (message == Message::kUDivE) {
              u_factor = 1 / y;
              e_factor = -x / (y * y);
            } else if (message == Message::kUSubE) {
              e_factor = -1;
            }
            if (!copies_edges) add(want_u, size_u, s * kCols + c, share * u_factor);
            if (message != Message::kCopyU) add(want_e, size_e, i * e_cols + j, share * e_factor);
          }
        }
        // Sums in f32 have up to 90 terms, of relative errors of some 2^-24 each.
        auto expect = [&](const TestFeatures& got, const Matrix& want, const Matrix& size) {
          const Matrix found = Values(got);
          for (size_t i = 0; i < want.size(); ++i)
            ASSERT_NEAR(found[i], want[i], Unit(dtype) * std::abs(want[i]) + 1e-5 * size[i]) << i;
        };
        expect(u_grad, want_u, size_u);
        expect(e_grad, want_e, size_e);
      }
    }
  }
}

// gsddmm in double.
Matrix ExpectedEdges(const TestEdges& graph, EdgeOp op, const Matrix& lhs, Target lhs_target,
                     const Matrix& rhs, Target rhs_target, const Case& c) {
  Matrix out(graph.size() * c.out_cols, 0);
  auto row = [&](Target target, int64_t e) -> int64_t {
    if (target == Target::kEdge) return e;
    return target == Target::kSource ? graph.src[e] : graph.dst[e];
  };
  for (int64_t e = 0; e < graph.size(); ++e) {
    for (int64_t i = 0; i < c.cols; ++i) {
      const double x = lhs[row(lhs_target, e) * c.cols + i];
      const double y = rhs[row(rhs_target, e) * c.e_cols + i / (c.cols / c.e_cols)];
      double value = x;
      if (op == EdgeOp::kAdd) value = x + y;
      if (op == EdgeOp::kSub) value = x - y;
      if (op == EdgeOp::kMul || op == EdgeOp::kDot) value = x * y;
      if (op == EdgeOp::kDiv) value = x / y;
      out[e * c.out_cols + i / (c.cols / c.out_cols)] += value;
    }
  }
  return out;
}

TEST_P(MessageOpsTest, GsddmmAndGradientsMatchDouble) {
  const TestEdges edges = RandomEdges(&rng_, 13, 12, 90);
  const Graph graph = edges.Build();
  constexpr Target kTargets[] = {Target::kSource, Target::kDestination, Target::kEdge};
  auto owners = [](Target target) {
    return target == Target::kEdge ? 90 : target == Target::kSource ? 13 : 12;
  };
  for (const EdgeOp op :
       {EdgeOp::kCopy, EdgeOp::kAdd, EdgeOp::kSub, EdgeOp::kMul, EdgeOp::kDiv, EdgeOp::kDot}) {
    for (const Target lhs_target : kTargets) {
      for (const Target rhs_target : kTargets) {
        for (const Case& c : op == EdgeOp::kDot ? std::vector<Case>{{40, 40, 5}, {9, 9, 1}}
                                                : std::vector<Case>{{19, 19, 19}, {24, 3, 24}}) {
          for (const tensor::DType dtype : kMessageTypes) {
            SCOPED_TRACE(testing::Message()
                         << "op " << int(op) << " of " << int(lhs_target) << " and " << int(rhs_target));
            const TestFeatures lhs = TestFeatures::Random(&rng_, dtype, owners(lhs_target), c.cols, 2);
            const TestFeatures rhs = TestFeatures::Random(&rng_, dtype, owners(rhs_target), c.e_cols);
            const TestFeatures grad = TestFeatures::Random(&rng_, dtype, 90, c.out_cols);
            TestFeatures out(dtype, 90, c.out_cols), lhs_grad(dtype, lhs.rows(), c.cols),
                rhs_grad(dtype, rhs.rows(), c.e_cols);
            rhs_grad.Fill(7);
            const GsddmmParams forward = {.op = op,
                                          .lhs = lhs.view(),
                                          .rhs = rhs.view(),
                                          .lhs_target = lhs_target,
                                          .rhs_target = rhs_target,
                                          .out = out.out()};
            ASSERT_TRUE(Gsddmm(ctx_, graph, forward).ok());
            ASSERT_TRUE(GsddmmBackward(
                            ctx_, graph, forward,
                            {.out_grad = grad.view(), .lhs_grad = lhs_grad.out(), .rhs_grad = rhs_grad.out()})
                            .ok());
            auto value = [&](const Matrix& x, const Matrix& y) {
              return ExpectedEdges(edges, op, x, lhs_target, y, rhs_target, c);
            };
            ExpectNear(out, value(Values(lhs), Values(rhs)), 1e-5 + Unit(dtype));
            const Matrix dl = Values(TestFeatures::Random(&rng_, dtype, lhs.rows(), c.cols));
            const Matrix dr = Values(TestFeatures::Random(&rng_, dtype, rhs.rows(), c.e_cols));
            double want = Derivative(
                [&](const Matrix& x) { return Dot(value(x, Values(rhs)), Values(grad)); }, Values(lhs), dl);
            ExpectDerivative(lhs_grad, dl, want);
            if (op == EdgeOp::kCopy) {
              for (const double x : Values(rhs_grad)) ASSERT_EQ(x, 0);
              continue;
            }
            want = Derivative([&](const Matrix& x) { return Dot(value(Values(lhs), x), Values(grad)); },
                              Values(rhs), dr);
            ExpectDerivative(rhs_grad, dr, want);
          }
        }
      }
    }
  }
}

TEST_P(MessageOpsTest, ResultsDoNotDependOnThreads) {
  const TestEdges edges = RandomEdges(&rng_, 300, 200, 30000, true);
  const Graph graph = edges.Build();
  const TestFeatures u = TestFeatures::Random(&rng_, tensor::DType::kF32, 300, 48);
  const TestFeatures e = TestFeatures::Random(&rng_, tensor::DType::kF32, 30000, 1);
  std::vector<TestFeatures> outs, u_grads, e_grads;
  for (const int threads : {1, 2, 7}) {
    const auto workspace = MakeWorkspace(GetParam(), threads);
    outs.emplace_back(tensor::DType::kF32, 200, 48);
    u_grads.emplace_back(tensor::DType::kF32, 300, 48);
    e_grads.emplace_back(tensor::DType::kF32, 30000, 1);
    const GspmmParams forward = {.message = Message::kUMulE,
                                 .reduce = Reduce::kSum,
                                 .u = u.view(),
                                 .e = e.view(),
                                 .out = outs.back().out(),
                                 .options = {}};
    ASSERT_TRUE(Gspmm(workspace->context(), graph, forward).ok());
    ASSERT_TRUE(
        GspmmBackward(
            workspace->context(), graph, forward,
            {.out_grad = outs.back().view(), .u_grad = u_grads.back().out(), .e_grad = e_grads.back().out()})
            .ok());
  }
  for (size_t i = 1; i < outs.size(); ++i) {
    EXPECT_EQ(outs[0].bytes(), outs[i].bytes());
    EXPECT_EQ(u_grads[0].bytes(), u_grads[i].bytes());
    EXPECT_EQ(e_grads[0].bytes(), e_grads[i].bytes());
  }
}

// Forward and backward of every reduction, of edges' maps, softmax and attention, bitwise.
TEST_P(MessageOpsTest, OperatorsOfAllTypesDoNotDependOnThreads) {
  constexpr int kSrc = 60, kDst = 40, kEdges = 9000, kCols = 20, kHeads = 4;
  const Graph graph = RandomEdges(&rng_, kSrc, kDst, kEdges, true).Build();
  for (const tensor::DType dtype : kMessageTypes) {
    auto random = [&](int64_t rows, int64_t cols) { return TestFeatures::Random(&rng_, dtype, rows, cols); };
    const TestFeatures u = random(kSrc, kCols), v = random(kDst, kCols), e = random(kEdges, kHeads),
                       grad = random(kDst, kCols), dots = random(kEdges, kCols), x = random(kEdges, kHeads);
    std::vector<std::vector<std::byte>> first;
    for (const int threads : {1, 3, 4}) {
      const auto workspace = MakeWorkspace(GetParam(), threads);
      const Context ctx = workspace->context();
      std::vector<std::vector<std::byte>> results;
      auto keep = [&](const TestFeatures& result) { results.push_back(result.bytes()); };
      for (const Reduce reduce : kReduces) {
        for (const Message message : {Message::kUMulE, Message::kUDotE}) {
          const bool dot = message == Message::kUDotE, extreme = IsExtreme(reduce);
          const TestFeatures& edge = dot ? dots : e;
          TestFeatures out(dtype, kDst, dot ? kHeads : kCols), u_grad(dtype, kSrc, kCols),
              e_grad(dtype, kEdges, edge.cols());
          std::vector<int32_t> arg(extreme ? kDst * out.cols() : 0);
          const GspmmParams forward = {.message = message,
                                       .reduce = reduce,
                                       .u = u.view(),
                                       .e = edge.view(),
                                       .out = out.out(),
                                       .options = {.arg = arg}};
          ASSERT_TRUE(Gspmm(ctx, graph, forward).ok());
          ASSERT_TRUE(
              GspmmBackward(
                  ctx, graph, forward,
                  {.out_grad = out.view(), .arg = arg, .u_grad = u_grad.out(), .e_grad = e_grad.out()})
                  .ok());
          keep(out);
          keep(u_grad);
          keep(e_grad);
        }
      }
      for (const EdgeOp op : {EdgeOp::kAdd, EdgeOp::kDiv, EdgeOp::kDot}) {
        TestFeatures out(dtype, kEdges, op == EdgeOp::kDot ? kHeads : kCols), u_grad(dtype, kSrc, kCols),
            v_grad(dtype, kDst, kCols);
        const GsddmmParams forward = {.op = op, .lhs = u.view(), .rhs = v.view(), .out = out.out()};
        ASSERT_TRUE(Gsddmm(ctx, graph, forward).ok());
        ASSERT_TRUE(
            GsddmmBackward(ctx, graph, forward,
                           {.out_grad = out.view(), .lhs_grad = u_grad.out(), .rhs_grad = v_grad.out()})
                .ok());
        keep(out);
        keep(u_grad);
        keep(v_grad);
      }
      TestFeatures softmax(dtype, kEdges, kHeads), softmax_grad(dtype, kEdges, kHeads),
          gathered(dtype, kEdges, kCols);
      ASSERT_TRUE(SegmentSoftmax(ctx, graph.by_destination(), x.view(), softmax.out()).ok());
      ASSERT_TRUE(
          SegmentSoftmaxBackward(ctx, graph.by_destination(), softmax.view(), e.view(), softmax_grad.out())
              .ok());
      ASSERT_TRUE(Gather(ctx, graph.by_destination(), v.view(), gathered.out()).ok());
      keep(softmax);
      keep(softmax_grad);
      keep(gathered);
      TestFeatures out(dtype, kDst, kCols), q_grad(dtype, kDst, kCols), k_grad(dtype, kSrc, kCols),
          v_grad(dtype, kSrc, kCols), bias_grad(dtype, kEdges, kHeads);
      const EdgeAttentionParams attention = {.heads = kHeads,
                                             .q = v.view(),
                                             .k = u.view(),
                                             .v = u.view(),
                                             .bias = x.view(),
                                             .scale = 0.4F,
                                             .out = out.out()};
      ASSERT_TRUE(EdgeAttention(ctx, graph, attention).ok());
      ASSERT_TRUE(EdgeAttentionBackward(ctx, graph, attention,
                                        {.out_grad = grad.view(),
                                         .q_grad = q_grad.out(),
                                         .k_grad = k_grad.out(),
                                         .v_grad = v_grad.out(),
                                         .bias_grad = bias_grad.out()})
                      .ok());
      for (const TestFeatures* result : {&out, &q_grad, &k_grad, &v_grad, &bias_grad}) keep(*result);
      if (first.empty()) first = results;
      ASSERT_EQ(first.size(), results.size());
      for (size_t i = 0; i < first.size(); ++i)
        EXPECT_EQ(first[i], results[i]) << i << ", threads " << threads;
    }
  }
}

TEST_P(MessageOpsTest, WrongShapesAreNamed) {
  const Graph graph = RandomEdges(&rng_, 5, 6, 20).Build();
  TestFeatures u(tensor::DType::kF32, 5, 6), e(tensor::DType::kF32, 20, 4), out(tensor::DType::kF32, 6, 6);
  GspmmParams params = {.message = Message::kUMulE,
                        .reduce = Reduce::kSum,
                        .u = u.view(),
                        .e = e.view(),
                        .out = out.out(),
                        .options = {}};
  EXPECT_EQ(moesaic::Message(Gspmm(ctx_, graph, params)),
            "the columns of e must divide the 6 columns of u, but are 4");
  params.u.rows = 4;
  EXPECT_EQ(moesaic::Message(Gspmm(ctx_, graph, params)), "u must have 5 rows, but has 4");
  params.u = u.view();
  params.u.stride = 3;
  EXPECT_EQ(moesaic::Message(Gspmm(ctx_, graph, params)),
            "rows of u must not overlap: 6 columns need a stride of 6 or more, not 3");
  params.u.dtype = tensor::DType::kF64;
  EXPECT_EQ(moesaic::Message(Gspmm(ctx_, graph, params)), "u must be f32, bf16 or f16, not F64");
}

TEST_P(MessageOpsTest, WrongGradientsAreNamed) {
  const Graph graph = RandomEdges(&rng_, 5, 6, 20).Build();
  TestFeatures u(tensor::DType::kBF16, 5, 8), e(tensor::DType::kBF16, 20, 8), v(tensor::DType::kBF16, 6, 8);
  TestFeatures narrow(tensor::DType::kBF16, 6, 3), dots(tensor::DType::kBF16, 20, 1);
  TestFeatures u_wide(tensor::DType::kF32, 5, 8), e_wide(tensor::DType::kF32, 20, 8),
      v_wide(tensor::DType::kF32, 6, 8);
  GspmmParams forward = {.message = Message::kUDotE,
                         .reduce = Reduce::kSum,
                         .u = u.view(),
                         .e = e.view(),
                         .out = {},
                         .options = {}};
  EXPECT_EQ(
      moesaic::Message(GspmmBackward(ctx_, graph, forward, {.out_grad = narrow.view(), .u_grad = u.out()})),
      "the columns of out must divide the 8 columns of a dot product, but are 3");
  forward.message = Message::kUMulE;
  EXPECT_EQ(
      moesaic::Message(GspmmBackward(ctx_, graph, forward, {.out_grad = v.view(), .u_grad = u_wide.out()})),
      "u_grad and the input must have one type, but are F32 and BF16");
  EXPECT_EQ(
      moesaic::Message(GspmmBackward(ctx_, graph, forward, {.out_grad = v.view(), .e_grad = e_wide.out()})),
      "e_grad and the input must have one type, but are F32 and BF16");
  const GsddmmParams edges = {.op = EdgeOp::kDot, .lhs = u.view(), .rhs = v.view(), .out = {}};
  EXPECT_EQ(moesaic::Message(
                GsddmmBackward(ctx_, graph, edges, {.out_grad = dots.view(), .lhs_grad = u_wide.out()})),
            "lhs_grad and lhs must have one type, but are F32 and BF16");
  EXPECT_EQ(moesaic::Message(
                GsddmmBackward(ctx_, graph, edges, {.out_grad = dots.view(), .rhs_grad = v_wide.out()})),
            "rhs_grad and lhs must have one type, but are F32 and BF16");
}

TEST_P(MessageOpsTest, EmptyGraphsGiveZeros) {
  const Graph graph = *Graph::FromCoo({}, {}, 0, 3);
  TestFeatures u(tensor::DType::kF32, 0, 9), e(tensor::DType::kF32, 0, 9), out(tensor::DType::kF32, 3, 9);
  for (const Message message : {Message::kCopyU, Message::kUMulE}) {
    out.Fill(7);
    ASSERT_TRUE(Gspmm(ctx_, graph,
                      {.message = message,
                       .reduce = Reduce::kMax,
                       .u = u.view(),
                       .e = e.view(),
                       .out = out.out(),
                       .options = {}})
                    .ok());
    for (int r = 0; r < 3; ++r) EXPECT_EQ(out.at(r, 8), 0);
  }
}

TEST_P(MessageOpsTest, DotProductsOverNoColumnsAreZero) {
  const Graph graph = RandomEdges(&rng_, 5, 6, 20).Build();
  TestFeatures u(tensor::DType::kF32, 5, 0), v(tensor::DType::kF32, 6, 0), e(tensor::DType::kF32, 20, 0);
  TestFeatures dots(tensor::DType::kF32, 20, 2), out(tensor::DType::kF32, 6, 2);
  dots.Fill(7);
  out.Fill(7);
  ASSERT_TRUE(
      Gsddmm(ctx_, graph, {.op = EdgeOp::kDot, .lhs = u.view(), .rhs = v.view(), .out = dots.out()}).ok());
  ASSERT_TRUE(Gspmm(ctx_, graph,
                    {.message = Message::kUDotE,
                     .reduce = Reduce::kSum,
                     .u = u.view(),
                     .e = e.view(),
                     .out = out.out(),
                     .options = {}})
                  .ok());
  for (const TestFeatures* x : {&dots, &out}) {
    for (const double value : Values(*x)) EXPECT_EQ(value, 0);
  }
}

}  // namespace
}  // namespace moesaic::graph
