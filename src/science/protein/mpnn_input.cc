// Conversion of structures to ProteinMPNN's input, decoding orders and random weights.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "science/protein/mpnn_features.h"
#include "science/protein/protein_mpnn.h"

namespace moesaic::science {
namespace {

constexpr int kChainOffset = 100;  // of residue indices between chains
constexpr int kUnknownLetter = kMpnnLetters - 1;
constexpr const char* kBackboneNames[kBackboneAtoms] = {"N", "CA", "C", "O"};

void AppendResidue(const Residue* residue, int32_t index, int32_t chain, bool designed, MpnnInput* input) {
  const bool known = residue != nullptr && residue->complete();
  for (int atom = 0; atom < kBackboneAtoms; ++atom) {
    for (int axis = 0; axis < 3; ++axis) input->xyz.push_back(known ? residue->atoms[atom][axis] : 0);
  }
  const size_t letter = residue == nullptr ? std::string_view::npos : kMpnnAlphabet.find(residue->letter);
  input->known.push_back(known ? 1 : 0);
  input->index.push_back(index);
  input->chain.push_back(chain);
  input->sequence.push_back(letter == std::string_view::npos ? kUnknownLetter : static_cast<int32_t>(letter));
  input->designed.push_back(designed ? 1 : 0);
}

std::vector<std::string> MissingAtoms(const Residue& residue) {
  std::vector<std::string> missing;
  for (int atom = 0; atom < kBackboneAtoms; ++atom) {
    if (!residue.present[atom]) missing.emplace_back(kBackboneNames[atom]);
  }
  return missing;
}

}  // namespace

StatusOr<MpnnInput> MakeMpnnInput(const Structure& structure, const std::vector<std::string>& chains) {
  std::vector<std::string> names;
  for (const Chain& chain : structure.chains) names.push_back(chain.name);
  for (const std::string& wanted : chains) {
    if (std::find(names.begin(), names.end(), wanted) == names.end()) {
      return InvalidArgument("the structure has no chain \"{}\"; it has {}", wanted, fmt::join(names, ", "));
    }
  }
  MpnnInput input;
  int32_t number = 0;
  const Chain* first_designed = nullptr;
  bool designs_any = false;
  for (const Chain& chain : structure.chains) {
    const bool designed =
        chains.empty() || std::find(chains.begin(), chains.end(), chain.name) != chains.end();
    ++number;
    if (designed && first_designed == nullptr && !chain.residues.empty()) first_designed = &chain;
    auto index = [&] { return kChainOffset * (number - 1) + static_cast<int32_t>(input.size()); };
    for (size_t r = 0; r < chain.residues.size(); ++r) {
      const int64_t gap = r == 0 ? 0 : int64_t{chain.residues[r].number} - chain.residues[r - 1].number - 1;
      for (int64_t missing = 0; gap <= kMaxFilledGap && missing < gap; ++missing)
        AppendResidue(nullptr, index(), number, designed, &input);
      AppendResidue(&chain.residues[r], index(), number, designed, &input);
      designs_any |= designed && chain.residues[r].complete();
      if (input.size() > kMaxMpnnPositions) {
        return ResourceExhausted(
            "the structure has more than {} residues, counting those that its numbering omits; design some "
            "of its chains by themselves",
            kMaxMpnnPositions);
      }
    }
  }
  if (first_designed != nullptr && !designs_any) {
    const Residue& residue = first_designed->residues[0];
    const std::vector<std::string> missing = MissingAtoms(residue);
    return InvalidArgument(
        "no residue to design has all of the atoms {}: residue {} of chain \"{}\" lacks {}, for example",
        fmt::join(kBackboneNames, ", "), residue.number, first_designed->name, fmt::join(missing, ", "));
  }
  return input;
}

std::vector<int32_t> DecodingOrder(const MpnnInput& input, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> keys(input.size());
  for (int64_t i = 0; i < input.size(); ++i) {
    const bool chosen = input.designed[i] != 0 && input.known[i] != 0;
    keys[i] = ((chosen ? 1 : 0) + 0.0001) * std::abs(normal(random));
  }
  std::vector<int32_t> order(input.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
  return order;
}

WeightMap ProteinMpnn::RandomWeights(uint64_t seed, int hidden, int layers) {
  std::mt19937_64 random(seed);
  WeightMap weights;
  auto add = [&](const std::string& name, std::vector<int64_t> shape, float low, float high) {
    std::uniform_real_distribution<float> uniform(low, high);
    WeightTensor tensor{.shape = std::move(shape), .values = {}};
    int64_t count = 1;
    for (const int64_t dim : tensor.shape) count *= dim;
    for (int64_t i = 0; i < count; ++i) tensor.values.push_back(uniform(random));
    weights[name] = std::move(tensor);
  };
  auto linear = [&](const std::string& name, int64_t n, int64_t k, bool bias) {
    const float bound = std::sqrt(6.0F / static_cast<float>(n + k));
    add(name + ".weight", {n, k}, -bound, bound);
    if (bias) add(name + ".bias", {n}, -0.1F, 0.1F);
  };
  auto norm = [&](const std::string& name) {
    add(name + ".weight", {hidden}, 0.9F, 1.1F);
    add(name + ".bias", {hidden}, -0.1F, 0.1F);
  };
  linear("features.embeddings.linear", kMpnnPositional, kMpnnOffsets, true);
  linear("features.edge_embedding", hidden, kMpnnEdgeInputs, false);
  norm("features.norm_edges");
  linear("W_e", hidden, hidden, true);
  linear("W_s", kMpnnLetters, hidden, false);
  linear("W_out", kMpnnLetters, hidden, true);
  for (const bool encoder : {true, false}) {
    for (int i = 0; i < layers; ++i) {
      const std::string prefix = fmt::format("{}coder_layers.{}.", encoder ? "en" : "de", i);
      for (const char* name : {"W1", "W2", "W3", "W11", "W12", "W13"}) {
        const bool second = std::string_view(name).size() == 3;
        if (second && !encoder) continue;
        const bool first = std::string_view(name).back() == '1';
        linear(prefix + name, hidden, first ? (encoder ? 3 : 4) * hidden : hidden, true);
      }
      linear(prefix + "dense.W_in", 4 * int64_t{hidden}, hidden, true);
      linear(prefix + "dense.W_out", hidden, 4 * int64_t{hidden}, true);
      for (const char* name : {"norm1", "norm2", "norm3"}) {
        if (encoder || std::string_view(name) != "norm3") norm(prefix + name);
      }
    }
  }
  return weights;
}

}  // namespace moesaic::science
