#include "science/protein/protein_mpnn.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "science/protein/mpnn_pass.h"
#include "science/protein/mpnn_sampler.h"

namespace moesaic::science {
namespace {

// A layer with H channels, an encoder's or a decoder's, whose sources have `sources` inputs.
StatusOr<MpnnLayer> LoadLayer(const WeightScope& weights, int hidden, bool encoder, int sources) {
  ASSIGN_OR_RETURN(MpnnLayer layer, MpnnLayer::Load(weights));
  if (encoder) RETURN_IF_ERROR(weights.Get("W11.weight").status());
  RETURN_IF_ERROR(weights.Get("W1.weight", {hidden, 2 * hidden + sources}).status());
  return layer;
}

}  // namespace

StatusOr<graph::Graph> NeighborGraph(const MpnnEncoding& e, std::span<const int32_t> sources,
                                     int64_t num_src) {
  std::vector<int32_t> ptr(e.size + 1);
  for (int64_t i = 0; i <= e.size; ++i) ptr[i] = static_cast<int32_t>(i * e.neighbors);
  return graph::Graph::FromCsc(graph::Indices::Of(ptr.data(), e.size + 1),
                               graph::Indices::Of(sources.data(), static_cast<int64_t>(sources.size())),
                               num_src);
}

Status CheckMpnnInput(const MpnnInput& input) {
  const auto size = static_cast<size_t>(input.size());
  if (input.xyz.size() != 12 * size || input.index.size() != size || input.chain.size() != size ||
      input.sequence.size() != size || input.designed.size() != size) {
    return InvalidArgument("all arrays of the input must have {} positions", size);
  }
  if (size == 0) return InvalidArgument("the input has no residues");
  if (input.size() > kMaxMpnnPositions) {
    return ResourceExhausted("the input has {} positions, more than {}", size, kMaxMpnnPositions);
  }
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
    ASSIGN_OR_RETURN(MpnnLayer layer,
                     LoadLayer(scope.Under(fmt::format("encoder_layers.{}", i)), hidden, true, hidden));
    model.encoder_.push_back(std::move(layer));
  }
  for (int i = 0; scope.Has(fmt::format("decoder_layers.{}.W1.weight", i)); ++i) {
    ASSIGN_OR_RETURN(MpnnLayer layer,
                     LoadLayer(scope.Under(fmt::format("decoder_layers.{}", i)), hidden, false, 2 * hidden));
    model.decoder_.push_back(std::move(layer));
  }
  if (model.encoder_.empty() || model.decoder_.empty()) {
    return NotFound(
        "the weights have no encoder_layers.0 or decoder_layers.0: they are no ProteinMPNN model");
  }
  return model;
}

std::vector<float> ProteinMpnn::OffsetEmbeddings() const {
  std::vector<float> offsets(kMpnnOffsets * kMpnnPositional), row(kMpnnOffsets);
  for (int p = 0; p < kMpnnPositional; ++p) {
    tensor::UnpackRow(positional_.matrix(), p, row);
    for (int o = 0; o < kMpnnOffsets; ++o)
      offsets[o * kMpnnPositional + p] = row[o] + (positional_.bias() != nullptr ? positional_.bias()[p] : 0);
  }
  return offsets;
}

MpnnEncoding ProteinMpnn::Embed(const graph::Context& ctx, MpnnGeometry& geometry) const {
  const int64_t size = geometry.size();
  ForRows(ctx, size, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) geometry.FindNeighbors(i);
  });
  const int k = geometry.neighbors(), width = edge_in_.k();
  MpnnEncoding e{.size = size, .neighbors = k, .neighbor = geometry.neighbor(), .nodes = {}, .edges = {}};
  e.nodes.assign(size * hidden_, 0);
  e.edges.resize(size * k * hidden_);
  const std::vector<float> offsets = OffsetEmbeddings();
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
    geometry.Features(ctx, i, offsets, w.features);
    w.dense.Run(edge_embedding_, w.features, kMpnnEdgeInputs, k, w.embedded, width);
    NormalizeRows(ctx, norm_edges_, w.embedded, k, w.embedded);
    w.dense.Run(edge_in_, w.embedded, width, k, e.edges.data() + i * k * hidden_, hidden_);
  });
  return e;
}

Status ProteinMpnn::RunEncoder(const graph::Context& ctx, const MpnnMasks& masks, MpnnEncoding& e,
                               std::vector<MpnnState>* states) const {
  ASSIGN_OR_RETURN(const graph::Graph graph, NeighborGraph(e, e.neighbor, e.size));
  for (const MpnnLayer& layer : encoder_) {
    if (states != nullptr) states->push_back({e.nodes, e.edges});
    RETURN_IF_ERROR(layer.Run(ctx, graph,
                              {.nodes = e.nodes.data(),
                               .src = nullptr,
                               .edge = e.edges.data(),
                               .node_mask = masks.known.data(),
                               .edge_mask = masks.both.data()},
                              e.nodes.data(), e.edges.data()));
  }
  return OkStatus();
}

