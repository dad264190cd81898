// Attention block of the SE(3)-Transformer, forward and backward.
#include <algorithm>
#include <cmath>

#include "science/edge_attention.h"
#include "science/se3/se3_conv_state.h"

namespace moesaic::science {

StatusOr<Se3AttentionBlock> Se3AttentionBlock::Load(const WeightScope& weights, const Fiber& in,
                                                    const Fiber& out, int edge_inputs, int heads,
                                                    int channels_div) {
  Se3AttentionBlock block;
  block.in_ = in;
  block.out_ = out;
  block.heads_ = heads;
  Fiber both, joined;
  for (const auto& [degree, channels] : out) {
    const int value = channels / std::max(1, channels_div);
    if (heads < 1 || value < 1 || value % heads != 0) {
      return InvalidArgument("{} channels of degree {} divided by {} must be divisible by {} heads", channels,
                             degree, channels_div, heads);
    }
    block.value_[degree] = value;
    const auto from = in.find(degree);
    if (from != in.end()) block.key_[degree] = value;
    both[degree] = from != in.end() ? 2 * value : value;
    joined[degree] = value + (from != in.end() ? from->second : 0);
  }
  if (block.key_.empty()) return InvalidArgument("input and output of attention have no degree in common");
  ASSIGN_OR_RETURN(block.to_key_value_, Se3Conv::Load(weights.Under("to_key_value"), in, both, edge_inputs));
  ASSIGN_OR_RETURN(block.to_query_, Se3Linear::Load(weights.Under("to_query"), in, block.key_));
  ASSIGN_OR_RETURN(block.project_, Se3Linear::Load(weights.Under("project"), joined, out));
  return block;
}

std::map<int, std::vector<int>> Se3AttentionBlock::HeadOffsets(const Fiber& fiber) const {
  const int head_width = FiberWidth(fiber) / heads_;
  std::map<int, std::vector<int>> offsets;
  int before = 0;  // columns of a head that lower degrees take
  for (const auto& [degree, channels] : fiber) {
    const int block = channels / heads_;
    for (int c = 0; c < channels; ++c)
      offsets[degree].push_back(c / block * head_width + before + c % block * Dim(degree));
    before += block * Dim(degree);
  }
  return offsets;
}

std::map<int, std::vector<int>> Se3AttentionBlock::KeyValueOffsets() const {
  std::map<int, std::vector<int>> offsets = HeadOffsets(value_);
  for (const auto& [degree, keys] : HeadOffsets(key_)) {
    for (const int offset : keys) offsets[degree].push_back(FiberWidth(value_) + offset);
  }
  return offsets;
}

struct Se3AttentionBlock::Pass {
  graph::Output messages, queries, attended;  // [edges, value and key], [nodes, key], [nodes, value]
  graph::Graph grouped;                       // its edges are in the order by destination
  FiberFeatures joined;                       // inputs of the projection: own features, then attended ones

  // Edges' values and keys are read in place.
  graph::EdgeAttentionParams Params(int heads) const {
    auto* rows = static_cast<float*>(messages.data);
    const int64_t value_width = attended.cols, key_width = queries.cols;
    return {.heads = heads,
            .q = queries,
            .k = graph::Features{rows + value_width, tensor::DType::kF32, messages.rows, key_width,
                                 messages.stride},
            .v = graph::Features{rows, tensor::DType::kF32, messages.rows, value_width, messages.stride},
            .bias = {},
            .k_target = graph::Target::kEdge,
            .v_target = graph::Target::kEdge,
            .scale = 1 / std::sqrt(static_cast<float>(key_width)),
            .out = attended};
  }
};

StatusOr<Se3AttentionBlock::Pass> Se3AttentionBlock::Attend(const graph::Context& ctx,
                                                            graph::ScratchScope* scope, const Se3Graph& edges,
                                                            const FiberFeatures& nodes,
                                                            const float* edge) const {
  RETURN_IF_ERROR(CheckNodeFeatures(in_, edges.graph().num_src(), nodes));
  const graph::Adjacency& csc = edges.graph().by_destination();
  const int64_t count = csc.edges(), rows = edges.graph().num_dst();
  // A row of an edge is its value, then its key. A head has a block of channels of every degree.
  const int key_width = FiberWidth(key_), value_width = FiberWidth(value_);
  Pass pass = {.messages = scope->Matrix(tensor::DType::kF32, count, value_width + key_width),
               .queries = scope->Matrix(tensor::DType::kF32, rows, key_width),
               .attended = scope->Matrix(tensor::DType::kF32, rows, value_width),
               .grouped = {},
               .joined = {}};
  RETURN_IF_ERROR(to_key_value_.RunEdges(
      ctx, edges, nodes, edge,
      {static_cast<float*>(pass.messages.data), pass.messages.stride, KeyValueOffsets()}));
  ASSIGN_OR_RETURN(const FiberFeatures query, to_query_.Run(ctx, rows, nodes));
  auto* q = static_cast<float*>(pass.queries.data);
  for (const auto& [degree, offsets] : HeadOffsets(key_)) {
    const int64_t dim = Dim(degree), channels = key_.at(degree);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < channels; ++c)
        std::copy_n(query.at(degree).data() + (r * channels + c) * dim, dim, q + r * key_width + offsets[c]);
    }
  }
  ASSIGN_OR_RETURN(pass.grouped, graph::Graph::FromCsc(graph::Indices::Of(csc.ptr.data(), rows + 1),
                                                       graph::Indices::Of(csc.neighbor.data(), count),
                                                       edges.graph().num_src()));
  RETURN_IF_ERROR(graph::EdgeAttention(ctx, pass.grouped, pass.Params(heads_)));
  for (const auto& [degree, offsets] : HeadOffsets(value_)) {
    const int64_t dim = Dim(degree), channels = value_.at(degree), own_width = OwnWidth(degree),
                  width = own_width + channels * dim;
    std::vector<float>& to = pass.joined[degree];
    to.resize(rows * width);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = static_cast<const float*>(pass.attended.data) + r * value_width;
      float* row = to.data() + r * width;
      if (own_width > 0) std::copy_n(nodes.at(degree).data() + r * own_width, own_width, row);
      for (int64_t c = 0; c < channels; ++c) std::copy_n(from + offsets[c], dim, row + own_width + c * dim);
    }
  }
  return pass;
}

