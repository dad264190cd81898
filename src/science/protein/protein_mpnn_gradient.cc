// The backward pass of ProteinMPNN.
#include <algorithm>
#include <cmath>

#include "science/protein/mpnn_pass.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kEmbeddedEdges = 4096;  // edges whose features exist at once

// logits_grad = the gradient of logs = log_softmax(logits), for rows of kMpnnLetters.
std::vector<float> LogitsGradient(const std::vector<float>& logs, const float* grad) {
  std::vector<float> out(logs.size());
  for (size_t row = 0; row < logs.size(); row += kMpnnLetters) {
    float sum = 0;
    for (int c = 0; c < kMpnnLetters; ++c) sum += grad[row + c];
    for (int c = 0; c < kMpnnLetters; ++c) out[row + c] = grad[row + c] - std::exp(logs[row + c]) * sum;
  }
  return out;
}

}  // namespace

struct ProteinMpnn::EmbeddingGradients {
  DenseGradients positional{}, embedding{}, edge_in{};
  NormGradients norm{};
  float* xyz = nullptr;
};

void ProteinMpnn::EmbeddingBackward(const graph::Context& ctx, const MpnnGeometry& geometry,
                                    const float* edges_grad, const EmbeddingGradients& grads) const {
  const int k = geometry.neighbors(), width = edge_in_.k();
  const int64_t size = geometry.size(), residues = std::max<int64_t>(1, kEmbeddedEdges / k),
                rows = std::min(residues, size) * k;
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  float *features = take(rows * kMpnnEdgeInputs), *embedded = take(rows * width),
        *embedded_grad = take(rows * width), *normal = take(rows * width);
  const std::vector<float> offsets = OffsetEmbeddings();
  std::vector<float> offsets_grad(offsets.size()), atoms_grad(grads.xyz == nullptr ? 0 : 15 * size);
  std::vector<MpnnGeometry::EdgeGradients> edges(grads.xyz == nullptr ? 0 : rows);
  const DenseBackward embedding(edge_embedding_), edge_in(edge_in_);
  for (int64_t first = 0; first < size; first += residues) {
    const int64_t last = std::min(first + residues, size), count = (last - first) * k;
    const float* grad = edges_grad + first * k * hidden_;
    ForRows(ctx, last - first, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        geometry.Features(ctx, first + i, offsets, features + i * k * kMpnnEdgeInputs);
    });
    Apply(ctx, edge_embedding_, features, kMpnnEdgeInputs, count, embedded, width);
    Apply(ctx, norm_edges_, embedded, count, normal);
    AddWeightGradients(ctx, grad, hidden_, hidden_, normal, width, width, count, grads.edge_in);
    edge_in.Inputs(ctx, grad, hidden_, count, normal, width);
    std::fill_n(embedded_grad, count * width, 0.0F);
    NormBackward(ctx, norm_edges_, embedded, normal, count, embedded_grad, grads.norm);
    AddWeightGradients(ctx, embedded_grad, width, width, features, kMpnnEdgeInputs, kMpnnEdgeInputs, count,
                       grads.embedding);
    embedding.Inputs(ctx, embedded_grad, width, count, features, kMpnnEdgeInputs);
    for (int64_t edge = 0; edge < count; ++edge) {
      float* to = offsets_grad.data() +
                  geometry.OffsetOf(first + edge / k, static_cast<int>(edge % k)) * kMpnnPositional;
      for (int p = 0; p < kMpnnPositional; ++p) to[p] += features[edge * kMpnnEdgeInputs + p];
    }
    if (grads.xyz == nullptr) continue;
    ForRows(ctx, count, 64, [&](int64_t begin, int64_t end) {
      for (int64_t edge = begin; edge < end; ++edge) {
        geometry.DistanceGradients(first + edge / k, static_cast<int>(edge % k),
                                   features + edge * kMpnnEdgeInputs + kMpnnPositional, edges[edge]);
      }
    });
    for (int64_t edge = 0; edge < count; ++edge)
      geometry.AddToAtoms(first + edge / k, static_cast<int>(edge % k), edges[edge], atoms_grad);
  }
  for (int p = 0; p < kMpnnPositional; ++p) {
    for (int o = 0; o < kMpnnOffsets; ++o) {
      const float g = offsets_grad[o * kMpnnPositional + p];
      if (grads.positional.weight != nullptr) grads.positional.weight[p * kMpnnOffsets + o] += g;
      if (grads.positional.bias != nullptr) grads.positional.bias[p] += g;
    }
  }
  if (grads.xyz != nullptr) geometry.AddToInput(atoms_grad, grads.xyz);
}

