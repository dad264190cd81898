// Layers of src/science: objects that own their weights, on contiguous float32 arrays.
#include <fmt/ranges.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/arrays.h"
#include "science/edge_mlp_gradient.h"
#include "science/egnn.h"
#include "science/evoformer.h"
#include "science/invariant_points.h"
#include "science/neighbors.h"
#include "science/protein/protein_mpnn.h"
#include "science/se3/se3_layers.h"
#include "science/structure_module.h"

namespace nb = nanobind;

// Layers own packed weights and cannot be copied. The standard trait does not see this through std::vector.
namespace nanobind::detail {
template <>
struct is_copy_constructible<moesaic::science::EdgeMlp> : std::false_type {};
template <>
struct is_copy_constructible<moesaic::science::EgnnLayer> : std::false_type {};
template <>
struct is_copy_constructible<moesaic::science::MpnnLayer> : std::false_type {};
template <>
struct is_copy_constructible<moesaic::science::StructureModule> : std::false_type {};
template <>
struct is_copy_constructible<moesaic::science::ProteinMpnn> : std::false_type {};
template <>
struct is_copy_constructible<moesaic::science::Se3AttentionBlock> : std::false_type {};
}  // namespace nanobind::detail

namespace moesaic::python {
namespace {

using graph::Graph;
using MaybeArray = std::optional<Array>;
using MaybeRead = std::optional<ReadArray>;
using Weights = std::map<std::string, ReadArray>;
using WeightGradients = std::map<std::string, Array>;

science::WeightMap ToWeights(const Weights& arrays) {
  science::WeightMap weights;
  for (const auto& [name, array] : arrays) {
    science::WeightTensor& tensor = weights[name];
    for (size_t i = 0; i < array.ndim(); ++i) tensor.shape.push_back(static_cast<int64_t>(array.shape(i)));
    const std::span<const float> values = ToFloats(array, name.c_str());
    tensor.values.assign(values.begin(), values.end());
  }
  return weights;
}

// A contiguous float32 array with this many elements.
float* Floats(const Array& array, const char* name, int64_t size) {
  const std::span<float> values = ToFloats(array, name);
  if (static_cast<int64_t>(values.size()) != size) {
    throw nb::value_error(
        fmt::format("{} must have {} elements, but has {}", name, size, values.size()).c_str());
  }
  return values.data();
}
// Throws unless an array has this shape.
template <typename AnyArray>
void CheckShape(const AnyArray& array, const char* name, const std::vector<int64_t>& shape) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < array.ndim(); ++i) found.push_back(static_cast<int64_t>(array.shape(i)));
  if (found != shape) {
    throw nb::value_error(fmt::format("{} must have the shape [{}], but has [{}]", name,
                                      fmt::join(shape, ", "), fmt::join(found, ", "))
                              .c_str());
  }
}
// A contiguous float32 array of this shape, which may be read-only.
const float* Shaped(const ReadArray& array, const char* name, const std::vector<int64_t>& shape) {
  CheckShape(array, name, shape);
  return ToFloats(array, name).data();
}
// The same, which the layer changes or writes.
float* ShapedOut(const Array& array, const char* name, const std::vector<int64_t>& shape) {
  CheckShape(array, name, shape);
  return ToFloats(array, name).data();
}
float* MaybeFloats(const MaybeArray& array, const char* name, int64_t size) {
  return array.has_value() ? Floats(*array, name, size) : nullptr;
}
const float* MaybeShaped(const MaybeRead& array, const char* name, const std::vector<int64_t>& shape) {
  return array.has_value() ? Shaped(*array, name, shape) : nullptr;
}
// Positions [n, 3] of any number of points.
std::span<const float> Points(const ReadArray& xyz) {
  const int64_t n = xyz.ndim() == 0 ? 0 : static_cast<int64_t>(xyz.shape(0));
  return {Shaped(xyz, "xyz", {n, 3}), static_cast<size_t>(3 * n)};
}
// A contiguous int32 vector.
std::span<const int32_t> IntVector(const ReadArray& array, const char* name) {
  if (array.ndim() != 1) {
    throw nb::value_error(
        fmt::format("{} must be a vector, but has {} dimensions", name, array.ndim()).c_str());
  }
  return ToInts(array, name);
}

// Gradients of parameters: arrays to which backward passes add.
science::GradientMap ToGradients(const WeightGradients& arrays) {
  science::GradientMap gradients;
  for (const auto& [name, array] : arrays) gradients[name] = ToFloats(array, name.c_str());
  return gradients;
}

// Copies a list of edges to arrays of Python.
using IntArray = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;
IntArray ToNumpy(std::vector<int32_t> values) {
  auto* owned = new std::vector<int32_t>(std::move(values));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
  return IntArray(owned->data(), {owned->size()}, owner);
}

std::span<const int32_t> MaybeSets(const MaybeRead& array) {
  return array.has_value() ? IntVector(*array, "sets") : std::span<const int32_t>{};
}

void BindNeighbors(nb::module_& m) {
  m.def(
      "nearest_graph",
      [](const ReadArray& xyz, int k, int window, bool self, const MaybeRead& sets) {
        graph::EdgeList edges = WithoutGil([&] {
          const Session session;
          return ValueOrThrow(graph::NearestGraph(
              session.context(), Points(xyz),
              {.k = k, .window = window, .self = self, .sequence = {}, .sets = MaybeSets(sets)}));
        });
        return nb::make_tuple(ToNumpy(std::move(edges.src)), ToNumpy(std::move(edges.dst)));
      },
      nb::arg("xyz"), nb::arg("k"), nb::arg("window"), nb::arg("self"), nb::arg("sets").none());
  m.def(
      "radius_graph",
      [](const ReadArray& xyz, float radius, int max_neighbors, bool self, const MaybeRead& sets) {
        graph::EdgeList edges = WithoutGil([&] {
          const Session session;
          return ValueOrThrow(graph::RadiusGraph(
              session.context(), Points(xyz),
              {.radius = radius, .max_neighbors = max_neighbors, .self = self, .sets = MaybeSets(sets)}));
        });
        return nb::make_tuple(ToNumpy(std::move(edges.src)), ToNumpy(std::move(edges.dst)));
      },
      nb::arg("xyz"), nb::arg("radius"), nb::arg("max_neighbors"), nb::arg("self"), nb::arg("sets").none());
}

