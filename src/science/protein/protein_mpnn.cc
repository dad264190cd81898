#include "science/protein/protein_mpnn.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "science/protein/mpnn_features.h"
#include "science/protein/mpnn_sampler.h"

namespace moesaic::science {
namespace {

constexpr float kMessageScale = 30;  // divides sums of messages

// The perceptron of layers NAMES on [h_d, h_E, source], with `sources` inputs of the source.
StatusOr<EdgeMlp> LoadMessage(const WeightScope& weights, int hidden, int sources,
                              const char* const (&names)[3]) {
  EdgeMlp mlp;
  mlp.activation = graph::Activation::kGelu;
  mlp.activate_last = false;
  const std::string first = names[0];
  ASSIGN_OR_RETURN(const WeightTensor* weight,
                   weights.Get(first + ".weight", {hidden, 2 * hidden + sources}));
  ASSIGN_OR_RETURN(const std::vector<float> bias, weights.Vector(first + ".bias", hidden));
  auto take = [&](int column, int count, std::span<const float> part_bias) {
    return Dense::Pack(hidden, count, ColumnsOf(weight->values, hidden, 2 * hidden + sources, column, count),
                       part_bias);
  };
  ASSIGN_OR_RETURN(mlp.first_dst, take(0, hidden, bias));
  ASSIGN_OR_RETURN(mlp.first_edge, take(hidden, hidden, {}));
  ASSIGN_OR_RETURN(mlp.first_src, take(2 * hidden, sources, {}));
  for (const char* name : {names[1], names[2]}) {
    ASSIGN_OR_RETURN(Dense dense, weights.Linear(name, hidden, hidden));
    mlp.rest.push_back(std::move(dense));
  }
  return mlp;
}

StatusOr<ProteinMpnn::FeedForward> LoadFeedForward(const WeightScope& weights, int hidden) {
  ProteinMpnn::FeedForward dense;
  ASSIGN_OR_RETURN(dense.in, weights.Linear("dense.W_in", -1, hidden));
  ASSIGN_OR_RETURN(dense.out, weights.Linear("dense.W_out", hidden, dense.in.n()));
  return dense;
}

StatusOr<ProteinMpnn::EncoderLayer> LoadEncoder(const WeightScope& weights, int hidden) {
  ProteinMpnn::EncoderLayer layer;
  ASSIGN_OR_RETURN(layer.message, LoadMessage(weights, hidden, hidden, {"W1", "W2", "W3"}));
  ASSIGN_OR_RETURN(layer.edge_message, LoadMessage(weights, hidden, hidden, {"W11", "W12", "W13"}));
  ASSIGN_OR_RETURN(layer.norm1, weights.LayerNorm("norm1", hidden));
  ASSIGN_OR_RETURN(layer.norm2, weights.LayerNorm("norm2", hidden));
  ASSIGN_OR_RETURN(layer.norm3, weights.LayerNorm("norm3", hidden));
  ASSIGN_OR_RETURN(layer.dense, LoadFeedForward(weights, hidden));
  return layer;
}

StatusOr<ProteinMpnn::DecoderLayer> LoadDecoder(const WeightScope& weights, int hidden) {
  ProteinMpnn::DecoderLayer layer;
  ASSIGN_OR_RETURN(layer.message, LoadMessage(weights, hidden, 2 * hidden, {"W1", "W2", "W3"}));
  ASSIGN_OR_RETURN(layer.norm1, weights.LayerNorm("norm1", hidden));
  ASSIGN_OR_RETURN(layer.norm2, weights.LayerNorm("norm2", hidden));
  ASSIGN_OR_RETURN(layer.dense, LoadFeedForward(weights, hidden));
  return layer;
}

StatusOr<graph::Graph> NeighborGraph(const MpnnEncoding& e, std::span<const int32_t> sources,
                                     int64_t num_src) {
  std::vector<int32_t> ptr(e.size + 1);
  for (int64_t i = 0; i <= e.size; ++i) ptr[i] = static_cast<int32_t>(i * e.neighbors);
  return graph::Graph::FromCsc(graph::Indices::Of(ptr.data(), e.size + 1),
                               graph::Indices::Of(sources.data(), static_cast<int64_t>(sources.size())),
                               num_src);
}

Status CheckInput(const MpnnInput& input) {
  const auto size = static_cast<size_t>(input.size());
  if (input.xyz.size() != 12 * size || input.index.size() != size || input.chain.size() != size ||
      input.sequence.size() != size || input.designed.size() != size) {
    return InvalidArgument("all arrays of the input must have {} positions", size);
  }
  if (size == 0) return InvalidArgument("the input has no residues");
  for (size_t i = 0; i < input.xyz.size(); ++i) {
    if (!std::isfinite(input.xyz[i])) {
      return InvalidArgument("coordinate {} of residue {} must be finite, but is {}", i % 12, i / 12,
                             input.xyz[i]);
    }
  }
  for (size_t i = 0; i < size; ++i) {
    if (input.sequence[i] < 0 || input.sequence[i] >= kMpnnLetters) {
      return InvalidArgument("sequence[{}] must be in [0, {}), but is {}", i, kMpnnLetters,
                             input.sequence[i]);
    }
  }
  return OkStatus();
}

}  // namespace

StatusOr<ProteinMpnn> ProteinMpnn::Load(const WeightMap& weights, int neighbors) {
  if (neighbors < 1) return InvalidArgument("the model needs one neighbour or more, not {}", neighbors);
  const WeightScope scope(weights);
  ProteinMpnn model;
  model.neighbors_ = neighbors;
  ASSIGN_OR_RETURN(model.edge_in_, scope.Linear("W_e"));
  const int hidden = model.hidden_ = model.edge_in_.n();
  ASSIGN_OR_RETURN(model.positional_,
                   scope.Linear("features.embeddings.linear", kMpnnPositional, kMpnnOffsets));
  ASSIGN_OR_RETURN(model.edge_embedding_,
                   scope.Linear("features.edge_embedding", model.edge_in_.k(), kMpnnEdgeInputs));
  ASSIGN_OR_RETURN(model.norm_edges_, scope.LayerNorm("features.norm_edges", model.edge_in_.k()));
  ASSIGN_OR_RETURN(model.out_, scope.Linear("W_out", kMpnnLetters, hidden));
  ASSIGN_OR_RETURN(const WeightTensor* letters, scope.Get("W_s.weight", {kMpnnLetters, hidden}));
  model.letters_ = letters->values;
  for (int i = 0; scope.Has(fmt::format("encoder_layers.{}.W1.weight", i)); ++i) {
    ASSIGN_OR_RETURN(EncoderLayer layer,
                     LoadEncoder(scope.Under(fmt::format("encoder_layers.{}", i)), hidden));
    model.encoder_.push_back(std::move(layer));
  }
  for (int i = 0; scope.Has(fmt::format("decoder_layers.{}.W1.weight", i)); ++i) {
    ASSIGN_OR_RETURN(DecoderLayer layer,
                     LoadDecoder(scope.Under(fmt::format("decoder_layers.{}", i)), hidden));
    model.decoder_.push_back(std::move(layer));
  }
  if (model.encoder_.empty() || model.decoder_.empty()) {
    return NotFound(
        "the weights have no encoder_layers.0 or decoder_layers.0: they are no ProteinMPNN model");
  }
  return model;
}

Status ProteinMpnn::UpdateNodes(const graph::Context& ctx, const std::vector<float>& sums, const Norm& norm1,
                                const Norm& norm2, const FeedForward& dense, std::span<const uint8_t> known,
                                std::vector<float>* nodes) const {
  const auto size = static_cast<int64_t>(known.size());
  for (int64_t i = 0; i < size * hidden_; ++i) (*nodes)[i] += sums[i] / kMessageScale;
  Apply(ctx, norm1, nodes->data(), size, nodes->data());
  std::vector<float> inner(size * dense.in.n());
  Apply(ctx, dense.in, nodes->data(), hidden_, size, inner.data(), dense.in.n());
  ForRows(ctx, size, 16, [&](int64_t first, int64_t last) {
    float* row = inner.data() + first * dense.in.n();
    ctx.graph->rows.activate(&row, 1, nullptr, 0, static_cast<int>((last - first) * dense.in.n()),
                             graph::Activation::kGelu, row);
  });
  Apply(ctx, dense.out, inner.data(), dense.in.n(), size, nodes->data(), hidden_, true);
  Apply(ctx, norm2, nodes->data(), size, nodes->data());
  for (int64_t i = 0; i < size; ++i) {
    if (known[i] == 0) std::fill_n(nodes->data() + i * hidden_, hidden_, 0.0F);
  }
  return OkStatus();
}

StatusOr<MpnnEncoding> ProteinMpnn::Encode(const graph::Context& ctx, const MpnnInput& input) const {
  RETURN_IF_ERROR(CheckInput(input));
  const int64_t size = input.size();
  MpnnGeometry geometry(input, neighbors_);
  ForRows(ctx, size, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) geometry.FindNeighbors(i);
  });
  const int k = geometry.neighbors(), width = edge_in_.k();
  MpnnEncoding e{.size = size, .neighbors = k, .neighbor = geometry.neighbor(), .nodes = {}, .edges = {}};
  e.nodes.assign(size * hidden_, 0);
  e.edges.resize(size * k * hidden_);
  // The embedding of an offset is a column of the positional layer plus its bias.
  std::vector<float> offsets(kMpnnOffsets * kMpnnPositional), row(kMpnnOffsets);
  for (int p = 0; p < kMpnnPositional; ++p) {
    tensor::UnpackRow(positional_.matrix(), p, row);
    for (int o = 0; o < kMpnnOffsets; ++o)
      offsets[o * kMpnnPositional + p] = row[o] + (positional_.bias() != nullptr ? positional_.bias()[p] : 0);
  }
  {
    const graph::ScratchScope scope(ctx);
    struct Worker {
      TileDense dense;
      float *features, *embedded;
    };
    std::vector<Worker> workers;
    for (int w = 0; w < ctx.exec.pool->size(); ++w) {
      workers.push_back({TileDense(ctx, tensor::PackedFormat::kF32, k, std::max(kMpnnEdgeInputs, width)),
                         ctx.exec.scratch->Take<float>(size_t(k) * kMpnnEdgeInputs).data(),
                         ctx.exec.scratch->Take<float>(size_t(k) * width).data()});
    }
    ctx.exec.pool->Run(size, [&](int64_t i, int worker) {
      const Worker& w = workers[worker];
      for (int n = 0; n < k; ++n) {
        float* features = w.features + int64_t{n} * kMpnnEdgeInputs;
        std::copy_n(offsets.data() + geometry.OffsetOf(i, n) * kMpnnPositional, kMpnnPositional, features);
        geometry.Exponents(i, n, features + kMpnnPositional);
        ctx.graph->rows.exp(features + kMpnnPositional, kMpnnEdgeInputs - kMpnnPositional);
      }
      w.dense.Run(edge_embedding_, w.features, kMpnnEdgeInputs, k, w.embedded, width);
      NormalizeRows(ctx, norm_edges_, w.embedded, k, w.embedded);
      w.dense.Run(edge_in_, w.embedded, width, k, e.edges.data() + i * k * hidden_, hidden_);
    });
  }
  ASSIGN_OR_RETURN(const graph::Graph graph, NeighborGraph(e, e.neighbor, size));
  const graph::Adjacency& csc = graph.by_destination();
  std::vector<float> sums(size * hidden_);
  for (const EncoderLayer& layer : encoder_) {
    std::fill(sums.begin(), sums.end(), 0.0F);
    RETURN_IF_ERROR(ForEdgeTiles(
        ctx, graph, layer.message, {.dst = e.nodes.data(), .src = e.nodes.data(), .edge = e.edges.data()},
        [&](const EdgeTile& tile) {
          for (int t = 0; t < tile.count; ++t) {
            const int64_t i = csc.own[tile.first + t], j = csc.neighbor[tile.first + t];
            if (input.known[i] == 0 || input.known[j] == 0) continue;
            ctx.exec.kernels->axpy(1, tile.messages + int64_t{t} * hidden_, hidden_,
                                   sums.data() + i * hidden_);
          }
        }));
    RETURN_IF_ERROR(UpdateNodes(ctx, sums, layer.norm1, layer.norm2, layer.dense, input.known, &e.nodes));
    // An edge is read with its own tile only, so that it can be replaced there.
    RETURN_IF_ERROR(ForEdgeTiles(
        ctx, graph, layer.edge_message,
        {.dst = e.nodes.data(), .src = e.nodes.data(), .edge = e.edges.data()}, [&](const EdgeTile& tile) {
          for (int t = 0; t < tile.count; ++t) {
            float* edge = e.edges.data() + int64_t{tile.first + t} * hidden_;
            ctx.exec.kernels->axpy(1, tile.messages + int64_t{t} * hidden_, hidden_, edge);
            ctx.graph->rows.layer_norm(edge, layer.norm3.gamma.data(), layer.norm3.beta.data(), hidden_,
                                       layer.norm3.eps, edge);
          }
        }));
  }
  return e;
}