Status ProteinMpnn::Backward(const graph::Context& ctx, const MpnnInput& input,
                             std::span<const int32_t> sequence, std::span<const int32_t> order,
                             const float* logs_grad, float* xyz_grad, const GradientMap& parameters) const {
  RETURN_IF_ERROR(CheckMpnnInput(input));
  const GradientScope names(parameters);
  EmbeddingGradients grads{.xyz = xyz_grad};
  ASSIGN_OR_RETURN(grads.positional, DenseGradients::Find(names, "features.embeddings.linear", positional_));
  ASSIGN_OR_RETURN(grads.embedding, DenseGradients::Find(names, "features.edge_embedding", edge_embedding_));
  ASSIGN_OR_RETURN(grads.norm, NormGradients::Find(names, "features.norm_edges", norm_edges_));
  ASSIGN_OR_RETURN(grads.edge_in, DenseGradients::Find(names, "W_e", edge_in_));
  ASSIGN_OR_RETURN(const DenseGradients out_grads, DenseGradients::Find(names, "W_out", out_));
  ASSIGN_OR_RETURN(float* letters_grad, names.Get("W_s.weight", int64_t{kMpnnLetters} * hidden_));

  MpnnGeometry geometry(input, neighbors_);
  MpnnEncoding e = Embed(ctx, geometry);
  const MpnnMasks masks(input, e);
  std::vector<MpnnState> encoder_states, decoder_states;
  RETURN_IF_ERROR(RunEncoder(ctx, masks, e, &encoder_states));
  ASSIGN_OR_RETURN(const std::vector<int32_t> sources, DecoderSources(e, sequence, order));
  ASSIGN_OR_RETURN(const graph::Graph decoder_graph, NeighborGraph(e, sources, 2 * e.size));
  ASSIGN_OR_RETURN(const std::vector<float> decoded,
                   RunDecoder(ctx, masks, e, decoder_graph, sequence, &decoder_states));

  const int64_t size = e.size, nodes_size = size * hidden_;
  const std::vector<float> logits_grad = LogitsGradient(LogProbabilitiesOf(ctx, decoded), logs_grad);
  AddWeightGradients(ctx, logits_grad.data(), kMpnnLetters, kMpnnLetters, decoded.data(), hidden_, hidden_,
                     size, out_grads);
  std::vector<float> nodes_grad(nodes_size), edges_grad(e.edges.size()), encoded_grad(nodes_size);
  DenseBackward(out_).Inputs(ctx, logits_grad.data(), kMpnnLetters, size, nodes_grad.data(), hidden_);
  for (size_t i = decoder_.size(); i-- > 0;) {
    const std::vector<float>& nodes = decoder_states[i].nodes;
    const std::vector<float> features = DecoderFeatures(e, sequence, nodes);
    std::vector<float> before(nodes_size), features_grad(features.size());
    RETURN_IF_ERROR(decoder_[i].Backward(ctx, decoder_graph,
                                         {.nodes = nodes.data(),
                                          .src = features.data(),
                                          .edge = e.edges.data(),
                                          .node_mask = masks.known.data(),
                                          .edge_mask = nullptr},
                                         {.nodes_out = nodes_grad.data(),
                                          .edge_out = nullptr,
                                          .nodes = before.data(),
                                          .src = features_grad.data(),
                                          .edge = edges_grad.data()},
                                         GradientsUnder(parameters, fmt::format("decoder_layers.{}", i))));
    for (int64_t j = 0; j < size; ++j) {
      const float *letter = features_grad.data() + 2 * j * hidden_, *node = letter + hidden_,
                  *waiting = features_grad.data() + (2 * (size + j) + 1) * hidden_;
      for (int c = 0; c < hidden_; ++c) {
        before[j * hidden_ + c] += node[c];
        encoded_grad[j * hidden_ + c] += waiting[c];
        if (letters_grad != nullptr) letters_grad[int64_t{sequence[j]} * hidden_ + c] += letter[c];
      }
    }
    nodes_grad = std::move(before);
  }
  AddTo(ctx, encoded_grad.data(), nodes_size, nodes_grad.data());

  ASSIGN_OR_RETURN(const graph::Graph encoder_graph, NeighborGraph(e, e.neighbor, size));
  for (size_t i = encoder_.size(); i-- > 0;) {
    const MpnnState& state = encoder_states[i];
    std::vector<float> nodes_before(nodes_size), edges_before(edges_grad.size());
    RETURN_IF_ERROR(encoder_[i].Backward(ctx, encoder_graph,
                                         {.nodes = state.nodes.data(),
                                          .src = nullptr,
                                          .edge = state.edges.data(),
                                          .node_mask = masks.known.data(),
                                          .edge_mask = masks.both.data()},
                                         {.nodes_out = nodes_grad.data(),
                                          .edge_out = edges_grad.data(),
                                          .nodes = nodes_before.data(),
                                          .src = nullptr,
                                          .edge = edges_before.data()},
                                         GradientsUnder(parameters, fmt::format("encoder_layers.{}", i))));
    nodes_grad = std::move(nodes_before);
    edges_grad = std::move(edges_before);
  }
  EmbeddingBackward(ctx, geometry, edges_grad.data(), grads);
  return OkStatus();
}

}  // namespace moesaic::science