graph::Activation ParseActivation(const std::string& name) {
  static constexpr std::pair<const char*, graph::Activation> kNames[] = {
      {"silu", graph::Activation::kSilu},
      {"relu", graph::Activation::kRelu},
      {"gelu", graph::Activation::kGelu},
      {"sigmoid", graph::Activation::kSigmoid}};
  for (const auto& [known, activation] : kNames) {
    if (name == known) return activation;
  }
  throw nb::value_error(
      fmt::format("unknown activation \"{}\"; it is one of silu, relu, gelu, sigmoid", name).c_str());
}

tensor::PackedFormat ParseWeightType(const std::string& name) {
  if (name == "float32") return tensor::PackedFormat::kF32;
  if (name == "bfloat16") return tensor::PackedFormat::kBF16;
  if (name == "int8") return tensor::PackedFormat::kI8;
  throw nb::value_error(
      fmt::format("unknown weight_dtype \"{}\"; it is one of float32, bfloat16, int8", name).c_str());
}

graph::Reduce ParseEdgeReduce(const std::string& name) {
  if (name == "sum") return graph::Reduce::kSum;
  if (name == "mean") return graph::Reduce::kMean;
  throw nb::value_error(fmt::format("unknown reduction \"{}\"; it is sum or mean", name).c_str());
}

science::EdgeMlpInputs ToEdgeInputs(const science::EdgeMlp& mlp, const Graph& g, const ReadArray& dst,
                                    const ReadArray& src, const MaybeRead& edge, const MaybeRead& dst_xyz,
                                    const MaybeRead& src_xyz) {
  const int edge_inputs = mlp.first_edge.empty() ? 0 : mlp.first_edge.k();
  return {Shaped(dst, "dst", {g.num_dst(), mlp.first_dst.k()}),
          Shaped(src, "src", {g.num_src(), mlp.first_src.k()}),
          MaybeShaped(edge, "edge", {g.num_edges(), edge_inputs}),
          MaybeShaped(dst_xyz, "dst_xyz", {g.num_dst(), 3}),
          MaybeShaped(src_xyz, "src_xyz", {g.num_src(), 3})};
}