StatusOr<MpnnEncoding> ProteinMpnn::Encode(const graph::Context& ctx, const MpnnInput& input) const {
  RETURN_IF_ERROR(CheckMpnnInput(input));
  MpnnGeometry geometry(input, neighbors_);
  MpnnEncoding e = Embed(ctx, geometry);
  RETURN_IF_ERROR(RunEncoder(ctx, MpnnMasks(input, e), e, nullptr));
  return e;
}

MpnnMasks::MpnnMasks(const MpnnInput& input, const MpnnEncoding& e)
    : known(input.known.begin(), input.known.end()), both(e.neighbor.size()) {
  for (size_t p = 0; p < both.size(); ++p) both[p] = known[p / e.neighbors] * known[e.neighbor[p]];
}

StatusOr<std::vector<int32_t>> DecoderSources(const MpnnEncoding& e, std::span<const int32_t> sequence,
                                              std::span<const int32_t> order) {
  const int64_t size = e.size;
  if (static_cast<int64_t>(sequence.size()) != size || static_cast<int64_t>(order.size()) != size) {
    return InvalidArgument("sequence and order must have {} positions, but have {} and {}", size,
                           sequence.size(), order.size());
  }
  std::vector<int32_t> rank(size, -1);
  for (int64_t r = 0; r < size; ++r) {
    if (sequence[r] < 0 || sequence[r] >= kMpnnLetters) {
      return InvalidArgument("sequence[{}] must be in [0, {}), but is {}", r, kMpnnLetters, sequence[r]);
    }
    if (order[r] < 0 || order[r] >= size || rank[order[r]] >= 0) {
      return InvalidArgument("order[{}] is {}, but order must be a permutation of {} positions", r, order[r],
                             size);
    }
    rank[order[r]] = static_cast<int32_t>(r);
  }
  std::vector<int32_t> sources(e.neighbor.size());
  for (int64_t p = 0; p < static_cast<int64_t>(sources.size()); ++p) {
    const int32_t j = e.neighbor[p];
    sources[p] = rank[j] < rank[p / e.neighbors] ? j : static_cast<int32_t>(size + j);
  }
  return sources;
}

std::vector<float> ProteinMpnn::DecoderFeatures(const MpnnEncoding& e, std::span<const int32_t> sequence,
                                                const std::vector<float>& nodes) const {
  std::vector<float> features(4 * e.size * hidden_, 0);
  for (int64_t j = 0; j < e.size; ++j) {
    std::copy_n(letters_.data() + int64_t{sequence[j]} * hidden_, hidden_, features.data() + 2 * j * hidden_);
    std::copy_n(nodes.data() + j * hidden_, hidden_, features.data() + (2 * j + 1) * hidden_);
    std::copy_n(e.nodes.data() + j * hidden_, hidden_, features.data() + (2 * (e.size + j) + 1) * hidden_);
  }
  return features;
}

StatusOr<std::vector<float>> ProteinMpnn::RunDecoder(const graph::Context& ctx, const MpnnMasks& masks,
                                                     const MpnnEncoding& e, const graph::Graph& graph,
                                                     std::span<const int32_t> sequence,
                                                     std::vector<MpnnState>* states) const {
  std::vector<float> nodes = e.nodes;
  for (const MpnnLayer& layer : decoder_) {
    if (states != nullptr) states->push_back({nodes, {}});
    const std::vector<float> features = DecoderFeatures(e, sequence, nodes);
    RETURN_IF_ERROR(layer.Run(ctx, graph,
                              {.nodes = nodes.data(),
                               .src = features.data(),
                               .edge = e.edges.data(),
                               .node_mask = masks.known.data(),
                               .edge_mask = nullptr},
                              nodes.data(), nullptr));
  }
  return nodes;
}

StatusOr<std::vector<float>> ProteinMpnn::LogProbabilities(const graph::Context& ctx, const MpnnInput& input,
                                                           const MpnnEncoding& e,
                                                           std::span<const int32_t> sequence,
                                                           std::span<const int32_t> order) const {
  RETURN_IF_ERROR(CheckMpnnInput(input));
  ASSIGN_OR_RETURN(const std::vector<int32_t> sources, DecoderSources(e, sequence, order));
  ASSIGN_OR_RETURN(const graph::Graph graph, NeighborGraph(e, sources, 2 * e.size));
  ASSIGN_OR_RETURN(const std::vector<float> nodes,
                   RunDecoder(ctx, MpnnMasks(input, e), e, graph, sequence, nullptr));
  return LogProbabilitiesOf(ctx, nodes);
}

std::vector<float> ProteinMpnn::LogProbabilitiesOf(const graph::Context& ctx,
                                                   const std::vector<float>& nodes) const {
  const auto size = static_cast<int64_t>(nodes.size()) / hidden_;
  std::vector<float> logits(size * kMpnnLetters);
  Apply(ctx, out_, nodes.data(), hidden_, size, logits.data(), kMpnnLetters);
  for (int64_t i = 0; i < size; ++i) LogSoftmax(logits.data() + i * kMpnnLetters, kMpnnLetters);
  return logits;
}

StatusOr<MpnnSample> ProteinMpnn::Sample(const graph::Context& ctx, const MpnnInput& input,
                                         const MpnnEncoding& e, const MpnnSampling& sampling) const {
  RETURN_IF_ERROR(CheckMpnnInput(input));
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
