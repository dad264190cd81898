// Autoregressive decoding of ProteinMPNN, one position at a time.
#pragma once

#include <span>
#include <vector>

#include "science/protein/protein_mpnn.h"

namespace moesaic::science {

void LogSoftmax(float* x, int n);

/// The decoder of a model; borrowed.
struct MpnnDecoder {
  int hidden;
  std::span<const float> letters;
  std::span<const MpnnLayer> decoder;
  const Dense& out;
};

class MpnnSampler {
 public:
  MpnnSampler(const graph::Context& ctx, const MpnnDecoder& model, const MpnnInput& input,
              const MpnnEncoding& encoding);
  StatusOr<MpnnSample> Run(const MpnnSampling& sampling);

 private:
  /// Runs layer `layer` at a position, from state_[layer] to state_[layer + 1].
  void RunLayer(size_t layer, int64_t position);
  /// Makes a decoded letter visible to its neighbours.
  void Publish(int64_t position, int32_t letter);
  float* State(size_t layer, int64_t position) {
    return state_.data() + (layer * encoding_.size + position) * model_.hidden;
  }

  const graph::Context& ctx_;
  const MpnnDecoder model_;
  const MpnnInput& input_;
  const MpnnEncoding& encoding_;
  TileDense dense_;
  std::vector<float> state_;    // [layers + 1, L, H]
  std::vector<float> waiting_;  // [layers, L, H]: first layer's part of sources still to decode
  std::vector<float> decoded_;  // [layers, L, H]: of decoded sources
  std::vector<int32_t> rank_;
  std::vector<float> in_, out_, inner_;
};

}  // namespace moesaic::science