void BindEdgeMlp(nb::module_& m) {
  using science::EdgeMlp;
  nb::class_<EdgeMlp>(m, "EdgeMlp")
      .def_static("load",
                  [](const Weights& weights, int dst_inputs, int src_inputs, bool distance, int edge_inputs,
                     const std::string& activation, bool activate_last, const std::string& weight_type) {
                    const science::WeightMap map = ToWeights(weights);
                    EdgeMlp mlp = ValueOrThrow(
                        EdgeMlp::Load(science::WeightScope(map, "", ParseWeightType(weight_type)), dst_inputs,
                                      src_inputs, distance, edge_inputs));
                    mlp.activation = ParseActivation(activation);
                    mlp.activate_last = activate_last;
                    return mlp;
                  })
      .def_prop_ro("outputs", &EdgeMlp::outputs)
      .def(
          "reduce",
          [](const EdgeMlp& mlp, const Graph& g, const std::string& reduce, float scale, const ReadArray& dst,
             const ReadArray& src, const MaybeRead& edge, const MaybeRead& dst_xyz, const MaybeRead& src_xyz,
             const Array& out) {
            const Session session;
            ThrowIfError(science::EdgeMlpReduce(
                session.context(), g, mlp, ToEdgeInputs(mlp, g, dst, src, edge, dst_xyz, src_xyz),
                ParseEdgeReduce(reduce), scale, ShapedOut(out, "out", {g.num_dst(), mlp.outputs()})));
          },
          nb::arg("graph"), nb::arg("reduce"), nb::arg("scale"), nb::arg("dst"), nb::arg("src"),
          nb::arg("edge").none(), nb::arg("dst_xyz").none(), nb::arg("src_xyz").none(), nb::arg("out"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "reduce_backward",
          [](const EdgeMlp& mlp, const Graph& g, const std::string& reduce, float scale, const ReadArray& dst,
             const ReadArray& src, const MaybeRead& edge, const MaybeRead& dst_xyz, const MaybeRead& src_xyz,
             const ReadArray& out_grad, const MaybeArray& dst_grad, const MaybeArray& src_grad,
             const MaybeArray& edge_grad, const MaybeArray& dst_xyz_grad, const MaybeArray& src_xyz_grad,
             const WeightGradients& parameters) {
            const Session session;
            const int edge_inputs = mlp.first_edge.empty() ? 0 : mlp.first_edge.k();
            science::EdgeMlpGradients out{
                .dst = MaybeFloats(dst_grad, "dst_grad", int64_t{g.num_dst()} * mlp.first_dst.k()),
                .src = MaybeFloats(src_grad, "src_grad", int64_t{g.num_src()} * mlp.first_src.k()),
                .edge = MaybeFloats(edge_grad, "edge_grad", int64_t{g.num_edges()} * edge_inputs),
                .dst_xyz = MaybeFloats(dst_xyz_grad, "dst_xyz_grad", 3 * int64_t{g.num_dst()}),
                .src_xyz = MaybeFloats(src_xyz_grad, "src_xyz_grad", 3 * int64_t{g.num_src()})};
            const science::GradientMap gradients = ToGradients(parameters);
            ThrowIfError(out.FindParameters(mlp, science::GradientScope(gradients)));
            ThrowIfError(science::EdgeMlpReduceBackward(
                session.context(), g, mlp, ToEdgeInputs(mlp, g, dst, src, edge, dst_xyz, src_xyz),
                ParseEdgeReduce(reduce), scale, Shaped(out_grad, "out_grad", {g.num_dst(), mlp.outputs()}),
                out));
          },
          nb::arg("graph"), nb::arg("reduce"), nb::arg("scale"), nb::arg("dst"), nb::arg("src"),
          nb::arg("edge").none(), nb::arg("dst_xyz").none(), nb::arg("src_xyz").none(), nb::arg("out_grad"),
          nb::arg("dst_grad").none(), nb::arg("src_grad").none(), nb::arg("edge_grad").none(),
          nb::arg("dst_xyz_grad").none(), nb::arg("src_xyz_grad").none(), nb::arg("parameters"),
          nb::call_guard<nb::gil_scoped_release>());
}

void BindEgnn(nb::module_& m) {
  nb::class_<science::EgnnLayer>(m, "EgnnLayer")
      .def_static(
          "load",
          [](const Weights& weights, int node_inputs, int edge_inputs, bool residual, bool mean,
             bool normalize, bool tanh, const std::string& weight_type) {
            const science::WeightMap map = ToWeights(weights);
            return ValueOrThrow(science::EgnnLayer::Load(
                science::WeightScope(map, "", ParseWeightType(weight_type)), node_inputs, edge_inputs,
                {.residual = residual, .mean_coordinates = mean, .normalize = normalize, .tanh = tanh}));
          })
      .def_prop_ro("outputs", &science::EgnnLayer::outputs)
      .def(
          "run",
          [](const science::EgnnLayer& layer, const Graph& g, const ReadArray& h, const ReadArray& x,
             const MaybeRead& edge, const Array& h_out, const Array& x_out) {
            const Session session;
            const int64_t n = g.num_dst();
            const float *rows = Shaped(h, "h", {n, layer.inputs()}),
                        *points = Shaped(x, "x", {n, 3});  // before results, whose shapes follow
            ThrowIfError(layer.Run(session.context(), g, rows, points,
                                   MaybeShaped(edge, "edge", {g.num_edges(), layer.edge_inputs()}),
                                   Floats(h_out, "h_out", n * layer.outputs()),
                                   Floats(x_out, "x_out", 3 * n)));
          },
          nb::arg("graph"), nb::arg("h"), nb::arg("x"), nb::arg("edge").none(), nb::arg("h_out"),
          nb::arg("x_out"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const science::EgnnLayer& layer, const Graph& g, const ReadArray& h, const ReadArray& x,
             const MaybeRead& edge, const Array& h_grad, const Array& x_grad, const MaybeArray& h_in_grad,
             const MaybeArray& x_in_grad, const MaybeArray& edge_grad, const WeightGradients& parameters) {
            const Session session;
            const int64_t n = g.num_dst(), edge_size = int64_t{g.num_edges()} * layer.edge_inputs();
            ThrowIfError(layer.Backward(
                session.context(), g, Shaped(h, "h", {n, layer.inputs()}), Shaped(x, "x", {n, 3}),
                MaybeShaped(edge, "edge", {g.num_edges(), layer.edge_inputs()}),
                Floats(h_grad, "h_grad", n * layer.outputs()), Floats(x_grad, "x_grad", 3 * n),
                {MaybeFloats(h_in_grad, "h_in_grad", n * layer.inputs()),
                 MaybeFloats(x_in_grad, "x_in_grad", 3 * n), MaybeFloats(edge_grad, "edge_grad", edge_size)},
                ToGradients(parameters)));
          },
          nb::arg("graph"), nb::arg("h"), nb::arg("x"), nb::arg("edge").none(), nb::arg("h_grad"),
          nb::arg("x_grad"), nb::arg("h_in_grad").none(), nb::arg("x_in_grad").none(),
          nb::arg("edge_grad").none(), nb::arg("parameters"), nb::call_guard<nb::gil_scoped_release>());
}

void BindAlignment(nb::module_& m) {
  using science::WeightScope;
  nb::class_<science::MsaAttention>(m, "MsaAttention")
      .def_static("load",
                  [](const Weights& w, int heads) {
                    return ValueOrThrow(science::MsaAttention::Load(WeightScope(ToWeights(w)), heads));
                  })
      .def(
          "run",
          [](const science::MsaAttention& layer, int64_t s, int64_t n, const MaybeRead& mask,
             const MaybeRead& z, const Array& m_rows) {
            const Session session;
            ThrowIfError(layer.Run(session.context(), s, n, MaybeShaped(mask, "mask", {s, n}),
                                   MaybeShaped(z, "z", {n, n, layer.c_z()}),
                                   ShapedOut(m_rows, "m", {s, n, layer.c_m()})));
          },
          nb::arg("s"), nb::arg("n"), nb::arg("mask").none(), nb::arg("z").none(), nb::arg("m"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const science::MsaAttention& layer, int64_t s, int64_t n, const MaybeRead& mask,
             const MaybeRead& z, const ReadArray& m_rows, const ReadArray& out_grad, const MaybeArray& z_grad,
             const MaybeArray& m_grad, const WeightGradients& parameters) {
            const Session session;
            const std::vector<int64_t> shape = {s, n, layer.c_m()};
            ThrowIfError(layer.Backward(
                session.context(), s, n, MaybeShaped(mask, "mask", {s, n}),
                MaybeShaped(z, "z", {n, n, layer.c_z()}), Shaped(m_rows, "m", shape),
                Shaped(out_grad, "out_grad", shape), MaybeFloats(z_grad, "z_grad", n * n * layer.c_z()),
                MaybeFloats(m_grad, "m_grad", s * n * layer.c_m()), ToGradients(parameters)));
          },
          nb::arg("s"), nb::arg("n"), nb::arg("mask").none(), nb::arg("z").none(), nb::arg("m"),
          nb::arg("out_grad"), nb::arg("z_grad").none(), nb::arg("m_grad").none(), nb::arg("parameters"),
          nb::call_guard<nb::gil_scoped_release>());
  nb::class_<science::OuterProductMean>(m, "OuterProductMean")
      .def_static("load",
                  [](const Weights& w) {
                    return ValueOrThrow(science::OuterProductMean::Load(WeightScope(ToWeights(w))));
                  })
      .def(
          "run",
          [](const science::OuterProductMean& layer, int64_t s, int64_t n, const MaybeRead& mask,
             const ReadArray& m_rows, const Array& z) {
            const Session session;
            ThrowIfError(layer.Run(session.context(), s, n, MaybeShaped(mask, "mask", {s, n}),
                                   Shaped(m_rows, "m", {s, n, layer.c_m()}),
                                   ShapedOut(z, "z", {n, n, layer.c_z()})));
          },
          nb::arg("s"), nb::arg("n"), nb::arg("mask").none(), nb::arg("m"), nb::arg("z"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const science::OuterProductMean& layer, int64_t s, int64_t n, const MaybeRead& mask,
             const ReadArray& m_rows, const ReadArray& out_grad, const MaybeArray& m_grad,
             const WeightGradients& parameters) {
            const Session session;
            ThrowIfError(layer.Backward(
                session.context(), s, n, MaybeShaped(mask, "mask", {s, n}),
                Shaped(m_rows, "m", {s, n, layer.c_m()}), Shaped(out_grad, "out_grad", {n, n, layer.c_z()}),
                MaybeFloats(m_grad, "m_grad", s * n * layer.c_m()), ToGradients(parameters)));
          },
          nb::arg("s"), nb::arg("n"), nb::arg("mask").none(), nb::arg("m"), nb::arg("out_grad"),
          nb::arg("m_grad").none(), nb::arg("parameters"), nb::call_guard<nb::gil_scoped_release>());
}

// Defines the methods of a layer that changes pair features z [n, n, c].
template <typename Layer>
void BindPairLayer(nb::class_<Layer>& bound) {
  bound
      .def(
          "run",
          [](const Layer& layer, int64_t n, const MaybeRead& mask, const Array& z) {
            const Session session;
            ThrowIfError(layer.Run(session.context(), n, MaybeShaped(mask, "mask", {n, n}),
                                   ShapedOut(z, "z", {n, n, layer.c()})));
          },
          nb::arg("n"), nb::arg("mask").none(), nb::arg("z"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const Layer& layer, int64_t n, const MaybeRead& mask, const ReadArray& z,
             const ReadArray& out_grad, const MaybeArray& z_grad, const WeightGradients& parameters) {
            const Session session;
            const std::vector<int64_t> shape = {n, n, layer.c()};
            ThrowIfError(layer.Backward(session.context(), n, MaybeShaped(mask, "mask", {n, n}),
                                        Shaped(z, "z", shape), Shaped(out_grad, "out_grad", shape),
                                        MaybeFloats(z_grad, "z_grad", n * n * layer.c()),
                                        ToGradients(parameters)));
          },
          nb::arg("n"), nb::arg("mask").none(), nb::arg("z"), nb::arg("out_grad"), nb::arg("z_grad").none(),
          nb::arg("parameters"), nb::call_guard<nb::gil_scoped_release>());
}

void BindEvoformer(nb::module_& m) {
  using science::WeightScope;
  nb::class_<science::TriangleMultiplication> multiplication(m, "TriangleMultiplication");
  multiplication.def_static("load", [](const Weights& w, bool incoming) {
    return ValueOrThrow(science::TriangleMultiplication::Load(WeightScope(ToWeights(w)), incoming));
  });
  BindPairLayer(multiplication);
  nb::class_<science::TriangleAttention> attention(m, "TriangleAttention");
  attention.def_static("load", [](const Weights& w, int heads, bool ending) {
    return ValueOrThrow(science::TriangleAttention::Load(WeightScope(ToWeights(w)), heads, ending));
  });
  BindPairLayer(attention);
  nb::class_<science::EvoformerBlock>(m, "EvoformerBlock")
      .def_static("load",
                  [](const Weights& w, int msa_heads, int pair_heads) {
                    return ValueOrThrow(
                        science::EvoformerBlock::Load(WeightScope(ToWeights(w)), msa_heads, pair_heads));
                  })
      .def(
          "run",
          [](const science::EvoformerBlock& block, int64_t s, int64_t n, const MaybeRead& msa_mask,
             const MaybeRead& pair_mask, const Array& m_rows, const Array& z) {
            const Session session;
            ThrowIfError(block.Run(session.context(), s, n, MaybeShaped(msa_mask, "msa_mask", {s, n}),
                                   MaybeShaped(pair_mask, "pair_mask", {n, n}),
                                   ShapedOut(m_rows, "m", {s, n, block.c_m()}),
                                   ShapedOut(z, "z", {n, n, block.c_z()})));
          },
          nb::arg("s"), nb::arg("n"), nb::arg("msa_mask").none(), nb::arg("pair_mask").none(), nb::arg("m"),
          nb::arg("z"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const science::EvoformerBlock& block, int64_t s, int64_t n, const MaybeRead& msa_mask,
             const MaybeRead& pair_mask, const ReadArray& m_rows, const ReadArray& z,
             const ReadArray& m_out_grad, const ReadArray& z_out_grad, const MaybeArray& m_grad,
             const MaybeArray& z_grad, const WeightGradients& parameters) {
            const Session session;
            const std::vector<int64_t> m_shape = {s, n, block.c_m()}, z_shape = {n, n, block.c_z()};
            ThrowIfError(block.Backward(session.context(), s, n, MaybeShaped(msa_mask, "msa_mask", {s, n}),
                                        MaybeShaped(pair_mask, "pair_mask", {n, n}),
                                        Shaped(m_rows, "m", m_shape), Shaped(z, "z", z_shape),
                                        {.m_out = Shaped(m_out_grad, "m_out_grad", m_shape),
                                         .z_out = Shaped(z_out_grad, "z_out_grad", z_shape),
                                         .m = MaybeFloats(m_grad, "m_grad", s * n * block.c_m()),
                                         .z = MaybeFloats(z_grad, "z_grad", n * n * block.c_z())},
                                        ToGradients(parameters)));
          },
          nb::arg("s"), nb::arg("n"), nb::arg("msa_mask").none(), nb::arg("pair_mask").none(), nb::arg("m"),
          nb::arg("z"), nb::arg("m_out_grad"), nb::arg("z_out_grad"), nb::arg("m_grad").none(),
          nb::arg("z_grad").none(), nb::arg("parameters"), nb::call_guard<nb::gil_scoped_release>());
  nb::class_<science::InvariantPointAttention>(m, "InvariantPointAttention")
      .def_static(
          "load",
          [](const Weights& w, int heads, int dim, int query_points, int value_points) {
            return ValueOrThrow(science::InvariantPointAttention::Load(
                WeightScope(ToWeights(w)),
                {.heads = heads, .dim = dim, .query_points = query_points, .value_points = value_points}));
          })
      .def(
          "run",
          [](const science::InvariantPointAttention& layer, int64_t n, const ReadArray& s, const ReadArray& z,
             const ReadArray& rotation, const ReadArray& translation, const MaybeRead& mask,
             const Array& out) {
            const Session session;
            const float* rows = Shaped(s, "s", {n, layer.c_s()});  // before out, which has its shape
            ThrowIfError(layer.Run(
                session.context(), n, rows, Shaped(z, "z", {n, n, layer.c_z()}),
                {Shaped(rotation, "rotation", {n, 3, 3}), Shaped(translation, "translation", {n, 3})},
                MaybeShaped(mask, "mask", {n}), Floats(out, "out", n * layer.c_s())));
          },
          nb::arg("n"), nb::arg("s"), nb::arg("z"), nb::arg("rotation"), nb::arg("translation"),
          nb::arg("mask").none(), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const science::InvariantPointAttention& layer, int64_t n, const ReadArray& s, const ReadArray& z,
             const ReadArray& rotation, const ReadArray& translation, const MaybeRead& mask,
             const ReadArray& out_grad, const MaybeArray& s_grad, const MaybeArray& z_grad,
             const MaybeArray& rotation_grad, const MaybeArray& translation_grad,
             const WeightGradients& parameters) {
            const Session session;
            ThrowIfError(layer.Backward(
                session.context(), n, Shaped(s, "s", {n, layer.c_s()}), Shaped(z, "z", {n, n, layer.c_z()}),
                {Shaped(rotation, "rotation", {n, 3, 3}), Shaped(translation, "translation", {n, 3})},
                MaybeShaped(mask, "mask", {n}), Shaped(out_grad, "out_grad", {n, layer.c_s()}),
                {MaybeFloats(s_grad, "s_grad", n * layer.c_s()),
                 MaybeFloats(z_grad, "z_grad", n * n * layer.c_z()),
                 MaybeFloats(rotation_grad, "rotation_grad", 9 * n),
                 MaybeFloats(translation_grad, "translation_grad", 3 * n)},
                ToGradients(parameters)));
          },
          nb::arg("n"), nb::arg("s"), nb::arg("z"), nb::arg("rotation"), nb::arg("translation"),
          nb::arg("mask").none(), nb::arg("out_grad"), nb::arg("s_grad").none(), nb::arg("z_grad").none(),
          nb::arg("rotation_grad").none(), nb::arg("translation_grad").none(), nb::arg("parameters"),
          nb::call_guard<nb::gil_scoped_release>());
}

