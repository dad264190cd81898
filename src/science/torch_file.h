// Reads the tensors of PyTorch checkpoints (.pt), the format of published ProteinMPNN weights: a zip archive
// of stored entries with a pickle of the object. https://pytorch.org/docs/stable/notes/serialization.html
#pragma once

#include <map>
#include <span>
#include <string>

#include "science/weights.h"

namespace moesaic::science {

/// The tensors of a checkpoint as f32, and its numbers. Keys of nested dictionaries are joined with '/':
/// "model_state_dict/W_e.weight", "num_edges".
struct TorchFile {
  WeightMap tensors;
  std::map<std::string, double> numbers;

  /// Returns the tensors under a prefix ("model_state_dict/"), without it.
  WeightMap Under(const std::string& prefix) const;
};

/// Parses a whole file. The pickle's program is not run: only the operations that torch.save writes for
/// tensors, dictionaries, lists, texts and numbers are understood, and other objects are skipped. f16, bf16,
/// f32, f64 and integer tensors are converted. Fails for compressed archives, and for the format before
/// PyTorch 1.6.
StatusOr<TorchFile> ParseTorchFile(std::span<const std::byte> bytes, const std::string& name);

}  // namespace moesaic::science
