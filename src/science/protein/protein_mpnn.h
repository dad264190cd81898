// ProteinMPNN: amino-acid sequences for a protein backbone. Dauparas et al., "Robust deep learning-based
// protein sequence design using ProteinMPNN" (Science 378, 2022), with the architecture, parameter names and
// conventions of the published program (full-backbone models).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "science/protein/mpnn_layer.h"
#include "science/protein/structure.h"
#include "science/weights.h"

namespace moesaic::science {

inline constexpr std::string_view kMpnnAlphabet = "ACDEFGHIKLMNPQRSTVWYX";
inline constexpr int kMpnnLetters = 21;

/// Input of the model: a backbone. Positions are residues of all chains, including gaps in the numbering.
struct MpnnInput {
  std::vector<float> xyz;         ///< [L, 4, 3]: N, CA, C, O; zeros where unknown.
  std::vector<uint8_t> known;     ///< [L]: all four atoms are present.
  std::vector<int32_t> index;     ///< [L]: position in the chain plus 100 per preceding chain.
  std::vector<int32_t> chain;     ///< [L]: number of the chain, from 1.
  std::vector<int32_t> sequence;  ///< [L]: letters of the file as indices into kMpnnAlphabet.
  std::vector<uint8_t> designed;  ///< [L]: 1: the model chooses the letter; 0: the letter is kept.

  int64_t size() const { return static_cast<int64_t>(known.size()); }
};

/// Largest gap in a chain's numbering that is filled with unknown residues, as in the published program.
/// Residues on both sides of a larger gap count as adjacent.
inline constexpr int kMaxFilledGap = 512;

/// Largest number of positions. The search for neighbours is quadratic in it, and with 128 channels and 48
/// neighbours the edges take 3.2 GB.
inline constexpr int64_t kMaxMpnnPositions = 1 << 17;

/// Converts a structure. `chains` names the chains to design; empty: all. Residues that lack an atom are
/// unknown, as in the published program. Fails if a chain does not exist, if all residues to design are
/// unknown, and with more than kMaxMpnnPositions positions.
StatusOr<MpnnInput> MakeMpnnInput(const Structure& structure, const std::vector<std::string>& chains = {});

/// Result of the encoder.
struct MpnnEncoding {
  int64_t size = 0;
  int neighbors = 0;              ///< K: min(k, size)
  std::vector<int32_t> neighbor;  ///< [L, K], nearest first
  std::vector<float> nodes;       ///< [L, H]
  std::vector<float> edges;       ///< [L, K, H]
};

struct MpnnSample {
  std::vector<int32_t> sequence;  ///< [L]
  double score = 0;               ///< Mean of -log p over designed known residues.
  double recovery = 0;            ///< Share of these residues whose letter equals the file's.
};

struct MpnnSampling {
  double temperature = 0.1;
  uint64_t seed = 0;
  std::string omit = "X";  ///< Letters of kMpnnAlphabet that are never chosen; not all of them.
};

class MpnnGeometry;
struct MpnnMasks;
struct MpnnState;

class ProteinMpnn {
 public:
  /// Loads the parameters of a state dict. neighbors is the checkpoint's "num_edges".
  static StatusOr<ProteinMpnn> Load(const WeightMap& weights, int neighbors);
  /// Returns random parameters (uniform, scaled by fan) for tests and benchmarks.
  static WeightMap RandomWeights(uint64_t seed, int hidden = 128, int layers = 3);

  StatusOr<MpnnEncoding> Encode(const graph::Context& ctx, const MpnnInput& input) const;
  /// Returns log-probabilities [L, 21] of each letter, given the letters of `sequence` at positions that
  /// precede it in `order`, a permutation of the positions.
  StatusOr<std::vector<float>> LogProbabilities(const graph::Context& ctx, const MpnnInput& input,
                                                const MpnnEncoding& encoding,
                                                std::span<const int32_t> sequence,
                                                std::span<const int32_t> order) const;
  /// Adds the gradients of LogProbabilities() on Encode() for logs_grad [L, 21] to xyz_grad [L, 4, 3] (or
  /// null) and `parameters`, which has the names of the state dict. The choice of neighbours counts as
  /// constant. Everything is computed again; the edges [L, K, H] before each encoder layer exist at once.
  Status Backward(const graph::Context& ctx, const MpnnInput& input, std::span<const int32_t> sequence,
                  std::span<const int32_t> order, const float* logs_grad, float* xyz_grad,
                  const GradientMap& parameters) const;
  /// Chooses letters one by one in a random order in which kept positions come first.
  StatusOr<MpnnSample> Sample(const graph::Context& ctx, const MpnnInput& input, const MpnnEncoding& encoding,
                              const MpnnSampling& sampling) const;

 private:
  struct EmbeddingGradients;
  // Embeddings of offsets: columns of the positional layer plus its bias.
  std::vector<float> OffsetEmbeddings() const;
  // Finds neighbours and embeds their edges; nodes are 0.
  MpnnEncoding Embed(const graph::Context& ctx, MpnnGeometry& geometry) const;
  // Runs the encoder's or decoder's layers; copies the inputs of each to `states` unless it is null.
  Status RunEncoder(const graph::Context& ctx, const MpnnMasks& masks, MpnnEncoding& e,
                    std::vector<MpnnState>* states) const;
  StatusOr<std::vector<float>> RunDecoder(const graph::Context& ctx, const MpnnMasks& masks,
                                          const MpnnEncoding& e, const graph::Graph& graph,
                                          std::span<const int32_t> sequence,
                                          std::vector<MpnnState>* states) const;
  // Sources of a decoder layer: rows [letter, node] of decoded positions, then [0, encoder's node] of all.
  std::vector<float> DecoderFeatures(const MpnnEncoding& e, std::span<const int32_t> sequence,
                                     const std::vector<float>& nodes) const;
  std::vector<float> LogProbabilitiesOf(const graph::Context& ctx, const std::vector<float>& nodes) const;
  // Adds the gradients of the embedding's inputs, given those of the embedded edges, to `grads`.
  void EmbeddingBackward(const graph::Context& ctx, const MpnnGeometry& geometry, const float* edges_grad,
                         const EmbeddingGradients& grads) const;

  int hidden_ = 0, neighbors_ = 0;
  Dense positional_, edge_embedding_, edge_in_, out_;
  Norm norm_edges_;
  std::vector<float> letters_;  // [21, H]
  std::vector<MpnnLayer> encoder_;
  // Sources of the decoder are [h_S, h_V] of 2 L rows: decoded positions, then those that are not decoded
  // yet.
  std::vector<MpnnLayer> decoder_;
};

/// Returns a random order of the positions in which kept ones come first, drawn as in the published program.
std::vector<int32_t> DecodingOrder(const MpnnInput& input, uint64_t seed);

}  // namespace moesaic::science