// Types [n] of residues, or null.
const int32_t* MaybeTypes(const MaybeRead& types, int64_t n) {
  if (!types.has_value()) return nullptr;
  const std::span<const int32_t> ids = IntVector(*types, "types");
  if (static_cast<int64_t>(ids.size()) != n)
    throw nb::value_error(fmt::format("types must have {} elements, but has {}", n, ids.size()).c_str());
  return ids.data();
}

void BindStructure(nb::module_& m) {
  using science::StructureModule;
  nb::class_<StructureModule>(m, "StructureModule")
      .def_static(
          "load",
          [](const Weights& w, int heads, int dim, int query_points, int value_points, int blocks) {
            return ValueOrThrow(StructureModule::Load(
                science::WeightScope(ToWeights(w)),
                {.heads = heads, .dim = dim, .query_points = query_points, .value_points = value_points},
                blocks));
          })
      .def_prop_ro("blocks", &StructureModule::blocks)
      .def_prop_ro("has_geometry", &StructureModule::has_geometry)
      .def(
          "run",
          [](const StructureModule& module, int64_t n, const ReadArray& single, const ReadArray& pair,
             const MaybeRead& types, const MaybeRead& mask, const Array& frames, const Array& angles,
             const Array& unnormalized, const MaybeArray& groups, const MaybeArray& positions,
             const Array& single_out) {
            const Session session;
            const int64_t b = module.blocks();
            ThrowIfError(module.Run(
                session.context(), n, Shaped(single, "single", {n, module.c_s()}),
                Shaped(pair, "pair", {n, n, module.c_z()}), MaybeTypes(types, n),
                MaybeShaped(mask, "mask", {n}),
                {Floats(frames, "frames", b * n * 7), Floats(angles, "angles", b * n * 14),
                 Floats(unnormalized, "unnormalized", b * n * 14), MaybeFloats(groups, "groups", b * n * 128),
                 MaybeFloats(positions, "positions", b * n * 42),
                 Floats(single_out, "single_out", n * module.c_s())}));
          },
          nb::arg("n"), nb::arg("single"), nb::arg("pair"), nb::arg("types").none(), nb::arg("mask").none(),
          nb::arg("frames"), nb::arg("angles"), nb::arg("unnormalized"), nb::arg("groups").none(),
          nb::arg("positions").none(), nb::arg("single_out"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const StructureModule& module, int64_t n, const ReadArray& single, const ReadArray& pair,
             const MaybeRead& types, const MaybeRead& mask, bool stop_rotations, const Array& frames,
             const Array& angles, const Array& unnormalized, const MaybeArray& groups,
             const MaybeArray& positions, const Array& single_out, const MaybeArray& single_grad,
             const MaybeArray& pair_grad, const WeightGradients& parameters) {
            const Session session;
            const int64_t b = module.blocks();
            ThrowIfError(module.Backward(session.context(), n, Shaped(single, "single", {n, module.c_s()}),
                                         Shaped(pair, "pair", {n, n, module.c_z()}), MaybeTypes(types, n),
                                         MaybeShaped(mask, "mask", {n}), stop_rotations,
                                         {.frames = Floats(frames, "frames", b * n * 7),
                                          .angles = Floats(angles, "angles", b * n * 14),
                                          .unnormalized = Floats(unnormalized, "unnormalized", b * n * 14),
                                          .groups = MaybeFloats(groups, "groups", b * n * 128),
                                          .positions = MaybeFloats(positions, "positions", b * n * 42),
                                          .single_out = Floats(single_out, "single_out", n * module.c_s()),
                                          .single = MaybeFloats(single_grad, "single_grad", n * module.c_s()),
                                          .pair = MaybeFloats(pair_grad, "pair_grad", n * n * module.c_z())},
                                         ToGradients(parameters)));
          },
          nb::arg("n"), nb::arg("single"), nb::arg("pair"), nb::arg("types").none(), nb::arg("mask").none(),
          nb::arg("stop_rotations"), nb::arg("frames"), nb::arg("angles"), nb::arg("unnormalized"),
          nb::arg("groups").none(), nb::arg("positions").none(), nb::arg("single_out"),
          nb::arg("single_grad").none(), nb::arg("pair_grad").none(), nb::arg("parameters"),
          nb::call_guard<nb::gil_scoped_release>());
}

