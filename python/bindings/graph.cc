// Plans and operators of src/science/message_ops.h, segment_ops.h and edge_attention.h.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "science/edge_attention.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

using graph::EdgeOp;
using graph::Graph;
using graph::Message;
using graph::Reduce;
using graph::Segments;
using graph::Target;

using MaybeRead = std::optional<ReadArray>;
using MaybeWrite = std::optional<Array>;

graph::Features Maybe(const MaybeRead& array, const char* name) {
  return array.has_value() ? ToFeatures(*array, name) : graph::Features{};
}
graph::Output MaybeOut(const MaybeWrite& array, const char* name) {
  return array.has_value() ? ToOutput(*array, name) : graph::Output{};
}
std::span<int32_t> MaybeInts(const MaybeWrite& array, const char* name) {
  return array.has_value() ? ToInts(*array, name) : std::span<int32_t>{};
}

template <typename Enum, size_t kCount>
Enum Parse(const std::string& text, const std::pair<const char*, Enum> (&names)[kCount], const char* kind) {
  for (const auto& [name, value] : names) {
    if (text == name) return value;
  }
  std::string known;
  for (const auto& [name, value] : names) known += (known.empty() ? "" : ", ") + std::string(name);
  throw nb::value_error(fmt::format("unknown {} \"{}\"; it is one of {}", kind, text, known).c_str());
}

Reduce ParseReduce(const std::string& text) {
  static constexpr std::pair<const char*, Reduce> kNames[] = {
      {"sum", Reduce::kSum}, {"mean", Reduce::kMean}, {"max", Reduce::kMax}, {"min", Reduce::kMin}};
  return Parse(text, kNames, "reduction");
}

Message ParseMessage(const std::string& text) {
  static constexpr std::pair<const char*, Message> kNames[] = {
      {"copy_u", Message::kCopyU},  {"copy_e", Message::kCopyE},  {"u_add_e", Message::kUAddE},
      {"u_sub_e", Message::kUSubE}, {"u_mul_e", Message::kUMulE}, {"u_div_e", Message::kUDivE},
      {"u_dot_e", Message::kUDotE}};
  return Parse(text, kNames, "message");
}

EdgeOp ParseEdgeOp(const std::string& text) {
  static constexpr std::pair<const char*, EdgeOp> kNames[] = {{"copy", EdgeOp::kCopy}, {"add", EdgeOp::kAdd},
                                                              {"sub", EdgeOp::kSub},   {"mul", EdgeOp::kMul},
                                                              {"div", EdgeOp::kDiv},   {"dot", EdgeOp::kDot}};
  return Parse(text, kNames, "operator");
}

Target ParseTarget(const std::string& text) {
  static constexpr std::pair<const char*, Target> kNames[] = {
      {"u", Target::kSource}, {"v", Target::kDestination}, {"e", Target::kEdge}};
  return Parse(text, kNames, "target");
}

