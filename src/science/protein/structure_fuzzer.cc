// Parses arbitrary bytes as PDB and mmCIF, and converts results to ProteinMPNN's input.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "science/protein/protein_mpnn.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const auto parse :
       {moesaic::science::ParsePdb, moesaic::science::ParseMmcif, moesaic::science::ParseStructure}) {
    const auto structure = parse(text, "fuzz");
    if (!structure.ok()) {
      if (structure.status().message().empty()) std::abort();
      continue;
    }
    const auto input = moesaic::science::MakeMpnnInput(*structure);
    if (!input.ok()) {
      const bool unknown = input.status().code() == absl::StatusCode::kInvalidArgument &&
                           structure->incomplete() == structure->residues();
      if (!unknown && input.status().code() != absl::StatusCode::kResourceExhausted) std::abort();
      continue;
    }
    if (input->size() < structure->residues() || input->size() > moesaic::science::kMaxMpnnPositions)
      std::abort();
  }
  return 0;
}