// Features [nodes, channels, 2 degree + 1] by degree; the layer checks the channels.
science::FiberFeatures ToFiber(const std::map<int, ReadArray>& arrays, int64_t nodes) {
  science::FiberFeatures features;
  for (const auto& [degree, array] : arrays) {
    if (array.ndim() != 3 || static_cast<int64_t>(array.shape(0)) != nodes ||
        static_cast<int64_t>(array.shape(2)) != 2 * int64_t{degree} + 1) {
      throw nb::value_error(fmt::format("features of degree {} must have the shape [{}, channels, {}]",
                                        degree, nodes, 2 * degree + 1)
                                .c_str());
    }
    const std::span<const float> values = ToFloats(array, "features");
    features[degree].assign(values.begin(), values.end());
  }
  return features;
}

// Copies features to arrays of the same degrees.
void CopyFiber(const science::FiberFeatures& features, const std::map<int, Array>& out) {
  for (const auto& [degree, values] : features) {
    std::copy(values.begin(), values.end(),
              Floats(out.at(degree), "out", static_cast<int64_t>(values.size())));
  }
}

// Arrays to which the gradients of features are added.
std::map<int, float*> ToFiberGradients(const std::map<int, Array>& arrays,
                                       const science::FiberFeatures& features) {
  std::map<int, float*> gradients;
  for (const auto& [degree, array] : arrays)
    gradients[degree] = Floats(array, "node_grad", static_cast<int64_t>(features.at(degree).size()));
  return gradients;
}