int64_t Se3AttentionBlock::OwnWidth(int degree) const {
  const auto own = in_.find(degree);
  return own == in_.end() ? 0 : int64_t{own->second} * Dim(degree);
}

StatusOr<FiberFeatures> Se3AttentionBlock::Run(const graph::Context& ctx, const Se3Graph& edges,
                                               const FiberFeatures& nodes, const float* edge) const {
  graph::ScratchScope scope(ctx);
  ASSIGN_OR_RETURN(const Pass pass, Attend(ctx, &scope, edges, nodes, edge));
  return project_.Run(ctx, edges.graph().num_dst(), pass.joined);
}

Status Se3AttentionBlock::Backward(const graph::Context& ctx, const Se3Graph& edges,
                                   const FiberFeatures& nodes, const float* edge,
                                   const FiberFeatures& out_grad, const Se3Gradients& out,
                                   const GradientMap& parameters) const {
  graph::ScratchScope scope(ctx);
  const GradientScope names(parameters);
  const int64_t rows = edges.graph().num_dst();
  ASSIGN_OR_RETURN(const Pass pass, Attend(ctx, &scope, edges, nodes, edge));
  const int64_t key_width = pass.queries.cols, value_width = pass.attended.cols;
  FiberFeatures joined_grad;
  std::map<int, float*> joined_pointers;
  for (const auto& [degree, values] : pass.joined) {
    joined_grad[degree].assign(values.size(), 0);
    joined_pointers[degree] = joined_grad[degree].data();
  }
  RETURN_IF_ERROR(
      project_.Backward(ctx, rows, pass.joined, out_grad, joined_pointers, names.Under("project")));
  const graph::Output attended_grad = scope.Matrix(tensor::DType::kF32, rows, value_width),
                      query_grad = scope.Matrix(tensor::DType::kF32, rows, key_width),
                      message_grad =
                          scope.Matrix(tensor::DType::kF32, pass.messages.rows, pass.messages.cols);
  for (const auto& [degree, offsets] : HeadOffsets(value_)) {
    const int64_t dim = Dim(degree), channels = value_.at(degree), own_width = OwnWidth(degree),
                  width = own_width + channels * dim;
    float* own_grad = out.Of(degree);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = joined_grad[degree].data() + r * width;
      for (int64_t i = 0; i < own_width && own_grad != nullptr; ++i) own_grad[r * own_width + i] += from[i];
      float* to = static_cast<float*>(attended_grad.data) + r * value_width;
      for (int64_t c = 0; c < channels; ++c) std::copy_n(from + own_width + c * dim, dim, to + offsets[c]);
    }
  }
  auto* message_rows = static_cast<float*>(message_grad.data);
  const graph::Output value_grad = {message_rows, tensor::DType::kF32, message_grad.rows, value_width,
                                    message_grad.stride},
                      key_grad = {message_rows + value_width, tensor::DType::kF32, message_grad.rows,
                                  key_width, message_grad.stride};
  RETURN_IF_ERROR(graph::EdgeAttentionBackward(
      ctx, pass.grouped, pass.Params(heads_),
      {.out_grad = attended_grad, .q_grad = query_grad, .k_grad = key_grad, .v_grad = value_grad}));
  FiberFeatures query_grads;
  for (const auto& [degree, offsets] : HeadOffsets(key_)) {
    const int64_t dim = Dim(degree), channels = key_.at(degree);
    query_grads[degree].resize(rows * channels * dim);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = static_cast<const float*>(query_grad.data) + r * key_width;
      for (int64_t c = 0; c < channels; ++c)
        std::copy_n(from + offsets[c], dim, query_grads[degree].data() + (r * channels + c) * dim);
    }
  }
  RETURN_IF_ERROR(to_query_.Backward(ctx, rows, nodes, query_grads, out.nodes, names.Under("to_query")));
  return to_key_value_.Backward(ctx, edges, nodes, edge,
                                {message_rows, message_grad.stride, KeyValueOffsets()}, out,
                                names.Under("to_key_value"));
}

}  // namespace moesaic::science