void BindPlans(nb::module_& m) {
  nb::class_<Segments>(m, "Segments")
      .def_static(
          "from_index",
          [](const ReadArray& index, int64_t count) {
            const Session session;
            return ValueOrThrow(
                graph::GroupByIndex(ToIndices(index, "index"), count, "index", session.context().exec.pool));
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def_static("from_ptr",
                  [](const ReadArray& ptr, int64_t edges) {
                    return ValueOrThrow(graph::SegmentsFromPtr(ToIndices(ptr, "ptr"), edges));
                  })
      .def_prop_ro("count", &Segments::count)
      .def_prop_ro("edges", &Segments::edges);
  nb::class_<Graph>(m, "Graph")
      .def_static(
          "from_coo",
          [](const ReadArray& src, const ReadArray& dst, int64_t num_src, int64_t num_dst) {
            const Session session;
            return ValueOrThrow(Graph::FromCoo(ToIndices(src, "src"), ToIndices(dst, "dst"), num_src, num_dst,
                                               session.context().exec.pool));
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def_static(
          "from_csc",
          [](const ReadArray& ptr, const ReadArray& src, int64_t num_src) {
            return ValueOrThrow(Graph::FromCsc(ToIndices(ptr, "ptr"), ToIndices(src, "src"), num_src));
          })
      .def_prop_ro("num_src", &Graph::num_src)
      .def_prop_ro("num_dst", &Graph::num_dst)
      .def_prop_ro("num_edges", &Graph::num_edges)
      .def_prop_ro(
          "destinations", [](const Graph& g) -> const Segments& { return g.by_destination(); },
          nb::rv_policy::reference_internal)
      .def("reversed", &Graph::Reversed)
      .def("matches",
           [](const Graph& g, const ReadArray& src, const ReadArray& dst) {
             return g.Matches(ToIndices(src, "src"), ToIndices(dst, "dst"));
           })
      .def("copy_csc", [](const Graph& g, const Array& ptr, const Array& src, const Array& edge) {
        const graph::Adjacency& csc = g.by_destination();
        const std::span<int32_t> outs[] = {ToInts(ptr, "ptr"), ToInts(src, "src"), ToInts(edge, "edge")};
        if (outs[0].size() != csc.ptr.size() || outs[1].size() != csc.neighbor.size() ||
            outs[2].size() != outs[1].size()) {
          throw nb::value_error("ptr, src and edge must have num_dst + 1, num_edges and num_edges elements");
        }
        std::copy(csc.ptr.begin(), csc.ptr.end(), outs[0].begin());
        std::copy(csc.neighbor.begin(), csc.neighbor.end(), outs[1].begin());
        for (int32_t p = 0; p < csc.edges(); ++p) outs[2][p] = csc.edge.empty() ? p : csc.edge[p];
      });
}

void BindSegments(nb::module_& m) {
  using nb::call_guard, nb::gil_scoped_release, nb::arg;
  m.def(
      "segment",
      [](const Segments& segments, const std::string& reduce, const ReadArray& src, const Array& out,
         const MaybeWrite& chosen, float alpha, float beta) {
        const Session session;
        ThrowIfError(graph::Segment(session.context(), ParseReduce(reduce), segments, ToFeatures(src, "src"),
                                    ToOutput(out, "out"),
                                    {.alpha = alpha, .beta = beta, .arg = MaybeInts(chosen, "arg")}));
      },
      arg("segments"), arg("reduce"), arg("src"), arg("out"), arg("arg").none(), arg("alpha"), arg("beta"),
      call_guard<gil_scoped_release>());
  m.def(
      "segment_backward",
      [](const Segments& segments, const std::string& reduce, const ReadArray& grad, const MaybeWrite& chosen,
         const Array& src_grad) {
        const Session session;
        ThrowIfError(graph::SegmentBackward(session.context(), ParseReduce(reduce), segments,
                                            ToFeatures(grad, "out_grad"), MaybeInts(chosen, "arg"),
                                            ToOutput(src_grad, "src_grad")));
      },
      arg("segments"), arg("reduce"), arg("out_grad"), arg("arg").none(), arg("src_grad"),
      call_guard<gil_scoped_release>());
  m.def(
      "gather",
      [](const Segments& segments, const ReadArray& src, const Array& out) {
        const Session session;
        ThrowIfError(
            graph::Gather(session.context(), segments, ToFeatures(src, "src"), ToOutput(out, "out")));
      },
      arg("segments"), arg("src"), arg("out"), call_guard<gil_scoped_release>());
  m.def(
      "segment_softmax",
      [](const Segments& segments, const ReadArray& x, const Array& out) {
        const Session session;
        ThrowIfError(
            graph::SegmentSoftmax(session.context(), segments, ToFeatures(x, "x"), ToOutput(out, "out")));
      },
      arg("segments"), arg("x"), arg("out"), call_guard<gil_scoped_release>());
  m.def(
      "segment_softmax_backward",
      [](const Segments& segments, const ReadArray& y, const ReadArray& grad, const Array& x_grad) {
        const Session session;
        ThrowIfError(graph::SegmentSoftmaxBackward(session.context(), segments, ToFeatures(y, "y"),
                                                   ToFeatures(grad, "y_grad"), ToOutput(x_grad, "x_grad")));
      },
      arg("segments"), arg("y"), arg("y_grad"), arg("x_grad"), call_guard<gil_scoped_release>());
}

void BindMessages(nb::module_& m) {
  using nb::call_guard, nb::gil_scoped_release, nb::arg;
  m.def(
      "gspmm",
      [](const Graph& g, const std::string& message, const std::string& reduce, const MaybeRead& u,
         const MaybeRead& e, const Array& out, const MaybeWrite& chosen) {
        const Session session;
        ThrowIfError(graph::Gspmm(session.context(), g,
                                  {.message = ParseMessage(message),
                                   .reduce = ParseReduce(reduce),
                                   .u = Maybe(u, "u"),
                                   .e = Maybe(e, "e"),
                                   .out = ToOutput(out, "out"),
                                   .options = {.arg = MaybeInts(chosen, "arg")}}));
      },
      arg("graph"), arg("message"), arg("reduce"), arg("u").none(), arg("e").none(), arg("out"),
      arg("arg").none(), call_guard<gil_scoped_release>());
  m.def(
      "gspmm_backward",
      [](const Graph& g, const std::string& message, const std::string& reduce, const MaybeRead& u,
         const MaybeRead& e, const ReadArray& grad, const MaybeWrite& chosen, const MaybeWrite& u_grad,
         const MaybeWrite& e_grad) {
        const Session session;
        ThrowIfError(graph::GspmmBackward(session.context(), g,
                                          {.message = ParseMessage(message),
                                           .reduce = ParseReduce(reduce),
                                           .u = Maybe(u, "u"),
                                           .e = Maybe(e, "e"),
                                           .out = {},
                                           .options = {}},
                                          {.out_grad = ToFeatures(grad, "out_grad"),
                                           .arg = MaybeInts(chosen, "arg"),
                                           .u_grad = MaybeOut(u_grad, "u_grad"),
                                           .e_grad = MaybeOut(e_grad, "e_grad")}));
      },
      arg("graph"), arg("message"), arg("reduce"), arg("u").none(), arg("e").none(), arg("out_grad"),
      arg("arg").none(), arg("u_grad").none(), arg("e_grad").none(), call_guard<gil_scoped_release>());
  m.def(
      "gsddmm",
      [](const Graph& g, const std::string& op, const ReadArray& lhs, const MaybeRead& rhs,
         const std::string& lhs_target, const std::string& rhs_target, const Array& out) {
        const Session session;
        ThrowIfError(graph::Gsddmm(session.context(), g,
                                   {.op = ParseEdgeOp(op),
                                    .lhs = ToFeatures(lhs, "lhs"),
                                    .rhs = Maybe(rhs, "rhs"),
                                    .lhs_target = ParseTarget(lhs_target),
                                    .rhs_target = ParseTarget(rhs_target),
                                    .out = ToOutput(out, "out")}));
      },
      arg("graph"), arg("op"), arg("lhs"), arg("rhs").none(), arg("lhs_target"), arg("rhs_target"),
      arg("out"), call_guard<gil_scoped_release>());
  m.def(
      "gsddmm_backward",
      [](const Graph& g, const std::string& op, const ReadArray& lhs, const MaybeRead& rhs,
         const std::string& lhs_target, const std::string& rhs_target, const ReadArray& grad,
         const MaybeWrite& lhs_grad, const MaybeWrite& rhs_grad) {
        const Session session;
        ThrowIfError(graph::GsddmmBackward(session.context(), g,
                                           {.op = ParseEdgeOp(op),
                                            .lhs = ToFeatures(lhs, "lhs"),
                                            .rhs = Maybe(rhs, "rhs"),
                                            .lhs_target = ParseTarget(lhs_target),
                                            .rhs_target = ParseTarget(rhs_target),
                                            .out = {}},
                                           {.out_grad = ToFeatures(grad, "out_grad"),
                                            .lhs_grad = MaybeOut(lhs_grad, "lhs_grad"),
                                            .rhs_grad = MaybeOut(rhs_grad, "rhs_grad")}));
      },
      arg("graph"), arg("op"), arg("lhs"), arg("rhs").none(), arg("lhs_target"), arg("rhs_target"),
      arg("out_grad"), arg("lhs_grad").none(), arg("rhs_grad").none(), call_guard<gil_scoped_release>());
}

graph::EdgeAttentionParams AttentionParams(int heads, float scale, const ReadArray& q, const ReadArray& k,
                                           const ReadArray& v, const MaybeRead& bias,
                                           const std::string& k_target, const std::string& v_target) {
  return {.heads = heads,
          .q = ToFeatures(q, "q"),
          .k = ToFeatures(k, "k"),
          .v = ToFeatures(v, "v"),
          .bias = Maybe(bias, "bias"),
          .k_target = ParseTarget(k_target),
          .v_target = ParseTarget(v_target),
          .scale = scale,
          .out = {}};
}

void BindAttention(nb::module_& m) {
  using nb::call_guard, nb::gil_scoped_release, nb::arg;
  m.def(
      "edge_attention",
      [](const Graph& g, int heads, float scale, const ReadArray& q, const ReadArray& k, const ReadArray& v,
         const MaybeRead& bias, const std::string& k_target, const std::string& v_target, const Array& out) {
        const Session session;
        graph::EdgeAttentionParams params = AttentionParams(heads, scale, q, k, v, bias, k_target, v_target);
        params.out = ToOutput(out, "out");
        ThrowIfError(graph::EdgeAttention(session.context(), g, params));
      },
      arg("graph"), arg("heads"), arg("scale"), arg("q"), arg("k"), arg("v"), arg("bias").none(),
      arg("k_target"), arg("v_target"), arg("out"), call_guard<gil_scoped_release>());
  m.def(
      "edge_attention_backward",
      [](const Graph& g, int heads, float scale, const ReadArray& q, const ReadArray& k, const ReadArray& v,
         const MaybeRead& bias, const std::string& k_target, const std::string& v_target,
         const ReadArray& grad, const MaybeWrite& q_grad, const MaybeWrite& k_grad, const MaybeWrite& v_grad,
         const MaybeWrite& bias_grad) {
        const Session session;
        ThrowIfError(graph::EdgeAttentionBackward(
            session.context(), g, AttentionParams(heads, scale, q, k, v, bias, k_target, v_target),
            {.out_grad = ToFeatures(grad, "out_grad"),
             .q_grad = MaybeOut(q_grad, "q_grad"),
             .k_grad = MaybeOut(k_grad, "k_grad"),
             .v_grad = MaybeOut(v_grad, "v_grad"),
             .bias_grad = MaybeOut(bias_grad, "bias_grad")}));
      },
      arg("graph"), arg("heads"), arg("scale"), arg("q"), arg("k"), arg("v"), arg("bias").none(),
      arg("k_target"), arg("v_target"), arg("out_grad"), arg("q_grad").none(), arg("k_grad").none(),
      arg("v_grad").none(), arg("bias_grad").none(), call_guard<gil_scoped_release>());
}

}  // namespace

void BindGraph(nb::module_& m) {
  BindPlans(m);
  BindSegments(m);
  BindMessages(m);
  BindAttention(m);
}

}  // namespace moesaic::python