// Defines the methods of a layer on features of nodes.
template <typename Layer>
void BindFiberLayer(nb::class_<Layer>& bound) {
  bound
      .def(
          "run",
          [](const Layer& layer, int64_t rows, const std::map<int, ReadArray>& x,
             const std::map<int, Array>& out) {
            const Session session;
            CopyFiber(ValueOrThrow(layer.Run(session.context(), rows, ToFiber(x, rows))), out);
          },
          nb::arg("rows"), nb::arg("x"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const Layer& layer, int64_t rows, const std::map<int, ReadArray>& x,
             const std::map<int, ReadArray>& out_grad, const std::map<int, Array>& x_grads,
             const WeightGradients& parameters) {
            const Session session;
            const science::FiberFeatures features = ToFiber(x, rows);
            const science::GradientMap gradients = ToGradients(parameters);
            ThrowIfError(layer.Backward(session.context(), rows, features, ToFiber(out_grad, rows),
                                        ToFiberGradients(x_grads, features),
                                        science::GradientScope(gradients)));
          },
          nb::arg("rows"), nb::arg("x"), nb::arg("out_grad"), nb::arg("x_grads"), nb::arg("parameters"),
          nb::call_guard<nb::gil_scoped_release>());
}

// Defines the methods of a layer on the edges of a graph, which calls these members.
template <auto kRun, auto kBackward, typename Layer>
void BindSe3EdgeLayer(nb::class_<Layer>& bound) {
  bound
      .def(
          "run",
          [](const Layer& layer, const science::Se3Graph& g, const std::map<int, ReadArray>& nodes,
             const MaybeRead& edge, const std::map<int, Array>& out) {
            const Session session;
            CopyFiber(ValueOrThrow((layer.*kRun)(
                          session.context(), g, ToFiber(nodes, g.graph().num_dst()),
                          MaybeShaped(edge, "edge", {g.graph().num_edges(), layer.edge_inputs()}))),
                      out);
          },
          nb::arg("graph"), nb::arg("nodes"), nb::arg("edge").none(), nb::arg("out"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const Layer& layer, const science::Se3Graph& g, const std::map<int, ReadArray>& nodes,
             const MaybeRead& edge, const std::map<int, ReadArray>& out_grad,
             const std::map<int, Array>& node_grads, const MaybeArray& edge_grad, const MaybeArray& xyz_grad,
             const WeightGradients& parameters) {
            const Session session;
            const int64_t edge_size = int64_t{g.graph().num_edges()} * layer.edge_inputs(),
                          rows = g.graph().num_dst();
            const science::FiberFeatures features = ToFiber(nodes, rows), grads = ToFiber(out_grad, rows);
            for (const auto& [degree, channels] : layer.out())
              Shaped(out_grad.at(degree), "out_grad", {rows, channels, 2 * int64_t{degree} + 1});
            const science::Se3Gradients out{.nodes = ToFiberGradients(node_grads, features),
                                            .edge = MaybeFloats(edge_grad, "edge_grad", edge_size),
                                            .xyz = MaybeFloats(xyz_grad, "xyz_grad", 3 * rows)};
            ThrowIfError(
                (layer.*kBackward)(session.context(), g, features,
                                   MaybeShaped(edge, "edge", {g.graph().num_edges(), layer.edge_inputs()}),
                                   grads, out, ToGradients(parameters)));
          },
          nb::arg("graph"), nb::arg("nodes"), nb::arg("edge").none(), nb::arg("out_grad"),
          nb::arg("node_grads"), nb::arg("edge_grad").none(), nb::arg("xyz_grad").none(),
          nb::arg("parameters"), nb::call_guard<nb::gil_scoped_release>());
}