StatusOr<std::vector<float>> ProteinMpnn::LogProbabilities(const graph::Context& ctx, const MpnnInput& input,
                                                           const MpnnEncoding& e,
                                                           std::span<const int32_t> sequence,
                                                           std::span<const int32_t> order) const {
  RETURN_IF_ERROR(CheckInput(input));
  const int64_t size = e.size;
  if (static_cast<int64_t>(sequence.size()) != size || static_cast<int64_t>(order.size()) != size) {
    return InvalidArgument("sequence and order must have {} positions, but have {} and {}", size,
                           sequence.size(), order.size());
  }
  std::vector<int32_t> rank(size, -1);
  for (int64_t r = 0; r < size; ++r) {
    if (order[r] < 0 || order[r] >= size || rank[order[r]] >= 0) {
      return InvalidArgument("order[{}] is {}, but order must be a permutation of {} positions", r, order[r],
                             size);
    }
    rank[order[r]] = static_cast<int32_t>(r);
  }
  // Source j of an edge is row j if it is decoded before, otherwise row size + j with the encoder's features.
  std::vector<int32_t> sources(e.neighbor.size());
  for (int64_t p = 0; p < static_cast<int64_t>(sources.size()); ++p) {
    const int32_t j = e.neighbor[p];
    sources[p] = rank[j] < rank[p / e.neighbors] ? j : static_cast<int32_t>(size + j);
  }
  ASSIGN_OR_RETURN(const graph::Graph graph, NeighborGraph(e, sources, 2 * size));
  std::vector<float> nodes = e.nodes, features(4 * size * hidden_, 0), sums(size * hidden_);
  for (int64_t j = 0; j < size; ++j) {
    if (sequence[j] < 0 || sequence[j] >= kMpnnLetters) {
      return InvalidArgument("sequence[{}] must be in [0, {}), but is {}", j, kMpnnLetters, sequence[j]);
    }
    std::copy_n(letters_.data() + int64_t{sequence[j]} * hidden_, hidden_, features.data() + 2 * j * hidden_);
    std::copy_n(e.nodes.data() + j * hidden_, hidden_, features.data() + (2 * (size + j) + 1) * hidden_);
  }
  for (const DecoderLayer& layer : decoder_) {
    for (int64_t j = 0; j < size; ++j)
      std::copy_n(nodes.data() + j * hidden_, hidden_, features.data() + (2 * j + 1) * hidden_);
    RETURN_IF_ERROR(EdgeMlpReduce(ctx, graph, layer.message,
                                  {.dst = nodes.data(), .src = features.data(), .edge = e.edges.data()},
                                  graph::Reduce::kSum, 1, sums.data()));
    RETURN_IF_ERROR(UpdateNodes(ctx, sums, layer.norm1, layer.norm2, layer.dense, input.known, &nodes));
  }
  std::vector<float> logits(size * kMpnnLetters);
  Apply(ctx, out_, nodes.data(), hidden_, size, logits.data(), kMpnnLetters);
  for (int64_t i = 0; i < size; ++i) LogSoftmax(logits.data() + i * kMpnnLetters, kMpnnLetters);
  return logits;
}

StatusOr<MpnnSample> ProteinMpnn::Sample(const graph::Context& ctx, const MpnnInput& input,
                                         const MpnnEncoding& e, const MpnnSampling& sampling) const {
  RETURN_IF_ERROR(CheckInput(input));
  if (!(sampling.temperature > 0))
    return InvalidArgument("the temperature must be positive, but is {}", sampling.temperature);
  for (const char letter : sampling.omit) {
    if (kMpnnAlphabet.find(letter) == std::string_view::npos)
      return InvalidArgument("\"{}\" is no letter of {} that can be omitted", letter, kMpnnAlphabet);
  }
  if (std::all_of(kMpnnAlphabet.begin(), kMpnnAlphabet.end(),
                  [&](char letter) { return sampling.omit.find(letter) != std::string::npos; })) {
    return InvalidArgument("all letters of {} are omitted: none is left to choose", kMpnnAlphabet);
  }
  const graph::ScratchScope scope(ctx);
  MpnnSampler sampler(ctx, {.hidden = hidden_, .letters = letters_, .decoder = decoder_, .out = out_}, input,
                      e);
  ASSIGN_OR_RETURN(MpnnSample sample, sampler.Run(sampling));
  return sample;
}

}  // namespace moesaic::science
