// Files of `moesaic protein`: structures and weights.
#pragma once

#include <string>

#include "base/status.h"
#include "science/protein/structure.h"
#include "science/weights.h"

namespace moesaic::app {

/// Maximum bytes of a structure file after decompression: above the largest entries of the PDB.
inline constexpr size_t kMaxStructureBytes = size_t{2} << 30;

/// Reads a PDB or mmCIF file, which may be gzipped, or standard input for "-".
StatusOr<science::Structure> ReadStructure(const std::string& path);

/// Weights of a model, and its number of neighbours (0 if the file does not state it).
struct ProteinWeights {
  science::WeightMap tensors;
  int neighbors = 0;
};
/// Reads a PyTorch checkpoint (.pt, .pth) with "model_state_dict" and "num_edges", or a safetensors file with
/// the same tensors and the metadata key "num_edges".
StatusOr<ProteinWeights> ReadProteinWeights(const std::string& path);

}  // namespace moesaic::app