void BindSe3(nb::module_& m) {
  using science::Fiber, science::WeightScope;
  using science::Se3AttentionBlock, science::Se3Conv, science::Se3Linear, science::Se3Norm;
  nb::class_<science::Se3Graph>(m, "Se3Graph")
      .def_static(
          "create",
          [](const Graph& g, const ReadArray& xyz, int max_degree) {
            return ValueOrThrow(
                science::Se3Graph::Create(g, Shaped(xyz, "xyz", {g.num_dst(), 3}), max_degree));
          },
          nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Se3Linear> linear(m, "Se3Linear");
  linear.def_static("load", [](const Weights& w, const Fiber& in, const Fiber& out) {
    return ValueOrThrow(Se3Linear::Load(WeightScope(ToWeights(w)), in, out));
  });
  BindFiberLayer(linear);
  nb::class_<Se3Norm> norm(m, "Se3Norm");
  norm.def_static("load", [](const Weights& w, const Fiber& fiber) {
    return ValueOrThrow(Se3Norm::Load(WeightScope(ToWeights(w)), fiber));
  });
  BindFiberLayer(norm);
  nb::class_<Se3Conv> conv(m, "Se3Conv");
  conv.def_static("load", [](const Weights& w, const Fiber& in, const Fiber& out, int edge_inputs) {
    return ValueOrThrow(Se3Conv::Load(WeightScope(ToWeights(w)), in, out, edge_inputs));
  });
  BindSe3EdgeLayer<&Se3Conv::RunNodes, &Se3Conv::BackwardNodes>(conv);
  nb::class_<Se3AttentionBlock> block(m, "Se3AttentionBlock");
  block.def_static("load", [](const Weights& w, const Fiber& in, const Fiber& out, int edge_inputs, int heads,
                              int div) {
    return ValueOrThrow(Se3AttentionBlock::Load(WeightScope(ToWeights(w)), in, out, edge_inputs, heads, div));
  });
  BindSe3EdgeLayer<&Se3AttentionBlock::Run, &Se3AttentionBlock::Backward>(block);
}

science::MpnnLayerInputs ToLayerInputs(const science::MpnnLayer& layer, const Graph& g,
                                       const ReadArray& nodes, const MaybeRead& src, const ReadArray& edge,
                                       const MaybeRead& node_mask, const MaybeRead& edge_mask) {
  return {.nodes = Shaped(nodes, "nodes", {g.num_dst(), layer.hidden()}),
          .src = src.has_value() ? Shaped(*src, "src", {g.num_src(), layer.source_inputs()}) : nullptr,
          .edge = Shaped(edge, "edge", {g.num_edges(), layer.hidden()}),
          .node_mask = MaybeShaped(node_mask, "node_mask", {g.num_dst()}),
          .edge_mask = MaybeShaped(edge_mask, "edge_mask", {g.num_edges()})};
}

void BindMpnnLayer(nb::module_& m) {
  using science::MpnnLayer;
  nb::class_<MpnnLayer>(m, "MpnnLayer")
      .def_static(
          "load",
          [](const Weights& w) { return ValueOrThrow(MpnnLayer::Load(science::WeightScope(ToWeights(w)))); })
      .def_prop_ro("encoder", &MpnnLayer::encoder)
      .def(
          "run",
          [](const MpnnLayer& layer, const Graph& g, const ReadArray& nodes, const MaybeRead& src,
             const ReadArray& edge, const MaybeRead& node_mask, const MaybeRead& edge_mask,
             const Array& nodes_out, const MaybeArray& edge_out) {
            const Session session;
            const int64_t h = layer.hidden();
            ThrowIfError(layer.Run(session.context(), g,
                                   ToLayerInputs(layer, g, nodes, src, edge, node_mask, edge_mask),
                                   Floats(nodes_out, "nodes_out", g.num_dst() * h),
                                   MaybeFloats(edge_out, "edge_out", g.num_edges() * h)));
          },
          nb::arg("graph"), nb::arg("nodes"), nb::arg("src").none(), nb::arg("edge"),
          nb::arg("node_mask").none(), nb::arg("edge_mask").none(), nb::arg("nodes_out"),
          nb::arg("edge_out").none(), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const MpnnLayer& layer, const Graph& g, const ReadArray& nodes, const MaybeRead& src,
             const ReadArray& edge, const MaybeRead& node_mask, const MaybeRead& edge_mask,
             const Array& nodes_out_grad, const MaybeArray& edge_out_grad, const MaybeArray& nodes_grad,
             const MaybeArray& src_grad, const MaybeArray& edge_grad, const WeightGradients& parameters) {
            const Session session;
            const int64_t h = layer.hidden(), node_size = g.num_dst() * h, edge_size = g.num_edges() * h;
            ThrowIfError(layer.Backward(
                session.context(), g, ToLayerInputs(layer, g, nodes, src, edge, node_mask, edge_mask),
                {.nodes_out = Floats(nodes_out_grad, "nodes_out_grad", node_size),
                 .edge_out = MaybeFloats(edge_out_grad, "edge_out_grad", edge_size),
                 .nodes = MaybeFloats(nodes_grad, "nodes_grad", node_size),
                 .src = MaybeFloats(src_grad, "src_grad", int64_t{g.num_src()} * layer.source_inputs()),
                 .edge = MaybeFloats(edge_grad, "edge_grad", edge_size)},
                ToGradients(parameters)));
          },
          nb::arg("graph"), nb::arg("nodes"), nb::arg("src").none(), nb::arg("edge"),
          nb::arg("node_mask").none(), nb::arg("edge_mask").none(), nb::arg("nodes_out_grad"),
          nb::arg("edge_out_grad").none(), nb::arg("nodes_grad").none(), nb::arg("src_grad").none(),
          nb::arg("edge_grad").none(), nb::arg("parameters"), nb::call_guard<nb::gil_scoped_release>());
}

science::MpnnInput ToMpnnInput(const ReadArray& xyz, const ReadArray& known, const ReadArray& index,
                               const ReadArray& chain, const ReadArray& sequence) {
  auto ints = [](const ReadArray& array, const char* name) {
    const std::span<const int32_t> values = IntVector(array, name);
    return std::vector<int32_t>(values.begin(), values.end());
  };
  science::MpnnInput input;
  for (const int32_t k : ints(known, "known")) input.known.push_back(k != 0 ? 1 : 0);
  const float* atoms = Shaped(xyz, "xyz", {input.size(), science::kBackboneAtoms, 3});
  input.xyz.assign(atoms, atoms + 3 * science::kBackboneAtoms * input.size());
  input.index = ints(index, "index");
  input.chain = ints(chain, "chain");
  input.sequence = ints(sequence, "sequence");
  input.designed.assign(input.known.size(), 1);
  return input;
}

void BindProteinMpnn(nb::module_& m) {
  nb::class_<science::ProteinMpnn>(m, "ProteinMpnn")
      .def_static("load",
                  [](const Weights& w, int neighbors) {
                    return ValueOrThrow(science::ProteinMpnn::Load(ToWeights(w), neighbors));
                  })
      .def(
          "log_probabilities",
          [](const science::ProteinMpnn& model, const ReadArray& xyz, const ReadArray& known,
             const ReadArray& index, const ReadArray& chain, const ReadArray& sequence,
             const ReadArray& order, const Array& out) {
            const Session session;
            const science::MpnnInput input = ToMpnnInput(xyz, known, index, chain, sequence);
            const science::MpnnEncoding encoding = ValueOrThrow(model.Encode(session.context(), input));
            const std::vector<float> logs = ValueOrThrow(model.LogProbabilities(
                session.context(), input, encoding, input.sequence, IntVector(order, "order")));
            std::copy(logs.begin(), logs.end(), Floats(out, "out", static_cast<int64_t>(logs.size())));
          },
          nb::arg("xyz"), nb::arg("known"), nb::arg("index"), nb::arg("chain"), nb::arg("sequence"),
          nb::arg("order"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "backward",
          [](const science::ProteinMpnn& model, const ReadArray& xyz, const ReadArray& known,
             const ReadArray& index, const ReadArray& chain, const ReadArray& sequence,
             const ReadArray& order, const Array& out_grad, const MaybeArray& xyz_grad,
             const WeightGradients& parameters) {
            const Session session;
            const science::MpnnInput input = ToMpnnInput(xyz, known, index, chain, sequence);
            ThrowIfError(model.Backward(session.context(), input, input.sequence, IntVector(order, "order"),
                                        Floats(out_grad, "out_grad", input.size() * science::kMpnnLetters),
                                        MaybeFloats(xyz_grad, "xyz_grad", 12 * input.size()),
                                        ToGradients(parameters)));
          },
          nb::arg("xyz"), nb::arg("known"), nb::arg("index"), nb::arg("chain"), nb::arg("sequence"),
          nb::arg("order"), nb::arg("out_grad"), nb::arg("xyz_grad").none(), nb::arg("parameters"),
          nb::call_guard<nb::gil_scoped_release>())
      .def("sample", [](const science::ProteinMpnn& model, const ReadArray& xyz, const ReadArray& known,
                        const ReadArray& index, const ReadArray& chain, const ReadArray& sequence,
                        double temperature, uint64_t seed) {
        science::MpnnSample sample = WithoutGil([&] {
          const Session session;
          const science::MpnnInput input = ToMpnnInput(xyz, known, index, chain, sequence);
          const science::MpnnEncoding encoding = ValueOrThrow(model.Encode(session.context(), input));
          return ValueOrThrow(
              model.Sample(session.context(), input, encoding, {.temperature = temperature, .seed = seed}));
        });
        return nb::make_tuple(ToNumpy(std::move(sample.sequence)), sample.score, sample.recovery);
      });
}

}  // namespace

void BindLayers(nb::module_& m) {
  BindNeighbors(m);
  BindEdgeMlp(m);
  BindEgnn(m);
  BindAlignment(m);
  BindEvoformer(m);
  BindStructure(m);
  BindSe3(m);
  BindMpnnLayer(m);
  BindProteinMpnn(m);
}

}  // namespace moesaic::python
